# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A lock on a run's directory, so that two runs do not mix their files.

One process, or group of processes, holds the lock. It is the operating system's
lock, which a killed process releases, on local file systems and on network file
systems that support it. Some file systems lock only within one host. The locked
file therefore also records which process uses the directory, and is touched
every few seconds. A process on another host waits to see whether the file is
still being touched.
"""

from collections.abc import Iterator
import contextlib
import json
import os
import pathlib
import socket
import threading
import time
from typing import Any

import filelock

from searchrl.runtime import processes

FILE = '.lock'

_BEAT_SECS = 10.0  # time between touches of the file
_SILENT_SECS = 35.0  # time without a touch after which the holder is gone
_HOST = socket.gethostname()
_held: dict[pathlib.Path, filelock.BaseFileLock] = {}  # by locked file


def hold(folder: pathlib.Path) -> None:
  """Locks a directory until this process ends or `release_at_end` releases it.

  Locking it again has no effect. If the file system has no locks, a warning is
  printed.

  Args:
    folder: Directory to lock. It must exist.

  Raises:
    ValueError: Another process holds the lock.
  """
  file = folder.resolve() / FILE
  if file in _held:
    return
  lock = filelock.FileLock(file, blocking=False, thread_local=False,
                           fallback_to_soft=False)
  try:
    lock.acquire()
  except filelock.Timeout:
    raise _in_use(folder, _read(file)) from None
  except OSError as error:
    processes.say(f'Warning: {folder} cannot be locked ({error.strerror}). '
                  'Make sure that no other run uses it.')
  holder = _read(file)
  if holder.get('host', _HOST) != _HOST and _is_touched(file, holder):
    lock.release()
    raise _in_use(folder, holder)
  file.write_text(json.dumps({'host': _HOST, 'process': os.getpid()}))
  _held[file] = lock
  threading.Thread(target=_beat, args=(file,), name='folder-lock',
                   daemon=True).start()


def is_held(folder: pathlib.Path) -> bool:
  """Returns whether this process has locked a directory with `hold`."""
  return folder.resolve() / FILE in _held


@contextlib.contextmanager
def release_at_end() -> Iterator[None]:
  """Releases the directories that were locked in the body, when it ends."""
  before = {*_held}
  try:
    yield
  finally:
    for file in {*_held} - before:
      with contextlib.suppress(OSError):  # the directory may be gone
        file.write_text('')
      _held.pop(file).release()


def _beat(file: pathlib.Path) -> None:
  while file in _held:
    with contextlib.suppress(OSError):  # the directory may be gone
      os.utime(file)
    time.sleep(_BEAT_SECS)


def _is_touched(file: pathlib.Path, holder: dict[str, Any]) -> bool:
  """Waits, and returns whether the file was touched in the meantime.

  Clocks of different hosts are not compared.
  """
  processes.say(f'The folder was used by process {holder.get("process")} of '
                f'{holder["host"]}. If it stays silent for {_SILENT_SECS:g} s, '
                'this run goes on.')
  before, deadline = file.stat().st_mtime_ns, time.monotonic() + _SILENT_SECS
  while time.monotonic() < deadline:
    time.sleep(_SILENT_SECS / 100)
    if file.stat().st_mtime_ns != before:
      return True
  return False


def _read(file: pathlib.Path) -> dict[str, Any]:
  """Returns the record of the process that holds the lock.

  It is {} if there is none, or if a kill interrupted its writing.
  """
  try:
    return json.loads(file.read_text() or '{}')
  except (FileNotFoundError, ValueError):
    return {}


def _in_use(folder: pathlib.Path, holder: dict[str, Any]) -> ValueError:
  user = (f'process {holder["process"]} of {holder["host"]}'
          if holder.get('host') else 'another process')
  return ValueError(
      f'{folder} must be used by one run at a time, but {user} uses it. Wait '
      'until that ends, or use another --workdir.')
