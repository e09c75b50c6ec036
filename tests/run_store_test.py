# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""run_store: a folder comes back from a store as it was at some push."""

import contextlib
import itertools
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import uuid

import fakes
import fsspec
import pytest

from searchrl.runtime import processes
from searchrl.runtime import run_store
from searchrl.runtime import signals
import train_test

ROOT = pathlib.Path(__file__).resolve().parent.parent
ADDRESS = 'memory://runs/one'


@pytest.fixture(name='scratch')
def _scratch(tmp_path, monkeypatch):
  """Makes a store in memory and a local folder, both empty."""
  fsspec.filesystem('memory').store.clear()
  monkeypatch.setenv('SEARCHRL_SCRATCH', str(tmp_path))
  return tmp_path


def mirror(folder, address=ADDRESS):
  folder.mkdir(exist_ok=True)
  result = run_store._Mirror(address, folder)
  result.pull()
  return result


def write(folder, **texts):
  for name, text in texts.items():
    (folder / 'sub').mkdir(exist_ok=True)
    (folder / 'sub' / name).write_text(text)


def contents(folder):
  return {str(file.relative_to(folder)): file.read_text()
          for file in folder.rglob('*') if file.is_file()}


def test_a_local_folder_is_used_as_it_is(tmp_path):
  with run_store.opened(str(tmp_path)) as folder:
    assert folder == str(tmp_path)
  assert run_store.local('runs/dspo') == 'runs/dspo'


def test_the_address_of_a_local_folder_is_its_path(tmp_path):
  path = tmp_path / 'missing' / 'run'
  with run_store.opened(f'file://{path}') as folder:
    assert folder == str(path)
  assert run_store.local(f'file://{path}') == str(path)
  assert not run_store.is_store(f'file://{path}')
  assert run_store.is_store('s3://bucket/run')


def test_another_machine_gets_what_was_pushed_and_nothing_else(scratch):
  first = mirror(scratch / 'a')
  write(first.folder, kept='1', changed='2', deleted='3')
  first.push()
  write(first.folder, changed='22', new='4')
  (first.folder / 'sub' / 'deleted').unlink()
  (first.folder / 'sub' / '.unfinished').write_text('5')
  first.push()
  write(first.folder, changed='222')  # not pushed
  (scratch / 'b').mkdir()
  write(scratch / 'b', old='6', kept='0')
  second = mirror(scratch / 'b')
  assert contents(second.folder) == {
      'sub/kept': '1', 'sub/changed': '22', 'sub/new': '4'}


def test_what_is_not_named_is_deleted_and_old_turns_too(scratch):
  one = mirror(scratch / 'a')
  for number in range(6):
    write(one.folder, changing=str(number))
    one.push()
  one.push()  # nothing is new
  store = fsspec.filesystem('memory')
  assert [name.rpartition('/')[2] for name in store.find('/runs/one/turns')] == [
      '000004.json', '000005.json', '000006.json']
  assert [name[:23] for name in store.find('/runs/one/files')] == [
      '/runs/one/files/000006-']


@pytest.mark.parametrize('deadly', [0, 1, 2])
def test_a_push_that_is_killed_leaves_the_turn_before_it(
    scratch, monkeypatch, deadly):
  """Killed before its first file, its second, or the turn that names them."""
  one = mirror(scratch / 'a')
  write(one.folder, a='1', b='1', c='1')
  one.push()
  monkeypatch.setattr(run_store, '_THREADS', 1)
  killed, writes = mirror(scratch / 'killed'), itertools.count()

  def mortal(function):
    def call(*args):
      if next(writes) == deadly:
        raise fakes.Killed
      return function(*args)
    return call

  for name in ('_upload', '_key'):
    setattr(killed, name, mortal(getattr(killed, name)))
  write(killed.folder, a='2', b='2')
  (killed.folder / 'sub' / 'c').unlink()
  with pytest.raises(fakes.Killed):
    killed.push()
  after = mirror(scratch / 'after')
  assert contents(after.folder) == {'sub/a': '1', 'sub/b': '1', 'sub/c': '1'}
  write(after.folder, a='3')
  after.push()  # also deletes what the killed one had uploaded
  assert len(after._fs.find('/runs/one/files')) == 3


def test_of_two_runs_the_first_to_push_goes_on(scratch):
  one, two = mirror(scratch / 'a'), mirror(scratch / 'b')
  write(one.folder, x='one')
  write(two.folder, x='two')
  one.push()
  with pytest.raises(ValueError, match='one run at a time, but another'):
    two.push()
  assert contents(mirror(scratch / 'c').folder) == {'sub/x': 'one'}


def test_a_turn_is_written_by_one_of_two_that_race(scratch, monkeypatch):
  """The second looks before the first writes, and writes after it."""
  one, two = mirror(scratch / 'a'), mirror(scratch / 'b')
  write(one.folder, x='one')
  write(two.folder, x='two')
  upload = two._upload

  def late(prefix, name):
    one.push()
    return upload(prefix, name)

  monkeypatch.setattr(two, '_upload', late)
  with pytest.raises(ValueError, match='one run at a time'):
    two.push()
  assert contents(mirror(scratch / 'c').folder) == {'sub/x': 'one'}


