# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rollbacks: a run goes back to a checkpoint, and on with other questions.

Each is a line of rollbacks.jsonl. Once that is written the rollback has
happened, whatever a kill interrupts; a resume does what is left of it.
"""

import dataclasses
import json
import pathlib
from typing import Any

from searchrl.rollouts.collect import Progress
from searchrl.runtime import atomic_files
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
  record = {'rollback': number, 'at': progress.step, 'to': to,
            'position': progress.position, 'why': why}
  atomic_files.write(folder / FILE, ''.join(
      json.dumps(line) + '\n' for line in (*read(folder), record)))
  finish(folder)


def finish(folder: pathlib.Path) -> None:
  """Deletes checkpoints that the last rollback left behind, if a kill has."""
  path = folder / 'checkpoints'
  for last in read(folder)[-1:]:
    for step in checkpoint.steps(path):
      if step > last['to'] and _rollbacks(path, step) < last['rollback']:
        checkpoint.delete(path, step)


def applied(folder: pathlib.Path, progress: Progress) -> Progress:
  """A restored progress; where it is what a rollback went back to, with that.

  Its questions are those that came next when the run went wrong.
  """
  for last in read(folder)[-1:]:
    if last['to'] == progress.step and progress.rollbacks < last['rollback']:
      return dataclasses.replace(
          progress, position=tuple(last['position']), in_flight=(),
          rollbacks=last['rollback'], before_collapse=last['to'])
  return progress


def read(folder: pathlib.Path) -> list[dict[str, Any]]:
  """The rollbacks of a run: number, at, to, position and why of each."""
  file = folder / FILE
  return [json.loads(line) for line in file.read_text().splitlines()
          ] if file.exists() else []


def _rollbacks(path: pathlib.Path, step: int) -> int:
  """Those before a checkpoint; none of one that is damaged."""
  try:
    return checkpoint.extra(path, step).get('rollbacks', 0)
  except ValueError:
    return 0
