# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Finds the best passages of a query without reading all its terms' postings.

The postings of a term are the passages that contain it, each with its impact:
the amount that the term adds to the passage's score. A span is one term of a
query, with the range of its postings. The module imports no package but numpy,
so that the processes of `ranking` start quickly.

Source: Turtle and Flood 1995, Query evaluation: strategies and optimizations,
  Information Processing and Management 31(6) (MaxScore).
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from multiprocessing import reduction
import os
import tempfile
from typing import Any, BinaryIO

from jaxtyping import Float, Int
import numpy as np

Span = tuple[float, int, int, int]  # largest sum, start, stop, count in query

_LEADERS = 8  # this times k passages are summed first, to raise the threshold


@dataclasses.dataclass(frozen=True)
class Postings:
  """Postings in two parallel arrays: the passages, and their impacts.

  The impact is what one query term adds to the passage's score. P is the number
  of postings, and N that of passages. The postings of a term are adjacent, in
  the order of the passages. If the arrays map `files`, a new process can get
  this object: the open files are pickled in place of the arrays. See
  `in_files`.
  """

  passages: Int[np.ndarray, 'P']  # in [0, N)
  impacts: Float[np.ndarray, 'P']  # float32; score added by one query term
  size: int  # N
  files: tuple[BinaryIO, ...] = ()  # open files that the arrays map; (): none
  # Arrays of N zeros that no call of `best` uses at present.
  _zeros: list[np.ndarray] = dataclasses.field(default_factory=list)

  @classmethod
  def mapped(cls, files: Sequence[BinaryIO], size: int) -> Postings:
    """Returns the postings in two .npy files, of passages and of impacts."""
    passages, impacts = map(mapped, files)
    return cls(passages, impacts, size, tuple(files))

  def in_files(self) -> Postings:
    """Returns these postings in files that several processes can map."""
    if self.files:
      return self
    return self.mapped([*map(_unnamed, (self.passages, self.impacts))],
                       self.size)

  def __reduce__(self) -> tuple[Any, ...]:
    return _received, (
        self.size, *(reduction.DupFd(file.fileno()) for file in self.files))

  def best(self, spans: Sequence[Span], k: int
          ) -> tuple[Int[np.ndarray, 'K'], Float[np.ndarray, 'K']]:
    """Returns positions and scores of the k passages with the largest sums.

    There are fewer than k if fewer passages contain a term of the query.

    The terms that can add most to a score are summed up first. At some point
    the remaining terms together cannot lift a new passage into the k best. They
    are then looked up only for passages that already have a sum and can still
    reach the k best.

    Args:
      spans: Spans of a query, one per term: the largest score that the term can
        add, the start and the stop of its postings, and its count in the query.
      k: Number of passages; ties go to the lower position.
    """
    spans = sorted(spans, key=lambda span: -span[0])
    if not spans or k < 1:
      return np.zeros(0, np.int32), np.zeros(0, np.float32)
    try:
      total = self._zeros.pop()
    except IndexError:  # the first call, or other threads use the arrays
      total = np.zeros(self.size)
    touched: list[np.ndarray] = []
    threshold = 0.0  # lower bound of the k-th best sum
    while spans and _bound(spans) >= threshold:
      _, start, stop, count = spans.pop(0)
      ids = self.passages[start:stop]
      before = total[ids]
      sums = before + count * self.impacts[start:stop]
      total[ids] = sums
      touched.append(ids[before == 0] if touched else ids)
      threshold = _raised(threshold, sums, k)
    ids = np.concatenate(touched)
    sums = total[ids]
    total[ids] = 0
    self._zeros.append(total)
    ids, sums = self._completed(spans, ids, sums, k, threshold)
    sums = sums.astype(np.float32)
    order = np.lexsort((ids, -sums))[:k]
    return ids[order], sums[order]

  def _completed(self, spans, ids, sums, k: int, threshold: float):
    """Returns ids and sums of passages, with the spans added to the sums.

    Passages that cannot be in the k best are left out.
    """
    ids, sums = _candidates(ids, sums, spans, threshold)
    if len(ids) > 2 * _LEADERS * k:
      leaders = np.argpartition(sums, -_LEADERS * k)[-_LEADERS * k:]
      whole = sums[leaders]
      for span in spans:
        whole = whole + span[3] * self._impacts_of(span, ids[leaders])
      threshold = _raised(threshold, whole, k)
    for i, span in enumerate(spans):
      ids, sums = _candidates(ids, sums, spans[i:], threshold)
      sums = sums + span[3] * self._impacts_of(span, ids)
    return ids, sums

  def _impacts_of(self, span: Span, ids: Int[np.ndarray, 'M']
                 ) -> Float[np.ndarray, 'M']:
    """Returns a term's impact on each passage; 0 if the passage lacks it."""
    _, start, stop, _ = span
    passages = self.passages[start:stop]
    places = np.searchsorted(passages, ids)
    places[places == len(passages)] = 0
    return np.where(
        passages[places] == ids, self.impacts[start:stop][places], 0)


def _bound(spans: Sequence[Span]) -> float:
  """Returns the most that the terms of some spans can add to a score."""
  return sum(bound for bound, _, _, _ in spans)


def _raised(threshold: float, sums: Float[np.ndarray, 'M'], k: int) -> float:
  """Returns a lower bound of the k-th best sum that is at least `threshold`.

  The new bound is the k-th highest of `sums`, less a float32's rounding error.
  """
  if k > len(sums):
    return threshold
  return max(threshold, float(np.partition(sums, -k)[-k]) * (1 - 1e-6))


def _candidates(ids, sums, spans, threshold: float):
  """Returns the ids and sums of passages that can still reach the threshold.

  The spans are the terms that are not in the sums yet.
  """
  able = np.flatnonzero(sums >= threshold - _bound(spans))
  return ids[able], sums[able]


def mapped(file: BinaryIO) -> np.ndarray:
  """Returns the array of an open .npy file, memory-mapped.

  The file's name may then be removed.
  """
  path = f'/dev/fd/{file.fileno()}' if os.name == 'posix' else file.name
  return np.asarray(np.load(path, mmap_mode='r'))


def _unnamed(array: np.ndarray) -> BinaryIO:
  """Writes an array to a new file that has no name, and returns it open.

  On Linux, the file is in memory.
  """
  file = (os.fdopen(os.memfd_create('searchrl'), 'w+b')
          if hasattr(os, 'memfd_create') else tempfile.TemporaryFile())
  np.save(file, array)
  file.flush()
  return file


def _received(size: int, *files: Any) -> Postings:
  return Postings.mapped([os.fdopen(file.detach(), 'rb') for file in files],
                         size)