def test_an_altered_object_is_refused(scratch):
  one = mirror(scratch / 'a')
  write(one.folder, x='one')
  one.push()
  store = fsspec.filesystem('memory')
  name, = store.find('/runs/one/files')
  store.pipe_file(name, b'other')
  with pytest.raises(OSError, match='^memory.*but has another. Restore'):
    mirror(scratch / 'b')


def away(store, monkeypatch, times, *, writes=False):
  """Lets the first `times` calls that write a turn fail, or seem to."""
  calls, pipe = itertools.count(), store._fs.pipe_file

  def pipe_file(*args, **options):
    fails = next(calls) < times
    if writes or not fails:
      pipe(*args, **options)
    if fails:
      raise ConnectionError('no route')

  monkeypatch.setattr(store._fs, 'pipe_file', pipe_file)


@pytest.mark.parametrize('writes', [False, True])
def test_a_store_that_is_away_is_asked_again(
    scratch, monkeypatch, capsys, writes):
  """If the turn was written but the answer lost, it is not another run's."""
  monkeypatch.setattr(run_store, '_PAUSES', (0, 0))
  one = mirror(scratch / 'a')
  write(one.folder, x='1')
  away(one, monkeypatch, 2 - writes, writes=writes)
  one.push()
  said = capsys.readouterr().err
  assert said.count('ConnectionError: no route') == 2 - writes
  assert 'It is tried again in 0 s.' in said
  assert contents(mirror(scratch / 'b').folder) == {'sub/x': '1'}
  assert contents(one.folder) == {'sub/x': '1'}
  write(one.folder, x='2')
  one.push()
  assert contents(mirror(scratch / 'b').folder) == {'sub/x': '2'}


def test_a_store_that_is_away_at_the_start_is_read_again(
    scratch, monkeypatch, capsys):
  one = mirror(scratch / 'a')
  write(one.folder, x='1')
  one.push()
  monkeypatch.setattr(run_store, '_PAUSES', (0, 0))
  two = run_store._Mirror(ADDRESS, scratch / 'b')
  two.folder.mkdir()
  calls, read = itertools.count(), two._fs.open

  def open_file(*args, **options):
    if next(calls) < 2:
      raise ConnectionError('no route')
    return read(*args, **options)

  monkeypatch.setattr(two._fs, 'open', open_file)
  two.pull()
  assert contents(two.folder) == {'sub/x': '1'}
  assert capsys.readouterr().err.count('It is tried again in 0 s.') == 2


def test_files_that_could_not_be_copied_are_kept_and_copied_by_the_next_start(
    scratch, monkeypatch):
  monkeypatch.setattr(run_store, '_PAUSES', ())
  one = mirror(scratch / 'a')
  write(one.folder, kept='1', changed='1')
  one.push()
  write(one.folder, changed='2', new='2')
  with monkeypatch.context() as patch:
    away(one, patch, 1)
    with pytest.raises(OSError, match='no route.* lacks are in .*/a. The same'):
      one.push()
  for _ in range(2):  # as if the first of two starts were killed
    two = mirror(scratch / 'a')
  write(two.folder, newer='3')
  two.push()
  expected = {'sub/kept': '1', 'sub/changed': '2', 'sub/new': '2',
              'sub/newer': '3'}
  assert contents(mirror(scratch / 'b').folder) == expected
  assert contents(mirror(scratch / 'a').folder) == expected


def test_files_that_could_not_be_copied_are_dropped_if_another_run_went_on(
    scratch, monkeypatch):
  monkeypatch.setattr(run_store, '_PAUSES', ())
  one, two = mirror(scratch / 'a'), mirror(scratch / 'b')
  write(one.folder, x='one', y='one')
  with monkeypatch.context() as patch:
    away(one, patch, 1)
    with pytest.raises(OSError):
      one.push()
  write(two.folder, x='two')
  two.push()
  assert contents(mirror(scratch / 'a').folder) == {'sub/x': 'two'}


def test_a_store_that_forbids_to_write_is_not_asked_again(
    scratch, monkeypatch, capsys):
  one = mirror(scratch / 'a')
  write(one.folder, x='1')

  def forbid(*args, **options):
    raise PermissionError('Access Denied')

  monkeypatch.setattr(one._fs, 'pipe_file', forbid)
  monkeypatch.setattr(run_store.time, 'sleep', None)
  with pytest.raises(OSError, match='Access Denied.* are in '):
    one.push()
  assert 'again' not in capsys.readouterr().err


def test_a_store_that_cannot_be_used_is_refused_with_a_sentence(scratch):
  with pytest.raises(ValueError, match='nosuch://x needs|nosuch'):
    with run_store.opened('nosuch://x'):
      pass


def test_a_job_works_in_the_local_folder_and_pushes_at_its_end(scratch):
  with pytest.raises(KeyError):
    with run_store.opened(ADDRESS) as folder:
      assert folder == str(scratch / 'work' / 'memory' / 'runs' / 'one')
      write(pathlib.Path(folder), x='1')
      raise KeyError
  run_store.local.cache_clear()
  assert contents(pathlib.Path(run_store.local(ADDRESS)) / 'sub') == {'x': '1'}


