# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""folder_lock: two runs on one folder, killed holders, holders elsewhere."""

import fcntl
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from searchrl.runtime import folder_lock
from searchrl.runtime import workdir

HOLD = '''
import pathlib, sys, time
from searchrl.runtime import folder_lock
folder_lock.hold(pathlib.Path(sys.argv[1]))
print('held', flush=True)
time.sleep(600)
'''


@pytest.fixture(name='holder')
def _holder(tmp_path):
  """Another process that holds the folder."""
  process = subprocess.Popen([sys.executable, '-c', HOLD, str(tmp_path)],
                             stdout=subprocess.PIPE, text=True)
  assert process.stdout.readline() == 'held\n'
  yield process
  process.kill()
  process.wait()


def test_a_second_process_is_told_who_uses_the_folder(tmp_path, holder):
  with pytest.raises(ValueError, match=(
      f'must be used by one run at a time, but process {holder.pid} of .* uses '
      'it. Wait until that ends, or use another --workdir.')):
    folder_lock.hold(tmp_path)


def test_a_refused_run_leaves_the_files_of_the_other_alone(tmp_path, holder):
  """They may be written after the second run has looked at the folder."""
  del holder
  with pytest.raises(ValueError, match='must be used by one run at a time'):
    with workdir.unchanged_on_error(tmp_path):
      (tmp_path / 'config.json').write_text('{"a": 1}')  # by the other run
      workdir.prepare(tmp_path, {'a': 1})
  assert (tmp_path / 'config.json').read_text() == '{"a": 1}'
  assert not folder_lock.is_held(tmp_path)


def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path, holder):
  holder.send_signal(signal.SIGKILL)
  holder.wait()
  with folder_lock.release_at_end():
    folder_lock.hold(tmp_path)
    folder_lock.hold(tmp_path)  # no more than once
    assert json.loads((tmp_path / '.lock').read_text())['process'] == os.getpid()
  assert (tmp_path / '.lock').read_text() == ''


def test_release_at_end_keeps_what_was_held_before(tmp_path):
  with folder_lock.release_at_end():
    folder_lock.hold(tmp_path)
    with folder_lock.release_at_end():
      folder_lock.hold(tmp_path)
    found = subprocess.run([sys.executable, '-c', HOLD, str(tmp_path)],
                           capture_output=True, text=True, check=False)
    assert found.returncode and 'one run at a time' in found.stderr


def elsewhere(folder: pathlib.Path) -> pathlib.Path:
  """A note that another host left, whose locks cannot be seen here."""
  note = folder / '.lock'
  note.write_text(json.dumps({'host': 'elsewhere', 'process': 7}))
  return note


def test_a_host_that_still_touches_its_note_is_not_disturbed(
    tmp_path, monkeypatch):
  monkeypatch.setattr(folder_lock, '_SILENT_SECS', 20.0)
  note, over = elsewhere(tmp_path), threading.Event()

  def touch():
    while not over.wait(0.05):
      os.utime(note)

  thread = threading.Thread(target=touch)
  thread.start()
  try:
    with pytest.raises(ValueError, match='process 7 of elsewhere uses it'):
      folder_lock.hold(tmp_path)
  finally:
    over.set()
    thread.join()
  assert json.loads(note.read_text())['host'] == 'elsewhere'


def test_a_host_that_is_gone_is_followed_and_that_is_said(
    tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(folder_lock, '_SILENT_SECS', 0.2)
  elsewhere(tmp_path)
  with folder_lock.release_at_end():
    folder_lock.hold(tmp_path)
  assert 'was used by process 7 of elsewhere' in capsys.readouterr().err


def test_a_note_that_a_kill_cut_is_no_hindrance(tmp_path):
  (tmp_path / '.lock').write_text('{"host": "els')
  with folder_lock.release_at_end():
    folder_lock.hold(tmp_path)
    assert json.loads((tmp_path / '.lock').read_text())['process'] == os.getpid()


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, capsys):
  def refuse(*_):
    raise OSError(95, 'Operation not supported')
  monkeypatch.setattr(fcntl, 'flock', refuse)
  with folder_lock.release_at_end():
    folder_lock.hold(tmp_path)
  assert 'cannot be locked (Operation not supported)' in capsys.readouterr().err


def test_a_held_folder_is_touched_now_and_then(tmp_path, monkeypatch):
  monkeypatch.setattr(folder_lock, '_BEAT_SECS', 0.05)
  with folder_lock.release_at_end():
    folder_lock.hold(tmp_path)
    os.utime(tmp_path / '.lock', (1, 1))
    deadline = time.monotonic() + 20
    while (tmp_path / '.lock').stat().st_mtime == 1:
      assert time.monotonic() < deadline
      time.sleep(0.02)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
  if not os.geteuid():
    pytest.skip('root may write everywhere')
  tmp_path.chmod(0o500)
  with pytest.raises(PermissionError):
    folder_lock.hold(tmp_path)
