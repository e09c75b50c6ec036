# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""processes: alone here, and as two real processes over loopback.

After `initialize` SIGTERM keeps its default, for jax's preemption service stays
off; a run's own handler then asks `stop_requested_anywhere`.
"""

import hashlib

import jax
import numpy as np
import pytest

from searchrl.runtime import processes
import loopback

DEVICES = 8

ALL_THREE = {'JAX_COORDINATOR_ADDRESS': '127.0.0.1:1234',
             'JAX_NUM_PROCESSES': '2', 'JAX_PROCESS_ID': '1'}
SLURM = {'SLURM_JOB_ID': '7', 'SLURM_STEP_NODELIST': 'node[1-2]',
         'SLURM_NTASKS': '2', 'SLURM_PROCID': '0', 'SLURM_LOCALID': '0'}


@pytest.fixture
def initialized(monkeypatch):
  """The arguments of each call of jax.distributed.initialize, not made."""
  calls = []
  monkeypatch.setattr(jax.distributed, 'initialize',
                      lambda **arguments: calls.append(arguments))
  monkeypatch.setattr(jax.config, 'update', lambda name, value: None)
  return calls


@pytest.mark.parametrize('environ', [
    {},
    {'JAX_COORDINATOR_ADDRESS': ''},
    ALL_THREE | {'JAX_NUM_PROCESSES': '1', 'JAX_PROCESS_ID': '0'},
    SLURM | {'SLURM_NTASKS': '1'},
    {'SLURM_NTASKS': '8'},  # an allocation, but no step of it
    {'TPU_WORKER_HOSTNAMES': 'localhost'},
    {'TPU_WORKER_HOSTNAMES': 'a,b', 'JAX_PLATFORMS': 'cpu'},
])
def test_one_process_starts_nothing(initialized, environ):
  processes.initialize(environ)
  assert not initialized


@pytest.mark.parametrize('environ', [
    SLURM,
    SLURM | {'JAX_PLATFORMS': 'cpu'},
    {'TPU_WORKER_HOSTNAMES': 'a,b'},
    {'TPU_WORKER_HOSTNAMES': 'a', 'MEGASCALE_NUM_SLICES': '2'},
])
def test_clusters_are_left_to_jax(initialized, environ):
  processes.initialize(environ)
  assert initialized == [dict(
      initialization_timeout=300, heartbeat_timeout_seconds=100,
      shutdown_timeout_seconds=300)]


@pytest.mark.parametrize('address, bound', [
    ('127.0.0.1:1234', True), ('localhost:1', True), ('[::1]:1', True),
    ('10.0.0.1:1234', False), ('node1:1234', False)])
def test_explicit_processes_and_a_loopback_coordinator(
    initialized, address, bound):
  processes.initialize(ALL_THREE | {'JAX_COORDINATOR_ADDRESS': address,
                                    'SEARCHRL_HEARTBEAT_SECS': '10'})
  arguments, = initialized
  assert arguments.pop('coordinator_bind_address', None) == (
      address if bound else None)
  assert arguments == dict(
      coordinator_address=address, num_processes=2, process_id=1,
      cluster_detection_method='deactivate', initialization_timeout=300,
      heartbeat_timeout_seconds=10, shutdown_timeout_seconds=300)


def test_every_process_says_for_whom_it_waits(initialized, capsys):
  processes.initialize(ALL_THREE)
  processes.initialize(SLURM | {'SEARCHRL_START_SECS': '60'})
  assert capsys.readouterr().err.splitlines() == [
      'Process 1 of 2 waits up to 300 s for the others at 127.0.0.1:1234.',
      'One of 2 processes waits up to 60 s for the others.']


@pytest.mark.parametrize('change, message', [
    ({'JAX_PROCESS_ID': ''}, 'set together, but lack JAX_PROCESS_ID. Set'),
    ({'JAX_COORDINATOR_ADDRESS': '', 'JAX_NUM_PROCESSES': ''},
     'lack JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES'),
    ({'JAX_COORDINATOR_ADDRESS': 'node1'}, "host:port .*, but is 'node1'"),
    ({'JAX_PROCESS_ID': '2'}, 'below JAX_NUM_PROCESSES=2, but is 2'),
    ({'JAX_NUM_PROCESSES': 'two'}, "JAX_NUM_PROCESSES must .* is 'two'"),
    ({'SEARCHRL_START_SECS': '5m'}, "SEARCHRL_START_SECS must .* is '5m'"),
])
def test_an_environment_that_asks_in_part_is_refused(
    initialized, change, message):
  with pytest.raises(ValueError, match=message):
    processes.initialize(ALL_THREE | change)
  assert not initialized


def test_alone_everything_is_free():
  assert (processes.count(), processes.index()) == (1, 0)
  assert processes.is_first()
  assert processes.exchange('x', b'mine', 1) == [b'mine']
  assert processes.agree('x', {'a': [1, None]}) == {'a': [1, None]}
  assert processes.stop_requested_anywhere(True) is True
  assert processes.stop_requested_anywhere(False) is False
  assert processes.share('abc') == 'abc'
  assert processes.leave(75) is True
  assert processes.on_first('x', lambda: {'a': [1, None]}) == {'a': [1, None]}
  with pytest.raises(FileNotFoundError, match='no such'):
    processes.on_first('x', lambda: _refuse(FileNotFoundError('no such')))
  processes.barrier('x', 1)


def _refuse(error):
  raise error


@pytest.mark.parametrize('items', [0, 1, 3, 4, 7, 16])
def test_shares_are_blocks_as_even_as_can_be(monkeypatch, items):
  monkeypatch.setattr(processes, 'count', lambda: 4)
  shares = []
  for i in range(4):
    monkeypatch.setattr(processes, 'index', lambda i=i: i)
    shares.append(processes.share(range(items)))
  assert [x for share in shares for x in share] == list(range(items))
  sizes = [len(share) for share in shares]
  assert max(sizes) - min(sizes) <= 1


def test_long_texts_are_shown_from_where_they_differ():
  texts = ['a' * 900 + 'x', 'a' * 900 + 'y', 'a' * 900 + 'x']
  assert processes.by_process(texts) == (f'processes 0, 2: ... {"a" * 100}x; '
                  f'process 1: ... {"a" * 100}y')
  assert processes._named(range(200)) == (
      'processes 0, 1, 2, 3, 4, 5, 6, 7, ... (200 in all)')


# One program of two processes; `out` and `message` are loopback's.
MEETINGS = r'''
import hashlib, json, os, signal, sys, threading, time
import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed, xla_bridge
from searchrl.runtime import mesh as mesh_lib
from searchrl.runtime import processes
from searchrl.runtime.processes import agree, barrier, exchange

processes.initialize()
me = processes.index()
client = distributed.global_state.client
def stored():
  barrier('before')  # whose own entries are stored until the next meeting
  keys = [key for key, _ in client.key_value_dir_get_bytes('searchrl/')]
  barrier('after')
  return keys
def let(name):  # the other process comes after this one
  client.key_value_set(f'{name}', '')
def after(name):
  client.blocking_key_value_get(f'{name}', 30_000)

caught = int(next(line for line in open('/proc/self/status') if
                  line.startswith('SigCgt')).split()[1], 16)
out('sigterm is caught', bool(caught >> (signal.SIGTERM - 1) & 1))
out('devices touched', xla_bridge.backends_are_initialized())
out('who', [processes.count(), me, processes.is_first()])

out('small', [x.decode() for x in exchange('a', b'from %d' % me, 30)])
out('again', [x.decode() for x in exchange('a', b'again %d' % me, 30)])
big = np.random.default_rng(me).bytes(3_000_000 + me)
out('big', [hashlib.sha256(x).hexdigest() for x in exchange('b', big, 60)])
out('empty', [len(x) for x in exchange('a', b'' if me else b'\n\n', 30)])
out('stored', stored())

out('agree', agree('config', {'a': {'b': [1, 2.5]}, 'c': None}))
out('disagree', message(agree, 'config', {'a': {'b': me, 'same': 1}, 'd': 3}))
out('versions', message(agree, 'git revision', 'abc' if me else 'def'))
out('no key', message(agree, 'config', {'a': 1} if me else {}))
out('other tag', message(exchange, 'train' if me else 'evaluate', b'', 30))

if me == 0:
  out('missing', message(barrier, 'checkpoint', 1)); let('gave up')
else:
  after('gave up'); out('missing', message(barrier, 'checkpoint', 1))
out('and on', [x.decode() for x in exchange('a', b'%d' % me, 30)])

def left(tag):  # as process 1 leaves
  try:
    return processes.leave(75) if me else exchange(tag, b'', 30)
  except processes.Left as error:
    return [str(error), error.code]
out('left', left('trajectories'))
out('both leave', processes.leave(1))
processes._LEAVE_SECS = 1
if me == 0:
  out('leaves alone', processes.leave(75)); let('has left')
else:
  after('has left'); out('leaves alone', message(barrier, 'x', 1)[:12])

out('share', processes.share('abcde'))
ran = []
def read(*errors):
  ran.append(me)
  for error in errors:
    raise error
  return {'by': me, 'rows': [1, None]}
def refused(*errors):
  try:
    return processes.on_first('data', lambda: read(*errors), 30)
  except (ValueError, OSError) as error:
    return f'{type(error).__name__}: {error}'
out('first', refused())
out('first refuses', refused(ValueError('bad rows')))
out('first lacks', refused(FileNotFoundError('no q.jsonl')))
out('first is full', refused(OSError(28, 'No space left')))
out('first is lost', refused(json.JSONDecodeError('no value', 'x', 0)))
out('ran', ran)

def beside():  # before the main thread's meeting on process 0, within it on 1
  time.sleep(me * 0.3)
  processes.channel('beside')
  for n in range(2):
    met.append([x.decode() for x in exchange('beside', b'%d' % (me + n), 30)])

for name in ('beside', 'beside again'):
  met, thread = [], threading.Thread(target=beside)
  thread.start()
  if me == 0:
    thread.join()
  out(name, [x.decode() for x in exchange('main', b'%d' % me, 30)])
  thread.join()
  out(f'{name}: thread', met)

asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
for step in range(4):
  if me == 1 and step == 2:
    os.kill(os.getpid(), signal.SIGTERM)
  if processes.stop_requested_anywhere(bool(asked)):
    break
out('stopped at', step)

mesh = mesh_lib.make()
x = jax.make_array_from_callback(
    (4,), mesh_lib.sharding(mesh, ('batch',)),
    lambda rows: np.arange(1., 5.)[rows])
total = jax.jit(jnp.sum, out_shardings=mesh_lib.sharding(mesh, ()))(x)
out('sum', [mesh.size, len(jax.local_devices()), float(total)])
out('index', jax.process_index() == me)
'''


# Process 1 gets SIGTERM in the middle of a meeting, and leaves.
SIGNALS = r'''
import os, signal, zlib
from jax._src import distributed
from searchrl.runtime import processes, signals

signals.raise_at_sigterm()
processes.initialize()
me, state = processes.index(), distributed.global_state
client = state.client

class Signalled:  # a client, or a module, whose function `name` gets a signal
  def __init__(self, whole, name):
    self.whole, self.name = whole, name
  def __getattr__(self, name):
    def call(*args, **options):
      result = getattr(self.whole, name)(*args, **options)
      if name == self.name:
        signal.raise_signal(signal.SIGTERM)
      return result
    return call

def meet(payload, name):
  if me:
    state.client = Signalled(client, name)
    processes.zlib = Signalled(zlib, name)
  try:
    return [len(x) for x in processes.exchange('x', payload, 60)]
  except signals.Terminated:
    state.client, processes.zlib = client, zlib
    return processes.leave(75)
  except (processes.Left, KeyError) as error:
    return repr(error)

large = os.urandom(1 << 15)  # has a key of its own, before that of the head
for name in ('compress', 'key_value_set_bytes', 'wait_at_barrier'):
  for payload in (b'', large):
    out(f'{name} {len(payload)}', meet(payload, name))
    if name == 'wait_at_barrier' and not me:  # this process left it unharmed
      out(f'next {len(payload)}', meet(payload, name))
    elif name == 'wait_at_barrier':
      out(f'next {len(payload)}', None)
out('and on', [x.decode() for x in processes.exchange('x', b'%d' % me, 30)])

state.num_processes += me
out('numbers', message(processes.exchange, 'config', b'', 30))
out('left', processes.leave(1) if me else meet(b'', ''))
state.num_processes = 2
'''


def test_a_signal_within_a_meeting_ends_that_meeting_or_the_next():
  outputs = loopback.outputs(2, SIGNALS)
  left = repr(processes.Left(1, 75))
  for name in ('compress', 'key_value_set_bytes'):
    for size in (0, 1 << 15):
      assert outputs[f'{name} {size}'] == [left, True]
  for size in (0, 1 << 15):  # all had come
    assert outputs[f'wait_at_barrier {size}'] == [[size, size], True]
    assert outputs[f'next {size}'] == [left, None]
  assert outputs['and on'] == [['0', '1']] * 2
  first, other = outputs['numbers']  # 2 is true
  assert first.startswith('no error')
  assert 'must be equal on all processes, but is 3 on process 1, and 2' in other
  assert outputs['left'] == [repr(processes.Left(1, 1)), True]


@pytest.fixture(scope='module')
def outputs():
  """{check: [output of process 0, of process 1]}."""
  return loopback.outputs(2, MEETINGS)


def test_start_touches_no_device_and_keeps_sigterm(outputs):
  assert outputs['who'] == [[2, 0, True], [2, 1, False]]
  assert outputs['devices touched'] == [False, False]
  assert outputs['sigterm is caught'] == [False, False]
  assert outputs['index'] == [True, True]


def test_exchange_is_whole_in_order_and_leaves_nothing(outputs):
  assert outputs['small'] == [['from 0', 'from 1']] * 2
  assert outputs['again'] == [['again 0', 'again 1']] * 2
  assert outputs['big'] == [[
      hashlib.sha256(np.random.default_rng(i).bytes(3_000_000 + i)).hexdigest()
      for i in range(2)]] * 2
  assert outputs['empty'] == [[2, 0]] * 2
  for keys in outputs['stored']:  # at meeting 4, perhaps before 3 is gone
    assert keys and {key.split('/')[1] for key in keys} <= {'3', '4', '5'}


def test_threads_meet_beside_the_main_thread(outputs):
  for name in ('beside', 'beside again'):
    assert outputs[name] == [['0', '1']] * 2
    assert outputs[f'{name}: thread'] == [[['0', '1'], ['1', '2']]] * 2


def test_agree_returns_or_names_both_values_on_both_sides(outputs):
  assert outputs['agree'] == [{'a': {'b': [1, 2.5]}, 'c': None}] * 2
  for text in outputs['disagree']:
    assert 'ValueError: config must be alike on all processes' in text
    assert 'config.a.b: process 0: 0; process 1: 1\n' in text
    assert 'same' not in text.split('\n', 1)[1].rsplit('\n', 1)[0]
  for text in outputs['versions']:
    assert 'git revision: process 0: "def"; process 1: "abc"' in text
  for text in outputs['no key']:
    assert 'config.a: process 0: nothing; process 1: 1' in text


def test_meetings_at_different_tags_are_an_error(outputs):
  for text in outputs['other tag']:
    assert "process 0: 'evaluate'; process 1: 'train'" in text


def test_a_timeout_names_the_missing_and_the_late_one_learns_of_it(outputs):
  first, late = outputs['missing']
  assert first.startswith(
      "TimeoutError: all 2 processes must reach 'checkpoint' within 1 s of the "
      'first, but process 1 did not (this is process 0).')
  assert 'TimeoutError' in late and 'the last did not (this is pro' in late
  assert outputs['and on'] == [['0', '1']] * 2


def test_a_process_that_leaves_ends_the_meeting_of_the_others(outputs):
  other, leaver = outputs['left']
  assert leaver is True
  text = 'Process 1 has ended early, with exit code 75, and so does this one,'
  assert other[0].startswith(text) and other[1] == 75
  assert outputs['both leave'] == [True, True]  # and neither is surprised
  assert outputs['leaves alone'] == [False, 'TimeoutError']


def test_shares_and_what_the_first_alone_does(outputs):
  assert outputs['share'] == ['ab', 'cde']
  assert outputs['first'] == [{'by': 0, 'rows': [1, None]}] * 2
  assert outputs['ran'] == [[0] * 5, []]


def test_a_refusal_of_the_first_is_one_of_all(outputs):
  assert outputs['first refuses'] == ['ValueError: bad rows'] * 2
  assert outputs['first lacks'] == ['FileNotFoundError: no q.jsonl'] * 2
  assert outputs['first is full'] == ['OSError: [Errno 28] No space left'] * 2
  first, other = outputs['first is lost']  # a ValueError of another name
  assert first.startswith('JSONDecodeError: no value')
  assert other.startswith('ValueError: no value')


def test_all_stop_at_the_step_after_a_signal_to_one(outputs):
  assert outputs['stopped at'] == [2, 2]


def test_a_program_runs_over_the_devices_of_both(outputs):
  assert outputs['sum'] == [[4, 2, 10.0]] * 2


def test_only_the_first_process_prints(monkeypatch, capsys):
  processes.say('one')
  monkeypatch.setattr(processes, 'is_first', lambda: False)
  processes.say('two')
  assert capsys.readouterr() == ('', 'one\n')
