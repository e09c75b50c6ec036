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


def write_json(file: pathlib.Path, value: Any) -> None:
  """Writes a file, whole or not at all, even if the power fails."""
  temporary = file.with_name(f'.{file.name}.{os.getpid()}')
  with temporary.open('w') as out:
    out.write(json.dumps(value, indent=1) + '\n')
    out.flush()
    os.fsync(out.fileno())
  temporary.replace(file)


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
