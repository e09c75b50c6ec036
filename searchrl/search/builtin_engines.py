# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The built-in search engines: a table of how each is built, and of its traits.

`engines.py` reads this table.
"""

from collections.abc import Callable, Mapping
import dataclasses
import inspect
from typing import Any

from searchrl.search import cache
from searchrl.search import engine_wrappers
from searchrl.search import fusion
from searchrl.search import noise
from searchrl.search import rerank
from searchrl.search import snippets
from searchrl.search.corpus import Corpus
from searchrl.search.index import bm25
from searchrl.search.index import bm25_files
from searchrl.search.index import dense
from searchrl.search.index import in_memory
from searchrl.search.index import open_index
from searchrl.trajectory import SearchFn

LoadJudge = Callable[..., rerank.ScoreFn]  # (folder, **options)
Options = Mapping[str, Any]
Trait = bool | Callable[[Options], bool]
# Keywords that an engine gets from the run, not from its options, if its
# signature names them.
FROM_THE_RUN = ('seed', 'steps', 'load_encoder', 'load_judge', 'load_model',
                'parts', 'fingerprint')


@dataclasses.dataclass(frozen=True)
class LocalModel:
  """Path and size of a language model that an engine loads with `load_model`.

  Attributes:
    path: Directory or hub id of the model; '' is the tiny base model.
    field: Config field that names the model, for errors.
    slots: Number of texts that are sampled at the same time.
    length: Largest number of tokens of a prompt and its text together.
    dtype: Data type of the weights and of the KV cache.
    cache_tokens: Tokens in the KV cache of all slots; 0: slots * length.
    shape: Directory or hub id of the model whose shape the memory plan reads;
      '': `path`.
  """

  path: str
  field: str
  slots: int
  length: int
  dtype: str
  cache_tokens: int = 0
  shape: str = ''


@dataclasses.dataclass(frozen=True)
class Engine:
  """A kind of engine: how it is built, and its traits.

  A trait is a bool, or a function of the engine's options that returns a bool.

  Attributes:
    make: Function of a corpus and options that returns a SearchFn.
    takes: Names of the options, or a function of the options that returns them;
      None: the keywords of `make`.
    paths: Names of the options that are paths on this machine.
    inner: Name of the option that gives the inner engines, for an engine that
      calls others, such as a cache. The option 'engine' is one engine; an
      option of another name is a list. '': it calls no others.
    needs_corpus: Trait: the engine searches a corpus that is loaded here.
    is_remote: Trait: the engine waits for a network.
    reads_text_alone: Trait: results depend on a query's text and top_k alone.
      They do not depend on the question, step, sample, turn or earlier turns.
    is_identified: Trait: `describe` and the options identify the searched data.
    depends_on_num_steps: Trait: results depend on train.num_steps.
    deadline_secs: Function of the options and of the number of queries in a
      call. It returns the longest time, in seconds, that servers may take.
    local_model: Function of the options that returns the size of the model that
      the engine loads with `load_model`, or None. `--plan` counts its memory.
    is_joint: Trait: processes search together; see `index.joint_search`.
    rows_on_devices: Function of the options, of the bytes of memory of a
      process's devices and of the number of processes. It returns the bytes
      that the engine holds on these devices in total, by name. `--plan` counts
      them.
    describe: Function of a corpus, the options and `load_encoder` that returns
      more facts for the record of a run.
  """

  make: Callable[..., SearchFn]
  takes: tuple[str, ...] | Callable[[Options], tuple[str, ...]] | None = None
  paths: tuple[str, ...] = ()
  inner: str = ''
  needs_corpus: Trait = True
  is_remote: Trait = False
  reads_text_alone: Trait = True
  is_identified: Trait = True
  depends_on_num_steps: Trait = False
  deadline_secs: Callable[[Options, int], float] = lambda options, queries: 0.0
  local_model: Callable[[Options], LocalModel | None] = lambda options: None
  is_joint: Trait = False
  rows_on_devices: Callable[[Options, float, int], dict[str, float]] = (
      lambda options, memory, hosts: {})
  describe: Callable[..., dict[str, Any]] = (
      lambda corpus, options, load_encoder: {})


_LATEST_BM25: dict[tuple, SearchFn] = {}  # only the engine that was made last


def _keywords(function: Callable[..., Any], *others: str) -> tuple[str, ...]:
  """Returns `others`, and then the names of a function's keyword options."""
  return (*others, *(p.name for p in inspect.signature(
      function).parameters.values() if p.kind is p.KEYWORD_ONLY
                     and p.name not in FROM_THE_RUN))


def _bm25(corpus: Corpus, *, index: str | None = None, **options: Any
          ) -> SearchFn:
  """Returns a function from queries to passages, which ranks by BM25.

  `index` is the folder of an index on disk. Without it, the corpus is indexed
  now. The last function is kept: a call with the same corpus, index and options
  returns it again, so that training and evaluation share it.
  """
  key = (corpus.digest, index and bm25_files.seal(index), *options.items())
  if key not in _LATEST_BM25:
    _LATEST_BM25.clear()  # before the next one takes its memory
    _LATEST_BM25[key] = (
        bm25.bm25(corpus, **options) if index is None else
        bm25_files.indexed(corpus, index, **options))
  return _LATEST_BM25[key]


