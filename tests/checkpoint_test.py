# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""checkpoint: bitwise round trips, all kinds of damage, death at any point."""

import errno
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from searchrl.runtime import checkpoint
from searchrl.runtime import mesh as mesh_lib

DEVICES = 8

# A read that failed inside Orbax leaves a future that nobody awaits.
pytestmark = pytest.mark.filterwarnings(
    'ignore::pytest.PytestUnraisableExceptionWarning')

EXTRA = {'position': 7, 'surplus': [{'tokens': [1, 2], 'logprobs': [-0.1]}],
         'none': None, 'infinite': float('inf')}


def state_of(step, mesh=None, axes=('embed', 'mlp')):
  """A state whose every leaf depends on the step."""
  kernel = jax.random.normal(jax.random.key(step), (64, 128))
  kernel = kernel.at[0, 0].set(jnp.nan).at[0, 1].set(-0.0)
  if mesh is not None:
    kernel = jax.device_put(kernel, mesh_lib.sharding(mesh, axes))
  return {'params': {'layers': {'kernel': kernel},
                     'norm': {'scale': jnp.full(3, step, jnp.bfloat16)}},
          'step': jnp.int32(step), 'mask': jnp.array([True, False])}


def template_of(state):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=x.sharding), state)


def saved(directory, *steps, keep=9):
  for step in steps:
    checkpoint.save(directory, step, state_of(step), {'step': step}, keep=keep)
  return directory


def restore(directory, **kwargs):
  """(step, digest, extra, notes); the digest is checked by the caller."""
  notes = []
  found = checkpoint.restore(
      directory, template_of(state_of(0)), warn=notes.append, **kwargs)
  if found is None:
    return None, None, None, notes
  step, state, extra = found
  assert checkpoint.digest(state) == checkpoint.digest(state_of(step))
  return step, state, extra, notes


def data_file(directory, step):
  """The file that holds the kernel's values."""
  files = (directory / str(step) / 'state').rglob('d/*')
  return max(files, key=lambda path: path.stat().st_size)


def flip_bit(path, at=0.5):
  raw = bytearray(path.read_bytes())
  raw[int(len(raw) * at)] ^= 1
  path.write_bytes(raw)


def test_round_trip_is_bitwise_and_layout_is_free(tmp_path):
  before = state_of(3, mesh_lib.make(fsdp=4, tensor=2))
  checkpoint.save(tmp_path / 'deep' / 'run', 3, before, EXTRA)
  other = state_of(0, mesh_lib.make(fsdp=2, tensor=4), ('mlp', 'embed'))
  step, after, extra = checkpoint.restore(
      tmp_path / 'deep' / 'run', template_of(other))
  assert (step, extra) == (3, EXTRA)
  assert checkpoint.digest(after) == checkpoint.digest(before)
  assert jax.tree.all(jax.tree.map(
      lambda x, y: x.sharding == y.sharding and x.dtype == y.dtype,
      after, other))
  assert jax.tree.structure(after) == jax.tree.structure(before)


def test_optimizer_states_and_host_templates_round_trip(tmp_path):
  params = {'kernel': jnp.ones((2, 3))}
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
  state = {'params': params, 'optimizer': tx.init(params)}
  checkpoint.save(tmp_path, 0, state, {})
  _, after, _ = checkpoint.restore(tmp_path, state)  # arrays as the template
  assert jax.tree.structure(after) == jax.tree.structure(state)
  assert checkpoint.digest(after) == checkpoint.digest(state)
  host = {'params': {'kernel': np.zeros((2, 3), np.float32)}}
  _, after, _ = checkpoint.restore(tmp_path, host, partial=True)
  assert isinstance(after['params']['kernel'], np.ndarray)
  np.testing.assert_array_equal(after['params']['kernel'], 1)


def test_digest_sees_values_names_and_dtypes_but_not_layout():
  mesh = mesh_lib.make(fsdp=8)
  digests = {checkpoint.digest(x) for x in (
      {'a': jnp.zeros(8)}, {'b': jnp.zeros(8)}, {'a': jnp.zeros((8, 1))},
      {'a': jnp.zeros(8, jnp.int32)}, {'a': -jnp.zeros(8)})}
  assert len(digests) == 5
  x = np.arange(8, dtype=np.float32)
  assert (checkpoint.digest({'a': x}) == checkpoint.digest({'a': jnp.array(x)})
          == checkpoint.digest({'a': mesh_lib.shard_batch(mesh, x)}))


