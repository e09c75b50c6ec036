# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Dense search without an index on disk: passages are encoded at the start.

It is for small corpora, or those that a run generates; their vectors stay in
memory. Larger ones need an index on disk; see `open_index`.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
import sys
from typing import Any

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
_QUERIES = 1000  # to measure recall by, at most


@dataclasses.dataclass(frozen=True)
class _Encoded:
  """A corpus and its encoder; two are equal if their digests are."""

  corpus_digest: str
  encoder_digest: str
  corpus: Corpus = dataclasses.field(compare=False, repr=False)
  encode: dense.EncodeFn = dataclasses.field(compare=False, repr=False)


def search(
    corpus: Corpus,
    *,
    encoder: str,
    load_encoder: open_index.LoadEncoder | None,
    backend: str = 'auto',
    min_recall: float = 0.95,
    batch: int = 64,
    **graph: int,
) -> SearchFn:
  """Encodes a corpus and returns its search.

  Args:
    corpus: of at most `open_index.EXACT_ON_HOST` passages.
    encoder: 'tiny_e5', or a BERT folder or hub id; '' for hashed n-grams.
    load_encoder: loads the encoder of a path; not needed for hashed n-grams.
    backend: 'exact' (on the devices of this process), 'scann', 'hnsw', or
      'auto', which is exact here. If ScaNN is not installed (it does not exist
      for macOS), the search is exact, and one line on stderr warns of it.
    min_recall: the least recall@3 of ScaNN or HNSW that is accepted.
    batch: queries per device call of exact search.
    **graph: of 'hnsw': links and construction, as of `hnsw.build`, and visited,
      as of `hnsw.open_`; without it, it is tuned to a recall@3 of .99.

  Raises:
    FileNotFoundError: there is no such encoder.
    ValueError: the folder is not an encoder, the corpus is too large, the
      recall too low, or an option out of range.
  """
  encoded = _encoded(corpus, encoder, load_encoder)
  index, _ = _index(encoded, _available(backend), min_recall, batch,
                    _sorted(backend, graph))
  return dense.searcher(corpus, encoded.encode, index)


def describe(
    corpus: Corpus,
    *,
    encoder: str,
    load_encoder: open_index.LoadEncoder | None,
    backend: str = 'auto',
    min_recall: float = 0.95,
    batch: int = 64,
    **graph: int,
) -> dict[str, Any]:
  """The encoder's digest, the backend, and the recall if it is approximate.

  Args and errors: those of `search`, which uses the same index.
  """
  encoded = _encoded(corpus, encoder, load_encoder)
  _, facts = _index(encoded, _available(backend), min_recall, batch,
                    _sorted(backend, graph))
  of_encoder = {'path': encoder, 'digest': encoded.encoder_digest}
  return {'encoder': of_encoder, **facts}


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
  """The backend that is used: one that is installed."""
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
  """The options of a graph, which only HNSW has, in order of their names."""
  legal = _GRAPH if backend == 'hnsw' else ()
  if unknown := sorted({*graph} - {*legal}):
    raise TypeError(
        f'search.options of dense vectors with backend={backend!r} must not '
        f'have {", ".join(unknown)}. Leave it out; only '
        f'backend=\'hnsw\' has {", ".join(_GRAPH)}.')
  return tuple(sorted(graph.items()))


@functools.cache
def _say_once(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


@functools.lru_cache(maxsize=4)  # for training and a few evaluation sets
def _index(encoded: _Encoded, backend: str, min_recall: float, batch: int,
           graph: tuple[tuple[str, int], ...]
          ) -> tuple[exact_host.Index, dict[str, Any]]:
  """The index of a corpus, and facts for the record of a run."""
  texts = encoded.corpus.texts
  rows = vector_store.InMemory(dense.encoded(encoded.encode, texts, 'passage'))
  if backend == 'exact':
    return exact_device.build(rows, batch=batch), {'backend': 'exact'}
  queries = [' '.join(texts[i].split()[:10])
             for i in dense.evenly_spaced(len(texts), _QUERIES)]
  options = dict(graph)
  settings = {key: options.pop(key) for key in ('visited',) if key in options}
  if backend == 'hnsw':  # several threads would not build it alike every time
    options |= dict(threads=1)
  index, recall = approximate.in_memory(
      backend, rows, dense.encoded(encoded.encode, queries, 'query'),
      min_recall=min_recall, settings=settings or None, **options)
  return index, {'backend': backend, **dict(graph), 'recall@3': recall}
