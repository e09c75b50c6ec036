# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""paired: intervals against tables and plain loops, curves against the head."""

import math

import numpy as np
import pytest

import paired

T_95 = {1: 12.7062047, 2: 4.3026527, 4: 2.7764451, 9: 2.2621572}  # by freedom


@pytest.mark.parametrize('n', [2, 3, 5, 10])
def test_an_interval_is_the_mean_and_a_t_of_the_tables(n):
  values = np.random.default_rng(n).normal(0.3, 0.1, n).tolist()
  mean = math.fsum(values) / n
  variance = math.fsum((x - mean) ** 2 for x in values) / (n - 1)
  half = T_95[n - 1] * math.sqrt(variance / n)
  assert paired.interval(values) == pytest.approx((mean - half, mean + half),
                                                  abs=1e-7)


def test_five_seeds_by_hand():
  # Differences .1 .2 .3 .4 .5: mean .3, deviation .1581, 2.776 * .0707 = .1963.
  a = {seed: 0.5 + 0.1 * seed for seed in range(1, 6)}
  found = paired.difference(a, dict.fromkeys(range(1, 6), 0.5), smallest=0.05)
  assert (found.mean, found.low, found.high) == pytest.approx(
      (0.3, 0.1037, 0.4963), abs=1e-4)
  assert found.seeds == 5 and found.separable


def test_what_a_world_makes_hard_cancels():
  worlds = dict(enumerate([0.1, 0.5, 0.9, 0.3]))
  better = {seed: value + 0.06 for seed, value in worlds.items()}
  found = paired.difference(better, worlds, smallest=0.05)
  assert found.low == pytest.approx(0.06) == found.high
  assert found.separable


def test_only_seeds_of_both_are_paired():
  found = paired.difference(
      {0: 1.0, 1: 0.5, 2: 9.0}, {1: 0.25, 0: 0.25, 7: 4.0}, smallest=0.1)
  assert found.seeds == 2 and found.mean == pytest.approx(0.5)
  assert paired.difference({0: 1.0}, {1: 1.0}, smallest=0.1) is None


@pytest.mark.parametrize('values, smallest, separable', [
    ([0.30, 0.31, 0.32], 0.1, True),
    ([-0.30, -0.31, -0.32], 0.1, True),
    ([0.30, 0.31, 0.32], 0.4, False),  # sure, but too small to count
    ([-0.2, 0.9, 0.3], 0.1, False),  # large, but not sure
    ([0.8 - 0.75] * 3, 0.05, True),  # a float below .05
    ([0.0, 0.0, 0.0], 0.0, False),
    ([0.9], 0.1, False),  # a single seed is no evidence
])
def test_separable_is_sure_and_large_enough(values, smallest, separable):
  a = dict(enumerate(values))
  found = paired.difference(a, dict.fromkeys(a, 0.0), smallest=smallest)
  assert found.separable is separable


def test_a_single_seed_has_no_bounds():
  assert paired.interval([0.4]) == (-math.inf, math.inf)


def test_intervals_hold_the_truth_as_often_as_they_say():
  rng = np.random.default_rng(0)
  rows = rng.normal(0.2, 0.1, (2000, 5))
  inside = [low <= 0.2 <= high for low, high in map(paired.interval, rows)]
  assert abs(np.mean(inside) - 0.95) < 0.015  # 3 standard errors


def test_an_area_by_hand():
  # 0 to 1 over [0, 10]: mean .5; then 1 over [10, 30].
  assert paired.area([0, 10], [0, 1], 10) == pytest.approx(0.5)
  assert paired.area([0, 10], [0, 1], 30) == pytest.approx((5 + 20) / 30)
  assert paired.area([0, 10], [0, 1], 5) == pytest.approx(0.25)
  assert paired.area([5, 10], [1, 1], 10) == pytest.approx(1)


@pytest.mark.parametrize('seed', range(4))
def test_an_area_is_the_mean_of_many_heights(seed):
  rng = np.random.default_rng(seed)
  x = np.cumsum(rng.uniform(1, 9, 7))
  y, end = rng.uniform(0, 1, 7), float(x[0] + rng.uniform(5, 60))
  places = np.linspace(x[0], end, 200_001)
  total = 0.0
  for place in (places[:-1] + places[1:]) / 2:
    right = int(np.searchsorted(x, place))
    if right == len(x):
      total += y[-1]
    else:
      share = (place - x[right - 1]) / (x[right] - x[right - 1])
      total += y[right - 1] + share * (y[right] - y[right - 1])
  assert paired.area(x, y, end) == pytest.approx(total / 200_000, abs=1e-6)


@pytest.mark.parametrize('y, where', [
    ([0.0, 0.3, 0.9], 7.5),  # halfway between 5 and 10
    ([0.7, 0.0, 0.0], 0), ([0.0, 0.6, 0.0], 5), ([0.0, 0.2, 0.59], None)])
def test_where_a_curve_first_reaches_a_level(y, where):
  found = paired.reaches([0, 5, 10], y, 0.6)
  assert found == (where if where is None else pytest.approx(where))


def test_the_nearest_fraction_is_so_as_a_ratio():
  fractions = {0.05: 0.40, 0.1: 0.10, 0.2: 0.01}
  assert paired.nearest(fractions, 0.25) == 0.05  # 1.6 times; .1 is 2.5 times
  assert paired.nearest(fractions, 0.15) == 0.1
  assert paired.nearest(fractions, 0.0) == 0.2
  assert paired.nearest({0.1: 0.0, 0.2: 0.0}, 0.0) == 0.1  # the smaller range
