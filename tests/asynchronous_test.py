# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""ahead: which policy plays which step, and that nothing waits for ever."""

import gzip
import json
import threading

import loopback
import pytest
import train_test

from configs import grpo
from configs import rloo
from searchrl.jobs import train
from searchrl.rollouts import asynchronous
from searchrl.rollouts import collect


def record(params, progress, policy_step):
  """A step that remembers who played it, and moves the play on."""
  progress.rollouts += 10
  progress.position = [progress.step + 1]
  progress.surplus = [('left over by', progress.step)]
  return params, progress.step, policy_step


def run(source, steps, start=0):
  """What each step was given, training between them."""
  progress = collect.Progress(step=start, rollouts=10 * start)
  seen = []
  for _ in range(start, steps):
    seen.append(source.take(f'policy {progress.step}', progress))
    assert progress.rollouts == 10 * (progress.step + 1)
    assert progress.position == [progress.step + 1]
    assert progress.surplus == [('left over by', progress.step)]
    progress.step += 1
  source.close()
  return seen


@pytest.mark.parametrize('staleness', [1, 2, 5])
def test_a_step_is_played_by_the_policy_of_so_many_steps_ago(staleness):
  seen = run(asynchronous.AsyncRollouts(record, lambda params: f'copy of {params}',
                         max_staleness=staleness, last_step=6), 6)
  assert seen == [
      (f'copy of policy {max(n - staleness, 0)}', n, max(n - staleness, 0))
      for n in range(6)]


def test_in_step_every_policy_plays_its_own():
  assert run(asynchronous.InStep(record), 3) == [
      (f'policy {n}', n, n) for n in range(3)]


def test_a_resumed_run_begins_with_the_policy_it_stopped_at():
  seen = run(asynchronous.AsyncRollouts(record, str, max_staleness=1, last_step=6), 6, start=3)
  assert [(step, policy) for _, step, policy in seen] == [(3, 3), (4, 3), (5, 4)]


def test_play_goes_on_while_the_learner_trains():
  """Step 1 is being played when step 0 is handed out, and not waited for."""
  let_go, begun = threading.Event(), threading.Event()

  def slow(params, progress, policy_step):
    if progress.step == 1:
      begun.set()
      assert let_go.wait(60)
    return record(params, progress, policy_step)

  source = asynchronous.AsyncRollouts(slow, str, max_staleness=1, last_step=3)
  progress = collect.Progress()
  source.take('policy 0', progress)
  assert begun.wait(60)
  let_go.set()
  progress.step = 1
  assert source.take('policy 1', progress)[1] == 1
  source.close()


def test_what_goes_wrong_is_raised_and_closing_does_not_hang():
  def fails(params, progress, policy_step):
    if progress.step == 1:
      raise ValueError('no such question')
    return record(params, progress, policy_step)

  source = asynchronous.AsyncRollouts(fails, str, max_staleness=2, last_step=9)
  progress = collect.Progress()
  source.take('policy 0', progress)
  progress.step = 1
  with pytest.raises(ValueError, match='no such question'):
    source.take('policy 1', progress)
  source.close()


def config_of(recipe, staleness):
  config = train_test.tiny(recipe, steps=4)
  config.evaluate.worlds.kinds = ()
  config.train.max_staleness = staleness
  return config


@pytest.mark.parametrize('config, message', [
    (config_of(rloo, 1), 'without an importance ratio'),
    (config_of(grpo, 1), 'train.max_staleness must be 0 on several devices'),
    (config_of(grpo, -1), 'must be at least 0, but is -1'),
])
def test_where_it_cannot_work_it_is_refused(tmp_path, config, message):
  with pytest.raises(ValueError, match=message):
    train.run(config, str(tmp_path / 'run'))


@pytest.mark.slow
def test_two_runs_ahead_are_equal_and_every_step_is_off_policy(tmp_path):
  for name in ('one', 'two'):
    loopback.run(
        1, 'searchrl.main', '--config=configs/grpo.py:smoke',
        '--config.train.num_steps=4', '--config.train.max_staleness=2',
        '--config.evaluate.worlds.kinds=()', '--config.train.tensorboard=False',
        f'--workdir={tmp_path / name}', devices=1, timeout=600)
  one, two = (train_test.state_digest(tmp_path / name)
              for name in ('one', 'two'))
  assert one == two
  for step, policy in ((1, 0), (2, 0), (3, 0), (4, 1)):
    file = tmp_path / 'one' / f'trajectories/step_{step:06d}.jsonl.gz'
    trajectories = [json.loads(line) for line in
             gzip.decompress(file.read_bytes()).splitlines()]
    assert {trajectory['policy_step'] for trajectory in trajectories} == {policy}
  last = train_test.lines(tmp_path / 'one')[-1]
  assert last['actor/grad_norm'] > 0 and last['training/rollouts'] == 64
