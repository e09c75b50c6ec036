# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A check that all processes of a run see the folder of the first process."""

import pathlib
import time
import uuid

from searchrl.runtime import processes

_FILE = '.process'
_WAIT_SECS = 60  # for which network file systems may hide a new file
_POLL_SECS = 0.1
_MEETING_SECS = 10 * _WAIT_SECS  # longest wait for the slowest process


def check(folder: pathlib.Path, rule: str) -> None:
  """Raises a ValueError unless all processes see the first process's folder.

  All processes must call it together. With one process, it does nothing.

  Args:
    folder: Folder that the first process has made.
    rule: Text that begins the error, such as '--workdir must be a folder that
      all processes share'.
  """
  if processes.count() == 1:
    return
  file = folder / _FILE

  def write() -> str:
    name = uuid.uuid4().hex
    file.write_text(name)
    return name

  name = processes.on_first('shared', write)
  sees = processes.exchange('shared?', b'1' if _has(file, name) else b'',
                            _MEETING_SECS)
  if processes.is_first():
    file.unlink(missing_ok=True)
  if not all(sees):
    raise ValueError(f'{rule}, but they do not all see {folder.absolute()}. '
                     'Set it to one on a shared file system.')


def _has(file: pathlib.Path, text: str) -> bool:
  """Waits for a while, and returns whether a file has this text."""
  deadline = time.monotonic() + _WAIT_SECS
  while True:
    try:
      if file.read_text() == text:
        return True
    except OSError:  # not there, or not yet
      pass
    if time.monotonic() > deadline:
      return False
    time.sleep(_POLL_SECS)
