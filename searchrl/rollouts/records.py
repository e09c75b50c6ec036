# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Files of trajectories, and of what was learned from them.

Gzipped jsonl, equal bytes for equal trajectories.
"""

from collections.abc import Iterable, Sequence
import gzip
import json
import pathlib
from typing import Any

import numpy as np

from searchrl import trajectory as trajectory_lib
from searchrl.runtime import atomic_files
from searchrl.trajectory import Batch, Trajectory


def write(file: pathlib.Path, trajectories: Sequence[Trajectory]) -> None:
  """Writes a file, which appears whole; folders are made."""
  _write(file, map(trajectory_lib.to_json, trajectories))


def read(file: pathlib.Path) -> list[Trajectory]:
  """The trajectories of a file, without loss."""
  return [trajectory_lib.from_json(record) for record in _read(file)]


def write_learned(file: pathlib.Path, trajectories: Sequence[Trajectory],
                  batch: Batch, advantages: Any) -> None:
  """Writes what an update saw of each trajectory, at the tokens it learns from.

  Args:
    file: of a step.
    trajectories: in the order of the batch's rows.
    batch: with `old_logprobs`.
    advantages: of the algorithm: [B] or [B T], or an `Estimate` of those;
      anything else is not written.
  """
  found = getattr(advantages, 'advantages', advantages)
  known = isinstance(found, np.ndarray) and found.shape in (
      batch.rewards.shape, batch.tokens.shape)
  _write(file, [{
      'group': one.group, 'sample': one.sample, 'uid': one.question.uid,
      'old_logprobs': _rounded(batch.old_logprobs[row][batch.loss_mask[row]]),
      'advantages': _rounded(np.broadcast_to(
          found[row], batch.tokens.shape[1:])[batch.loss_mask[row]])
      if known else None} for row, one in enumerate(trajectories)])


def read_learned(file: pathlib.Path) -> dict[tuple[int, int], dict[str, Any]]:
  """{(group, sample): what was learned from it}; {} if there is no such file.

  `old_logprobs` are the learner's, in nats, and `advantages` those of the loss,
  at the sampled tokens in order; no trajectory that was left out has any.
  """
  return {(record['group'], record['sample']): record for record in _read(file)
          } if file.exists() else {}


def _rounded(values: np.ndarray) -> list[float]:
  return [float(f'{value:.6g}') for value in values]


def _write(file: pathlib.Path, lines: Iterable[Any]) -> None:
  text = ''.join(json.dumps(line, ensure_ascii=False) + '\n' for line in lines)
  data = text.encode(errors='backslashreplace')  # as JSON has half a character
  atomic_files.write(file, gzip.compress(data, mtime=0))


def _read(file: pathlib.Path) -> list[Any]:
  lines = gzip.decompress(file.read_bytes()).decode().split('\n')
  return [json.loads(line) for line in lines if line]
