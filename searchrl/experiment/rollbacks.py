# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rollbacks: a run goes back to a checkpoint, and on with other questions.

Each is a line of rollbacks.jsonl. Once that is written the rollback has
happened, whatever a kill interrupts; a resume does what is left of it.
"""

import dataclasses
import json
import os
import pathlib
from typing import Any

from searchrl.rollouts.collect import Progress
from searchrl.runtime import checkpoint
from searchrl.runtime import metrics

FILE = 'rollbacks.jsonl'  # of a run's folder


def note(folder: pathlib.Path, progress: Progress, to: int, why: str) -> None:
  """Writes down that a run goes back, and deletes later checkpoints.

  The metrics that it loses are kept in a file of their own.

  Args:
    folder: of the run.
    progress: of the run, where it went wrong.
    to: the step of the checkpoint.
    why: for people.
  """
  number = progress.rollbacks + 1
  (folder / f'rollback_{number}_{metrics.FILE}').write_bytes(
      (folder / metrics.FILE).read_bytes())
  with (folder / FILE).open('a') as file:
    file.write(json.dumps({
        'rollback': number, 'at': progress.step, 'to': to,
        'position': progress.position, 'why': why}) + '\n')
    file.flush()
    os.fsync(file.fileno())
  finish(folder)


def finish(folder: pathlib.Path) -> None:
  """Deletes checkpoints that the last rollback left behind, if a kill has."""
  last, path = _last(folder), folder / 'checkpoints'
  if last:
    for step in checkpoint.steps(path):
      if step > last['to'] and checkpoint.extra(path, step).get(
          'rollbacks', 0) < last['rollback']:
        checkpoint.delete(path, step)


def applied(folder: pathlib.Path, progress: Progress) -> Progress:
  """A restored progress; where it is what a rollback went back to, with that.

  Its questions are those that came next when the run went wrong.
  """
  last = _last(folder)
  if not last or last['to'] != progress.step or (
      progress.rollbacks >= last['rollback']):
    return progress
  return dataclasses.replace(
      progress, position=tuple(last['position']), in_flight=(),
      rollbacks=last['rollback'], before_collapse=last['to'])


def _last(folder: pathlib.Path) -> dict[str, Any] | None:
  """The last rollback; a line that a kill has cut was none yet."""
  file = folder / FILE
  lines = file.read_text().split('\n')[:-1] if file.exists() else []
  return json.loads(lines[-1]) if lines else None
