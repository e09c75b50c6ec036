# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Metrics of a run: writes scalars to metrics.jsonl and to loggers.

`metrics.jsonl` is the source of truth: curves, reports and logs are derived
from it. It is append-only, with one JSON object per write, which is on disk
when `write` returns. Only one process writes.
"""

from collections.abc import Callable, Mapping, Sequence
import json
import math
import os
import pathlib
from typing import Any, IO

import numpy as np

from searchrl.runtime import atomic_files
from searchrl.runtime import loggers

FILE = 'metrics.jsonl'
STEP = 'training/global_step'


class Writer:
  """A writer that appends to `workdir`/metrics.jsonl and to loggers.

  Args:
    workdir: Directory of the run. It is made if it is missing. If it has a
      metrics file, lines are appended.
    log_to: Names of loggers: keys of `loggers.OURS` or 'module:function'.
    config: Fields of the run's config, {name: value}, for the loggers.
    step_field: Name of the step in a line.
    enabled: False on all processes but the first. Then nothing is written, and
      `holds`, which tells whether a step has been written, is always True.
  """

  def __init__(self, workdir: str | os.PathLike[str], *,
               log_to: Sequence[str] = (),
               config: Mapping[str, Any] | None = None, step_field: str = STEP,
               enabled: bool = True):
    self._file: IO[str] | None = None
    self._loggers: list[loggers.Logger] | None = None  # the first write opens
    if not enabled:
      return
    folder = pathlib.Path(workdir)
    folder.mkdir(parents=True, exist_ok=True)
    self.path, self._step_field = folder / FILE, step_field
    self._makers, self._config = loggers.resolve(log_to), config or {}
    self._purge_from: int | None = None
    self._file = self.path.open('a')
    # Drops half a line that a kill inside `write` may have left.
    os.truncate(self.path, self.path.read_bytes().rfind(b'\n') + 1)

  def write(self, step: int, values: Mapping[str, Any]) -> None:
    """Writes one line {step_field: step, **values}, and syncs it to disk.

    The values also go to the loggers.

    Args:
      step: Number of the step. The caller decides whether it starts at 0 or 1.
      values: Scalars by name, on the host or a device. They are written as
        floats. NaN and infinities, which JSON lacks, are written as null and
        read as NaN.

    Raises:
      ValueError: A value is not a scalar, or has the name of the step.
    """
    if self._file is None:
      return
    if self._step_field in values:
      raise ValueError(f'values must leave {self._step_field} to `step`, but '
                       'have that name, too. Rename the value.')
    floats = {name: _scalar(name, value) for name, value in values.items()}
    line = {self._step_field: int(step)} | {
        name: x if math.isfinite(x) else None for name, x in floats.items()}
    self._file.write(json.dumps(line) + '\n')
    self._file.flush()
    os.fsync(self._file.fileno())
    if self._loggers is None:
      self._loggers = [make(self.path.parent, self._config, self._purge_from)
                       for make in self._makers]
    for logger in self._loggers:
      logger.log(int(step), floats)

  def holds(self, step: int, prefix: str) -> bool:
    """Returns whether `step` has a metric whose name begins with `prefix`.

    Processes that do not write return True.
    """
    return self._file is None or any(
        line[self._step_field] == step and
        any(name.startswith(prefix) for name in line)
        for line in read(self.path))

  def missing(self, step: int) -> list[int]:
    """Returns the steps from 1 to `step` that have no line.

    Processes that do not write return [].
    """
    if self._file is None:
      return []
    held = {line[self._step_field] for line in read(self.path)}
    return sorted({*range(1, step + 1)} - held)

  def truncate(self, step: int) -> None:
    """Drops the lines of later steps, for a run that was restored at `step`.

    The run writes these steps again. Pass -1 for a run that starts from the
    beginning in an old `workdir`.
    """
    if self._file is None:
      return
    self.close()
    _drop(self.path, lambda line: line[self._step_field] > step)
    self._file = self.path.open('a')
    self._purge_from = step + 1

  def close(self) -> None:
    """Closes the file and the loggers."""
    if self._file is None:
      return
    self._file.close()
    for logger in self._loggers or ():
      logger.close()
    self._loggers = None


def drop(workdir: str | os.PathLike[str], step: int, prefix: str) -> None:
  """Removes lines of one step from the file metrics.jsonl of a run.

  These are the lines in which the names of all metrics begin with `prefix`. No
  line of step 0 is removed.
  """
  _drop(pathlib.Path(workdir) / FILE, lambda line: (
      line[STEP] == step > 0 and
      all(name.startswith((STEP, prefix)) for name in line)))


def _drop(file: pathlib.Path, is_dropped: Callable[[Any], bool]) -> None:
  lines = file.read_text().splitlines(keepends=True)
  atomic_files.write(file, ''.join(
      line for number, line in enumerate(lines, start=1)
      if not is_dropped(_parsed(line, file, number))))


def read(path: str | os.PathLike[str]) -> list[dict[str, float]]:
  """Returns the lines of a metrics.jsonl, in order, with NaN for null.

  An incomplete last line, which a kill may leave, is dropped.
  """
  lines = pathlib.Path(path).read_text().split('\n')[:-1]
  return [{name: math.nan if x is None else x
           for name, x in _parsed(line, path, number).items()}
          for number, line in enumerate(lines, start=1)]


def _parsed(line: str, file: Any, number: int) -> dict[str, Any]:
  try:
    return json.loads(line)
  except ValueError as error:
    raise ValueError(f'line {number} of {file} must be JSON, but is damaged: '
                     f'{error}. Restore the file, or delete that line.'
                    ) from error


def _scalar(name: str, value: Any) -> float:
  if np.size(value) != 1:
    raise ValueError(
        f'values must be scalars, but {name} has shape {np.shape(value)}. '
        'Reduce it before it is written.')
  return float(np.asarray(value).reshape(()))
