# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A run of GRPO whose rows are split over devices: it trains and resumes."""

import pytest
import train_test

from configs import grpo
from searchrl.experiment import loop
from searchrl.jobs import train
from searchrl.runtime import metrics

DEVICES = 8
OPTIMIZATION_LEVEL = 1


def number(trajectory):
  """A reward that differs between the samples of a question."""
  return sum(trajectory.tokens) % 7 / 7


def config_of(steps, **mesh):
  config = train_test.tiny(grpo, steps=steps)
  config.evaluate.worlds.kinds = ()
  config.reward = config.outcome = 'sequence_run_test:number'
  config.mesh.update(mesh)
  return config


def updates(folder):
  return [line for line in metrics.read(folder / metrics.FILE)
          if 'actor/grad_norm' in line]


@pytest.mark.slow
def test_a_run_with_split_rows_resumes_to_the_same_bits(tmp_path):
  ways = dict(fsdp=2, sequence=2)
  train.run(config_of(2, **ways), str(tmp_path / 'whole'))
  train.run(config_of(1, **ways), str(tmp_path / 'resumed'))
  train.run(config_of(2, **ways), str(tmp_path / 'resumed'))
  assert train_test.state_digest(tmp_path / 'whole') == (
      train_test.state_digest(tmp_path / 'resumed'))
  train.run(config_of(1), str(tmp_path / 'usual'))
  steps = updates(tmp_path / 'whole')
  assert len(steps) == 2
  for step in steps:
    assert step['training/rollout_logprobs_diff_max'] < 1e-4
  usual = updates(tmp_path / 'usual')[0]
  assert steps[0]['critic/rewards/mean'] == usual['critic/rewards/mean']
  for name in ('actor/grad_norm', 'actor/pg_loss', 'actor/entropy'):
    assert steps[0][name] == pytest.approx(usual[name], rel=1e-4, abs=1e-6)


@pytest.mark.slow
@pytest.mark.long
def test_split_rows_beside_devices_that_sample(tmp_path, monkeypatch):
  """Four of eight devices sample, and rows are split over two of the others."""
  def run(name, devices=4, **ways):
    config = config_of(3, **ways)
    config.train.update(max_staleness=1, rollout_devices=devices)
    train.run(config, str(tmp_path / name))

  record = loop._record

  def die(folder, writer, result, values):
    if result.progress.step == 2:
      raise RuntimeError('killed')
    record(folder, writer, result, values)

  run('split', sequence=2)
  with monkeypatch.context() as patch, pytest.raises(
      RuntimeError, match='killed'):
    patch.setattr(loop, '_record', die)
    run('resumed', sequence=2)
  run('resumed', sequence=2)
  assert train_test.state_digest(tmp_path / 'split') == (
      train_test.state_digest(tmp_path / 'resumed'))
  run('usual', devices=0)
  split, usual = updates(tmp_path / 'split'), updates(tmp_path / 'usual')
  assert [step['training/staleness/max'] for step in split] == [0, 1, 1]
  assert len(split) == len(usual)
  for ours, theirs in zip(split, usual):
    assert ours['critic/rewards/mean'] == theirs['critic/rewards/mean']
    for name in ('actor/grad_norm', 'actor/pg_loss', 'actor/entropy'):
      assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5)
