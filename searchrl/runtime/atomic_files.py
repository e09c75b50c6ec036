# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Files and folders that are written whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import json
import os
import pathlib
import shutil
from typing import Any


@contextlib.contextmanager
def new_file(file: pathlib.Path) -> Iterator[pathlib.Path]:
  """A path to write that takes the place of `file` once it is written.

  If the body raises, is killed, or the power fails, `file` stays as it was.
  Folders above it are made.
  """
  file.parent.mkdir(parents=True, exist_ok=True)
  temporary = file.with_name(f'.{file.name}.{os.getpid()}')
  try:
    yield temporary
    with temporary.open('rb') as written:
      os.fsync(written.fileno())
    temporary.replace(file)
  finally:
    temporary.unlink(missing_ok=True)


def write(file: pathlib.Path, data: str | bytes) -> None:
  """Writes a file of UTF-8 text, or of bytes.

  Half a surrogate pair, which UTF-8 cannot write, becomes its escape in JSON.
  """
  if isinstance(data, str):
    data = data.encode(errors='backslashreplace')
  with new_file(file) as temporary:
    temporary.write_bytes(data)


def write_json(file: pathlib.Path, value: Any) -> None:
  """Writes a file that holds a value, for people to read."""
  write(file, json.dumps(value, indent=1) + '\n')


@contextlib.contextmanager
def new_folder(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """An empty folder that takes the place of `folder` once it is filled.

  If the body raises or is killed, `folder` stays as it was.
  """
  unfinished = folder.with_name(f'.{folder.name}.unfinished')
  shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed
  unfinished.mkdir(parents=True)
  yield unfinished
  shutil.rmtree(folder, ignore_errors=True)
  unfinished.rename(folder)
