# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""compare: coverage of intervals, McNemar's test by hand, overlap of sets."""

import math

import numpy as np
import pytest

from searchrl.evaluation import compare
from searchrl.evaluation import scores
import tiny


@pytest.mark.slow
@pytest.mark.parametrize('rate', [0.3, 0.5, 0.8])
def test_intervals_cover_the_truth_as_often_as_they_say(rate):
  rng, hits = np.random.default_rng(int(100 * rate)), 0
  for _ in range(2000):
    low, high = compare.bootstrap(rng.random(200) < rate)
    hits += low <= rate <= high
  assert 0.93 <= hits / 2000 <= 0.97


def test_an_interval_is_that_of_resampled_means_and_may_be_a_point():
  values = np.random.default_rng(0).normal(size=60)
  low, high = compare.bootstrap(values)
  plain = [np.mean(np.random.default_rng(n).choice(values, 60))
           for n in range(4000)]
  np.testing.assert_allclose((low, high), np.quantile(plain, [.025, .975]),
                             atol=0.02)
  assert compare.bootstrap([1.0] * 9) == (1.0, 1.0)
  assert compare.bootstrap([0.5]) == (0.5, 0.5)


def of(*right, first=0):
  return [scores.Score(f'q{n}', 1, '', False, dict.fromkeys(
      scores.NAMES, float(r))) for n, r in enumerate(right, start=first)]


def test_a_difference_is_paired_and_tested_exactly():
  ours = of(*[1] * 9, *[0] * 1, *[1] * 10)
  theirs = of(*[0] * 9, *[1] * 1, *[1] * 10)
  found = compare.difference(ours, theirs)
  assert found.mean == pytest.approx(0.4) and found.questions == 20
  # Of ten questions that differ, nine or more go one way: twice 11 in 1,024.
  assert found.p == pytest.approx(2 * (math.comb(10, 1) + 1) / 2**10)
  assert found.low < 0.4 < found.high and found.low > 0
  back = compare.difference(theirs, ours)
  assert back.mean == -found.mean and back.p == found.p


def test_f1_is_tested_by_the_questions_that_each_answers_better():
  ours = of(.6, .7, .9, .2, .4, .5, .5, .1)
  theirs = of(.5, .6, .8, .1, .3, .4, .5, .2)
  found = compare.difference(ours, theirs, 'f1')
  assert found.mean == pytest.approx((6 * .1 - .1) / 8)
  # Of seven questions that differ, six or more go one way.
  assert found.p == pytest.approx(2 * (math.comb(7, 1) + 1) / 2**7)
  assert compare.difference(ours, theirs).p == 1.0  # .5 and .4 differ alone


def test_only_common_questions_count_and_equal_methods_differ_by_nothing():
  found = compare.difference(of(1, 0, 1), of(0, 1, first=2))
  assert found.questions == 1 and found.mean == 1.0
  same = compare.difference(of(1, 0), of(1, 0))
  assert (same.mean, same.low, same.high, same.p) == (0.0, 0.0, 0.0, 1.0)
  with pytest.raises(ValueError, match='none in common'):
    compare.difference(of(1), of(1, first=5))


def test_overlap_is_of_normalised_questions():
  test = {'nq': [tiny.question('a', 'Who is the king?'), tiny.question('b', 'x')],
          'other': [tiny.question('c', 'y')]}
  assert compare.overlap([tiny.question('t', 'who is king')], test) == {
      'nq': 0.5, 'other': 0.0}


def test_overlap_with_answers_is_of_questions_about_the_same_fact():
  test = {'nq': [
      tiny.question('a', 'Who is the king?', answers=('Ann', 'The B')),
      tiny.question('b', 'Who rides?', answers=('C',))]}
  train = [tiny.question('t', 'who is king', answers=('b!',)),
           tiny.question('u', 'Who rides?', answers=('D',))]
  assert compare.overlap(train, test) == {'nq': 1.0}
  assert compare.overlap(train, test, with_answers=True) == {'nq': 0.5}