def test_only_the_newest_are_kept(tmp_path):
  saved(tmp_path, 1, 5, keep=2)
  (tmp_path / '4').mkdir()  # left behind by a killed save
  saved(tmp_path, 10, keep=2)
  assert sorted(p.name for p in tmp_path.iterdir()) == ['10', '5']
  assert checkpoint.steps(tmp_path) == [5, 10]


def test_pinned_steps_stay_besides(tmp_path):
  saved(tmp_path, 1, 2, 3)
  checkpoint.save(tmp_path, 4, state_of(4), {}, keep=1, pinned=(2, 77))
  assert checkpoint.steps(tmp_path) == [2, 4]


@pytest.fixture(params=('on CPUs', 'in the background'))
def each_way(request, monkeypatch):
  """Saves as on CPUs, without a copy, and as on accelerators."""
  if request.param == 'in the background':
    monkeypatch.setattr(checkpoint, '_is_on_cpus', lambda leaf: False)


@pytest.mark.usefixtures('each_way')
def test_what_is_saved_is_what_was_there(tmp_path):
  """An update that takes the buffers over changes neither bytes nor digests."""
  update = jax.jit(lambda state: jax.tree.map(jnp.zeros_like, state),
                   donate_argnums=0)
  with checkpoint.Saver(tmp_path, keep=9) as saver:
    for step in (1, 2, 3):
      state = state_of(step)
      saver.save(step, state, {'step': step})
      jax.block_until_ready(update(state))
  for step in (1, 2, 3):
    assert restore(tmp_path, at=step)[2] == {'step': step}


def test_cpus_copy_nothing_and_have_committed_when_save_returns(
    tmp_path, monkeypatch):
  monkeypatch.setattr(checkpoint, '_AT_ONCE', 8)  # array by array
  with checkpoint.Saver(tmp_path) as saver:
    with monkeypatch.context() as patch:
      patch.setattr(checkpoint.array_digests, 'copy', lambda leaf: 1 / 0)
      patch.setattr(checkpoint.array_digests, 'describe', lambda leaf: {})
      saver.save(1, state_of(1), {})
    assert checkpoint.steps(tmp_path) == [1]
    saver.save(2, state_of(2), {})
  assert restore(tmp_path)[0] == 2


def test_memory_is_given_back_before_and_after_the_writing(
    tmp_path, monkeypatch):
  written = []  # when it was given back
  monkeypatch.setattr(checkpoint.host_memory, 'give_back', lambda: (
      written.append((tmp_path / '1' / 'integrity.json').exists())))
  with checkpoint.Saver(tmp_path) as saver:
    saver.save(1, state_of(1), {})
  assert written == [False, True]


@pytest.mark.usefixtures('each_way')
def test_a_save_that_fails_is_told_and_harms_no_other(tmp_path, monkeypatch):
  saved(tmp_path, 1)
  write = checkpoint.atomic_files.write

  def full(path, text):
    if path.name == 'integrity.json':
      raise OSError(28, 'No space left on device', str(path))
    write(path, text)

  for end in ('wait', 'save', 'leave'):
    with monkeypatch.context() as patch, pytest.raises(
        OSError, match='No space left'):
      patch.setattr(checkpoint.atomic_files, 'write', full)
      with checkpoint.Saver(tmp_path, keep=9) as saver:
        saver.save(2, state_of(2), {})
        if end == 'wait':
          saver.wait()
        if end == 'save':
          saver.save(3, state_of(3), {})
    assert restore(tmp_path)[0] == 1
  saved(tmp_path, 2)  # there is room again
  assert restore(tmp_path)[0] == 2


def test_any_kept_step_is_restored_and_told_what_it_holds(tmp_path):
  saved(tmp_path, 1, 2, 3)
  for step in (1, 3, 2):
    assert restore(tmp_path, at=step)[0] == step
  assert checkpoint.holds(tmp_path, 2, 'params/layers')
  assert not checkpoint.holds(tmp_path, 2, 'param')


def test_nothing_saved_is_none(tmp_path):
  assert restore(tmp_path) == (None, None, None, [])
  assert restore(tmp_path / 'missing') == (None, None, None, [])


