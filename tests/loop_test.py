# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""loop: a step's data, losses and counts, when searches are too slow."""

import dataclasses
import time
import types

from configs import grpo
import numpy as np
import pytest

import train_test
from searchrl.experiment import build
from searchrl.experiment import loop
from searchrl.jobs import train
from searchrl.rollouts import collect
from searchrl.rollouts import records
from searchrl.runtime import checkpoint
from searchrl.runtime import progress as progress_lib

OPTIMIZATION_LEVEL = 1

TIMEOUT_SECS = 0.3


@pytest.mark.slow
def test_a_search_beyond_the_timeout_is_counted_and_not_trained_on(tmp_path):
  config = train_test.tiny(grpo)
  config.evaluate.worlds.kinds = ()
  config.rollout.search_timeout_secs = TIMEOUT_SECS
  config.rollout.search_calls = 1
  experiment = build.build(config, tmp_path)
  engine, slow = experiment.search, experiment.stream.draw(
      experiment.stream.start, 1)[0][0]
  experiment = dataclasses.replace(
      experiment, search=lambda queries: (
          any(q.question == slow for q in queries) and
          time.sleep(4 * TIMEOUT_SECS)) or engine(queries))
  state, progress = loop.restore(experiment, tmp_path, keep=1)
  kept = []
  with loop.rollouts(experiment, config) as source:
    result = loop.step(
        experiment, config,
        lambda *args: kept.append(source.take(*args)) or kept[0], state, progress,
        progress_lib.Timer())
  values, trajectories = result.metrics, result.trajectories
  late = [t for t in trajectories if t.stop_reason == 'search_error']
  assert late and len(late) < len(trajectories)
  assert {t.search_error.kind for t in late} == {'timeout'}
  assert all(t.search_error is None for t in trajectories if t not in late)
  assert values['search/timeout_rate'] > 0 == values['search/empty_rate']
  assert values['search/error_rate'] == len(late) / len(trajectories)
  # All queries of a late call were late, once each; both tries were.
  assert values['search/failed_queries'] == pytest.approx(
      values['search/timeout_rate'] * values['search/queries'])
  batch = collect.collate(kept[0].groups, experiment.algorithm, 0,
                       experiment.rounds, length=config.rollout.max_length,
                       mask_truncated=False)
  rows = [t for group in kept[0].groups for t in group]
  for row, trajectory in enumerate(rows):
    trained = bool(np.any(batch.loss_mask[row]))
    assert trained == batch.in_loss[row] == batch.in_baseline[row] == (
        trajectory.stop_reason != 'search_error')
  records.write_learned(tmp_path / 'learned.jsonl.gz',
                        result.learned.trajectories, result.learned.batch,
                        result.learned.advantages, result.learned.trained)
  found = records.read_learned(tmp_path / 'learned.jsonl.gz')
  advantages = np.asarray(experiment.algorithm.advantages(batch))
  assert len(found) == len(rows) and np.ptp(advantages) > 0
  for row, trajectory in enumerate(rows):  # each has its own numbers
    seen = found[trajectory.group, trajectory.sample]
    assert seen['uid'] == trajectory.question.uid
    sampled = [logprob for turn in trajectory.turns
               for logprob in turn.action_logprobs] if batch.in_loss[row] else []
    np.testing.assert_allclose(  # a row whose advantage is 0 is not trained on
        seen['old_logprobs'], sampled if result.learned.trained[row] else [],
        atol=1e-3)
    np.testing.assert_allclose(
        seen['advantages'], advantages[row][batch.loss_mask[row]]
        if advantages.ndim > 1 else [advantages[row]] * len(sampled), rtol=1e-5)


def test_freed_memory_is_given_back_before_the_update(monkeypatch):
  calls = []

  def record(name, result=None):
    return lambda *args, **kwargs: calls.append(name) or result

  class Updates(Exception):
    """Ends the step where the update begins."""

  def update(*args):
    raise Updates

  collected = collect.Collected([], [], {}, collect.Progress())
  experiment = types.SimpleNamespace(
      learner=types.SimpleNamespace(
          policy=record('policy'), score=record('score'), update=update),
      sampler=types.SimpleNamespace(
          budgets=types.SimpleNamespace(contexts=1)),
      algorithm=None, rounds=(), params=None)
  monkeypatch.setattr(loop.collect, 'collate', record('collate'))
  monkeypatch.setattr(loop.host_memory, 'give_back', record('give back'))
  with pytest.raises(Updates):
    loop.step(experiment, grpo.get_config(), record('sample', collected), None,
              collected.progress, progress_lib.Timer())
  assert calls == ['policy', 'sample', 'collate', 'score', 'give back']


@pytest.mark.slow
def test_a_run_that_learns_nothing_ends_and_says_so_and_may_go_on(tmp_path):
  config = train_test.tiny(grpo, steps=2, stop_after=2, checkpoint_every=100)
  config.evaluate.worlds.kinds = ()
  config.evaluate.initial = False
  config.reward = config.outcome = 'loop_test:nothing'
  for _ in range(2):  # the second time without a step
    with pytest.raises(ValueError, match=r'last 2 steps, up to step 2.*alike.*'
                       r'stop_after is 2.*set it to 0'):
      train.run(config, tmp_path)
    assert checkpoint.steps(tmp_path / 'checkpoints')[-1] == 2
  config.train.update(stop_after=0, num_steps=3)
  train.run(config, tmp_path)
  assert checkpoint.steps(tmp_path / 'checkpoints')[-1] == 3


def nothing(trajectory):
  del trajectory
  return 0.0
