# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Training on several contexts per trajectory; killed and resumed."""

import gzip
import json
import time

import loopback
import pytest
import train_test

from searchrl.rollouts import records
from searchrl.runtime import checkpoint


def command(folder, recipe, rule):
  return (1, 'searchrl.main', f'--config=configs/{recipe}.py:smoke',
          '--config.rollout.max_length=200',
          f'--config.rollout.budgets.when_full={rule}',
          '--config.evaluate.worlds.kinds=()', '--config.train.loggers=()',
          f'--workdir={folder}')


def trajectories_of(folder, step):
  file = folder / f'trajectories/step_{step:06d}.jsonl.gz'
  return [records.from_json(json.loads(line))
          for line in gzip.decompress(file.read_bytes()).splitlines()]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize('recipe, rule', [
    ('grpo', 'drop'), ('ppo', 'summarise'), ('gigpo', 'summarise')])
def test_a_run_with_several_contexts_is_killed_and_resumed(
    tmp_path, recipe, rule):
  whole, killed = tmp_path / 'whole', tmp_path / 'killed'
  loopback.run(*command(whole, recipe, rule), devices=1, timeout=600)
  with loopback.start(*command(killed, recipe, rule), devices=1) as group:
    while group.popen[0].poll() is None and not checkpoint.steps(
        killed / 'checkpoints'):
      time.sleep(0.02)
    assert group.popen[0].poll() is None, group.logs()
  loopback.run(*command(killed, recipe, rule), devices=1, timeout=600)
  lines = train_test.lines(whole)
  trajectories = [
      t for step in range(1, len(lines) + 1)
      for t in trajectories_of(whole, step)]
  assert any(len(t.contexts) > 1 for t in trajectories)
  assert all(len(context.tokens) <= 200 + 200 for t in trajectories
             for context in t.contexts)
  # A step of PPO may warm up the critic alone.
  updates = [line for line in lines if line.get('actor/grad_norm', 0) > 0]
  # The learner scores each context as the sampler did.
  assert max(line['training/rollout_logprobs_diff_max']
             for line in updates) < 1e-4
  learned = records.read_learned(whole / 'learned/step_000001.jsonl.gz')
  for trajectory in trajectories_of(whole, 1):
    line = learned[trajectory.group, trajectory.sample]
    assert len(line['advantages']) == sum(trajectory.loss_mask)
  assert train_test.lines(killed) == lines
  assert train_test.state_digest(killed) == train_test.state_digest(whole)