def remove(path):
  shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize('damage', {
    'bit of the data': lambda d: flip_bit(data_file(d, 2)),
    'bit near its end': lambda d: flip_bit(data_file(d, 2), 0.9),
    'bit of extra': lambda d: flip_bit(d / '2/extra.json', 0.8),
    'bit of integrity': lambda d: flip_bit(d / '2/integrity.json', 0.3),
    'truncated data': lambda d: os.truncate(data_file(d, 2), 40),
    'no data': lambda d: remove(data_file(d, 2)),
    'no state': lambda d: remove(d / '2/state'),
    'no manifest': lambda d: remove(d / '2/state/manifest.ocdbt'),
    'no extra': lambda d: remove(d / '2/extra.json'),
    'empty integrity': lambda d: os.truncate(d / '2/integrity.json', 0),
    'another step': lambda d: (
        remove(d / '2'), shutil.copytree(d / '1', d / '2')),
    'good JSON, wrong kind': lambda d: (
        d / '2/integrity.json').write_text('[1, 2]'),
}.items(), ids=lambda item: item[0])
def test_damage_is_found_and_the_older_step_restored(tmp_path, damage):
  saved(tmp_path, 1, 2)
  damage[1](tmp_path)
  step, _, extra, notes = restore(tmp_path)
  assert (step, extra) == (1, {'step': 1})
  assert len(notes) == 1 and 'moved to 2.corrupt, restored step 1' in notes[0]
  assert sorted(p.name for p in tmp_path.iterdir()) == ['1', '2.corrupt']
  saved(tmp_path, 2)  # the number is free again
  flip_bit(data_file(tmp_path, 2))
  assert restore(tmp_path)[0] == 1
  assert (tmp_path / '2.corrupt1').is_dir()


def test_the_reason_of_damage_names_an_array_without_noise(tmp_path):
  saved(tmp_path, 1, 2)
  os.truncate(data_file(tmp_path, 2), 40)
  *_, (note,) = restore(tmp_path)
  assert 'params/layers/kernel' in note and 'TensorStore' not in note


@pytest.fixture
def run_of_a_user():
  """A directory with steps 1 and 2; the test runs without rights of root."""
  user, nobody = os.geteuid(), 65534
  with tempfile.TemporaryDirectory() as folder:
    os.chmod(folder, 0o777)
    try:
      os.seteuid(user or nobody)
      yield saved(pathlib.Path(folder), 1, 2)
    finally:
      os.system(f'chmod -R u+rwX {folder}')
      os.seteuid(user)


@pytest.mark.parametrize('place', [
    'integrity.json', 'extra.json', 'data', 'state', 'state/_METADATA'])
def test_a_step_that_must_not_be_read_is_not_called_damaged(
    run_of_a_user, place):
  path = data_file(run_of_a_user, 2) if place == 'data' else (
      run_of_a_user / '2' / place)
  mode = path.stat().st_mode
  path.chmod(0)
  with pytest.raises(PermissionError, match=f"'{path}'$"):
    restore(run_of_a_user)
  path.chmod(mode)
  assert checkpoint.steps(run_of_a_user) == [1, 2]
  assert restore(run_of_a_user)[0] == 2


