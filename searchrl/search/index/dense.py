# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Dense search: makes a SearchFn of a corpus, an encoder and an index.

The encoder is any function from texts and their kind to vectors. The encoder in
this module hashes n-grams of letters, without trained weights, for tests and
small runs.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import hashlib
import itertools
import json
import re
from typing import Any, Literal, Protocol
import zlib

from jaxtyping import Float, Int
import numpy as np
import regex

from searchrl.search import engine_wrappers
from searchrl.search.corpus import Corpus
from searchrl.search.index import exact_device
from searchrl.search.index import exact_host
from searchrl.search.index import vector_store
from searchrl.trajectory import Passages, Query, SearchFn

Kind = Literal['query', 'passage']
EncodeFn = Callable[[Sequence[str], Kind], Float[np.ndarray, 'N D']]


class Encoder(Protocol):
  """An EncodeFn with weights, and the description that an index records."""

  @property
  def about(self) -> Mapping[str, Any]:
    """Facts about the encoder; 'digest' identifies its weights."""

  def __call__(self, texts: Sequence[str], kind: Kind
              ) -> Float[np.ndarray, 'N D']:
    """Returns one vector per text."""


def hashed_ngrams(
    texts: Sequence[str],
    *,
    dim: int = 512,
    n: int = 3,
    weights: Mapping[str, float] | None = None,
) -> Float[np.ndarray, 'N D']:
  """Returns unit vectors of the texts' n-grams, hashed into `dim` buckets.

    x_d = sum over g with h(g) = d of  sign(g) weight(g) (1 + ln count(g))

  Here g is an n-gram of the text, h(g) its bucket and sign(g) 1 or -1, both by
  its hash. The rows are then scaled to length 1. Words are lower-cased and
  marked at both ends; the hash is the same in every process and on every
  machine.

  Args:
    texts: Texts in any language.
    dim: Number of buckets, D; fewer mean more collisions, whose signs cancel on
      average.
    n: Number of letters of an n-gram, word marks included.
    weights: Weight of each n-gram, 0 if it is missing. Default: all 1.

  Returns:
    float32 rows of length 1, or of zeros if no n-gram of a text has a weight.

  Raises:
    ValueError: The dimension or n is below 1.

  Source: Weinberger et al. 2009, Feature Hashing for Large Scale Multitask
    Learning, arXiv:0902.2206.
  """
  if dim < 1 or n < 1:
    raise ValueError(f'dim and n must be at least 1, but they are {dim} and '
                     f'{n}. 512 and 3 suit a few thousand passages.')
  rows = np.zeros((len(texts), dim), np.float32)
  for row, text in zip(rows, texts):
    grams = _count_grams(text, n)
    hashes = np.array([_hash(gram) for gram in grams], np.int64)
    sizes = 1 + np.log(np.array(list(grams.values()), np.float64))
    if weights is not None:
      sizes *= [weights.get(gram, 0.0) for gram in grams]
    signs = 1 - 2 * (hashes >> 31)
    row[:] = np.bincount(hashes % dim, signs * sizes, dim)
    row /= np.linalg.norm(row) or 1
  return rows


def ngram_encoder(corpus: Corpus, *, dim: int = 512, n: int = 3) -> EncodeFn:
  """Returns a function that embeds texts by their hashed character n-grams.

  It calls `hashed_ngrams`. The weight of an n-gram that occurs in df of the N
  passages is ln(1 + N / df).
  """
  dfs: collections.Counter[str] = collections.Counter()
  for text in corpus.texts:
    dfs.update(_count_grams(text, n).keys())
  weights = {g: float(np.log1p(len(corpus) / df)) for g, df in dfs.items()}

  def encode(texts: Sequence[str], kind: Kind) -> Float[np.ndarray, 'N D']:
    del kind  # queries and passages are encoded alike
    return hashed_ngrams(texts, dim=dim, n=n, weights=weights)

  return encode


def _count_grams(text: str, n: int) -> collections.Counter[str]:
  # A word keeps its combining marks, which are no word characters for `re`.
  has_marks = not text.isascii() and regex.search(r'\p{M}', text)
  words = (regex if has_marks else re).findall(r'\w+', text.lower())
  return collections.Counter(itertools.chain.from_iterable(
      _grams(word, n) for word in words))


@functools.lru_cache(maxsize=2**16)
def _grams(word: str, n: int) -> tuple[str, ...]:
  marked = f' {word} '
  return tuple(marked[i:i + n] for i in range(max(len(marked) - n, 0) + 1))


@functools.lru_cache(maxsize=2**16)
def _hash(gram: str) -> int:
  """Returns a hash of 32 bits; Python's own differs from process to process."""
  return zlib.crc32(gram.encode('utf-8', 'surrogatepass'))


