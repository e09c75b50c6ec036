# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Query vectors in, the rows with the highest dot products out: any index.

`Index` keeps what a library does not promise: bad vectors are refused before
they reach it, and what it returns of too few rows is no passage 0 and no -1.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses

from jaxtyping import Float, Int
import numpy as np

from searchrl.search.index import vector_store

# Vectors and k to scores and ids, best first, padded with anything.
FindFn = Callable[[Float[np.ndarray, 'B D'], int],
                  tuple[Float[np.ndarray, 'B K'], Int[np.ndarray, 'B K']]]
_BLOCK = 65_536  # rows that are compared at a time on the host


@dataclasses.dataclass(frozen=True)
class Index:
  """Rows that can be searched."""

  name: str  # of what searches: 'mesh', 'numpy', 'scann' or 'hnsw'
  count: int  # rows
  dim: int
  find: FindFn

  def __call__(
      self, vectors: Float[np.ndarray, 'B D'], k: int
  ) -> tuple[Float[np.ndarray, 'B K'], Int[np.ndarray, 'B K']]:
    """Scores and ids, best first, K = min(k, rows).

    A place that stays empty has id -1 and score -inf, and stands at the end.

    Raises:
      ValueError: vectors of another shape, or not finite; k below 1.
    """
    vectors = np.asarray(vectors, np.float32)
    if vectors.ndim != 2 or vectors.shape[1] != self.dim:
      raise ValueError(
          f'query vectors must have shape [B, {self.dim}], as the rows of this '
          f'index, but have {vectors.shape}. Encode them by its own encoder.')
    if not np.isfinite(vectors).all():
      raise ValueError('query vectors must be finite, but are not. Check the '
                       'encoder and its weights.')
    if k < 1:
      raise ValueError(f'k must be at least 1, but is {k}.')
    k = min(k, self.count)
    if not len(vectors):
      return np.zeros((0, k), np.float32), np.zeros((0, k), np.int64)
    return _cleaned(*self.find(np.ascontiguousarray(vectors), k), k, self.count)


def _cleaned(scores, ids, k: int, count: int):
  """Float32 and int64 [B, k], with what is no row at the end as (-inf, -1)."""
  scores = np.asarray(scores, np.float32)
  ids = np.asarray(ids).astype(np.int64)
  good = np.isfinite(scores) & (ids >= 0) & (ids < count)
  scores, ids = np.where(good, scores, -np.inf), np.where(good, ids, -1)
  order = np.argsort(~good, axis=1, kind='stable')
  scores, ids = (np.take_along_axis(x, order, 1)[:, :k] for x in (scores, ids))
  short = ((0, 0), (0, k - ids.shape[1]))
  return (np.pad(scores, short, constant_values=-np.inf),
          np.pad(ids, short, constant_values=-1))


def merge(
    scores: Float[np.ndarray, 'B M'], ids: Int[np.ndarray, 'B M'], k: int):
  """The k best of each row, ties to the lower id."""
  order = np.lexsort((ids, -scores), axis=1)[:, :k]
  return (np.take_along_axis(scores, order, 1),
          np.take_along_axis(ids, order, 1))


def on_host(source: vector_store.Source) -> Index:
  """Compares with every row, by numpy, a block at a time; nothing stays."""

  def find(vectors, k):
    scores = np.full((len(vectors), 0), -np.inf, np.float32)
    ids = np.zeros((len(vectors), 0), np.int64)
    for start, rows in vector_store.blocks(source, _BLOCK):
      new, at = _best(vectors @ rows.T, k)
      scores, ids = merge(np.concatenate([scores, new], 1),
                          np.concatenate([ids, at + start], 1), k)
    return scores, ids

  return Index('numpy', source.count, source.dim, find)


def _best(scores: Float[np.ndarray, 'B N'], k: int):
  """The k best of each row, ties to the lower column."""
  if k >= scores.shape[1]:
    ids = np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
    return merge(scores, ids, k)
  worst = np.partition(scores, -k, axis=1)[:, -k, None]
  ids = np.zeros((len(scores), k), np.int64)
  for row, (of_row, least) in enumerate(zip(scores, worst)):
    held = np.flatnonzero(of_row >= least)  # ties may make them more than k
    ids[row] = held[np.argsort(-of_row[held], kind='stable')][:k]
  return np.take_along_axis(scores, ids, 1), ids


def recall(found: Int[np.ndarray, 'Q K'], exact_ids: Int[np.ndarray, 'Q M'],
           exact_scores: Float[np.ndarray, 'Q M'], k: int) -> float:
  """Share of the k truly best rows that are among the first k found.

  A row that ties with the k-th counts for it: which of two equal passages an
  index gives says nothing of the index.

  Args:
    found: ids that an index gave.
    exact_ids: those of exact search, M at least k; more show more of the ties.
    exact_scores: of the same.
    k: of recall@k.
  """
  tied = exact_scores >= exact_scores[:, k - 1:k] - 1e-6
  hits = [min(np.isin(ids[:k], truth[equal]).sum(), k)
          for ids, truth, equal in zip(found, exact_ids, tied, strict=True)]
  return float(np.mean(hits) / k)
