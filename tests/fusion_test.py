# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""fusion: the formula in exact fractions; failures and ties."""

import fractions
import threading

import numpy as np
import pytest
import tiny

from searchrl.search import fusion
from searchrl.trajectory import Passage, Query, SearchError


def passage(name, score=0.0):
  return Passage(name, f'Title {name}', 'x', score)


def ranking(names):
  return tuple(passage(name, 10.0 - i) for i, name in enumerate(names))


def oracle(rankings, k):
  """Names from the best down, with exact scores."""
  scores, first = {}, {}
  for number, names in enumerate(rankings):
    for rank, name in enumerate(names, start=1):
      scores[name] = scores.get(name, 0) + fractions.Fraction(1, k + rank)
      first[name] = min(first.get(name, (99, 99)), (rank, number))
  return sorted(scores, key=lambda n: (-scores[n], first[n])), scores


def test_three_passages_by_hand():
  fused = fusion.fuse([ranking('ab'), ranking('cb')], k=60, top_k=3)
  assert [p.id for p in fused] == ['b', 'a', 'c']  # b: 2/62 > a, c: 1/61
  assert [p.score for p in fused] == [2 / 62, 1 / 61, 1 / 61]


@pytest.mark.parametrize('seed', range(20))
def test_order_and_scores_are_those_of_the_formula(seed):
  rng = np.random.default_rng(seed)
  k = int(rng.integers(0, 61))
  rankings = [''.join(rng.permutation(list('abcdefgh'))[:rng.integers(0, 9)])
              for _ in range(rng.integers(1, 5))]
  names, scores = oracle(rankings, k)
  fused = fusion.fuse(list(map(ranking, rankings)), k=k, top_k=20)
  assert [p.id for p in fused] == names
  np.testing.assert_allclose([p.score for p in fused],
                             [float(scores[n]) for n in names], rtol=1e-14)
  for top_k in (0, 1, 3):
    assert fusion.fuse(list(map(ranking, rankings)), k=k,
                       top_k=top_k) == fused[:top_k]


def test_equal_ids_of_different_passages_are_kept_apart():
  one, other = passage('a'), Passage('a', 'Another', 'y')
  fused = fusion.fuse([(one,), (other,), (other,)], k=60, top_k=3)
  assert [p.title for p in fused] == ['Another', 'Title a']


def test_a_passage_counts_once_in_a_ranking():
  fused = fusion.fuse([ranking('aab'), ranking('b')], k=60, top_k=3)
  assert [p.score for p in fused] == [1 / 62 + 1 / 61, 1 / 61]


def test_engines_are_asked_deep_and_failures_stay_failures():
  depths = []

  def engine(names, fails=()):
    def search(queries):
      depths.append([q.top_k for q in queries])
      return [SearchError('timeout') if q.text in fails else
              ranking(names)[:q.top_k] for q in queries]
    return search

  search = fusion.fused((engine('abc'), engine('cbd', {'late'})), depth=2)
  found = search([Query(text, k, tiny.question())
                  for text, k in (('x', 1), ('late', 3), ('y', 3))])
  assert depths == [[2, 3, 3]] * 2
  assert [p.id for p in found[0]] == ['b']
  assert found[1] == SearchError('timeout')
  # c: 1/63 + 1/61 > b: 2/62, as the mean of reciprocals is.
  assert [p.id for p in found[2]] == ['c', 'b', 'a']


def test_engines_are_asked_at_the_same_time():
  both = threading.Barrier(2)

  def engine(queries):
    both.wait(10)  # fails if the other is asked only afterwards
    return [ranking('a') for _ in queries]

  found, = fusion.fused((engine, engine))([Query('x', 1, tiny.question())])
  assert [p.id for p in found] == ['a']


@pytest.mark.parametrize('options', [dict(k=-1), dict(k=float('nan')),
                                     dict(depth=0)])
def test_options_are_checked(options):
  with pytest.raises(ValueError, match='must have engines, k of'):
    fusion.fused((lambda queries: [],), **options)
