# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""One process (or group of processes) a folder: two runs would mix their files.

The lock is the system's (`flock`), which a killed process gives back, on local
file systems and on those of a network that have it. There, and where a file
system locks only within a host, a note in the folder tells who uses it, and is
touched all the time: a process on another host waits to see whether it still
is.
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

_BEAT_SECS = 10.0  # from one touch of the note to the next
_SILENT_SECS = 35.0  # after which whoever wrote the note is gone
_held: dict[pathlib.Path, IO[str]] = {}
_beats = threading.Lock()  # of the one thread that touches all notes


def hold(folder: pathlib.Path) -> None:
  """Keeps other processes out of a folder, until this one ends or `given_back`.

  Holding it twice is no more than once. Where the file system has no locks, a
  warning says so.

  Args:
    folder: that is there.

  Raises:
    ValueError: another process holds it.
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
  """At its end, folders that were first held within may be used by others."""
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
  """Raises a ValueError if another process holds the folder."""
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
      with contextlib.suppress(OSError, ValueError):  # it was closed meanwhile
        os.utime(file.fileno())


def _is_touched(file: IO[str], holder: dict) -> bool:
  """Whether a note is touched while one waits; clocks are not compared."""
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
  # By its name: a network's file system asks its server then.
  return os.stat(file.name).st_mtime_ns


def _read(file: IO[str]) -> dict:
  """Who holds a folder; {} if nobody does, or the note was cut by a kill."""
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
