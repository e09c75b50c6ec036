# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The best passages of a query, from few of its terms' postings.

It imports numpy alone, so that the processes of `ranking` start soon.

Source: Turtle and Flood 1995, Query evaluation: strategies and optimizations,
  Information Processing and Management 31(6) (MaxScore).
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from typing import BinaryIO

from jaxtyping import Float, Int
import numpy as np

Span = tuple[float, int, int, int]  # the most it can add, start, stop, count

_LEADERS = 8  # times k passages are summed up first: they raise the threshold


@dataclasses.dataclass(frozen=True)
class Postings:
  """Where each term occurs, and what it adds there."""

  passages: Int[np.ndarray, 'P']  # in [0, N)
  impacts: Float[np.ndarray, 'P']  # float32; what one query term adds
  size: int  # N
  files: tuple[BinaryIO, ...] = ()  # that the two are mapped from, if they are
  _zeros: list[np.ndarray] = dataclasses.field(default_factory=list)  # free [N]

  def best(self, spans: Sequence[Span], k: int
          ) -> tuple[Int[np.ndarray, 'K'], Float[np.ndarray, 'K']]:
    """Positions and scores of the k passages with the largest sums.

    The terms that can add most are summed up first. Once the rest together
    cannot lift a new passage into the k best, they are looked up only for the
    passages that have a summed term and can still get there.

    Args:
      spans: of each term of a query: the most it can add, its postings, and
        how often the query has it.
      k: passages; ties go to the lower position.
    """
    spans = sorted(spans, key=lambda span: -span[0])
    if not spans or k < 1:
      return np.zeros(0, np.int32), np.zeros(0, np.float32)
    try:
      total = self._zeros.pop()
    except IndexError:  # the first call, or other threads use them
      total = np.zeros(self.size)
    touched, threshold = [], 0.0  # the k-th best has no less
    while spans and _bound(spans) >= threshold:
      _, start, stop, count = spans.pop(0)
      at = self.passages[start:stop]
      before = total[at]
      sums = before + count * self.impacts[start:stop]
      total[at] = sums
      touched.append(at[before == 0] if touched else at)
      threshold = _raised(threshold, sums, k)
    at = np.concatenate(touched)
    sums = total[at]
    total[at] = 0
    self._zeros.append(total)
    at, sums = self._completed(spans, at, sums, k, threshold)
    sums = sums.astype(np.float32)
    order = np.lexsort((at, -sums))[:k]
    return at[order], sums[order]

  def _completed(self, spans, at, sums, k: int, threshold: float):
    """Adds the spans to sums, and drops what cannot be among the k best."""
    at, sums = _candidates(at, sums, spans, threshold)
    if len(at) > 2 * _LEADERS * k:
      leaders = np.argpartition(sums, -_LEADERS * k)[-_LEADERS * k:]
      whole = sums[leaders]
      for span in spans:
        whole = whole + span[3] * self._impacts_of(span, at[leaders])
      threshold = _raised(threshold, whole, k)
    for i, span in enumerate(spans):
      at, sums = _candidates(at, sums, spans[i:], threshold)
      sums = sums + span[3] * self._impacts_of(span, at)
    return at, sums

  def _impacts_of(self, span: Span, at: Int[np.ndarray, 'M']
                 ) -> Float[np.ndarray, 'M']:
    """What a term adds to each passage, 0 where it does not occur."""
    _, start, stop, _ = span
    passages = self.passages[start:stop]
    place = np.searchsorted(passages, at)
    place[place == len(passages)] = 0
    return np.where(
        passages[place] == at, self.impacts[start:stop][place], 0)


def _bound(spans: Sequence[Span]) -> float:
  """The most that these terms together can add to a passage."""
  return sum(most for most, _, _, _ in spans)


def _raised(threshold: float, sums: Float[np.ndarray, 'M'], k: int) -> float:
  """The k-th highest of sums, less a float32's error, if that is higher."""
  if k > len(sums):
    return threshold
  return max(threshold, float(np.partition(sums, -k)[-k]) * (1 - 1e-6))


def _candidates(at, sums, spans, threshold: float):
  """The passages that can reach the threshold once all spans are added."""
  able = np.flatnonzero(sums >= threshold - _bound(spans))
  return at[able], sums[able]
