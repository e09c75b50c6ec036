# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Comparisons: intervals of means, and differences paired by question."""

import collections
from collections.abc import Mapping, Sequence
import dataclasses

import numpy as np

from searchrl.agent import rewards
from searchrl.evaluation.scores import Score
from searchrl.trajectory import Question

RESAMPLES = 4000


@dataclasses.dataclass(frozen=True)
class Difference:
  """The difference of two methods on the same questions, first minus second."""

  mean: float
  low: float  # ends of the 95 % interval of the mean
  high: float
  p: float  # two-sided p-value of McNemar's exact test (1947), a sign test
  questions: int  # number of questions that both were asked


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
  """Returns the 95 % confidence interval (low, high) of the mean of values.

  It is found by resampling the values: the percentile bootstrap. To save time,
  the number of draws of each distinct value is drawn, which is equivalent.

  Source: Efron 1979.
  """
  distinct, counts = np.unique(values, return_counts=True)
  total = counts.sum()
  draws = np.random.default_rng(0).multinomial(
      total, counts / total, RESAMPLES)
  low, high = np.quantile(draws @ distinct / total, [0.025, 0.975])
  return float(low), float(high)


def difference(first: Sequence[Score], second: Sequence[Score],
               score: str = 'em') -> Difference:
  """Returns the mean difference of two methods' scores on common questions.

  It comes with a bootstrap interval and McNemar's exact p. Several samples of a
  question count as their mean. For p, a question counts for the method that
  alone answers it right, with a mean score of at least one half. With F1, it
  counts for the method with the higher mean.

  Args:
    first: Scores of the first method.
    second: Scores of the second method. They are subtracted from the first's.
    score: Name of the score, such as 'em'.

  Raises:
    ValueError: The methods have no question in common.
  """
  ours, theirs = by_question(first, score), by_question(second, score)
  common = [uid for uid in ours if uid in theirs]
  if not common:
    raise ValueError('methods are compared on the same questions, but these '
                     'two have none in common.')
  differences = [ours[uid] - theirs[uid] for uid in common]
  low, high = bootstrap(differences)
  right = [(ours[uid], theirs[uid]) if score == 'f1' else
           (ours[uid] >= .5, theirs[uid] >= .5) for uid in common]
  won, lost = (sum(a > b for a, b in right), sum(a < b for a, b in right))
  from scipy import stats  # slow to import
  p = stats.binomtest(won, won + lost).pvalue if won + lost else 1.0
  return Difference(float(np.mean(differences)), low, high, float(p),
                    len(common))


def by_question(scores: Sequence[Score], name: str = 'em'
               ) -> dict[str, float]:
  """Returns the score of each question, by uid: the mean over its samples."""
  values = collections.defaultdict(list)
  for score in scores:
    values[score.uid].append(score.values[name])
  return {uid: float(np.mean(samples)) for uid, samples in values.items()}


def overlap(train: Sequence[Question], test: Mapping[str, Sequence[Question]],
            *, with_answers: bool = False) -> dict[str, float]:
  """Returns for each set the fraction of its questions that are in training.

  Args:
    train: Questions of the training.
    test: Questions by set. They are normalised before the comparison.
    with_answers: True: a question is the same only if a gold answer is, too.
      Generated worlds ask the same question about other facts.
  """
  def facts(question: Question) -> set[tuple[str, str]]:
    answers = question.answers if with_answers else ('',)
    return {(rewards.normalise(question.text), rewards.normalise(answer))
            for answer in answers}

  known = set[tuple[str, str]]().union(*map(facts, train))
  return {name: float(np.mean([not known.isdisjoint(facts(q))
                               for q in questions]))
          for name, questions in test.items()}