def ngram_recipe(corpus: Corpus, *, dim: int = 512, n: int = 3
                ) -> dict[str, Any]:
  """Returns the facts by which an index identifies its `ngram_encoder`.

  They are 'kind', 'dim', 'n', and a 'digest' of these and the corpus.
  """
  facts = json.dumps(['ngrams', dim, n, corpus.digest])
  return {'kind': 'ngrams', 'dim': dim, 'n': n,
          'digest': hashlib.sha256(facts.encode()).hexdigest()}


def exact(corpus: Corpus, encode: EncodeFn, *, batch: int = 64) -> SearchFn:
  """Encodes a corpus, and returns a search that compares all passages.

  Args:
    corpus: Corpus whose passages are encoded, title and text together.
    encode: Function from texts and their kind ('query' or 'passage') to one row
      each.
    batch: Number of queries per device call. Smaller calls are padded, so that
      a program is compiled only for each value of a call's largest top_k.

  Returns:
    A search whose passages are ordered from the highest dot product down, and
    ties by position in the corpus. A blank query, or one encoded as zeros,
    finds none.

  Raises:
    ValueError: The batch is below 1, or the encoder does not return one finite
      row per text.
  """
  rows = vector_store.InMemory(encoded(encode, corpus.texts, 'passage'))
  return searcher(corpus, encode, exact_device.build(rows, batch=batch))


def searcher(corpus: Corpus, encode: EncodeFn, index: exact_host.Index
            ) -> SearchFn:
  """Returns a function from queries to their top_k passages, by vectors.

  The score is the dot product of a query's vector and a passage's row. A blank
  query, or one encoded as zeros, finds none.

  Args:
    corpus: The passages.
    encode: Function from texts and 'query' to one vector each.
    index: Index of the passages' vectors; row i is passage i of the corpus.

  Raises:
    ValueError: The number of rows is not the number of passages.
  """
  if index.count != len(corpus):
    raise ValueError(
        f'an index must have a row for each of {len(corpus)} passages, but has '
        f'{index.count}. Build it from this corpus.')

  def search(queries: Sequence[Query]) -> list[Passages]:
    top_ks = np.array([query.top_k for query in queries])
    if not (top_ks > 0).any():
      return [()] * len(queries)
    vectors = encoded(encode, [q.text for q in queries], 'query')
    rows = _search(index, vectors, top_ks)
    return [
        _passages(corpus, ids[:query.top_k], scores)
        if query.text.strip() and vector.any() else ()
        for query, vector, (scores, ids) in zip(queries, vectors, rows)]

  return engine_wrappers.Wrapped(search, (index,))


def _search(index: exact_host.Index, vectors: Float[np.ndarray, 'B D'],
            top_ks: Int[np.ndarray, 'B']
           ) -> list[tuple[Float[np.ndarray, 'K'], Int[np.ndarray, 'K']]]:
  """Returns the scores and ids of each query; there may be more than its top_k.

  An approximate index is called once for each value of top_k. In one call with
  the largest value, one query would change what the others find.
  """
  if not index.is_approximate:
    return [*zip(*index(vectors, int(top_ks.max())))]
  found = [(np.zeros(0, np.float32), np.zeros(0, np.int64))] * len(vectors)
  for k in {*top_ks[top_ks > 0].tolist()}:
    places = np.flatnonzero(top_ks == k)
    for place, row in zip(places, zip(*index(vectors[places], k))):
      found[place] = row
  return found


def encoded(
    encode: EncodeFn, texts: Sequence[str], kind: Kind
) -> Float[np.ndarray, 'N D']:
  """Returns an encoder's vectors of texts, after a check.

  Raises:
    ValueError: The encoder does not return one finite vector per text.
  """
  rows = np.asarray(encode(texts, kind), np.float32)
  if rows.ndim != 2 or len(rows) != len(texts) or not np.isfinite(rows).all():
    raise ValueError(
        f'encode must return one finite row for each {kind}, {len(texts)} in '
        f'all, but returned shape {rows.shape}, finite: '
        f'{np.isfinite(rows).all()}. Check the encoder and its weights.')
  return rows


def evenly_spaced(count: int, limit: int) -> Int[np.ndarray, 'M']:
  """Returns up to `limit` positions in [0, count), from first to last."""
  return np.unique(np.linspace(0, count - 1, min(limit, count)).astype(int))


def _passages(
    corpus: Corpus, ids: Int[np.ndarray, 'K'], scores: Float[np.ndarray, 'K']
) -> Passages:
  return tuple(dataclasses.replace(corpus[int(i)], score=float(score))
               for i, score in zip(ids, scores) if i >= 0)
