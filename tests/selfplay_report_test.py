# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""selfplay_report: the summary of a folder, by hand, and of half of one."""

import json

import pytest

from configs import drzero
from searchrl.experiment import rules
from searchrl.papers.dr_zero import roles
from searchrl.papers.dr_zero import selfplay
from searchrl.papers.dr_zero import selfplay_report
from searchrl.runtime import metrics


def step(number, **values):
  return {'training/global_step': number, 'critic/score/mean': 0.1 * number,
          'training/rollouts': 8 * number} | {
              name.replace('__', '/'): value for name, value in values.items()}


def folder_of(folder, iterations=1, trained=True):
  for number in range(1, iterations + 1):
    for role in ('proposer', 'solver'):
      here = folder / f'iteration_{number}' / role
      here.mkdir(parents=True)
      lines = [step(n, critic__rewards__mean=0.25 * n, actor__entropy=1.0 / n,
                    response_length__mean=30.0, reward__attempts__sum=20.0 * (
                        role == 'proposer')) for n in (1, 2)]
      (here / metrics.FILE).write_text(''.join(
          json.dumps(line) + '\n' for line in lines * (
              trained or role == 'solver')))
  return folder


def write(file, value):
  file.parent.mkdir(parents=True, exist_ok=True)
  file.write_text(json.dumps(value))


def rows_of(text, title):
  """The cells of the table below a title."""
  lines = text.split(title)[1].strip('\n').split('\n\n')[1].splitlines()
  return [line.split('  ') for line in lines[2:]]


def test_the_summary_counts_rollouts_apart_and_shows_how_phases_went(tmp_path):
  folder = folder_of(tmp_path, iterations=2)
  write(folder / 'examined/before/report.json', {
      'rows': [{'hops': 'all', 'n': 4, 'difficulty': 0.5}], 'pass_rates': [3, 1],
      'diversity': {'unique_questions': 1.0}, 'alarms': ['too few.']})
  write(folder / 'iteration_1/solver/evaluation/before/table.json', [
      {'set': 'known', 'engine': 'bm25', 'decoding': 'greedy', 'hops': hops,
       'em': 0.25} for hops in (1, 'all')])
  text = selfplay_report.finish(folder, 2, 'seed 0')
  assert text == (folder / selfplay_report.FILE).read_text().removesuffix('\n')
  row = next(line.split() for line in text.splitlines()
             if line.split()[1:2] == ['proposer'])
  assert row[:5] == ['1', 'proposer', '2', '16', '40']
  assert '0.25 -> 0.50' in text and '1.00 -> 0.50' in text
  assert 'before: too few.' in text
  assert 'known  bm25    greedy    0.250  0.250' in text
  assert (folder / 'curve.png').stat().st_size > 0


def test_a_proposer_that_was_not_trained_has_no_curve(tmp_path):
  text = selfplay_report.finish(folder_of(tmp_path, trained=False), 1, 'seed 0')
  assert '1  proposer      0' in text
  assert 'No evaluation set' in text and 'Alarms\n\nnone' in text
  assert (tmp_path / 'curve.png').stat().st_size > 0


def test_a_shorter_game_keeps_the_iterations_of_a_longer_one(tmp_path):
  assert selfplay._finished(tmp_path, 2) == 2
  for number in (2, 3, 5):  # 4 is not finished
    solver = tmp_path / f'iteration_{number}' / 'solver'
    solver.mkdir(parents=True)
    (solver / 'summary.txt').touch()
  assert selfplay._finished(tmp_path, 1) == 3
  assert selfplay._finished(tmp_path, 4) == 5


@pytest.mark.parametrize('given', [0, 96])
def test_a_roles_slots_follow_the_memory_unless_they_are_given(given):
  config = drzero.get_config('qwen2.5-7b')
  if given:
    config.solver.rollout.max_num_seqs = given
  role = roles.role_config(config, 'solver')
  unset = dict(rules.unset(role))
  assert ('rollout.max_num_seqs' in unset) == (not given)
  assert role.rollout.max_num_seqs == (given or 72) and (
      'rollout.tensor' in unset)
  role.rollout.max_num_seqs = 8  # changes the copy alone
  assert config.solver.rollout.max_num_seqs == (given or 72)
