# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Errors of Orbax and tensorstore as OSErrors that name a file.

tensorstore raises a ValueError with the error number in its text, and Orbax may
raise another error from it. For files that Orbax writes itself, the error has
no file name. A folder that must not be read is a missing one to Orbax.
"""

from collections.abc import Iterator
import contextlib
import os
import pathlib
import re

# Errors of a file that is not there, and may have been lost.
ABSENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError)

_NUMBER = re.compile(r"os_error_code='(\d+)'")
_FILE = re.compile(r'"([^"]+)": [^"]*os_error_code=')
_NOISE = ' See full TensorStore details'  # begins many lines in Orbax's texts


@contextlib.contextmanager
def of_writes(path: pathlib.Path) -> Iterator[None]:
  """Turns an error of a write in its body into one that names the checkpoint."""
  try:
    yield
  except (ValueError, OSError) as error:
    code = getattr(error, 'errno', None)
    if match := _NUMBER.search(str(error)):
      code = int(match[1])
    if not code or getattr(error, 'filename', None):
      raise
    raise OSError(code, f'{os.strerror(code)}: a checkpoint could not be '
                  'written; those before it are whole', str(path)) from error


def damage(folder: pathlib.Path, error: Exception) -> str:
  """Returns a text about the damage because of which a read has failed.

  A file that is there, but cannot be read, may be intact: a permission is
  missing, too many files are open, or the disk or the network failed.

  Args:
    folder: Folder that Orbax read.
    error: Error that Orbax raised.

  Raises:
    OSError: A file is there, but cannot be read.
  """
  failures = [error] if isinstance(error, OSError) else []
  for place, _, names in os.walk(folder, onerror=failures.append):
    for name in names:
      try:
        open(os.path.join(place, name), 'rb').close()
      except OSError as failure:
        failures.append(failure)
  text = str(error.__cause__ or error)
  if number := _NUMBER.search(text):
    file, code = _FILE.search(text), int(number[1])
    failures.append(OSError(
        code, os.strerror(code), file[1] if file else str(folder)))
  for failed in failures:
    if failed.errno and not isinstance(failed, ABSENT):
      raise failed
  reason = f'{type(error).__name__}: {error}'
  if _NOISE in reason and error.__cause__:  # which names the array
    reason = f'{type(error.__cause__).__name__}: {error.__cause__}'
  return reason.partition(_NOISE)[0]
