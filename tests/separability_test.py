# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""separability: equal texts cannot be told apart, unlike ones always."""

import numpy as np

from searchrl.papers.zerosearch.simulator_report import separability

WORDS = ('river', 'tower', 'mayor', 'harbour', 'winter', 'sea', 'source')


def texts(seed, words=WORDS, count=60):
  rng = np.random.default_rng(seed)
  return [' '.join(rng.choice(words, 12)) for _ in range(count)]


GROUPS = [str(n // 2) for n in range(60)]


def test_draws_of_one_source_are_not_told_apart():
  found = [separability(texts(seed), texts(seed + 50), GROUPS)
           for seed in range(5)]
  assert abs(np.mean(found) - 0.5) < 0.1


def test_another_spelling_is_always_told():
  other = [text.replace('er', 're') for text in texts(1)]
  assert separability(texts(0), other, GROUPS) > 0.99


def test_the_area_grows_with_the_difference():
  few = [text + ' and so on' * (n % 5 == 0) for n, text in enumerate(texts(1))]
  half = [text + ' and so on' * (n % 2) for n, text in enumerate(texts(1))]
  assert 0.5 < separability(texts(0), few, GROUPS) < (
      separability(texts(0), half, GROUPS)) < 0.9


def test_a_text_is_not_told_by_what_its_group_has_learned():
  """Both kinds of a group are equal: what a fold has seen is no evidence."""
  same = texts(0)
  assert abs(separability(same, same, GROUPS) - 0.5) < 0.05


def test_too_few_groups_say_nothing():
  assert separability(['a', 'b'], ['c', 'd'], ['x', 'y']) is None
