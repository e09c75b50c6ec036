# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""One run in one, two or four processes: the same numbers, one writer, one end.

The same four devices each time. The run of two processes is stopped by SIGTERM
to one of them and started again, and has to end like the others all the same.
"""

import gzip
import json
import re
import signal
import time
import types

import jax
import numpy as np
import pytest

from searchrl.models import weights
from searchrl.rollouts import records
from searchrl.runtime import checkpoint
from searchrl.runtime import metrics
from searchrl.runtime import signals
import loopback
import train_test

DEVICES = 8

pytestmark = pytest.mark.slow

STEPS = 3
PATIENCE = 600  # seconds; the machine may do much else
ARGUMENTS = (
    '--config=configs/grpo.py:smoke', f'--config.train.num_steps={STEPS}',
    '--config.train.checkpoint_every=100',  # only a stop saves, and the end
    '--config.train.loggers=()', '--config.train.progress=False',
    '--config.evaluate.worlds.kinds=()',
    # Quick, and with outcomes that differ: one search, then an answer.
    '--config.data.mix=(1,)', '--config.data.per_hop=(100,)',
    '--config.rollout.budgets.max_turns=2', '--config.rollout.budgets.top_k=1')
COUNTS = pytest.mark.parametrize(
    'count', [2, pytest.param(4, marks=pytest.mark.long)])
# Of the first process's own share of the searches.
OF_ONE = ('search/queries', 'search/batch_size')


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  """Runs by how many processes they had, and how one of them was stopped.

  `run(count)` makes a run that is not there yet.
  """
  top = tmp_path_factory.mktemp('runs')
  folder = {count: top / str(count) for count in (1, 2, 4)}
  # XLA cuts large matrix products for as many threads as a process has, which
  # decides last bits: as many as devices, unless NPROC asks for more.
  env = {'NPROC': '4'}
  done = {}

  def start(count):
    return loopback.start(
        count, 'searchrl.main', *ARGUMENTS, f'--workdir={folder[count]}',
        devices=4 // count, env=env)

  def end(group, code=0):
    done = group.wait(PATIENCE)
    assert all(d.returncode == code for d in done), group.logs()
    return done

  def run(count):
    if count not in done:
      with start(count) as group:
        done[count] = end(group)

  with start(1) as alone:  # compiles on one core, and the others on another
    with start(2) as group:
      _wait_for_step(1, folder[2] / metrics.FILE, group)
      group.popen[1].send_signal(signal.SIGTERM)
      stopped = types.SimpleNamespace(
          done=end(group, signals.EXIT_CODE),
          steps=checkpoint.steps(folder[2] / 'checkpoints'),
          lines=train_test.lines(folder[2]),
          exported=(folder[2] / 'model').exists())
    run(2)
    done[1] = end(alone)
  return types.SimpleNamespace(
      folder=folder, done=done, stopped=stopped, run=run)


def _wait_for_step(step, file, group):
  """Waits until the run has written the metrics of a step."""
  deadline = time.monotonic() + PATIENCE
  while not (file.exists() and
             f'"training/global_step": {step},' in file.read_text()):
    running = all(process.poll() is None for process in group.popen)
    assert running and time.monotonic() < deadline, group.logs()
    time.sleep(0.02)


def trajectories_of(folder, step):
  """Returns the trajectories of a step, in the order of the batch's rows."""
  file = folder / 'trajectories' / f'step_{step:06d}.jsonl.gz'
  return [records.from_json(json.loads(line))
          for line in gzip.decompress(file.read_bytes()).splitlines()]


def files_of(folder):
  """Returns the files of a run, without those of its checkpoints."""
  return {str(file.relative_to(folder)) for file in folder.rglob('*')
          if 'checkpoints' not in file.parts}


def test_gradients_come_from_rows_on_all_devices(runs):
  """Otherwise the order of summation, which layouts may change, is untested."""
  most = 0
  for step in range(1, STEPS + 1):
    trajectories = trajectories_of(runs.folder[1], step)
    mixed = [len({t.outcome_reward for t in trajectories[i:i + 4]}) > 1
             for i in range(0, 16, 4)]
    most = max(most, sum(mixed[:2]), sum(mixed[2:]))  # of each mini-batch
  # Then all eight rows of a mini-batch have an advantage: two a device.
  assert most == 2, 'choose another seed'


