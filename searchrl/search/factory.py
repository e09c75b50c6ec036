# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Builds a SearchFn from the name of an engine and a corpus, and describes it.

Engines can be built over others: fusion, rerank and cache. An engine inside
another is given as dict(name=..., **options).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import functools
import hashlib
import json
from typing import Any

from searchrl.search import cache
from searchrl.search import fusion
from searchrl.search import noise
from searchrl.search import rerank
from searchrl.search import engine_wrappers
from searchrl.search.corpus import Corpus
from searchrl.search.index import bm25
from searchrl.search.index import bm25_files
from searchrl.search.index import dense
from searchrl.search.index import in_memory
from searchrl.search.index import open_index
from searchrl.search.simulated import curriculum as curricula
from searchrl.search.simulated import simulated
from searchrl.search.simulated import writers
from searchrl.trajectory import SearchFn

# Engines by what is true of them; those built over others are as these are.
_OWN_CORPUS = frozenset([  # none is loaded for them
    'remote', 'web', 'simulated by served', 'simulated by model'])
_REMOTE = frozenset(  # answer over a network
    ['remote', 'web', 'simulated by served'])
_READ_MORE = frozenset([  # than a query's text and top_k
    'noise', *(f'simulated by {writer}' for writer in writers.WRITERS)])

LoadJudge = Callable[..., rerank.ScoreFn]  # (folder, **options)


def make(
    name: str,
    corpus: Corpus | None,
    *,
    seed: int = 0,
    steps: int = 0,
    load_encoder: open_index.LoadEncoder | None = None,
    load_judge: LoadJudge | None = None,
    load_writer: writers.LoadWriter | None = None,
    **options: Any,
) -> SearchFn:
  """Builds an engine by its name.

  A search returns at most top_k passages, and at most the whole corpus.

  Args:
    name: 'bm25', 'dense' (vectors), 'noise' (random passages),
      'remote' (search servers) or 'web', which have a corpus of their own, 'simulated' (documents written to
      order), or 'fusion', 'rerank' or 'cache', which are built over other
      engines.
    corpus: what is searched; None if `needs_corpus` is False.
    seed: of 'noise' and 'simulated'; other engines ignore it.
    steps: of the run; for the curriculum of 'simulated'.
    load_encoder: loads the text encoder of 'dense'; see
      `open_index.LoadEncoder`.
    load_judge: loads the cross-encoder of 'rerank'; see `reranker.load`.
    load_writer: loads the model that writes for 'simulated'.
    **options: bm25: index (a folder that has one), or k1 and b, and workers; dense: index and those
      of `open_index.indexed`, or encoder and those of `in_memory.search`, or dim,
      n and batch of hashed n-grams; noise: none; remote: those of
      `remote.remote`; web: those of `web.web`; fusion: engines, k, depth;
      rerank: engine, model, max_length, batch, candidates; cache: engine, path,
      entries, index; simulated: writer and the other options of
      `writers.make`, curriculum (fields of `Curriculum`; steps 0: the run's),
      malformed and titled.

  Raises:
    ValueError: there is no engine of that name, or an option is out of range.
    TypeError: the engine has no such option.
  """
  if name in ('fusion', 'rerank', 'cache'):
    build = functools.partial(_inner, corpus=corpus, seed=seed,
                              load_encoder=load_encoder, load_judge=load_judge,
                              steps=steps, load_writer=load_writer)
    return _composed(name, corpus, options, build, load_encoder, load_judge)
  if name == 'noise':
    return noise.random_passages(corpus, seed=seed, **options)
  if name == 'simulated':
    return _simulated(corpus, seed, steps, load_writer=load_writer, **options)
  return _single(name, corpus, options, load_encoder)


def _single(name: str, corpus: Corpus | None, options: dict[str, Any],
            load_encoder: open_index.LoadEncoder | None) -> SearchFn:
  """An engine that is not built over others."""
  if name == 'bm25' and 'index' in options:
    return bm25_files.indexed(corpus, options.pop('index'), **options)
  if name == 'bm25':
    return bm25.bm25(corpus, **options)
  if name == 'dense' and 'index' in options:
    return open_index.indexed(
        corpus, options.pop('index'), load_encoder=load_encoder, **options)
  if name == 'dense':
    return _dense(corpus, load_encoder, **options)
  if name == 'remote':
    from searchrl.search.remote import remote  # imports urllib3
    return remote.remote(**options)
  if name == 'web':
    from searchrl.search.remote import web
    return web.web(**options)
  raise ValueError(
      "engine must be 'bm25', 'dense', 'noise', 'remote', "
      f"'web', 'simulated', 'fusion', 'rerank' or 'cache', but is {name!r}. "
      'Correct it in the configuration.')


