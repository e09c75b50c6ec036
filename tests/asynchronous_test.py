# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""asynchronous: which policy samples which step; nothing waits for ever."""

import contextlib
import dataclasses
import functools
import gzip
import json
import threading
import time

import fakes
import jax
import loopback
import multihost_test
import pytest
import tiny
import train_test

from configs import grpo
from configs import rloo
from searchrl.agent import dialogue as dialogues
from searchrl.agent import rewards
from searchrl.jobs import train
from searchrl.rl import algorithms
from searchrl.rollouts import asynchronous
from searchrl.rollouts import collect
from searchrl.rollouts import driver
from searchrl.rollouts import records
from searchrl.rollouts import sampler as samplers
from searchrl.rollouts import scoring
from searchrl.rollouts import weight_sync
from searchrl.runtime import checkpoint
from searchrl.search.index import dense
from searchrl.search.index import exact_device
from searchrl.search.index import vector_store

DEVICES = 8
OPTIMIZATION_LEVEL = 1


def record(synced, progress, policy_step):
  """The data of a step, with the policy and weights that sampled it."""
  return collect.Collected(
      groups=[], trajectories=[], metrics={
          'weights': synced.weights, 'step': progress.step,
          'policy': policy_step, 'synced': synced.bytes},
      progress=dataclasses.replace(
          progress, rollouts=progress.rollouts + 10,
          position=(progress.step + 1,),
          surplus=(('left over by', progress.step),)))


def snapshot(params):
  return weight_sync.Synced(f'copy of {params}', bytes=8)


def rollouts(collected=record, **options):
  return asynchronous.AsyncRollouts(collected, snapshot, **options)


def run(source, steps, start=0):
  """Returns what each step takes, with an update between them."""
  progress = collect.Progress(step=start, rollouts=10 * start, silent_steps=3)
  seen = []
  with contextlib.closing(source):
    for _ in range(start, steps):
      found = source.take(f'policy {progress.step}', progress)
      assert found.progress == dataclasses.replace(
          progress, rollouts=10 * (progress.step + 1),
          position=(progress.step + 1,),
          surplus=(('left over by', progress.step),))
      seen.append(tuple(found.metrics[name] for name in (
          'weights', 'step', 'policy', 'synced')))
      progress = dataclasses.replace(  # with what the learner has found out
          found.progress, step=progress.step + 1, silent_steps=5,
          best=(progress.step, 0.5), best_of=(24, 1), collapsing=True,
          before_collapse=progress.step)
  return seen


@pytest.mark.parametrize('staleness', [1, 2, 5])
def test_a_step_is_sampled_by_the_policy_of_so_many_steps_ago(staleness):
  seen = run(rollouts(max_staleness=staleness, last_step=6), 6)
  assert [found[:3] for found in seen] == [
      (f'copy of policy {max(n - staleness, 0)}', n, max(n - staleness, 0))
      for n in range(6)]
  # One step counts the bytes of a sync: the first with those weights.
  assert [found[3] for found in seen] == [
      8 if n == 0 or n > staleness else 0 for n in range(6)]


def test_a_resumed_run_begins_with_the_policy_it_stopped_at():
  seen = run(rollouts(max_staleness=1, last_step=6), 6, start=3)
  assert [(step, policy) for _, step, policy, _ in seen] == [
      (3, 3), (4, 3), (5, 4)]


@pytest.mark.parametrize('staleness', [1, 3])
@pytest.mark.parametrize('stop', [1, 3, 5])
def test_what_is_in_flight_at_a_stop_is_trained_on_after_it(staleness, stop):
  """The same weights sample the same steps as in a run that is not stopped."""
  options = dict(max_staleness=staleness, last_step=6)

  def go_on(source, progress, steps):
    seen = []
    for _ in range(steps):
      found = source.take(f'policy {progress.step}', progress)
      seen.append((found.metrics, found.progress.rollouts))
      progress = dataclasses.replace(found.progress, step=progress.step + 1)
    return seen, progress

  with contextlib.closing(rollouts(**options)) as source:
    whole, _ = go_on(source, collect.Progress(), 6)
  with contextlib.closing(rollouts(**options)) as source:
    first, progress = go_on(source, collect.Progress(), stop)
    saved = source.settled(progress)
  assert len(saved.in_flight) == min(staleness, 6 - stop)
  with contextlib.closing(rollouts(**options)) as source:
    rest, _ = go_on(source, saved, 6 - stop)
  assert first + rest == whole


