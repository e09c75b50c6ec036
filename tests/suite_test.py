# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Evaluation: intervals, rows, names of metrics, and a run's table."""

import json

import numpy as np
import pytest
from searchrl.data import datasets
from searchrl.evaluation import suite
from searchrl.evaluation import summary
from searchrl.runtime import workdir
from searchrl.trajectory import Action, Question, Trajectory, Turn


@pytest.mark.parametrize('hits, n', [(0, 10), (3, 10), (10, 10), (50, 200)])
def test_wilson_interval_solves_its_equation(hits, n):
  # The ends p of the interval are where |hits/n - p| = z sqrt(p (1-p) / n).
  for p in suite.wilson(hits, n):
    np.testing.assert_allclose(
        (hits / n - p) ** 2, 1.96 ** 2 * p * (1 - p) / n, atol=1e-12)


def games():
  for i, (hops, answer) in enumerate([(1, 'Elba'), (1, 'Oder'), (2, 'the elba')]):
    question = Question(f'q{i}', 'which?', ('Elba',), hops)
    turn = Turn((1,), (0.0,), Action('answer', (answer,)))
    yield Trajectory(question, 0, 0, (1,), (turn,), 'answer')


class FakePlayer:
  """Gives the same three trajectories, whatever is asked."""

  def play(self, params, requests, **options):
    assert len(requests) == 3 and options['temperature'] == 0.0
    return list(games())


def test_rows_are_by_hops_and_scored_by_every_measure():
  case = suite.EvalCase(
      datasets.Dataset('known', [g.question for g in games()], None), 'bm25', None,
      'greedy')
  rows, records = suite.run(FakePlayer(), None, [case])
  assert [(r['hops'], r['n'], r['em']) for r in rows] == [
      (1, 2, 0.5), (2, 1, 1.0)]
  assert rows[0]['f1'] == 0.5 and rows[0]['searches'] == 0
  assert len(records[0][1]) == 3
  assert suite.scalars(rows)['val/known_2hop/em/greedy'] == 1.0


def test_table_of_a_run_shows_before_and_after(tmp_path):
  for name, em in (('before', 0.25), ('after', 0.75)):
    (tmp_path / 'evaluation' / name).mkdir(parents=True)
    (tmp_path / 'evaluation' / name / 'table.json').write_text(json.dumps([
        {'set': 'known', 'engine': 'bm25', 'decoding': 'greedy', 'hops': 1,
         'n': 8, 'em': em, 'searches': 1.5}]))
  assert '0.25 -> 0.75' in summary.table(tmp_path)


def test_run_folder_remembers_its_config_and_refuses_another(tmp_path):
  import ml_collections
  config = ml_collections.ConfigDict(
      dict(a=dict(b=1), steps=2, allow_changes=True))
  workdir.prepare(tmp_path, config, free=('steps',))
  config.allow_changes = False  # the flag is no part of what was asked
  config.steps = 3
  workdir.prepare(tmp_path, config, free=('steps',))
  config.a.b = 2
  with pytest.raises(ValueError, match='a.b: 1 -> 2'):
    workdir.prepare(tmp_path, config)
  workdir.prepare(tmp_path, config, allow_changes=True)
  assert json.loads((tmp_path / 'config.json').read_text())['a']['b'] == 2
  assert json.loads((tmp_path / 'environment.json').read_text())['packages'][
      'jax']


def test_generated_data_is_written_once_and_read_back(tmp_path):
  first = datasets.generated(tmp_path, name='known', source='known',
                             world_seed=3, per_hop=(2, 1))
  stamp = (tmp_path / 'questions.jsonl').stat().st_mtime_ns
  again = datasets.generated(tmp_path, name='known', source='known',
                             world_seed=3, per_hop=(2, 1))
  assert (tmp_path / 'questions.jsonl').stat().st_mtime_ns == stamp
  assert list(first.questions) == list(again.questions)
  assert first.corpus.digest == again.corpus.digest
  assert [q.hops for q in first.questions] == [1, 1, 2]
  other = datasets.generated(tmp_path, name='known', source='known',
                             world_seed=4, per_hop=(3,))
  assert [q.hops for q in other.questions] == [1, 1, 1]
  assert other.corpus.digest != first.corpus.digest


def test_a_run_is_judged_through_its_own_engine(tmp_path):
  assert suite.own_search('') == ('bm25', {})
  assert suite.own_search(str(tmp_path)) == ('bm25', {})
  (tmp_path / 'config.json').write_text(json.dumps({
      'search': {'engine': 'dense', 'options': {'encoder': 'tiny_e5'}}}))
  assert suite.own_search(str(tmp_path)) == (
      'dense', {'encoder': 'tiny_e5'})
