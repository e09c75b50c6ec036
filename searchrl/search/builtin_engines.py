# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The built-in search engines: how each is built, and what is true of it.

Fusion, rerank and cache are built over other engines, each of which is given as
dict(name=..., **options). `engines.py` reads this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import inspect
from typing import Any

from searchrl.search import cache
from searchrl.search import engine_wrappers
from searchrl.search import fusion
from searchrl.search import noise
from searchrl.search import rerank
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

LoadJudge = Callable[..., rerank.ScoreFn]  # (folder, **options)
Options = Mapping[str, Any]
Trait = bool | Callable[[Options], bool]
# Keywords that an engine gets from the run, not from its options, if its
# signature names them.
FROM_THE_RUN = ('seed', 'steps', 'load_encoder', 'load_judge', 'load_writer',
                 'make_inner', 'fingerprint')


@dataclasses.dataclass(frozen=True)
class Engine:
  """A kind of engine: how it is built, and what is true of it.

  A trait is a bool, or a function of the engine's options that returns one.

  Attributes:
    make: Function of a corpus and options that returns a SearchFn.
    takes: Names of the options, or a function of the options that returns them;
      None: the keywords of `make`.
    inner: Name of the option that has the engines that this one is built over;
      '': it is built over none. Traits of the parts replace its own.
    needs_corpus: Trait: the engine searches a corpus that is loaded here.
    is_remote: Trait: the engine waits for a network.
    reads_text_alone: Trait: results depend on a query's text and top_k alone.
    is_identified: Trait: `describe` and the options identify what is searched.
    lasts_as_the_run: Trait: results depend on train.num_steps.
    deadline_secs: Function of the options and of the number of queries at a
      time that returns the longest time in seconds that servers get.
    model_options: Function of the options that returns those of a model in the
      process of the run, or None.
    describe: Function of a corpus, the options and `load_encoder` that returns
      more facts for the record of a run.
    label: Function of the options that returns an addition to the name in
      error messages.
  """

  make: Callable[..., SearchFn]
  takes: tuple[str, ...] | Callable[[Options], tuple[str, ...]] | None = None
  inner: str = ''
  needs_corpus: Trait = True
  is_remote: Trait = False
  reads_text_alone: Trait = True
  is_identified: Trait = True
  lasts_as_the_run: Trait = False
  deadline_secs: Callable[[Options, int], float] = lambda options, queries: 0.0
  model_options: Callable[[Options], dict[str, Any] | None] = (
      lambda options: None)
  describe: Callable[..., dict[str, Any]] = (
      lambda corpus, options, load_encoder: {})
  label: Callable[[Options], str] = lambda options: ''


def _keywords(function: Callable[..., Any], *others: str) -> tuple[str, ...]:
  """Returns the names of a function's options, after other names."""
  return (*others, *(p.name for p in inspect.signature(
      function).parameters.values() if p.kind is p.KEYWORD_ONLY
                     and p.name not in FROM_THE_RUN))


def _bm25(corpus: Corpus, *, index: str | None = None, **options: Any
          ) -> SearchFn:
  if index is not None:
    return bm25_files.indexed(corpus, index, **options)
  return bm25.bm25(corpus, **options)


def _dense(corpus: Corpus, *, load_encoder: open_index.LoadEncoder | None,
           index: str | None = None, encoder: str = '', **options: Any
           ) -> SearchFn:
  """Searches by vectors of an index, of an encoder, or of hashed n-grams."""
  if index is not None:
    return open_index.indexed(corpus, index, load_encoder=load_encoder,
                              **dict(encoder=encoder) | options)
  if encoder or 'backend' in options:
    return in_memory.search(
        corpus, encoder=encoder, load_encoder=load_encoder, **options)
  return _ngrams(corpus, **options)


def _ngrams(
    corpus: Corpus, *, dim: int = 512, n: int = 3, batch: int = 64
) -> SearchFn:
  return dense.exact(
      corpus, dense.ngram_encoder(corpus, dim=dim, n=n), batch=batch)


def _dense_options(options: Options) -> tuple[str, ...]:
  if 'index' in options:
    return _keywords(open_index.indexed, 'index')
  return _keywords(in_memory.search, 'index', 'links', 'construction',
                   'visited', 'dim', 'n')


def _describe_dense(corpus: Corpus, options: Options,
                    load_encoder: open_index.LoadEncoder | None
                    ) -> dict[str, Any]:
  if 'index' in options:
    return {'index': open_index.describe(options['index'])}
  if options.get('encoder') or 'backend' in options:
    return in_memory.describe(
        corpus, load_encoder=load_encoder, **{'encoder': '', **options})
  return {}