def test_after_a_rollback_nothing_in_flight_is_trained_on():
  sampled = []

  def noted(synced, progress, policy_step):
    sampled.append(progress.step)
    return record(synced, progress, policy_step)

  with contextlib.closing(
      rollouts(noted, max_staleness=2, last_step=9)) as source:
    source.take('collapsed', collect.Progress())
    source.restart()
    assert sampled == [0, 1, 2]  # on all processes, whatever has begun
    found = source.take('restored', collect.Progress(step=4))
  assert found.metrics['weights'] == 'copy of restored'
  assert found.metrics['step'] == 4


def test_sampling_goes_on_while_the_learner_trains():
  """Step 1 is being sampled when step 0 is returned, and not waited for."""
  let_go, begun = threading.Event(), threading.Event()

  def slow(synced, progress, policy_step):
    if progress.step == 1:
      begun.set()
      assert let_go.wait(60)
    return record(synced, progress, policy_step)

  with contextlib.closing(
      rollouts(slow, max_staleness=1, last_step=3)) as source:
    source.take('policy 0', collect.Progress())
    assert begun.wait(60)
    let_go.set()
    found = source.take('policy 1', collect.Progress(step=1))
  assert found.metrics['step'] == 1


def test_a_query_says_the_step_that_it_is_sampled_for():
  script = {(f'q{n}', sample): [
      '<search> a </search>', f'<search> b{n} </search>',
      '<answer> c </answer>'] for n in range(8) for sample in range(2)}
  search = fakes.Noting()
  sampler = samplers.Sampler(
      tiny.CONFIG, fakes.TOKENIZER, dialogues.tags('q: {question}\n'),
      driver.Budgets(), fakes.Engine(script, steps=range(4)), snapshot)
  collected = functools.partial(
      collect.collect, sampler, draw=fakes.draw, keep=algorithms.keep_all,
      search=search, scorer=scoring.Scorer(rewards.each(lambda t: 0.5)),
      rounds=collect.Rounds(2, 2))
  progress, expected = collect.Progress(), []
  with contextlib.closing(
      rollouts(collected, max_staleness=1, last_step=4)) as source:
    for step in range(4):
      found = source.take('policy', progress)
      expected += [(step, *asked) for asked in fakes.asked_by(
          found.trajectories)]
      assert {t.policy_step for t in found.trajectories} == {max(step - 1, 0)}
      progress = dataclasses.replace(found.progress, step=step + 1)
  assert len(expected) == 4 * 2 * 2 * 2
  assert sorted((q.step, q.question.uid, q.sample, q.turn, q.text)
                for q in search.asked) == sorted(expected)


def test_what_goes_wrong_is_raised_and_closing_does_not_hang():
  def fails(synced, progress, policy_step):
    if progress.step == 1:
      raise ValueError('no such question')
    return record(synced, progress, policy_step)

  with contextlib.closing(
      rollouts(fails, max_staleness=2, last_step=9)) as source:
    source.take('policy 0', collect.Progress())
    with pytest.raises(ValueError, match='no such question'):
      source.take('policy 1', collect.Progress(step=1))


def config_of(recipe, staleness):
  config = train_test.tiny(recipe, steps=4)
  config.evaluate.worlds.kinds = ()
  config.train.max_staleness = staleness
  return config


@pytest.mark.parametrize('config, message', [
    (config_of(rloo, 1), 'without an importance ratio'),
    (config_of(grpo, -1), 'must be at least 0 .*, but is -1'),
])
def test_where_it_cannot_work_it_is_refused(tmp_path, config, message):
  with pytest.raises(ValueError, match=message):
    train.run(config, str(tmp_path / 'run'))


