# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Comparisons: intervals of means, and differences paired by question."""

from collections.abc import Mapping, Sequence
import dataclasses

import numpy as np

from searchrl.agent import rewards
from searchrl.evaluation import scores
from searchrl.trajectory import Question

RESAMPLES = 4000


@dataclasses.dataclass(frozen=True)
class Difference:
  """The mean difference of two methods on the same questions.

  Attributes:
    mean: Mean of the first minus the second.
    low: Lower end of its 95 % interval.
    high: Upper end of its 95 % interval.
    p: Two-sided p-value of McNemar's exact test (1947) of exact match.
    questions: Number of questions that both were asked.
  """

  mean: float
  low: float
  high: float
  p: float
  questions: int


def bootstrap(values: Sequence[float], *, seed: int = 0, level: float = 0.95
             ) -> tuple[float, float]:
  """Returns the percentile bootstrap's interval of a mean (Efron 1979).

  Equal values are drawn together, so that more of them take no more time.

  Args:
    values: The values, at least one.
    seed: Seed of the resamples.
    level: Level of the interval.
  """
  return _percentiles(_means(values, np.random.default_rng(seed)), level)


def bootstrap_of_sets(sets: Sequence[Sequence[float]], *, seed: int = 0,
                      level: float = 0.95) -> tuple[float, float]:
  """Returns the interval of the mean over sets, each with equal weight."""
  rng = np.random.default_rng(seed)
  return _percentiles(np.mean([_means(values, rng) for values in sets], 0),
                      level)


def _means(values: Sequence[float], rng: np.random.Generator) -> np.ndarray:
  """Returns means of resamples."""
  distinct, counts = np.unique(values, return_counts=True)
  total = counts.sum()
  return rng.multinomial(total, counts / total, RESAMPLES) @ distinct / total


def _percentiles(means: np.ndarray, level: float) -> tuple[float, float]:
  low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
  return float(low), float(high)


def difference(first: Sequence[scores.Score], second: Sequence[scores.Score],
               name: str = 'em') -> Difference:
  """Returns the difference of two methods in a score, on common questions.

  Several samples of a question count as their mean. The test counts a question
  as right if that mean is at least one half.

  Raises:
    ValueError: The methods have no question in common.
  """
  ours, theirs = by_question(first, name), by_question(second, name)
  common = [uid for uid in ours if uid in theirs]
  if not common:
    raise ValueError('methods are compared on the same questions, but these '
                     'two have none in common.')
  differences = [ours[uid] - theirs[uid] for uid in common]
  low, high = bootstrap(differences)
  ours, theirs = (by_question(of) for of in (first, second))
  right = [(ours[uid] >= .5, theirs[uid] >= .5) for uid in common]
  won, lost = (sum(a > b for a, b in right), sum(a < b for a, b in right))
  from scipy import stats  # slow to import
  p = stats.binomtest(won, won + lost).pvalue if won + lost else 1.0
  return Difference(float(np.mean(differences)), low, high, float(p),
                    len(common))


def by_question(found: Sequence[scores.Score], name: str = 'em'
               ) -> dict[str, float]:
  """Returns a score of each question, by uid: the mean over its samples."""
  values = {}
  for score in found:
    values.setdefault(score.uid, []).append(score.values[name])
  return {uid: float(np.mean(of)) for uid, of in values.items()}


def overlap(train: Sequence[Question], test: Mapping[str, Sequence[Question]]
           ) -> dict[str, float]:
  """Returns the share of each set's normalised questions that training has."""
  known = {rewards.normalise(question.text) for question in train}
  return {name: float(np.mean([rewards.normalise(q.text) in known
                               for q in questions]))
          for name, questions in test.items()}
