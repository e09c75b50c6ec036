# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A lock on a run's directory, so that two runs do not mix their files.

One process, or group of processes, holds it. It is the system's lock (`flock`),
which a killed process releases, on local file systems and on network file
systems that support it. Some file systems lock only within one host. So a note
in the directory also says who uses it, and is touched every few seconds. A
process on another host waits to see whether the note is still being touched.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import fcntl
import json
import os
import pathlib
import socket
import threading
import time
from typing import IO

from searchrl.runtime import processes

FILE = '.lock'

_BEAT_SECS = 10.0  # time between touches of the note
_SILENT_SECS = 35.0  # time without a touch after which the holder is gone
_held: dict[pathlib.Path, IO[str]] = {}
_beats = threading.Lock()  # held once the one thread that touches notes runs


def hold(folder: pathlib.Path) -> None:
  """Locks a directory until this process ends or `given_back` releases it.

  Locking it again has no effect. If the file system has no locks, a warning is
  printed.

  Args:
    folder: Directory to lock. It must exist.

  Raises:
    ValueError: Another process holds the lock.
  """
  folder = folder.resolve()
  if folder in _held:
    return
  file = (folder / FILE).open('a+')
  try:
    _take(folder, file)
  except BaseException:
    file.close()
    raise
  _write(file, {'host': _host(), 'process': os.getpid()})
  _held[folder] = file
  if _beats.acquire(blocking=False):
    threading.Thread(target=_beat, name='folder-lock', daemon=True).start()


@contextlib.contextmanager
def given_back() -> Iterator[None]:
  """Releases, at its end, the directories that were locked inside it."""
  before = {*_held}
  try:
    yield
  finally:
    for folder in {*_held} - before:
      file = _held.pop(folder)
      with contextlib.suppress(OSError):  # the folder may be gone
        _write(file, {})
      file.close()


def _take(folder: pathlib.Path, file: IO[str]) -> None:
  """Takes the lock; raises a ValueError if another process holds it."""
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    raise _in_use(folder, _read(file)) from None
  except OSError as error:
    processes.say(f'Warning: {folder} cannot be locked ({error.strerror}). See '
                  'that no other run uses it.')
  holder = _read(file)
  if holder.get('host', _host()) != _host() and _is_touched(file, holder):
    raise _in_use(folder, holder)


def _beat() -> None:
  while True:
    time.sleep(_BEAT_SECS)
    for file in [*_held.values()]:
      with contextlib.suppress(OSError, ValueError):  # closed meanwhile
        os.utime(file.fileno())


def _is_touched(file: IO[str], holder: dict) -> bool:
  """Waits; returns whether the note was touched. No clocks are compared."""
  processes.say(f'The folder was used by process {holder.get("process")} of '
                f'{holder["host"]}. If nothing is heard of it for '
                f'{_SILENT_SECS:g} s, this run goes on.')
  before, deadline = _touched(file), time.monotonic() + _SILENT_SECS
  while time.monotonic() < deadline:
    time.sleep(_SILENT_SECS / 100)
    if _touched(file) != before:
      return True
  return False


def _touched(file: IO[str]) -> int:
  # Uses the name, which makes a network file system ask its server.
  return os.stat(file.name).st_mtime_ns


def _read(file: IO[str]) -> dict:
  """Returns the holder; {} if there is none or a kill cut the note short."""
  file.seek(0)
  try:
    return json.loads(file.read() or '{}')
  except ValueError:
    return {}


def _write(file: IO[str], holder: dict) -> None:
  file.seek(0)
  file.truncate()
  file.write(json.dumps(holder) if holder else '')
  file.flush()


def _in_use(folder: pathlib.Path, holder: dict) -> ValueError:
  who = (f'process {holder["process"]} of {holder["host"]}'
         if holder.get('host') else 'another process')
  return ValueError(
      f'{folder} must be used by one run at a time, but {who} uses it. Wait '
      'until that ends, or use another --workdir.')


def _host() -> str:
  return socket.gethostname()