def test_attention_spans_as_much_of_the_cache_everywhere(runs):
  """Half of it: how much follows the longest conversation of a process, and
  log-probs follow it in their last bit."""
  for step in range(1, STEPS + 1):
    assert max(len(trajectory.tokens) for trajectory in trajectories_of(
        runs.folder[1], step)) <= 512 // 2 - 16  # that a decode samples


@COUNTS
def test_layouts_agree_bit_for_bit(runs, count):
  runs.run(count)
  here, alone = runs.folder[count], runs.folder[1]
  for step in range(1, STEPS + 1):
    name = f'trajectories/step_{step:06d}.jsonl.gz'  # ids, log-probs, rewards
    assert (here / name).read_bytes() == (alone / name).read_bytes()
  assert train_test.state_digest(here) == train_test.state_digest(alone)
  name = 'model/model.safetensors'
  assert (here / name).read_bytes() == (alone / name).read_bytes()


@COUNTS
def test_metrics_are_those_of_one_process(runs, count):
  runs.run(count)
  ours, alone = ([
      {name: x for name, x in line.items() if name not in OF_ONE}
      for line in train_test.lines(runs.folder[n])] for n in (count, 1))
  assert [line['training/global_step'] for line in ours] == [1, 2, 3]
  assert ours == alone
  assert any(line['actor/grad_norm'] > 0 for line in ours)


@COUNTS
def test_the_first_process_alone_writes_and_prints(runs, count):
  runs.run(count)
  assert files_of(runs.folder[count]) == files_of(runs.folder[1])
  for step in range(1, STEPS + 1):
    trajectories = trajectories_of(runs.folder[count], step)
    assert len(trajectories) == 16  # those of all processes
    assert [t.sample for t in trajectories] == [0, 1, 2, 3] * 4
  first, *others = runs.done[count]
  assert 'Hugging Face format' in first.stdout
  for done in others:
    lines = [line for line in done.stdout.splitlines()
             # Gloo's own, which its threads sometimes tear; also at its end.
             if line and not re.search(
                 r'Gloo|connected peer ranks is :|^\d+$', line)]
    assert not lines and re.fullmatch(
        r'Process \d of \d waits up to .* for the others at .*\n', done.stderr)


def test_exported_model_is_the_last_checkpoint(runs):
  folder = runs.folder[2]
  params = weights.load(
      folder / 'model', weights.read_config(folder / 'model'))
  step, state, _ = checkpoint.restore(
      folder / 'checkpoints', {'policy': {'params': params}}, partial=True)
  assert step == STEPS
  jax.tree.map(np.testing.assert_array_equal, state['policy']['params'],
               params)


def test_sigterm_to_one_process_ends_all_at_the_same_step(runs):
  stopped = runs.stopped
  first, other = stopped.done
  assert first.returncode == other.returncode == signals.EXIT_CODE
  step = int(re.search(r'Stopped after step (\d+);', first.stderr)[1])
  assert 1 <= step < STEPS and not stopped.exported
  assert [line['training/global_step'] for line in stopped.lines] == list(
      range(1, step + 1))
  assert stopped.steps == [0, step]  # saved, though no save was due
  resumed, _ = runs.done[2]
  assert f'Resumed at step {step} of ' in resumed.stderr


