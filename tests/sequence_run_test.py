# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A run of GRPO whose rows are split over devices: it trains and resumes."""

import pytest
import train_test

from configs import grpo
from searchrl.jobs import train
from searchrl.runtime import metrics

DEVICES = 8


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
