# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Statistics of runs that share seeds: paired differences, areas, crossings.

Two arms with one seed have the same worlds, of training and of the test, so
that what a world makes easy or hard cancels in their difference.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math

import numpy as np
from scipy import stats


@dataclasses.dataclass(frozen=True)
class Difference:
  """The difference of two arms over the seeds that both have."""

  mean: float
  low: float  # of the interval; -inf with a single seed
  high: float
  seeds: int
  smallest: float  # absolute difference that counts, said before any run

  @property
  def separable(self) -> bool:
    """True if the interval excludes 0 and the difference is one that counts.

    The last digits of a float do not decide: 0.8 - 0.75 counts as 0.05.
    """
    counts = abs(self.mean) >= self.smallest - 1e-9
    return counts and (self.low > 0 or self.high < 0)


def difference(a: Mapping[int, float], b: Mapping[int, float], *,
               smallest: float, level: float = 0.95) -> Difference | None:
  """Returns the mean of a - b over the seeds of both, with its t interval.

  Args:
    a: Values of an arm by seed.
    b: Values of the other arm by seed.
    smallest: Smallest absolute difference that counts.
    level: Confidence level of the interval of this one difference. Of many such
      intervals, some exclude 0 by chance.

  Returns:
    None if no seed is in both.
  """
  pairs = np.array([a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())])
  if not len(pairs):
    return None
  low, high = interval(pairs, level=level)
  return Difference(float(pairs.mean()), low, high, len(pairs), smallest)


def interval(values: Sequence[float], *, level: float = 0.95
            ) -> tuple[float, float]:
  """Student's t interval of a mean; without bounds for a single value."""
  n, mean = len(values), float(np.mean(values))
  if n < 2:
    return -math.inf, math.inf
  half = stats.t.ppf((1 + level) / 2, n - 1) * np.std(values, ddof=1) / n ** .5
  return mean - float(half), mean + float(half)


def area(x: Sequence[float], y: Sequence[float], end: float) -> float:
  """Returns a curve's mean height from its first x to an end, by trapezoids.

  Args:
    x: Increasing places.
    y: Height at each x. The curve is straight between them, and constant after
      the last one.
    end: End of the mean, above the first x.
  """
  inside = [point for point in zip(x, y) if point[0] < end]
  inside.append((end, float(np.interp(end, x, y))))
  at, heights = np.array(inside, np.float64).T
  return float(np.trapezoid(heights, at) / (end - at[0]))


def reaches(x: Sequence[float], y: Sequence[float], level: float
           ) -> float | None:
  """Finds where a curve, straight between its points, first reaches a level.

  Returns:
    An x, or None if it stays below.
  """
  for i, height in enumerate(y):
    if height >= level:
      if not i:
        return float(x[0])
      share = (level - y[i - 1]) / (height - y[i - 1])
      return float(x[i - 1] + share * (x[i] - x[i - 1]))
  return None


def nearest(fractions: Mapping[float, float], wanted: float) -> float:
  """Returns the key whose value is nearest to a wanted one, as a ratio.

  Args:
    fractions: Fraction that each clip range clips, by clip range. Fractions
      below 1e-4 count as 1e-4.
    wanted: Fraction to find.
  """
  def distance(key):
    return abs(math.log(max(fractions[key], 1e-4) / max(wanted, 1e-4)))
  return min(sorted(fractions), key=distance)
