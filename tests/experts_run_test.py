# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A run of GRPO on a random model with experts: it trains, resumes, exports."""

import dataclasses
import gzip

import jax
import loopback
import numpy as np
import pytest
import train_test

from configs import grpo
from searchrl.agent import tokenizer as tokenizers
from searchrl.experiment import loop
from searchrl.experiment import policy as policies
from searchrl.jobs import train
from searchrl.models import experts
from searchrl.models import transformer
from searchrl.models import weights
from searchrl.runtime import checkpoint
from searchrl.runtime import metrics

OPTIMIZATION_LEVEL = 1


def number(trajectory):
  """A reward that differs between the samples of a question."""
  return sum(trajectory.tokens) % 7 / 7


@pytest.fixture(scope='module', name='folder')
def fixture_folder(tmp_path_factory):
  base = str(policies.TINY_BASE)
  shape = dataclasses.replace(
      weights.read_config(base), architecture='Qwen3MoeForCausalLM',
      attention_bias=False, qk_norm=True, num_hidden_layers=2,
      experts=experts.Experts(8, 2, 32, True))
  folder = tmp_path_factory.mktemp('model') / 'experts'
  weights.save(folder, transformer.init(shape, jax.random.key(0)), shape,
               tokenizer_from=base, eos_id=tokenizers.load(base).eos_ids[0])
  return folder


def config_of(folder, steps):
  config = train_test.tiny(grpo, steps=steps)
  config.evaluate.worlds.kinds = ()
  config.model.path = str(folder)
  config.reward = config.outcome = 'experts_run_test:number'
  config.learner.router_aux_loss_coef = 0.01
  config.optimizer.learning_rate = 1e-2
  return config


@pytest.mark.slow
def test_a_run_trains_experts_and_resumes_to_the_same_bits(folder, tmp_path):
  train.run(config_of(folder, 2), str(tmp_path / 'whole'))
  train.run(config_of(folder, 1), str(tmp_path / 'resumed'))
  train.run(config_of(folder, 2), str(tmp_path / 'resumed'))
  assert train_test.state_digest(tmp_path / 'whole') == (
      train_test.state_digest(tmp_path / 'resumed'))
  steps = [line for line in metrics.read(tmp_path / 'whole' / metrics.FILE)
           if 'actor/grad_norm' in line]
  for step in steps:
    assert step['actor/grad_norm'] > 0
    assert step['training/rollout_logprobs_diff_max'] < 1e-4
    assert 1 < step['actor/experts_max_load'] < 8
    assert 2 <= step['actor/experts_balance'] < 8
  assert len(steps) == 2
  before, after = (weights.load(str(path), weights.read_config(str(path)))
                   for path in (folder, tmp_path / 'whole' / 'model'))
  for name in ('router', 'expert_gate', 'expert_up', 'expert_down'):
    changed = np.abs(before['layers'][name]['kernel']
                     - after['layers'][name]['kernel'])
    assert changed.max() > 1e-4, name


@pytest.mark.slow
@pytest.mark.long
def test_a_run_that_replays_experts_resumes_with_samples_in_flight(
    folder, tmp_path, monkeypatch):
  config = config_of(folder, 3)
  config.learner.router_replay = True
  config.rollout.dtype = 'bfloat16'
  config.train.max_staleness = 1
  train.run(config, str(tmp_path / 'whole'))
  record = loop._record

  def die(folder, writer, result, values):
    if result.progress.step == 2:
      raise RuntimeError('killed')
    record(folder, writer, result, values)

  with monkeypatch.context() as patch, pytest.raises(
      RuntimeError, match='killed'):
    patch.setattr(loop, '_record', die)
    train.run(config, str(tmp_path / 'resumed'))
  kept = checkpoint.extra(tmp_path / 'resumed' / 'checkpoints', 1)
  (sampled,), shape = kept['in_flight'], weights.read_config(str(folder))
  for t in sampled['trajectories']:
    assert t['routing'][0]['shape'][1] == 2 * shape.num_hidden_layers
  train.run(config, str(tmp_path / 'resumed'))
  assert train_test.state_digest(tmp_path / 'whole') == (
      train_test.state_digest(tmp_path / 'resumed'))
  steps = [line for line in metrics.read(tmp_path / 'whole' / metrics.FILE)
           if 'actor/grad_norm' in line]
  # Later samples are of a policy that is a large step behind.
  replaced = [step['actor/experts_replaced'] for step in steps]
  assert len(replaced) == 3 and 0 < replaced[0] < min(replaced[1:])
  file, *_ = (tmp_path / 'whole' / 'trajectories').iterdir()
  assert b'"routing"' not in gzip.decompress(file.read_bytes())


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize('ways, sampling', [(1, 4), (2, 0)])
def test_processes_that_replay_experts_end_as_one_process(
    folder, tmp_path, ways, sampling):
  """The same bits, if sums over CPU devices have one order.

  Split experts, and a loss with their balance, are summed in another order.
  """
  flags = (
      '--config=configs/grpo.py:smoke', f'--config.model.path={folder}',
      '--config.train.num_steps=3', '--config.train.loggers=()',
      '--config.train.max_staleness=1', '--config.evaluate.worlds.kinds=()',
      '--config.learner.router_replay=True', '--config.rollout.dtype=bfloat16',
      f'--config.learner.router_aux_loss_coef={0.01 * (ways > 1)}',
      f'--config.mesh.expert={ways}', '--config.optimizer.learning_rate=0.01',
      '--config.reward=experts_run_test:number',
      '--config.outcome=experts_run_test:number')
  for count in (1, 2):
    loopback.run(
        count, 'searchrl.main', *flags, f'--workdir={tmp_path / str(count)}',
        f'--config.train.rollout_devices={sampling // count}',
        devices=8 // count, timeout=900, env={'NPROC': '8'})
  one, two = ([line for line in metrics.read(tmp_path / count / metrics.FILE)
               if 'actor/grad_norm' in line] for count in '12')
  assert len(one) == len(two) == 3
  assert all(step['actor/experts_replaced'] > 0 for step in two)
  for name in ('actor/pg_loss', 'actor/grad_norm', 'actor/experts_balance',
               'actor/experts_replaced', 'critic/rewards/mean'):
    assert one[0][name] == pytest.approx(two[0][name], rel=1e-5), name
  if ways == 1:
    assert train_test.state_digest(tmp_path / '1') == (
        train_test.state_digest(tmp_path / '2'))
