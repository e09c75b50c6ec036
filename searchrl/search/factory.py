# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Builds a SearchFn from the name of an engine and a corpus."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import functools
import hashlib
import json
from typing import Any

from searchrl.search import cache
from searchrl.search.corpus import Corpus
from searchrl.search import fusion
from searchrl.search.index import bm25
from searchrl.search.index import bm25_files
from searchrl.search.index import bm25_others
from searchrl.search.index import dense
from searchrl.search.index import in_memory
from searchrl.search.index import open_index
from searchrl.search import noise
from searchrl.search import rerank
from searchrl.search import wrapped
from searchrl.trajectory import SearchFn

LoadJudge = Callable[..., rerank.ScoreFn]  # (folder, **options)


def make(
    name: str,
    corpus: Corpus | None,
    *,
    seed: int = 0,
    load_encoder: open_index.LoadEncoder | None = None,
    load_judge: LoadJudge | None = None,
    **options: Any,
) -> SearchFn:
  """Builds the engine of a name; every engine finds at most the whole corpus.

  Args:
    name: 'bm25', 'dense' (vectors), 'noise' (random), 'bm25s' or 'lucene'
      (other libraries' BM25); 'remote' (servers) or 'web', which have a corpus
      of their own; or 'fusion', 'rerank' or 'cache', which are made of others.
    corpus: what it searches; None where `needs_corpus` is false.
    seed: of the noise; other engines ignore it.
    load_encoder: makes the encoder of dense vectors; see `backends.indexed`.
    load_judge: makes the judge of pairs of a reranker; see `reranker.load`.
    **options: bm25: index (a folder that holds one) or k1, b; bm25s: k1, b;
      lucene: those of `adapters.lucene`; dense: index and those of
      `backends.indexed`, or encoder and those of `in_memory.search`, else dim,
      n, batch of hashed n-grams; noise: none;
      remote: those of `remote.remote`; web: those of `web.web`; fusion:
      engines, each as dict(name=..., **its options), k, depth; rerank: engine,
      model, max_length, batch, candidates; cache: engine, path, entries, index.

  Raises:
    ValueError: no engine has that name.
    TypeError: the engine has no such option.
  """
  if name == 'bm25' and 'index' in options:
    return bm25_files.indexed(corpus, options.pop('index'), **options)
  if name == 'bm25':
    return bm25.bm25(corpus, **options)
  if name == 'dense' and 'index' in options:
    folder = options.pop('index')
    return open_index.indexed(
        corpus, folder, load_encoder=load_encoder, **options)
  if name == 'dense':
    return _dense(corpus, load_encoder, **options)
  if name == 'noise':
    return noise.random_passages(corpus, seed=seed, **options)
  if name == 'bm25s':
    return bm25_others.bm25s(corpus, **options)
  if name == 'lucene':
    return bm25_others.lucene(corpus, **options)
  if name == 'remote':
    from searchrl.search.remote import remote  # urllib3 is for those who need it
    return remote.remote(**options)
  if name == 'web':
    from searchrl.search.remote import web
    return web.web(**options)
  if name in ('fusion', 'rerank', 'cache'):
    again = functools.partial(_part, corpus=corpus, seed=seed,
                              load_encoder=load_encoder, load_judge=load_judge)
    return _made_of(name, corpus, options, again, load_encoder, load_judge)
  raise ValueError(
      "engine must be 'bm25', 'dense', 'noise', 'bm25s', 'lucene', 'remote', "
      f"'web', 'fusion', 'rerank' or 'cache', but is {name!r}. Correct it in "
      'the configuration.')


def _made_of(name: str, corpus: Corpus, options: dict[str, Any],
             again: Callable[[Any], SearchFn],
             load_encoder: open_index.LoadEncoder | None,
             load_judge: LoadJudge | None) -> SearchFn:
  """An engine over others, which `again` builds."""
  field = 'engines' if name == 'fusion' else 'engine'
  if field not in options or name == 'rerank' and 'model' not in options:
    raise ValueError(
        f'search.options of {name!r} must have {field}'
        f'{" and model" if name == "rerank" else ""}, but have '
        f'{sorted(options)}. An engine is given as dict(name=..., **options).')
  inside = options.pop(field)
  if name == 'fusion':
    parts = tuple(map(again, inside))
    return wrapped.Wrapped(fusion.fused(parts, **options), parts)
  inner = again(inside)
  if name == 'rerank':
    about = {key: options.pop(key) for key in ('max_length', 'batch')
             if key in options}
    score = load_judge(options.pop('model'), **about)
    return wrapped.Wrapped(rerank.reranked(inner, score, **options), (inner,))
  named = _fingerprint(*_named(inside), corpus, load_encoder)
  return cache.cached(inner, **options | dict(
      index=options.get('index') or named))


def _part(spec: Any, **common: Any) -> SearchFn:
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


def _parts(options: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
  """The engines that an engine is made of."""
  specs = options.get('engines', ())
  if 'engine' in options:
    specs = (options['engine'],)
  return [_named(spec) for spec in specs]


def _fingerprint(name: str, options: dict[str, Any], corpus: Corpus,
                 load_encoder: open_index.LoadEncoder | None) -> str:
  """Names what an engine searches; '' where that cannot be known."""
  if name in ('remote', 'web', 'lucene', 'rerank', 'cache') or (
      name == 'bm25' and 'index' in options):
    return ''  # what stands behind an address or a path may change
  if name == 'noise':
    raise ValueError("search.options.engine must not be 'noise' for a cache: "
                     'what it finds depends on the question, too.')
  inside = [_fingerprint(*part, corpus, load_encoder)
            for part in _parts(options)]
  if '' in inside:
    return ''
  facts = [describe(name, corpus, options, load_encoder=load_encoder), inside,
           options]
  text = json.dumps(facts, sort_keys=True, default=dict)
  return hashlib.sha256(text.encode()).hexdigest()


def _dense(
    corpus: Corpus, load_encoder: open_index.LoadEncoder | None, *,
    encoder: str = '', **options: Any,
) -> SearchFn:
  """Vectors that are made now, by an encoder or of hashed n-grams."""
  if encoder or 'backend' in options:
    return in_memory.search(
        corpus, encoder=encoder, load_encoder=load_encoder, **options)
  return _ngrams(corpus, **options)


def _ngrams(
    corpus: Corpus, *, dim: int = 512, n: int = 3, batch: int = 64
) -> SearchFn:
  return dense.exact(
      corpus, dense.ngram_encoder(corpus, dim=dim, n=n), batch=batch)


def needs_corpus(name: str, options: Mapping[str, Any]) -> bool:
  """Whether an engine searches a corpus of ours, or has one elsewhere."""
  if name in ('remote', 'web'):
    return False
  parts = _parts(options)
  return not parts or any(needs_corpus(*part) for part in parts)


def describe(
    name: str,
    corpus: Corpus | None,
    options: Mapping[str, Any],
    *,
    load_encoder: open_index.LoadEncoder | None = None,
) -> dict[str, Any]:
  """What was searched, for the record of a run: digests, an index's recall."""
  told = {'engine': name}
  if corpus is not None:
    told |= {'corpus': corpus.digest, 'passages': len(corpus)}
  if name == 'dense' and 'index' in options:
    told['index'] = open_index.describe(options['index'])
  elif name == 'dense' and (options.get('encoder') or 'backend' in options):
    told |= in_memory.describe(
        corpus, load_encoder=load_encoder, **{'encoder': '', **options})
  if parts := _parts(options):
    told['engines'] = [describe(part, corpus, its, load_encoder=load_encoder)
                       for part, its in parts]
  return told