def _dense(corpus: Corpus, *, load_encoder: open_index.LoadEncoder | None,
           index: str | None = None, encoder: str = '', **options: Any
           ) -> SearchFn:
  """Returns a search by vectors.

  The passages' vectors are read from the folder `index` if it is given. If not,
  they are made now, by `encoder` or, if that is '', from hashed n-grams.
  """
  if index is not None:
    return open_index.indexed(corpus, index, load_encoder=load_encoder,
                              **dict(encoder=encoder) | options)
  if encoder or 'backend' in options:
    return in_memory.search(
        corpus, encoder=encoder, load_encoder=load_encoder, **options)
  return _ngrams(corpus, **options)


def _ngrams(corpus: Corpus, *, dim: int = 512, n: int = 3, batch: int = 64
           ) -> SearchFn:
  return dense.exact(
      corpus, dense.ngram_encoder(corpus, dim=dim, n=n), batch=batch)


def _dense_options(options: Options) -> tuple[str, ...]:
  if 'index' in options:
    return _keywords(open_index.indexed, 'index')
  return _keywords(in_memory.build, 'index', 'links', 'construction',
                   'visited', 'dim', 'n')


def _dense_rows(options: Options, memory: float, hosts: int
               ) -> dict[str, float]:
  if 'index' not in options:
    return {}
  return open_index.rows_on_devices(memory, hosts, **{
      name: value for name, value in options.items()
      if name in ('index', 'backend', 'storage', 'memory_share')})


def _describe_bm25(corpus: Corpus, options: Options, load_encoder: Any
                  ) -> dict[str, Any]:
  index = options.get('index')
  return {'index': bm25_files.digest(index)} if index else {}


def _describe_dense(corpus: Corpus, options: Options,
                    load_encoder: open_index.LoadEncoder | None
                    ) -> dict[str, Any]:
  if 'index' in options:
    return {'index': open_index.describe(options['index'])}
  if options.get('encoder') or 'backend' in options:
    return in_memory.describe(
        corpus, load_encoder=load_encoder, **{'encoder': '', **options})
  return {}


def _remote(_: None, **options: Any) -> SearchFn:
  from searchrl.search.remote import remote  # imports aiohttp
  return remote.remote(**options)


def _web(_: None, **options: Any) -> SearchFn:
  from searchrl.search.remote import web  # imports aiohttp
  return web.web(**options)


def _deadline(options: Options, _: int) -> float:
  from searchrl.search.remote import transport  # imports aiohttp
  return options.get('deadline_secs', transport.RetryPolicy.deadline_secs)


def _fusion(_: Any, *, parts: tuple[SearchFn, ...], **options: Any
           ) -> SearchFn:
  return engine_wrappers.Wrapped(fusion.fused(parts, **options), parts)


def _rerank(_: Any, *, parts: tuple[SearchFn, ...], load_judge: LoadJudge,
            model: str, candidates: int = 10, **options: Any) -> SearchFn:
  return engine_wrappers.Wrapped(rerank.reranked(
      parts[0], load_judge(model, **options), candidates=candidates), parts)


def _snippets(_: Any, *, parts: tuple[SearchFn, ...], sentences: int = 1
             ) -> SearchFn:
  return engine_wrappers.Wrapped(
      snippets.shown(parts[0], sentences=sentences), parts)


def _cache(corpus: Any, *, parts: tuple[SearchFn, ...],
           fingerprint: Callable[[], str], index: str = '', **options: Any
           ) -> SearchFn:
  name = f'{index}/{corpus.digest}' if index and corpus else index
  return cache.Cached(parts[0], index=name or fingerprint(), **options)


ENGINES = {
    'bm25': Engine(
        _bm25, _keywords(bm25.bm25, 'index'), paths=('index',),
        describe=_describe_bm25),
    'dense': Engine(_dense, _dense_options, paths=('index',),
                    rows_on_devices=_dense_rows,
                    is_joint=lambda options: options.get('backend') == 'mesh',
                    describe=_describe_dense),
    'noise': Engine(noise.random_passages, reads_text_alone=False),
    'remote': Engine(_remote, needs_corpus=False, is_remote=True,
                     is_identified=False, deadline_secs=_deadline),
    'web': Engine(_web, needs_corpus=False, is_remote=True,
                  is_identified=False, deadline_secs=_deadline),
    'fusion': Engine(_fusion, _keywords(fusion.fused), inner='engines',
                     needs_corpus=False),
    'rerank': Engine(_rerank, ('model', 'max_length', 'batch', 'candidates'),
                     inner='engine', needs_corpus=False, is_identified=False),
    'snippets': Engine(_snippets, inner='engine', needs_corpus=False),
    'cache': Engine(_cache, ('path', 'entries', 'index'), paths=('path',),
                    inner='engine', needs_corpus=False, is_identified=False),
}