def _simulated(corpus: Corpus | None, seed: int, steps: int, *,
               writer: str, curriculum: Mapping[str, float] | None = None,
               malformed: str = 'nothing', titled: bool = False, **options: Any
               ) -> simulated.Simulated:
  """A search whose documents a writer makes."""
  course = dict(curriculum or {})
  course['steps'] = course.get('steps') or max(steps, 1)
  return simulated.Simulated(
      writers.make(writer, corpus, titled=titled, **options),
      curricula.Curriculum(**course), seed=seed, malformed=malformed,
      titled=titled)


def needs_corpus(name: str, options: Mapping[str, Any]) -> bool:
  """Whether an engine, or a part of it, searches a corpus loaded here."""
  return not _parts(name, options) <= _OWN_CORPUS


def is_remote(name: str, options: Mapping[str, Any]) -> bool:
  """Whether an engine waits for a network, if only in a part of it."""
  return bool(_parts(name, options) & _REMOTE)


def deadline_secs(name: str, options: Mapping[str, Any], queries: int) -> float:
  """Seconds that an engine gives its servers, at most; 0: it asks none.

  Args:
    name: of the engine.
    options: of the engine.
    queries: at a time, each of which is a request of its own to a writer.
  """
  inner = max((deadline_secs(*spec, queries) for spec in _inner_specs(options)),
              default=0.0)
  if inner or not is_remote(name, options):
    return inner
  from searchrl.search.remote import completions  # imports urllib3
  from searchrl.search.remote import transport
  own = options.get('deadline_secs', transport.RetryPolicy.deadline_secs)
  connections = options.get('connections', completions.CONNECTIONS)
  return own * -(-queries // connections) if name == 'simulated' else own


def lasts_as_the_run(name: str, options: Mapping[str, Any]) -> bool:
  """Whether a curriculum takes as many steps as the run has."""
  own = name == 'simulated' and not (options.get('curriculum') or {}).get(
      'steps')
  return own or any(lasts_as_the_run(*spec) for spec in _inner_specs(options))


def model_options(name: str, options: Mapping[str, Any]
                 ) -> dict[str, Any] | None:
  """Options of the model that writes in the run's process; None: there is none.

  Raises:
    ValueError: the model has the name of no published simulator.
  """
  if name == 'simulated' and options.get('writer') == 'model':
    kept = {key: value for key, value in options.items() if key not in (
        'writer', 'simulator', 'prompts', 'curriculum', 'malformed', 'titled')}
    found = writers.published(options.get('simulator', ''), 'model')
    return kept | {key: value for key, value in found.items()
                   if key != 'prompts'}
  inner = (model_options(*spec) for spec in _inner_specs(options))
  return next((found for found in inner if found is not None), None)


def reads_text_alone(name: str, options: Mapping[str, Any]) -> bool:
  """Whether results depend on a query's text and top_k, and on nothing else.

  Else they also depend on who asks: the question, the step, the sample, the
  turn or those before it. A cache around such an engine is an error.
  """
  return not _parts(name, options) & _READ_MORE


def describe(
    name: str,
    corpus: Corpus | None,
    options: Mapping[str, Any],
    *,
    load_encoder: open_index.LoadEncoder | None = None,
) -> dict[str, Any]:
  """What is searched, for the record of a run: digests, an index's recall."""
  facts = {'engine': name}
  if corpus is not None:
    facts |= {'corpus': corpus.digest, 'passages': len(corpus)}
  if name == 'dense' and 'index' in options:
    facts['index'] = open_index.describe(options['index'])
  elif name == 'dense' and (options.get('encoder') or 'backend' in options):
    facts |= in_memory.describe(
        corpus, load_encoder=load_encoder, **{'encoder': '', **options})
  if specs := _inner_specs(options):
    facts['engines'] = [
        describe(inner, corpus, inner_options, load_encoder=load_encoder)
        for inner, inner_options in specs]
  return facts


def _dense(
    corpus: Corpus, load_encoder: open_index.LoadEncoder | None, *,
    encoder: str = '', **options: Any,
) -> SearchFn:
  """A search by vectors made now, by an encoder or of hashed n-grams."""
  if encoder or 'backend' in options:
    return in_memory.search(
        corpus, encoder=encoder, load_encoder=load_encoder, **options)
  return _ngrams(corpus, **options)


def _ngrams(
    corpus: Corpus, *, dim: int = 512, n: int = 3, batch: int = 64
) -> SearchFn:
  return dense.exact(
      corpus, dense.ngram_encoder(corpus, dim=dim, n=n), batch=batch)


def _composed(name: str, corpus: Corpus, options: dict[str, Any],
              build: Callable[[Any], SearchFn],
              load_encoder: open_index.LoadEncoder | None,
              load_judge: LoadJudge | None) -> SearchFn:
  """An engine over others, each of which `build` makes from its spec."""
  field = 'engines' if name == 'fusion' else 'engine'
  if field not in options or name == 'rerank' and 'model' not in options:
    raise ValueError(
        f'search.options of {name!r} must have {field}'
        f'{" and model" if name == "rerank" else ""}, but have '
        f'{sorted(options)}. An engine is given as dict(name=..., **options).')
  _parts(name, options)  # whose errors come before any index is loaded
  spec = options.pop(field)
  if name == 'fusion':
    engines = tuple(map(build, spec))
    return engine_wrappers.Wrapped(fusion.fused(engines, **options), engines)
  inner = build(spec)
  if name == 'rerank':
    of_model = {key: options.pop(key) for key in ('max_length', 'batch')
                if key in options}
    score = load_judge(options.pop('model'), **of_model)
    return engine_wrappers.Wrapped(rerank.reranked(inner, score, **options), (inner,))
  found = _fingerprint(*_named(spec), corpus, load_encoder)
  return cache.cached(inner, **options | dict(
      index=options.get('index') or found))


def _inner(spec: Any, **common: Any) -> SearchFn:
  """The engine of dict(name=..., **options)."""
  name, options = _named(spec)
  return make(name, **common, **options)


def _named(spec: Any) -> tuple[str, dict[str, Any]]:
  """The name and the options of dict(name=..., **options)."""
  options = dict(spec) if hasattr(spec, 'items') else {}  # or a ConfigDict
  if 'name' not in options:
    raise ValueError('search.options must give an engine as dict(name=..., '
                     f'**options), but give {spec!r}.')
  return options.pop('name'), options


def _parts(name: str, options: Mapping[str, Any]) -> set[str]:
  """The names of the engines that are built over no other.

  Raises:
    ValueError: a cache stands around one that reads more than the text.
  """
  specs = _inner_specs(options)
  own = name if name != 'simulated' else f'{name} by {options.get("writer")}'
  parts = set().union(*(_parts(*spec) for spec in specs)) if specs else {own}
  if name == 'cache' and (found := parts & _READ_MORE):
    raise ValueError(
        "search.options.engine of 'cache' must read no more of a query than "
        f'its text and top_k, but {", ".join(sorted(found))} in it also reads '
        'who asks. Leave the cache out, or put it around the other engines.')
  return parts


def _inner_specs(
    options: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
  """The names and options of the engines that an engine is built over."""
  specs = options.get('engines', ())
  if 'engine' in options:
    specs = (options['engine'],)
  return [_named(spec) for spec in specs]


def _fingerprint(name: str, options: dict[str, Any], corpus: Corpus,
                 load_encoder: open_index.LoadEncoder | None) -> str:
  """A digest of what an engine searches; '' if that cannot be known."""
  if name in ('remote', 'web', 'rerank', 'cache') or (
      name == 'bm25' and 'index' in options):
    return ''  # what an address or a path leads to may change
  inner = [_fingerprint(*spec, corpus, load_encoder)
           for spec in _inner_specs(options)]
  if '' in inner:
    return ''
  facts = [describe(name, corpus, options, load_encoder=load_encoder), inner,
           options]
  text = json.dumps(facts, sort_keys=True, default=dict)
  return hashlib.sha256(text.encode()).hexdigest()
