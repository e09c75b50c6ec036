# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The interface of every vector index, and exact search on the host by numpy.

`Index` gives guarantees that libraries do not. It raises an error for bad
vectors before they reach the library. If too few rows are found, all kinds of
index pad their results in the same way.
"""

from collections.abc import Callable
import dataclasses
import functools
import importlib
from typing import Any

from jaxtyping import Float, Int
import numpy as np

from searchrl.search.index import vector_store

# Maps vectors and k to scores and ids, best first. An id that is not a row's
# number, or a score that is not finite, stands for a row that was not found.
FindFn = Callable[[Float[np.ndarray, 'B D'], int],
                  tuple[Float[np.ndarray, 'B K'], Int[np.ndarray, 'B K']]]
_BLOCK = 65_536  # rows that are compared at once on the host


@dataclasses.dataclass(frozen=True)
class Index:
  """N rows of vectors that can be searched by dot product."""

  name: str  # name of the implementation: 'mesh', 'numpy', 'scann' or 'hnsw'
  count: int  # N
  dim: int  # D
  find: FindFn
  # Takes part in searches until all processes have finished; None: the index
  # belongs to one process. See `joint_search`.
  finish: Callable[[], None] | None = None
  is_approximate: bool = False  # a larger k may change the first ids, too

  @property
  def is_joint(self) -> bool:
    """True if the rows are split over processes, which search together."""
    return self.finish is not None

  def __call__(
      self, vectors: Float[np.ndarray, 'B D'], k: int
  ) -> tuple[Float[np.ndarray, 'B K'], Int[np.ndarray, 'B K']]:
    """Returns scores and ids of the rows with the highest dot products.

    There are K = min(k, N) per query, best first, where N is the number of rows
    of the index. An id is a row's number. If fewer than K rows are found, id -1
    and score -inf pad the end.

    Args:
      vectors: B queries of the dimension D of the rows.
      k: Number of rows to find per query.

    Raises:
      ValueError: The vectors have another shape or are not finite, or k is
        below 1.
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


def package(module: str, backend: str, name: str) -> Any:
  """Imports the package of a backend.

  Raises:
    ValueError: The package is missing; the message says how to install it.
  """
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise ValueError(
        f'backend {backend!r} needs the package {name}. Run: pip install '
        "'searchrl[search]'; or take another backend.") from error


def _cleaned(scores, ids, k: int, count: int):
  """Returns float32 scores and int64 ids, [B, k].

  A row that was not found has score -inf and id -1, at the end.
  """
  scores = np.asarray(scores, np.float32)
  ids = np.asarray(ids).astype(np.int64)
  valid = np.isfinite(scores) & (ids >= 0) & (ids < count)
  scores, ids = np.where(valid, scores, -np.inf), np.where(valid, ids, -1)
  order = np.argsort(~valid, axis=1, kind='stable')
  scores, ids = (np.take_along_axis(x, order, 1)[:, :k] for x in (scores, ids))
  missing = ((0, 0), (0, k - ids.shape[1]))
  return (np.pad(scores, missing, constant_values=-np.inf),
          np.pad(ids, missing, constant_values=-1))


def merge(
    scores: Float[np.ndarray, 'B M'], ids: Int[np.ndarray, 'B M'], k: int):
  """Returns the k best scores and ids of each row; ties go to the lower id."""
  order = np.lexsort((ids, -scores), axis=1)[:, :k]
  return (np.take_along_axis(scores, order, 1),
          np.take_along_axis(ids, order, 1))


def on_host(source: vector_store.Source) -> Index:
  """Returns an exact index by numpy, which reads all rows in every call."""

  def find(vectors, k):
    scores = np.full((len(vectors), 0), -np.inf, np.float32)
    ids = np.zeros((len(vectors), 0), np.int64)
    for start, rows in vector_store.blocks(source, _BLOCK):
      new, columns = _best(vectors @ rows.T, k)
      scores, ids = merge(np.concatenate([scores, new], 1),
                          np.concatenate([ids, columns + start], 1), k)
    return scores, ids

  return Index('numpy', source.count, source.dim, find)


def _best(scores: Float[np.ndarray, 'B N'], k: int):
  """Returns the k best scores and columns per row; ties: lower column."""
  if k >= scores.shape[1]:
    ids = np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
    return merge(scores, ids, k)
  worst = np.partition(scores, -k, axis=1)[:, -k, None]
  ids = np.zeros((len(scores), k), np.int64)
  for row, (row_scores, least) in enumerate(zip(scores, worst)):
    columns = np.flatnonzero(row_scores >= least)  # more than k if some tie
    ids[row] = columns[np.argsort(-row_scores[columns], kind='stable')][:k]
  return np.take_along_axis(scores, ids, 1), ids


def recall_of(source: vector_store.Source, vectors: Float[np.ndarray, 'Q D'],
              k: int) -> Callable[[Int[np.ndarray, 'Q M']], float]:
  """Returns a function that measures recall@k of the ids that an index returns.

  Recall@k is the share of the k best rows that were found, as a mean over the
  Q queries. Only the first k ids of a query are compared. Any row whose dot
  product with the query is that of the k-th best row counts as one of the k
  best, because the choice between two equal passages says nothing about the
  index. Sums are float64, and may differ by 1e-6.

  Args:
    source: The rows. There are at least k.
    vectors: The queries.
    k: Number of rows per query, the k of recall@k.
  """

  @functools.cache  # the ids of several trials are mostly the same
  def score(query: int, row: int) -> float:
    if row < 0:
      return -np.inf
    return float(source.read(row, row + 1)[0].astype(np.float64)
                 @ vectors[query].astype(np.float64))

  def scores(ids):
    return np.array([[score(query, row) for row in rows[:k]]
                     for query, rows in enumerate(ids.tolist())])

  least = scores(on_host(source)(vectors, k)[1]).min(1, keepdims=True)
  return lambda ids: float(np.mean(scores(ids) >= least - 1e-6))