def test_all_processes_wait_for_the_last_push_unless_one_has_failed(
    scratch, monkeypatch):
  stored = []
  monkeypatch.setattr(processes, 'barrier', lambda tag, secs: stored.append(
      len(fsspec.filesystem('memory').find('/runs/one/turns'))))
  for error in (None, signals.Stopped(), KeyError()):
    with contextlib.suppress(signals.Stopped, KeyError):
      with run_store.opened(ADDRESS) as folder:
        write(pathlib.Path(folder), x=repr(error))
        if error:
          raise error
  assert stored == [1, 2]  # after the push
  assert len(fsspec.filesystem('memory').find('/runs/one/turns')) == 3


@pytest.fixture(name='bucket')
def _bucket(monkeypatch):
  """Starts a server of S3's protocol with an empty bucket."""
  server = pytest.importorskip(
      'moto.server', reason="needs pip install '.[dev]'")
  pytest.importorskip('s3fs')
  thread = server.ThreadedMotoServer('127.0.0.1', port=0)
  thread.start()
  host, port = thread.get_host_and_port()
  for name, value in dict(
      AWS_ENDPOINT_URL=f'http://{host}:{port}', AWS_ACCESS_KEY_ID='x',
      AWS_SECRET_ACCESS_KEY='x', AWS_DEFAULT_REGION='us-east-1').items():
    monkeypatch.setenv(name, value)
  name = f'b{uuid.uuid4().hex}'  # a process's servers share their buckets
  fsspec.filesystem('s3', skip_instance_cache=True).mkdir(name)
  yield f's3://{name}'
  thread.stop()


def command(*flags, **variables):
  return subprocess.Popen(
      [sys.executable, '-m', 'searchrl.main', *flags], cwd=ROOT, text=True,
      env=os.environ | {'JAX_PLATFORMS': 'cpu'} | variables,
      stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finished(*flags, **variables):
  process = command(*flags, **variables)
  said, _ = process.communicate(timeout=900)
  assert process.returncode == 0, said
  return said


@pytest.mark.slow
def test_s3_refuses_a_bucket_that_is_missing_and_a_turn_that_exists(
    bucket, tmp_path):
  with pytest.raises(ValueError, match='there is no nobucket'):
    mirror(tmp_path / 'a', 's3://nobucket/run')
  one, two = (mirror(tmp_path / name, f'{bucket}/run') for name in 'ab')
  write(one.folder, x='one')
  write(two.folder, x='two')
  one.push()
  with pytest.raises(FileExistsError):
    two._fs.pipe_file(two._key(1), b'{}', mode='create')
  with pytest.raises(ValueError, match='one run at a time'):
    two.push()


@pytest.mark.slow
@pytest.mark.long
def test_a_killed_run_goes_on_from_s3_on_another_machine_with_equal_bits(
    bucket, tmp_path):
  """The oracle is a run in a local folder that nobody interrupts."""
  flags = ('--config=configs/grpo.py:smoke', '--config.train.num_steps=4',
           '--config.train.checkpoint_every=1')
  whole, address = tmp_path / 'whole', f'{bucket}/runs/one'
  finished(*flags, f'--workdir={whole}')
  scratch = {'SEARCHRL_SCRATCH': str(tmp_path / 'first')}
  store = fsspec.filesystem('s3', skip_instance_cache=True,
                            use_listings_cache=False)
  process = command(*flags, f'--workdir={address}', **scratch)
  while not any('/checkpoints/2/integrity.json' in key
                for key in store.find(f'{address}/files')):
    assert process.poll() is None, process.communicate()
    time.sleep(0.02)
  process.send_signal(signal.SIGKILL)
  process.communicate()
  shutil.rmtree(tmp_path / 'first')
  scratch = {'SEARCHRL_SCRATCH': str(tmp_path / 'second')}
  said = finished(*flags, f'--workdir={address}', **scratch)
  assert 'Resumed at step' in said
  local = tmp_path / 'second' / 'work' / address.replace('://', '/')
  assert train_test.lines(local) == train_test.lines(whole)
  assert train_test.state_digest(local) == train_test.state_digest(whole)
  scratch = {'SEARCHRL_SCRATCH': str(tmp_path / 'third')}
  said = finished(*flags, f'--workdir={address}', **scratch)
  assert 'is finished' in said
  for config in (
      ['--config=configs/report.py', f"--config.report.runs=('{address}',)",
       f'--workdir={tmp_path / "report"}'],
      [f'--config=configs/ask.py:{address}', '--question=Where is it?',
       f'--workdir={tmp_path / "ask"}'],
      [f'--config=configs/evaluate.py:{address}@4',
       '--config.evaluate.worlds.questions_per_hop=2',
       f'--workdir={bucket}/evaluations/one']):
    finished(*config, **scratch)
  assert (tmp_path / 'report' / 'report.html').exists()
  keys = store.find(f'{bucket}/evaluations/one/files')
  assert any(key.endswith('/table.json') for key in keys)
