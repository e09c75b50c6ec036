# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Shards: files of an evaluation's records, about a thousand in each.

A shard is on the disk, with its digest, before the next one is sampled. Memory
is therefore bounded, and a killed process loses at most one shard. Damaged
shards are sampled again.
"""

from collections.abc import Iterator, Mapping, Sequence
import hashlib
import pathlib
from typing import Any

from searchrl.rollouts import records
from searchrl.runtime import atomic_files
from searchrl.runtime import processes
from searchrl.trajectory import Question

DIGESTS = 'digests.json'  # file of a folder with the SHA-256 of each shard


def write(file: pathlib.Path, lines: Sequence[Any]) -> None:
  """Writes a shard, a gzip file of JSON lines, then its digest beside it."""
  data = records.packed(lines)
  atomic_files.write(file, data)
  digests = atomic_files.read_json(file.parent / DIGESTS) or {}
  digests[file.name] = hashlib.sha256(data).hexdigest()
  atomic_files.write_json(file.parent / DIGESTS, digests)


def read(file: pathlib.Path) -> list[Any] | None:
  """Returns the lines of a shard; None if it is missing or damaged."""
  digest = (atomic_files.read_json(file.parent / DIGESTS) or {}).get(file.name)
  if digest is None or not file.exists():
    return None
  data = file.read_bytes()
  if hashlib.sha256(data).hexdigest() != digest:
    processes.say(f'Warning: {file} is damaged, and is sampled again.')
    return None
  return records.unpacked(data)


def read_scores(file: pathlib.Path, questions: Sequence[Question],
                source: str | None) -> list[dict[str, Any]]:
  """Returns the scores of a shard; [] if its questions must be asked again.

  Args:
    file: File of the shard.
    questions: Questions of the shard's records, in their order.
    source: Source of the records, if they have one; see `evaluator.run`.

  Returns:
    Fields of `Score` for each question. They are [] if the shard is missing or
    damaged, has records of other questions or another source, or if one of its
    searches failed, or the judge did. A judge that replied without a verdict
    has not failed: it would reply alike.
  """
  lines = read(file) or ()
  fits = [records.question(line['trajectory']['question'])
          for line in lines] == [*questions] and not any(
              line.get('source') != source or line['score']['failed']
              or _has_failed_judge(line) for line in lines)
  return [line['score'] for line in lines] if fits else []


def _has_failed_judge(line: Mapping[str, Any]) -> bool:
  """Returns whether the judge of a record's answer failed to reply."""
  error = line['trajectory'].get('judge_error')
  return bool(error) and not error.startswith('no_verdict')


def read_all(folder: pathlib.Path) -> Iterator[Any]:
  """Yields the lines of all shards below a folder, in the order of names.

  Raises:
    ValueError: A shard differs from its digest.
  """
  for file in sorted(folder.glob('**/*.jsonl.gz')):
    lines = read(file)
    if lines is None:
      raise ValueError(f'{file} has changed since it was written. Delete it, '
                       'and the command that wrote it makes it again.')
    yield from lines
