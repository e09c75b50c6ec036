# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Dense search without an index on disk: passages are encoded at the start.

It is for small corpora and for corpora that a run generates. The vectors stay
in memory. Larger corpora need an index on disk; see `open_index`.
"""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

from searchrl.runtime import log
from searchrl.search.corpus import Corpus
from searchrl.search.index import approximate
from searchrl.search.index import dense
from searchrl.search.index import exact_device
from searchrl.search.index import exact_host
from searchrl.search.index import open_index
from searchrl.search.index import scann as scann_index
from searchrl.search.index import vector_store
from searchrl.trajectory import SearchFn

BACKENDS = ('auto', 'exact', 'scann', 'hnsw')
_GRAPH = ('links', 'construction', 'visited')  # options of HNSW
_QUERIES = 1000  # largest number of queries with which recall is measured


@dataclasses.dataclass(frozen=True)
class _Encoded:
  """A corpus and its encoder, compared by their digests."""

  corpus_digest: str
  encoder_digest: str
  corpus: Corpus = dataclasses.field(compare=False, repr=False)
  encode: dense.EncodeFn = dataclasses.field(compare=False, repr=False)


def search(corpus: Corpus, **options: Any) -> SearchFn:
  """Encodes a corpus; returns a function from queries to passages, by vectors.

  Args:
    corpus: Corpus whose passages are searched.
    **options: Encoder, kind of index and further keywords of `build`.
  """
  encoded, index, _ = build(corpus, **options)
  return dense.searcher(corpus, encoded.encode, index)


def describe(corpus: Corpus, **options: Any) -> dict[str, Any]:
  """Returns the 'encoder' and 'backend' of a search, for a run's record.

  An approximate index also has its 'recall@3', and HNSW its options. The
  arguments are those of `build`, which makes the index only once for `search`
  and `describe`.
  """
  encoded, _, facts = build(corpus, **options)
  digest = encoded.encoder_digest
  return {'encoder': {'path': options['encoder'], 'digest': digest}, **facts}


def build(
    corpus: Corpus,
    *,
    encoder: str,
    load_encoder: open_index.LoadEncoder | None,
    backend: str = 'auto',
    min_recall: float = 0.95,
    batch: int = 64,
    **graph: int,
) -> tuple[_Encoded, exact_host.Index, dict[str, Any]]:
  """Returns an encoded corpus, its index, and facts about the index.

  Args:
    corpus: Corpus of at most `open_index.EXACT_ON_HOST` passages.
    encoder: 'tiny_e5', or a BERT folder or hub id; '' for hashed n-grams.
    load_encoder: Function that loads the encoder of a path; not needed for
      hashed n-grams.
    backend: 'exact' (on the devices of this process), 'auto' (here the same as
      'exact'), 'hnsw', or 'scann'. If ScaNN is not installed (it does not exist
      for macOS), 'scann' is exact, too, and a line on stderr says so.
    min_recall: Least recall@3 of ScaNN or HNSW that is accepted.
    batch: Number of queries per device call of exact search.
    **graph: Options of 'hnsw': the links and construction of `hnsw.build`, and
      the visited of `hnsw.open_`, which by default is tuned to a recall@3 of
      .99.

  Raises:
    FileNotFoundError: There is no such encoder.
    ValueError: The folder is not an encoder, the corpus is too large, the
      recall is too low, or an option is out of range.
    TypeError: `graph` has an option that the backend does not have.
  """
  encoded = _encoded(corpus, encoder, load_encoder)
  return encoded, *_index(encoded, _available(backend), min_recall, batch,
                          _sorted(backend, graph))


def _encoded(corpus: Corpus, encoder: str,
             load_encoder: open_index.LoadEncoder | None) -> _Encoded:
  if len(corpus) > open_index.EXACT_ON_HOST:
    raise ValueError(
        f'a corpus that is encoded as a run begins must have at most '
        f'{open_index.EXACT_ON_HOST} passages, but has {len(corpus)}. Build an '
        'index with configs/build_index.py, and set search.options.index.')
  if not encoder:
    return _Encoded(corpus.digest, dense.ngram_recipe(corpus)['digest'], corpus,
                    dense.ngram_encoder(corpus))
  if load_encoder is None:
    raise ValueError(
        f'search.options.encoder={encoder!r} needs load_encoder, which loads '
        'it. Pass embedder.cached_loader().')
  encode = load_encoder(path=encoder)
  return _Encoded(corpus.digest, encode.about['digest'], corpus, encode)


def _available(backend: str) -> str:
  """Returns the backend to use: 'exact', 'scann' or 'hnsw'.

  It is `backend`, with two exceptions: 'auto' becomes 'exact', and so does
  'scann' if ScaNN is not installed. An unknown name raises a ValueError.
  """
  if backend not in BACKENDS:
    raise ValueError('search.options.backend must be one of '
                     f'{", ".join(BACKENDS)} without an index, but is '
                     f'{backend!r}.')
  if backend == 'scann' and not scann_index.available():
    _say_once('ScaNN is not installed here: the search is exact instead.')
    return 'exact'
  return 'exact' if backend == 'auto' else backend


def _sorted(backend: str, graph: Mapping[str, int]
           ) -> tuple[tuple[str, int], ...]:
  """Returns the options of HNSW's graph as (name, value), sorted by name.

  Raises:
    TypeError: The backend does not have one of the options.
  """
  legal = _GRAPH if backend == 'hnsw' else ()
  if unknown := sorted({*graph} - {*legal}):
    raise TypeError(
        f'search.options of dense vectors with backend={backend!r} must not '
        f'have {", ".join(unknown)}. Leave it out; only '
        f'backend=\'hnsw\' has {", ".join(_GRAPH)}.')
  return tuple(sorted(graph.items()))


_say_once = functools.cache(log.say)


@functools.lru_cache(maxsize=4)  # indexes of training and a few evaluation sets
def _index(encoded: _Encoded, backend: str, min_recall: float, batch: int,
           graph: tuple[tuple[str, int], ...]
          ) -> tuple[exact_host.Index, dict[str, Any]]:
  """Returns the index of a corpus, and facts such as its 'backend'."""
  texts = encoded.corpus.texts
  rows = vector_store.InMemory(dense.encoded(encoded.encode, texts, 'passage'))
  if backend == 'exact':
    return exact_device.build(rows, batch=batch), {'backend': 'exact'}
  queries = [' '.join(texts[i].split()[:10])
             for i in dense.evenly_spaced(len(texts), _QUERIES)]
  options = dict(graph)
  settings = {key: options.pop(key) for key in ('visited',) if key in options}
  if backend == 'hnsw':  # one thread, because more do not build it reproducibly
    options |= dict(threads=1)
  index, recall = approximate.in_memory(
      backend, rows, dense.encoded(encoded.encode, queries, 'query'),
      min_recall=min_recall, settings=settings or None, **options)
  return index, {'backend': backend, **dict(graph), 'recall@3': recall}