@pytest.mark.parametrize('code', [errno.EMFILE, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize('place', ['integrity.json', 'state'])
def test_a_read_that_fails_is_an_os_error_and_changes_nothing(
    tmp_path, monkeypatch, place, code):
  saved(tmp_path, 1, 2)
  file = str(tmp_path / '2' / place)
  read_text = pathlib.Path.read_text

  def fail(path):
    if str(path) == file:
      raise OSError(code, os.strerror(code), file)
    return read_text(path)

  def fail_in_tensorstore(*_, **__):
    try:
      raise ValueError(f'Error reading "a/0": Failed to open: "{file}": '
                       f"{os.strerror(code)} [os_error_code='{code}']")
    except ValueError as error:
      raise Exception('Encountered error while reading.') from error

  with monkeypatch.context() as patch, pytest.raises(
      OSError, match=f"'{file}'$") as error:
    if place == 'state':
      patch.setattr(checkpoint.ocp.Checkpointer, 'restore', fail_in_tensorstore)
    else:
      patch.setattr(pathlib.Path, 'read_text', fail)
    restore(tmp_path)
  assert error.value.errno == code
  assert restore(tmp_path)[0] == 2 and checkpoint.steps(tmp_path) == [1, 2]


def test_steps_that_were_never_committed_are_passed_over(tmp_path):
  saved(tmp_path, 1, 2)
  (tmp_path / '9').mkdir()
  (tmp_path / '2/integrity.json').unlink()
  for name in ('notes', '07', '3.orbax-checkpoint-tmp'):
    (tmp_path / name).mkdir()
  (tmp_path / '8').write_text('a file')
  step, _, _, notes = restore(tmp_path)
  assert step == 1
  assert [t.split()[1] for t in notes] == [
      str(tmp_path / '2'), str(tmp_path / '9')]
  assert (tmp_path / '2/state').is_dir(), 'a save may be under way: hands off'


def test_all_damaged_is_an_error_that_changes_nothing(tmp_path):
  saved(tmp_path, 1, 2)
  flip_bit(data_file(tmp_path, 1))
  remove(data_file(tmp_path, 2))
  with pytest.raises(ValueError, match='every step is damaged') as error:
    restore(tmp_path)
  assert all(f'{tmp_path / s}: ' in str(error.value) for s in '12')
  assert 'another directory to start anew' in str(error.value)
  assert checkpoint.steps(tmp_path) == [1, 2]


def test_a_damaged_step_that_is_named_names_the_others(tmp_path):
  saved(tmp_path, 1, 2)
  flip_bit(data_file(tmp_path, 2))
  with pytest.raises(ValueError, match='step 2 is damaged') as error:
    restore(tmp_path, at=2)
  assert str(error.value).endswith('or name one of [1].')
  assert restore(tmp_path, at=1)[0] == 1


def test_another_model_is_an_error_not_damage(tmp_path):
  saved(tmp_path, 1)
  template = template_of(state_of(0))
  layers = template['params']['layers']
  layers['kernel'] = jax.ShapeDtypeStruct((64, 4), jnp.float32)
  with pytest.raises(ValueError, match=(
      r'params/layers/kernel must be float32\[64, 128\] as in .* but is '
      r'float32\[64, 4\]. Restore with the configuration')):
    checkpoint.restore(tmp_path, template)
  layers['kernel'] = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)
  with pytest.raises(ValueError, match='but is bfloat16'):
    checkpoint.restore(tmp_path, template)
  del layers['kernel']
  with pytest.raises(ValueError, match='kernel must be float32.* is absent'):
    checkpoint.restore(tmp_path, template)
  template = template_of(state_of(0)) | {'values': layers}
  template['values'] = jax.ShapeDtypeStruct((), jnp.float32)
  with pytest.raises(ValueError, match='values must be absent .* is float32'):
    checkpoint.restore(tmp_path, template, partial=True)
  assert checkpoint.steps(tmp_path) == [1]


@pytest.mark.parametrize('changes, message', [
    (dict(step=2), r'step must be .* but is 2, and .* holds \[2\]'),
    (dict(step=-1), 'step must be at least 0'),
    (dict(keep=0), 'keep must be at least 1, but is 0'),
    (dict(state={'a': np.ones(2)}), r'leaf a must be a jax.* is ndarray\(2,\)'),
    (dict(state={'a': jnp.ones((0, 2))}), r'leaf a .*ArrayImpl\(0, 2\)'),
    (dict(state={'a/b': jnp.ones(2), 'a': {'b': jnp.ones(2)}}), 'paths must'),
    (dict(extra={'a': np.ones(2)}), 'extra must hold .*ndarray.*tolist'),
    (dict(directory='gs://bucket/run'), 'directory must be .* but is gs://'),
])
def test_arguments_that_break_a_rule_write_nothing(tmp_path, changes, message):
  saved(tmp_path, 2)
  arguments = dict(
      directory=tmp_path, step=3, state=state_of(3), extra={}, keep=2) | changes
  with pytest.raises(ValueError, match=message):
    checkpoint.save(**arguments)
  assert [p.name for p in tmp_path.iterdir()] == ['2']


def test_defaults_warn_and_accept_relative_paths(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  saved('run', 1, 2)
  flip_bit(data_file(pathlib.Path('run'), 2))
  with pytest.warns(UserWarning, match='leaf params/|DATA_LOSS|Error'):
    step, _, _ = checkpoint.restore('run', template_of(state_of(0)))
  assert step == 1
  with warnings.catch_warnings(action='error'):
    assert checkpoint.restore('run', template_of(state_of(0)))[0] == 1


_spies = []  # called before every change of the file system


def _audit(event, args):
  if event.startswith('os.') or event in ('open', 'shutil.rmtree'):
    for spy in _spies:
      spy()


sys.addaudithook(_audit)  # cannot be taken back; free while no one spies


def test_death_at_any_point_leaves_an_intact_step(tmp_path):
  """The tree as `kill -9` would leave it, before each change by save."""
  run, shots = tmp_path / 'run', []
  saved(run, 1, 2, keep=2)
  one_at_a_time = threading.Lock()

  def snapshot():
    if one_at_a_time.acquire(blocking=False):  # else: made by the copy itself
      try:
        shots.append(tmp_path / f'shot{len(shots)}')
        copy_tree(run, shots[-1])
      finally:
        one_at_a_time.release()

  _spies.append(snapshot)
  try:
    saved(run, 3, keep=2)
  finally:
    _spies.remove(snapshot)
  assert len(shots) > 20
  restored = [restore(shot)[0] for shot in shots]
  assert restored == sorted(restored) and set(restored) == {2, 3}
  for i, shot in enumerate(shots):
    if i % 5 == 0:
      saved(shot, 4, keep=2)  # the next save sweeps what was left behind
      names = {p.name for p in shot.iterdir()}
      assert len(names) == 2 and '4' in names
    while committed := checkpoint.steps(shot):  # older ones are whole, too
      step, _, _, notes = restore(shot)
      assert step == committed[-1] and 'damaged' not in ''.join(notes)
      (shot / str(step) / 'integrity.json').unlink()


def copy_tree(source, target):
  """A copy of a tree in which files may vanish meanwhile."""
  for folder, _, files in os.walk(source):
    copy = target / os.path.relpath(folder, source)
    copy.mkdir(parents=True)
    for name in files:
      try:
        shutil.copyfile(os.path.join(folder, name), copy / name)
      except FileNotFoundError:
        pass


def run_python(code, *arguments, **environment):
  return subprocess.Popen(
      [sys.executable, '-c', textwrap.dedent(code), *map(str, arguments)],
      env=os.environ | {'PYTHONPATH': os.getcwd()} | environment,
      stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize('where', ['state', 'extra.json', 'integrity.json'])
def test_kill_inside_save_restores_the_previous_step(tmp_path, where):
  saved(tmp_path, 1)
  child = run_python('''
      import os, signal, sys
      import jax.numpy as jnp
      import orbax.checkpoint as ocp
      from searchrl.runtime import checkpoint

      die = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
      write = checkpoint.atomic_files.write
      if sys.argv[2] == 'state':
        ocp.PyTreeCheckpointHandler.finalize = die
      checkpoint.atomic_files.write = lambda path, text: (
          die() if path.name == sys.argv[2] else write(path, text))
      checkpoint.save(sys.argv[1], 2, {'x': jnp.ones(3)}, {})
      ''', tmp_path, where)
  output, _ = child.communicate(timeout=60)
  assert child.returncode == -signal.SIGKILL, output
  assert (tmp_path / '2').is_dir()
  step, _, _, notes = restore(tmp_path)
  assert step == 1 and 'never committed' in notes[0]
  saved(tmp_path, 2)  # as the resumed run will
  assert restore(tmp_path)[0] == 2


def test_two_processes_save_fall_back_and_agree(tmp_path):
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    port = probe.getsockname()[1]
  code = '''
      import pathlib, sys
      import jax, jax.numpy as jnp, numpy as np
      from jax.experimental import multihost_utils
      from searchrl.runtime import checkpoint
      from searchrl.runtime import mesh as mesh_lib

      directory, port, rank = pathlib.Path(sys.argv[1]), *sys.argv[2:]
      address = f'127.0.0.1:{port}'
      jax.distributed.initialize(
          address, 2, int(rank), initialization_timeout=60,
          coordinator_bind_address=address, shutdown_timeout_seconds=20)

      def state_of(step, **sizes):
        x = np.arange(32, dtype=np.float32).reshape(4, 8) + step
        return {'x': jax.device_put(x, mesh_lib.sharding(
            mesh_lib.make(**sizes), ('embed', 'mlp')))}

      for step in (1, 2):
        checkpoint.save(directory, step, state_of(step, fsdp=4), {'s': step})
      if rank == '0':
        for path in (directory / '2/state').rglob('d/*'):
          path.write_bytes(path.read_bytes()[:-9])
      checkpoint._all_agree()
      step, state, extra = checkpoint.restore(
          directory, state_of(0, fsdp=2, tensor=2), warn=lambda message: None)
      print('RESULT', step, extra, checkpoint.digest(state))
      # Each host has all parts of these, which are therefore not gathered.
      gather, calls = multihost_utils.process_allgather, []
      multihost_utils.process_allgather = lambda x, **options: (
          calls.append(x.size) or gather(x, **options))
      for step, sizes in ((3, dict(data=2, fsdp=2)), (4, dict(data=4))):
        state = state_of(step, **sizes)
        calls.clear()  # device_put compares what it is given by a gather
        checkpoint.save(directory, step, state, {})
        _, state, _ = checkpoint.restore(directory, state, at=step)
        print('WHOLE', step, checkpoint.digest(state), max(calls))
      '''
  children = [run_python(
      code, tmp_path, port, rank,
      XLA_FLAGS='--xla_force_host_platform_device_count=2') for rank in (0, 1)]
  outputs = [child.communicate(timeout=90)[0] for child in children]
  x = np.arange(32, dtype=np.float32).reshape(4, 8) + 1
  want = f"RESULT 1 {{'s': 1}} {checkpoint.digest({'x': x})}"
  assert all(want in output for output in outputs), '\n'.join(outputs)
  for step in (3, 4):
    want = f"WHOLE {step} {checkpoint.digest({'x': x - 1 + step})} 1"
    assert all(want in output for output in outputs), '\n'.join(outputs)
  assert sorted(p.name for p in tmp_path.iterdir()) == ['2.corrupt', '3', '4']
  seal = json.loads((tmp_path / '3/integrity.json').read_text())
  assert seal['leaves']['x']['array'] == 'float32[4, 8]'


def test_a_full_disk_is_one_sentence_and_what_was_saved_stays(
    tmp_path, monkeypatch, capfd):
  saved(tmp_path, 1)
  monkeypatch.setattr(shutil, 'disk_usage', lambda path: (
      shutil._ntuple_diskusage(10, 0, 10)))
  with pytest.raises(OSError, match=r'^\[Errno 28\] No space left: a check'
                     rf"point has [\d,]+ bytes, and the disk 10: '{tmp_path}"):
    saved(tmp_path, 2)
  assert sorted(path.name for path in tmp_path.iterdir()) == ['1']
  assert capfd.readouterr().err == ''
  monkeypatch.undo()
  assert restore(saved(tmp_path, 2))[0] == 2


def test_a_write_that_fails_is_one_os_error_and_prints_nothing(
    tmp_path, monkeypatch):
  # A slow compilation would be written to its cache, which fails, too.
  monkeypatch.setenv('JAX_ENABLE_COMPILATION_CACHE', 'false')
  result = subprocess.run([sys.executable, '-c', textwrap.dedent("""
      import resource, sys
      import jax.numpy as jnp
      from searchrl.runtime import checkpoint, error_logging
      error_logging.drop_repeated_errors()
      limits = resource.getrlimit(resource.RLIMIT_FSIZE)
      state = {f'leaf{n}': jnp.arange(40_000) for n in range(9)}
      checkpoint.save(sys.argv[1], 1, state, {})
      resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
      try:
        checkpoint.save(sys.argv[1], 2, state, {})
      except OSError as error:
        print(error)
      resource.setrlimit(resource.RLIMIT_FSIZE, limits)
      print(checkpoint.steps(sys.argv[1]))
      checkpoint.save(sys.argv[1], 3, state, {})
      print(checkpoint.steps(sys.argv[1]))
      """), str(tmp_path)], capture_output=True, text=True)
  assert result.stdout.splitlines() == [
      '[Errno 27] File too large: a checkpoint could not be written; those '
      f"before it are whole: '{tmp_path}/2'", '[1]', '[1, 3]']
  assert result.stderr == '' and result.returncode == 0


def test_what_else_is_logged_or_cannot_be_raised_is_still_told():
  result = subprocess.run([sys.executable, '-c', textwrap.dedent("""
      import logging
      from searchrl.runtime import error_logging
      error_logging.drop_repeated_errors()
      error_logging.drop_repeated_errors()
      class Bad:
        def __del__(self):
          raise RuntimeError('from __del__')
      Bad()
      logging.getLogger('asyncio').error('of asyncio')
      try:
        int('x')
      except ValueError:
        logging.getLogger('absl').exception('of absl')
      """)], capture_output=True, text=True)
  for words in ('from __del__', 'of asyncio', 'of absl', 'invalid literal'):
    assert words in result.stderr
