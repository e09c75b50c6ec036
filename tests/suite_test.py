# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""suite: intervals, rows, and names of metrics."""

import numpy as np
import pytest
from searchrl.data import datasets
from searchrl.evaluation import suite
from searchrl.rollouts import sampler as samplers
from searchrl.rollouts import weight_sync
from searchrl.trajectory import Action, Question, Trajectory, Turn


@pytest.mark.parametrize('hits, n', [(0, 10), (3, 10), (10, 10), (50, 200)])
def test_wilson_interval_solves_its_equation(hits, n):
  # The ends p of the interval are where |hits/n - p| = z sqrt(p (1-p) / n).
  for p in suite.wilson(hits, n):
    np.testing.assert_allclose(
        (hits / n - p) ** 2, 1.96 ** 2 * p * (1 - p) / n, atol=1e-12)


def answered():
  for i, (hops, answer) in enumerate(
      [(1, 'Elba'), (1, 'Oder'), (2, 'the elba')]):
    question = Question(f'q{i}', 'which?', ('Elba',), hops)
    turn = Turn((1,), (0.0,), Action('answer', (answer,)))
    yield Trajectory(question, 0, 0, (1,), (turn,), 'answer')


class Answers:
  """A sampler whose policy gives these three answers."""

  def sync(self, params):
    return weight_sync.Synced(params)

  def rollout(self, weights, requests, *, temperature, **_):
    assert weights == 'params' and temperature == 0.0
    by_uid = {t.question.uid: t for t in answered()}
    return samplers.Rollouts([by_uid[r.question.uid] for r in requests], [])


def test_rows_are_by_hops_and_scored_by_every_measure():
  case = suite.EvalCase(
      datasets.Dataset('known', [t.question for t in answered()], None),
      'bm25', None,
      'greedy')
  rows, records = suite.run(Answers(), 'params', [case])
  assert [(r['hops'], r['n'], r['em']) for r in rows] == [
      (1, 2, 0.5), (2, 1, 1.0)]
  assert rows[0]['f1'] == 0.5 and rows[0]['searches'] == 0
  assert len(records[0][1]) == 3
  assert suite.scalars(rows)['val/known_2hop/em/greedy'] == 1.0
