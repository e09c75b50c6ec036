# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Files of trajectories: gzipped jsonl, equal bytes for equal trajectories."""

from collections.abc import Sequence
import gzip
import json
import pathlib

from searchrl import trajectory as trajectory_lib
from searchrl.runtime import atomic
from searchrl.trajectory import Trajectory


def write(file: pathlib.Path, trajectories: Sequence[Trajectory]) -> None:
  """Writes a file, which appears whole; folders are made."""
  lines = ''.join(
      json.dumps(trajectory_lib.to_json(t), ensure_ascii=False) + '\n'
      for t in trajectories)
  atomic.write(file, gzip.compress(lines.encode(), mtime=0))


def read(file: pathlib.Path) -> list[Trajectory]:
  """The trajectories of a file, without loss."""
  lines = gzip.decompress(file.read_bytes()).decode().split('\n')
  return [trajectory_lib.from_json(json.loads(line)) for line in lines if line]
