# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rollbacks: a run returns to a checkpoint and continues with other questions.

Each rollback is a line of rollbacks.jsonl. Once the line is written, the
rollback counts. If a kill interrupts the rest, a resume finishes it.
"""

import dataclasses
import json
import pathlib
from typing import Any

from searchrl.rollouts.collect import Progress
from searchrl.runtime import atomic_files
from searchrl.runtime import checkpoint
from searchrl.runtime import metrics

FILE = 'rollbacks.jsonl'  # in a run's directory


def note(folder: pathlib.Path, progress: Progress, to: int, why: str) -> None:
  """Records a rollback, and deletes later checkpoints.

  A copy of the metrics is kept in a separate file.

  Args:
    folder: Directory of the run.
    progress: Progress of the run where it failed.
    to: Step of the checkpoint to which the run returns.
    why: Reason, a text for users.
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
  """Deletes the checkpoints that the last rollback undid, if any are left.

  Some are left if a kill interrupted the rollback. Checkpoints that the run
  wrote after the rollback stay.
  """
  path = folder / 'checkpoints'
  for last in read(folder)[-1:]:
    for step in checkpoint.steps(path):
      if step > last['to'] and _rollbacks(path, step) < last['rollback']:
        checkpoint.delete(path, step)


def applied(folder: pathlib.Path, progress: Progress) -> Progress:
  """Returns the progress with which a run goes on from a restored checkpoint.

  If the last rollback went to this checkpoint, it is counted, and questions are
  drawn from where the run was before the rollback. Otherwise the progress is
  returned as it is.

  Args:
    folder: Directory of the run.
    progress: Progress in the restored checkpoint.
  """
  for last in read(folder)[-1:]:
    if last['to'] == progress.step and progress.rollbacks < last['rollback']:
      return dataclasses.replace(
          progress, position=tuple(last['position']), in_flight=(),
          rollbacks=last['rollback'], before_collapse=last['to'])
  return progress


def read(folder: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the records of a run's rollbacks, the oldest first.

  A record has the keys rollback (its number, from 1), at (step at which the run
  failed), to (step of the checkpoint to which it returned), position (numbers
  of questions drawn before the failure) and why (the reason).

  Raises:
    ValueError: A line of the file is damaged.
  """
  return atomic_files.read_jsonl(folder / FILE)


def _rollbacks(path: pathlib.Path, step: int) -> int:
  """Returns the number of rollbacks recorded in a checkpoint; 0 if damaged."""
  try:
    return checkpoint.extra(path, step).get('rollbacks', 0)
  except ValueError:
    return 0
