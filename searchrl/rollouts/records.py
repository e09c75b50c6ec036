# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Files of trajectories, and of the values that an update learned from.

The format is gzipped jsonl; equal trajectories give equal bytes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import functools
import gzip
import json
import pathlib
from typing import Any

import numpy as np

from searchrl import trajectory as trajectory_lib
from searchrl.rl.algorithm import scored
from searchrl.runtime import atomic_files
from searchrl.runtime import processes
from searchrl.trajectory import Batch, Question, Trajectory


def write(file: pathlib.Path, trajectories: Sequence[Trajectory]) -> None:
  """Writes a file atomically; missing folders are made."""
  _write(file, map(trajectory_lib.to_json, trajectories))


def read(file: pathlib.Path) -> list[Trajectory]:
  """Reads the trajectories of a file; the round trip is lossless."""
  return [trajectory_lib.from_json(record) for record in _read(file)]


def in_rounds(
    folder: pathlib.Path, questions: Sequence[Question], size: int,
    play: Callable[[int, Sequence[Question]], Sequence[Trajectory]]
) -> Iterator[list[Trajectory]]:
  """Yields the trajectories of one round of questions after another.

  A round whose file exists is read, so that a repeated call continues after the
  last whole round.

  Args:
    folder: Directory of the files round_000000.jsonl.gz and so on.
    questions: Questions of all rounds.
    size: Number of questions per round.
    play: Function that samples the trajectories of a round, given its number
      from 0 and its questions.
  """
  for number, first in enumerate(range(0, len(questions), size)):
    file = folder / f'round_{number:06d}.jsonl.gz'
    if not processes.on_first(str(file), file.exists):
      sampled = play(number, questions[first:first + size])
      processes.on_first('round', functools.partial(write, file, sampled))
    yield read(file)


def write_learned(file: pathlib.Path, trajectories: Sequence[Trajectory],
                  batch: Batch, advantages: Any, trained: np.ndarray) -> None:
  """Writes each trajectory's old log-probs and advantages at sampled tokens.

  Args:
    file: The file of a step.
    trajectories: Trajectories in the order of the batch's rows.
    batch: The batch, with `old_logprobs`.
    advantages: The algorithm's advantages, [B] or [B T], or an `Estimate` that
      has them. Anything else is not written.
    trained: True for the rows that were trained on, [B]. Others have no old
      log-probs.
  """
  per_row = getattr(advantages, 'advantages', advantages)
  known = isinstance(per_row, np.ndarray) and per_row.shape in (
      batch.rewards.shape, batch.tokens.shape)
  lines = []
  for row, trajectory in enumerate(trajectories):
    sampled = np.asarray(batch.loss_mask[row])
    lines.append({
        'group': trajectory.group, 'sample': trajectory.sample,
        'uid': trajectory.question.uid,
        'old_logprobs': _rounded(
            scored(batch, 'old_logprobs')[row][sampled & trained[row]]),
        'advantages': _rounded(
            np.broadcast_to(per_row[row], sampled.shape)[sampled])
        if known else None})
  _write(file, lines)


def read_learned(file: pathlib.Path) -> dict[tuple[int, int], dict[str, Any]]:
  """Reads {(group, sample): learned values}; {} if there is no such file.

  The values are at the sampled tokens, in order. `old_logprobs` are the
  learner's, in nats; `advantages` are those of the loss. Trajectories that were
  left out of the update have no values. Those that were not trained on because
  their advantages are 0 have no `old_logprobs`.
  """
  return {(record['group'], record['sample']): record for record in _read(file)
          } if file.exists() else {}


def _rounded(values: Iterable[float]) -> list[float]:
  return [float(f'{value:.6g}') for value in values]


def _write(file: pathlib.Path, lines: Iterable[Any]) -> None:
  text = ''.join(json.dumps(line, ensure_ascii=False) + '\n' for line in lines)
  # Half a surrogate pair is written as JSON's escape.
  data = text.encode(errors='backslashreplace')
  atomic_files.write(file, gzip.compress(data, mtime=0))


def _read(file: pathlib.Path) -> list[Any]:
  lines = gzip.decompress(file.read_bytes()).decode().split('\n')
  return [json.loads(line) for line in lines if line]