def exact_on_eight(corpus):
  """Exact search whose rows are on all devices of the policy."""
  encode = dense.ngram_encoder(corpus)
  rows = vector_store.InMemory(dense.encoded(encode, corpus.texts, 'passage'))
  index = exact_device.build(rows, block_rows=-(-rows.count // 8))
  return dense.searcher(corpus, encode, index)


@pytest.mark.slow
@pytest.mark.long
def test_on_several_devices_each_step_is_sampled_a_step_ahead(tmp_path):
  """Decoding, exact search and updates share them; results as they arrive."""
  assert jax.device_count() == 8
  for order in ('arrival', 'deterministic'):
    config = config_of(grpo, 1)
    config.search.engine = 'asynchronous_test:exact_on_eight'
    config.search.options = {}
    config.rollout.search_order = order
    train.run(config, str(tmp_path / order))
  for number in range(1, 5):
    arrived, awaited = (records.read(
        tmp_path / order / 'trajectories' / f'step_{number:06d}.jsonl.gz')
                        for order in ('arrival', 'deterministic'))
    assert {t.policy_step for t in arrived} == {max(number - 2, 0)}
    assert [t.tokens for t in arrived] == [t.tokens for t in awaited]
  assert train_test.state_digest(tmp_path / 'arrival')[0] == (
      train_test.state_digest(tmp_path / 'deterministic')[0])


def command(folder, kinds='()'):
  return (1, 'searchrl.main', '--config=configs/grpo.py:smoke',
          '--config.train.num_steps=4', '--config.train.max_staleness=1',
          f'--config.evaluate.worlds.kinds={kinds}',
          '--config.train.loggers=()', f'--workdir={folder}')


@pytest.mark.slow
def test_an_asynchronous_run_that_is_killed_ends_with_the_same_bits(tmp_path):
  whole, killed = tmp_path / 'whole', tmp_path / 'killed'
  loopback.run(*command(whole), devices=1, timeout=600)
  with loopback.start(*command(killed), devices=1) as group:
    while group.popen[0].poll() is None and checkpoint.steps(
        killed / 'checkpoints')[-1:] < [2]:
      time.sleep(0.02)
    assert group.popen[0].poll() is None, group.logs()
  loopback.run(*command(killed), devices=1, timeout=600)
  assert train_test.lines(killed) == train_test.lines(whole)
  assert train_test.state_digest(killed) == train_test.state_digest(whole)


def on_four(folder, *flags):
  return (*command(folder, "('known',)"),
          '--config.evaluate.worlds.questions_per_hop=1',
          '--config.evaluate.every=2', '--config.evaluate.noise=False', *flags)


@pytest.fixture(scope='module')
def apart(tmp_path_factory):
  """An uninterrupted run whose last two of four devices sample."""
  folder = tmp_path_factory.mktemp('meshes') / 'apart'
  loopback.run(*on_four(folder, '--config.train.rollout_devices=2'), devices=4,
               timeout=600)
  return folder


def trajectories_of(folder):
  return [(t.tokens, t.behavior_logprobs, t.reward, t.policy_step)
          for file in sorted((folder / 'trajectories').iterdir())
          for t in records.read(file)]


@pytest.mark.slow
def test_devices_that_only_sample_give_the_same_samples_and_losses(
    apart, tmp_path):
  """One device that does both: all metrics are equal but for rounding."""
  shared = tmp_path / 'shared'
  loopback.run(*on_four(shared), devices=1, timeout=600)
  tokens, logprobs, *rest = zip(*trajectories_of(shared))
  apart_tokens, apart_logprobs, *apart_rest = zip(*trajectories_of(apart))
  assert apart_tokens == tokens and apart_rest == rest
  for ours, theirs in zip(apart_logprobs, logprobs):
    assert ours == pytest.approx(theirs, abs=1e-3)
  for ours, theirs in zip(train_test.lines(apart), train_test.lines(shared)):
    assert ours.keys() == theirs.keys()
    for name in ours.keys() & {'actor/pg_loss', 'actor/entropy',
                               'training/staleness/max'}:
      assert ours[name] == pytest.approx(theirs[name], rel=1e-2, abs=1e-4)
  stale = [line['training/staleness/max'] for line in train_test.lines(apart)
           if 'training/staleness/max' in line]
  assert stale == [0, 1, 1, 1]
  assert (apart / 'evaluation/step_000002/table.json').exists()


@pytest.mark.slow
def test_devices_apart_end_with_the_same_bits_after_a_kill(apart, tmp_path):
  run = on_four(tmp_path / 'killed', '--config.train.rollout_devices=2')
  checkpoints = tmp_path / 'killed' / 'checkpoints'
  with loopback.start(*run, devices=4) as group:
    while group.popen[0].poll() is None and checkpoint.steps(
        checkpoints)[-1:] < [2]:
      time.sleep(0.02)
    assert group.popen[0].poll() is None, group.logs()
  loopback.run(*run, devices=4, timeout=600)
  assert train_test.lines(tmp_path / 'killed') == train_test.lines(apart)
  assert train_test.state_digest(tmp_path / 'killed') == (
      train_test.state_digest(apart))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize('count', [2, 4])
def test_processes_of_which_one_is_killed_end_as_one_process(tmp_path, count):
  """Half of each process's devices sample; of one process's eight, too."""
  folder = {n: tmp_path / str(n) for n in (1, count)}
  env = {'NPROC': '8'}  # as one process of 8 devices; it decides last bits

  def run(n):
    return (n, *on_four(
        folder[n], f'--config.train.rollout_devices={4 // n}')[1:])

  loopback.run(*run(1), devices=8, timeout=600, env=env)
  with loopback.start(*run(count), devices=8 // count, env=env) as group:
    while group.popen[0].poll() is None and checkpoint.steps(
        folder[count] / 'checkpoints')[-1:] < [2]:
      time.sleep(0.02)
    assert group.popen[-1].poll() is None, group.logs()
    group.popen[-1].kill()
    assert all(done.returncode for done in group.wait(600))
  loopback.run(*run(count), devices=8 // count, timeout=600, env=env)
  for name in (f'trajectories/step_{n:06d}.jsonl.gz' for n in range(1, 5)):
    assert (folder[count] / name).read_bytes() == (folder[1] / name).read_bytes()
  assert train_test.state_digest(folder[count]) == (
      train_test.state_digest(folder[1]))
  ours, theirs = ([
      {name: x for name, x in line.items() if name not in multihost_test.OF_ONE}
      for line in train_test.lines(folder[n])] for n in (count, 1))
  assert ours == theirs


@pytest.mark.slow
@pytest.mark.long
def test_asynchronous_runs_are_equal_and_steps_count_their_own_searches(
    tmp_path):
  for name in ('one', 'two'):
    loopback.run(*command(tmp_path / name), devices=1, timeout=600)
  one, two = (train_test.state_digest(tmp_path / name)
              for name in ('one', 'two'))
  assert one == two
  for step, policy in ((1, 0), (2, 0), (3, 1), (4, 2)):
    file = tmp_path / 'one' / f'trajectories/step_{step:06d}.jsonl.gz'
    trajectories = [json.loads(line) for line in
                    gzip.decompress(file.read_bytes()).splitlines()]
    assert {t['policy_step'] for t in trajectories} == {policy}
    line = train_test.lines(tmp_path / 'one')[step - 1]
    assert line['training/global_step'] == step
    searched = [turn for t in trajectories for turn in t['turns']
                if turn['action']['kind'] == 'search'
                and turn['observation_tokens']]
    # Counts are those of the step's own trajectories, whenever sampled.
    assert not any(t['retries'] for t in trajectories)
    assert line['search/queries'] == sum(
        len(turn['action']['texts']) for turn in searched) > 0
    assert line['search/failed_queries'] == line['search/timeout_rate'] == 0
  last = train_test.lines(tmp_path / 'one')[-1]
  assert last['actor/grad_norm'] > 0 and last['training/rollouts'] == 64