def _disturbed(folder, number, victim, wait, count=2):
  """Returns the ends of a run that a signal disturbs, and of its repeat."""
  arguments = (*ARGUMENTS, '--config.train.checkpoint_every=1',
               f'--workdir={folder}')
  options = dict(devices=4 // count, env={'NPROC': '4'})
  with loopback.start(
      count, 'searchrl.main', *arguments, **options) as group:
    wait(group)
    group.popen[victim].send_signal(number)
    ends = group.wait(PATIENCE)
  return ends, loopback.run(
      count, 'searchrl.main', *arguments, timeout=PATIENCE, **options)


@pytest.mark.parametrize('count, victim', [
    (2, 1), pytest.param(2, 0, marks=pytest.mark.long),
    pytest.param(4, 3, marks=pytest.mark.long)])
def test_others_end_without_a_lost_process_and_the_next_run_ends_alike(
    tmp_path, runs, count, victim):
  ends, _ = _disturbed(
      tmp_path, signal.SIGKILL, victim,
      lambda group: _wait_for_step(1, tmp_path / metrics.FILE, group), count)
  for number, done in enumerate(ends):  # jax ends them; a shell says 134
    assert done.returncode == (
        -signal.SIGKILL if number == victim else -signal.SIGABRT), done.stderr
    assert number == victim or 'another task died' in done.stderr
  lines, alone = (train_test.lines(folder)
                  for folder in (tmp_path, runs.folder[1]))
  assert [line['training/global_step'] for line in lines] == [1, 2, 3]
  assert [line['critic/score/mean'] for line in lines] == [
      line['critic/score/mean'] for line in alone]
  assert train_test.state_digest(tmp_path) == train_test.state_digest(
      runs.folder[1])


@pytest.mark.long
def test_sigterm_before_the_first_step_ends_all(tmp_path, runs):
  def wait(group):
    while not (tmp_path / 'checkpoints' / '0' / 'integrity.json').exists():
      assert all(p.poll() is None for p in group.popen), group.logs()
      time.sleep(0.02)

  ends, _ = _disturbed(tmp_path, signal.SIGTERM, 1, wait)
  for done in ends:  # all are to be started again, whatever they waited for
    assert done.returncode in (signals.EXIT_CODE, -signal.SIGABRT), done.stderr
  assert train_test.state_digest(tmp_path) == train_test.state_digest(
      runs.folder[1])


@pytest.mark.long
def test_two_processes_roll_back_and_end_alike(tmp_path):
  """Each step breaks a rule: back once, and the second time is the end."""
  with loopback.start(
      2, 'searchrl.main', *ARGUMENTS, f'--workdir={tmp_path}',
      '--config.guards.limits.mismatch=-1.0',
      '--config.guards.actions.mismatch=rollback',
      '--config.guards.most_rollbacks=1', devices=1) as group:
    done = group.wait(PATIENCE)
  assert [one.returncode for one in done] == [1, 1], group.logs()
  first, other = (one.stderr for one in done)
  assert 'Step 1 is rolled back to the checkpoint of step 0.' in first
  for text in (first, other):
    assert 'ends at step 1, as it was rolled back 1 times already' in text
    assert 'Traceback' not in text
  assert checkpoint.steps(tmp_path / 'checkpoints') == [0]
  record, = (tmp_path / 'rollbacks.jsonl').read_text().splitlines()
  assert json.loads(record)['position'] != [0]
  lost, = metrics.read(tmp_path / 'rollback_1_metrics.jsonl')
  again, = metrics.read(tmp_path / metrics.FILE)
  assert lost['guards/rollbacks'] == 0 and again['guards/rollbacks'] == 1


@pytest.mark.long
def test_adapters_in_two_processes_end_as_in_one(tmp_path):
  """They are merged into the sampler's weights and into the exported model."""
  folder = {count: tmp_path / str(count) for count in (1, 2)}
  for count, here in folder.items():
    with loopback.start(
        count, 'searchrl.main', *ARGUMENTS, f'--workdir={here}',
        '--config.model.lora.rank=4', '--config.optimizer.learning_rate=0.01',
        devices=4 // count, env={'NPROC': '4'}) as group:
      done = group.wait(PATIENCE)
    assert not any(process.returncode for process in done), group.logs()
  assert train_test.lines(folder[1])[0]['actor/grad_norm'] > 0
  sampled = [f'trajectories/step_{step:06d}.jsonl.gz'
             for step in range(1, STEPS + 1)]
  for file in ('model/model.safetensors', *sampled):
    assert (folder[1] / file).read_bytes() == (folder[2] / file).read_bytes()


# What a program of two processes x two devices begins with.
START = r'''
import dataclasses
import jax
from jax.experimental import multihost_utils
import numpy as np
from searchrl.models import transformer
from searchrl.models.inference import engine_weights
from searchrl.rollouts import weight_sync
from searchrl.runtime import lockstep
from searchrl.runtime import mesh as meshes
from searchrl.runtime import processes
import learner_test, tiny

processes.initialize()
me = processes.index()
params = jax.device_get(tiny.params(learner_test.CONFIG))
batch = learner_test.ragged_batch()
batch = dataclasses.replace(  # scored
    batch, old_logprobs=batch.behavior_logprobs,
    ref_logprobs=batch.behavior_logprobs)
'''


def outputs(code):
  return loopback.outputs(2, START + code, timeout=PATIENCE)


# Another number of micro-batches; a score too many.
DIVERGE = r'''
def learner(**options):
  return learner_test.make(
      meshes.make(), microbatch_rows=4, max_segments=1,
      lockstep=lockstep.LockstepCheck('call', timeout_secs=300), **options)

other = learner(minibatches=2)
longer = np.array(batch.loss_mask)
longer[8 + 4:, 1] = me  # rows that are filler on process 0
mine = dataclasses.replace(batch, loss_mask=longer)
out('count', message(other.update, other.init(params), other.pack(mine)))

same = learner(minibatches=2)
state = same.init(params)
base = state['policy'].params
same.score(state, batch, base)
if me == 1:
  out('score', message(same.score, state, batch, base))
else:
  out('score', message(same.update, state, same.pack(batch)))
'''


def test_a_planted_divergence_is_caught_at_its_call():
  messages = outputs(DIVERGE)
  for process, message in enumerate(messages['count']):
    assert 'the same calls in the same order, but differ at call 1.' in message
    count = process + 1
    assert f'This is process {process}, which calls update({count},' in message
    assert re.search(r'process 0: update\(1, .*; process 1: update\(2, ',
                     message)
    assert re.search(r'call in common: update\(2, True, .*int32\[2,4,24\]',
                     message)
  for message in messages['score']:
    # After the log-probs of a mini-batch by the policy, and of two by another.
    assert 'differ at call 3.' in message
    assert 'process 0: update(' in message
    assert 'process 1: logprobs(1, int32[2,4,24])' in message
    assert 'Last call in common: logprobs(1, int32[2,4,24])' in message


# Parameters of which a process holds a part, read whole by each for itself.
SPLIT = r'''
axes = transformer.logical_axes(learner_test.CONFIG)

def check(seen, whole, devices=jax.local_devices()):
  for leaf in jax.tree.leaves(seen):
    assert leaf.is_fully_addressable
    assert leaf.devices() == set(devices)
  jax.tree.map(np.testing.assert_array_equal, seen,
               engine_weights.unstacked(whole, 'float32'))

def part_of(params):
  """The shape of a device's part of the embedding."""
  return params['embed']['embedding'].addressable_shards[0].data.shape

for sizes, tensor in ((dict(data=4), 1), (dict(data=2, fsdp=2), 1),
                      (dict(data=1, fsdp=2, tensor=2), 2),
                      (dict(data=1, fsdp=4), 2)):
  mesh = meshes.make(**sizes)
  learner = learner_test.make(mesh)
  state = learner.init(params)
  view = weight_sync.WeightSync(
      mesh, axes, learner_test.CONFIG.num_hidden_layers, tensor=tensor)
  assert set(view.mesh.devices.flat) == set(jax.local_devices())
  held_here = state['policy'].params
  seen = view(held_here).weights
  check(seen, params)
  out(str([*mesh.shape.values(), tensor]), [part_of(held_here), part_of(seen)])

# The last device of each process only samples; the others hold half.
mesh, onto = meshes.divided(1, 1, fsdp=2)
synced = weight_sync.WeightSync(
    mesh, axes, learner_test.CONFIG.num_hidden_layers, onto=onto)(
        learner_test.make(mesh).init(params)['policy'].params)
check(synced.weights, params, jax.local_devices()[1:])
out('apart', [mesh.devices.size, synced.bytes / sum(
    x.nbytes for x in jax.tree.leaves(params))])

# The last one of the loop learns, too.
state, *_ = learner.update(state, learner.pack(batch))
held_here = state['policy'].params
seen = view(held_here).weights
check(seen, multihost_utils.process_allgather(held_here, tiled=True))
mine = meshes.make(data=1, devices=jax.local_devices()[:1])
alone = learner_test.make(mine)
state, *_ = alone.update(alone.init(params), alone.pack(batch))
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6),
             jax.device_get(seen), engine_weights.unstacked(
                 jax.device_get(state['policy'].params), 'float32'))
'''


def test_a_process_reads_parameters_that_are_split_between_processes():
  found = outputs(SPLIT)
  assert found.pop('apart') == [[2, 2.0]] * 2  # devices, copies that are sent
  # The shapes of an embedding of [96, 32] that a process holds, and reads.
  assert found == {
      '[4, 1, 1, 1]': [[[96, 32], [96, 32]]] * 2,
      '[2, 2, 1, 1]': [[[96, 16], [96, 32]]] * 2,
      '[1, 2, 2, 2]': [[[48, 16], [48, 32]]] * 2,
      '[1, 4, 1, 2]': [[[96, 8], [48, 32]]] * 2}