def _remote(corpus: Corpus | None, **options: Any) -> SearchFn:
  del corpus
  from searchrl.search.remote import remote  # imports urllib3
  return remote.remote(**options)


def _web(corpus: Corpus | None, **options: Any) -> SearchFn:
  del corpus
  from searchrl.search.remote import web  # imports urllib3
  return web.web(**options)


def _deadline(options: Options, queries: int = 0) -> float:
  del queries
  from searchrl.search.remote import transport  # imports urllib3
  return options.get('deadline_secs', transport.RetryPolicy.deadline_secs)


def _simulated(corpus: Corpus | None, *, seed: int, steps: int,
               load_writer: writers.LoadWriter | None, writer: str,
               curriculum: Mapping[str, float] | None = None,
               malformed: str = 'nothing', titled: bool = False, **options: Any
               ) -> simulated.Simulated:
  """Builds a search whose documents a writer makes."""
  course = dict(curriculum or {})
  course['steps'] = course.get('steps') or max(steps, 1)
  return simulated.Simulated(
      writers.make(writer, corpus, titled=titled, load_writer=load_writer,
                   **options),
      curricula.Curriculum(**course), seed=seed, malformed=malformed,
      titled=titled)


def _is_written_by(*names: str) -> Callable[[Options], bool]:
  return lambda options: options.get('writer') in names


def _simulated_deadline(options: Options, queries: int) -> float:
  """Returns the seconds of all rounds of requests, each of one query."""
  if options.get('writer') != 'served':
    return 0.0
  from searchrl.search.remote import completions  # imports urllib3
  connections = options.get('connections', completions.CONNECTIONS)
  return _deadline(options) * -(-queries // connections)


def _simulated_model(options: Options) -> dict[str, Any] | None:
  """Returns the options of the model that writes, if it is in this process."""
  if options.get('writer') != 'model':
    return None
  model = {key: value for key, value in options.items() if key not in (
      'writer', 'simulator', 'prompts', 'curriculum', 'malformed', 'titled')}
  published = writers.published(options.get('simulator', ''), 'model')
  return model | {key: value for key, value in published.items()
                  if key != 'prompts'}


def _fusion(corpus: Corpus | None, *, make_inner: Callable[[Any], SearchFn],
            engines: Any, **options: Any) -> SearchFn:
  del corpus
  searches = tuple(map(make_inner, engines))
  return engine_wrappers.Wrapped(fusion.fused(searches, **options), searches)


def _rerank(corpus: Corpus | None, *, make_inner: Callable[[Any], SearchFn],
            load_judge: LoadJudge, engine: Any, model: str, **options: Any
            ) -> SearchFn:
  del corpus
  search = make_inner(engine)
  of_model = {key: options.pop(key) for key in ('max_length', 'batch')
              if key in options}
  score = load_judge(model, **of_model)
  return engine_wrappers.Wrapped(
      rerank.reranked(search, score, **options), (search,))


def _cache(corpus: Corpus | None, *, make_inner: Callable[[Any], SearchFn],
           fingerprint: Callable[[Any], str], engine: Any, index: str = '',
           **options: Any) -> SearchFn:
  del corpus
  return cache.cached(make_inner(engine), index=index or fingerprint(engine),
                      **options)


ENGINES = {
    'bm25': Engine(
        _bm25, _keywords(bm25.bm25, 'index'),
        is_identified=lambda options: 'index' not in options),
    'dense': Engine(_dense, _dense_options, describe=_describe_dense),
    'noise': Engine(noise.random_passages, reads_text_alone=False),
    'remote': Engine(_remote, needs_corpus=False, is_remote=True,
                     is_identified=False, deadline_secs=_deadline),
    'web': Engine(_web, needs_corpus=False, is_remote=True,
                  is_identified=False, deadline_secs=_deadline),
    'simulated': Engine(
        _simulated,
        needs_corpus=lambda options: not _is_written_by(
            'served', 'model')(options),
        is_remote=_is_written_by('served'),
        reads_text_alone=lambda options: not _is_written_by(
            *writers.WRITERS)(options),
        lasts_as_the_run=lambda options: not (
            options.get('curriculum') or {}).get('steps'),
        deadline_secs=_simulated_deadline, model_options=_simulated_model,
        label=lambda options: f' by {options.get("writer")}'),
    'fusion': Engine(_fusion, _keywords(fusion.fused, 'engines'),
                     inner='engines'),
    'rerank': Engine(_rerank, ('engine', 'model', 'max_length', 'batch',
                               'candidates'),
                     inner='engine', is_identified=False),
    'cache': Engine(_cache, ('engine', 'path', 'entries', 'index'),
                    inner='engine', is_identified=False),
}
