# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Atomic writes: an interrupted write leaves the old file or folder.

Other functions read a JSON or jsonl file that may be missing, and return the
digest of a file.
"""

from collections.abc import Iterator
import contextlib
import hashlib
import json
import os
import pathlib
import shutil
from typing import Any


@contextlib.contextmanager
def new_file(file: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields a temporary path that replaces `file` when the body ends.

  If the body raises or is killed, or if the power fails, `file` is unchanged.
  Missing parent directories are made.
  """
  file.parent.mkdir(parents=True, exist_ok=True)
  temporary = file.with_name(f'.{file.name}.{os.getpid()}')
  try:
    yield temporary
    _sync(temporary)
    temporary.replace(file)
    _sync(file.parent)
  finally:
    temporary.unlink(missing_ok=True)


def _sync(path: pathlib.Path) -> None:
  descriptor = os.open(path, os.O_RDONLY)
  os.fsync(descriptor)
  os.close(descriptor)


def write(file: pathlib.Path, data: str | bytes) -> None:
  """Writes text, as UTF-8, or bytes to a file.

  A lone surrogate, which UTF-8 cannot encode, is written as its JSON escape.
  """
  if isinstance(data, str):
    data = data.encode(errors='backslashreplace')
  with new_file(file) as temporary:
    temporary.write_bytes(data)


def write_json(file: pathlib.Path, value: Any) -> None:
  """Writes a value to a file as indented JSON, which people can read."""
  write(file, json.dumps(value, indent=1) + '\n')


def read_json(file: pathlib.Path) -> Any:
  """Returns the value in a JSON file, or None if there is no such file.

  Raises:
    ValueError: The file is damaged.
  """
  try:
    return json.loads(file.read_text()) if file.exists() else None
  except ValueError as error:  # also of UTF-8
    raise ValueError(f'{file} must be JSON, but is damaged: {error}. Restore '
                     'it, or delete it if it can be made again.') from error


def read_jsonl(file: pathlib.Path) -> list[Any]:
  """Returns the values in the lines of a file; [] if there is no such file.

  Raises:
    ValueError: A line is damaged.
  """
  values: list[Any] = []
  lines = file.read_bytes().splitlines() if file.exists() else []
  for number, line in enumerate(lines, start=1):
    try:
      values.append(json.loads(line))
    except ValueError as error:  # also of UTF-8
      raise ValueError(
          f'line {number} of {file} must be JSON, but is damaged: {error}. '
          'Restore the file, or delete that line.') from error
  return values


def sha256(path: str | pathlib.Path) -> str:
  """Returns the SHA-256 of a file, in hex."""
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


@contextlib.contextmanager
def new_folder(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields an empty directory that replaces `folder` when the body ends.

  If the body raises or is killed, `folder` stays as it was. After an error, the
  new directory is deleted, since a full disk needs the room.
  """
  unfinished = folder.with_name(f'.{folder.name}.unfinished')
  shutil.rmtree(unfinished, ignore_errors=True)  # left by a killed run
  unfinished.mkdir(parents=True)
  try:
    yield unfinished
  except BaseException:
    shutil.rmtree(unfinished, ignore_errors=True)
    raise
  shutil.rmtree(folder, ignore_errors=True)
  unfinished.rename(folder)
