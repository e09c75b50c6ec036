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
      (1, 2, 0.5), (2, 1, 1.0), ('all', 3, 2 / 3)]
  assert rows[0]['f1'] == 0.5 and rows[0]['searches'] == 0
  assert len(records[0][1]) == 3
  values = suite.scalars(rows)
  assert values['val/known_2hop/em/greedy'] == 1.0
  assert values['val/known/em/greedy'] == 2 / 3
  assert not [name for name in values if 'mean' in name]


def case_of(name, *uids, decoding='greedy', engine='bm25', **fields):
  by_uid = {t.question.uid: t.question for t in answered()}
  return suite.EvalCase(
      datasets.Dataset(name, [by_uid[uid] for uid in uids], None, **fields),
      engine, None, decoding)


def test_a_set_of_one_hop_count_has_its_name_alone():
  rows, _ = suite.run(Answers(), 'params', [case_of('nq', 'q0', 'q1')])
  assert [(r['set'], r['hops'], r['em']) for r in rows] == [('nq', 'all', 0.5)]
  assert set(suite.scalars(rows)) == {
      f'val/nq/{score}/greedy' for score in ('em', 'subem', 'f1', 'searches')}


def test_the_mean_weighs_sets_alike_and_leaves_random_passages_out():
  rows, _ = suite.run(Answers(), 'params', [
      case_of('nq', 'q0', 'q1'), case_of('hotpotqa', 'q2'),
      case_of('nq', 'q1', engine='noise')])
  mean = rows[-1]
  assert (mean['set'], mean['hops'], mean['n'], mean['em']) == (
      'mean', 'all', 3, 0.75)
  values = suite.scalars(rows)
  assert values['val/mean/em/greedy'] == 0.75
  assert values['val/nq_noise/em/greedy'] == 0.0
  assert values['val/hotpotqa/em/greedy'] == 1.0


def test_during_training_few_questions_are_answered_greedily():
  cases = [case_of('nq', 'q0', 'q1', 'q2'),
           case_of('nq', 'q0', 'q1', 'q2', decoding='sampled'),
           case_of('nq', 'q0', engine='noise'), case_of('hotpotqa', 'q2')]
  few = suite.limited(cases, 2, seed=3)
  assert [(c.dataset.name, len(c.dataset.questions)) for c in few] == [
      ('nq', 2), ('hotpotqa', 1)]
  assert all(c.decoding == 'greedy' and c.engine == 'bm25' for c in few)
  assert few == suite.limited(cases, 2, seed=3)
  assert [len(c.dataset.questions) for c in suite.limited(cases, 0, 3)] == [
      3, 1]


def test_common_knowledge_is_no_part_of_the_mean():
  cases = [case_of('known', 'q0', 'q1'), case_of('unseen', 'q2'),
           case_of('famous', 'q1', is_common=True)]
  rows, _ = suite.run(Answers(), 'params', cases)
  assert [(r['n'], r['em']) for r in rows if r['set'] == 'mean'] == [(3, 0.75)]
  rows, _ = suite.run(Answers(), 'params', cases[1:])
  assert [r['set'] for r in rows] == ['unseen', 'famous']  # a mean of one


def test_the_first_sets_alone_may_be_asked_during_training():
  cases = [case_of(name, 'q0') for name in ('known', 'unseen', 'famous')]
  assert [[c.dataset.name for c in suite.limited(cases, 0, 3, sets)]
          for sets in (1, 2, 0, 9)] == [
              ['known'], ['known', 'unseen'],
              ['known', 'unseen', 'famous'], ['known', 'unseen', 'famous']]
