# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Trajectories as JSON and in files, with the values that an update used.

These values are old log-probs and advantages. The files are gzipped jsonl;
equal trajectories give equal bytes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import gzip
import json
import pathlib
from typing import Any
import zlib

import numpy as np

from searchrl.rl.algorithm import scored
from searchrl.rollouts import routing
from searchrl.runtime import atomic_files
from searchrl.runtime import processes
from searchrl.trajectory import (
    Action, Batch, Passage, Question, SearchError, Trajectory, Turn)


def to_json(trajectory: Trajectory) -> dict[str, Any]:
  """Returns a trajectory as a dict that JSON can hold.

  `from_json` reads it back without loss.
  """
  record = dataclasses.asdict(dataclasses.replace(trajectory, routing=()))
  del record['routing']
  if trajectory.routing:
    record['routing'] = [*map(routing.to_json, trajectory.routing)]
  return record


def from_json(record: dict[str, Any]) -> Trajectory:
  """Returns the trajectory of a record that `to_json` made.

  The record may have been written to a file as JSON and read again. Fields that
  an older record lacks get their defaults.
  """
  turns = tuple(
      Turn(**turn | {
          'action_tokens': tuple(turn['action_tokens']),
          'action_logprobs': tuple(turn['action_logprobs']),
          'action': Action(**turn['action'] | {
              'texts': tuple(turn['action']['texts'])}),
          'observation_tokens': tuple(turn.get('observation_tokens', ())),
          'lead_tokens': tuple(turn.get('lead_tokens', ())),
          'passages': tuple(
              Passage(**p) for p in turn.get('passages', ()))})
      for turn in record['turns'])
  error, turn_rewards = record.get('search_error'), record.get('turn_rewards')
  return Trajectory(**record | {
      'turn_rewards': None if turn_rewards is None else tuple(turn_rewards),
      'search_error': SearchError(**error) if error else None,
      'routing': tuple(map(routing.from_json, record.get('routing', ()))),
      'question': question(record['question']),
      'prompt_tokens': tuple(record['prompt_tokens']), 'turns': turns})


def question(record: Mapping[str, Any]) -> Question:
  """Returns the Question whose fields a record has.

  The record may come from JSON, in which tuples are lists.
  """
  return Question(**dict(record) | {
      name: tuple(record.get(name, ())) for name in ('answers', 'gold_passages')})


def write(file: pathlib.Path, trajectories: Sequence[Trajectory]) -> None:
  """Writes trajectories to a gzipped jsonl file, one per line, atomically.

  Their field `routing` is left out. Missing folders are made.
  """
  atomic_files.write(file, packed(
      to_json(dataclasses.replace(trajectory, routing=()))
      for trajectory in trajectories))


def read(file: pathlib.Path) -> list[Trajectory]:
  """Returns the trajectories of a file that `write` wrote.

  Raises:
    FileNotFoundError: There is no such file.
    ValueError: The file is damaged.
  """
  try:
    return [from_json(record) for record in unpacked(file.read_bytes())]
  except (EOFError, gzip.BadGzipFile, ValueError, zlib.error) as error:
    raise ValueError(f'{file} must hold trajectories, but is damaged: {error}. '
                     'Restore it.') from error


def in_rounds(
    folder: pathlib.Path, questions: Sequence[Question], size: int,
    play: Callable[[int, Sequence[Question]], Sequence[Trajectory]]
) -> Iterator[list[Trajectory]]:
  """Yields a list of trajectories for each round of `size` questions.

  A round is sampled and written to a file. If the file exists, is undamaged and
  has these questions, the round is read from it instead. A call that was
  interrupted can thus be repeated, and goes on after its last round.

  Args:
    folder: Directory of the files round_000000.jsonl.gz and so on.
    questions: Questions of all rounds.
    size: Number of questions per round.
    play: Function that samples the trajectories of a round, given its number
      from 0 and its questions.
  """
  for number, first in enumerate(range(0, len(questions), size)):
    file = folder / f'round_{number:06d}.jsonl.gz'
    asked = questions[first:first + size]

    def is_done(file=file, asked=asked) -> bool:
      try:
        return file.exists() and {t.question for t in read(file)} == {*asked}
      except ValueError:
        processes.say(f'Warning: {file} is damaged, and is sampled again.')
        return False

    if not processes.on_first(str(file), is_done):
      processes.on_first('round', functools.partial(
          write, file, play(number, asked)))
    yield read(file)


def write_learned(file: pathlib.Path, trajectories: Sequence[Trajectory],
                  batch: Batch, advantages: Any, trained: np.ndarray,
                  contexts: int = 1) -> None:
  """Writes the old log-probs and the advantages of an update to a file.

  The file has a line for each trajectory, with the values at the tokens that
  the policy sampled.

  Args:
    file: File to write, usually one per training step.
    trajectories: Trajectories in the order of the batch's rows.
    batch: Batch of B rows and T tokens per row, with `old_logprobs`.
    advantages: Advantages of the algorithm: a numpy array, [B] or [B, T], or an
      `Estimate` that contains such an array. For any other value, no advantages
      are written.
    trained: True for the rows that were trained on, [B]. No old log-probs are
      written for the other rows.
    contexts: Number of rows per trajectory.
  """
  per_row = getattr(advantages, 'advantages', advantages)
  known = isinstance(per_row, np.ndarray) and per_row.shape in (
      batch.rewards.shape, batch.tokens.shape)
  lines = []
  for number, trajectory in enumerate(trajectories):
    rows = slice(number * contexts, (number + 1) * contexts)
    sampled = np.asarray(batch.loss_mask[rows])
    lines.append({
        'group': trajectory.group, 'sample': trajectory.sample,
        'uid': trajectory.question.uid,
        'old_logprobs': _rounded(scored(batch, 'old_logprobs')[rows][
            sampled & trained[rows, None]], digits=9),  # exact in float32
        'advantages': _rounded(np.broadcast_to(
            per_row[rows].reshape(len(sampled), -1), sampled.shape)[sampled])
        if known else None})
  atomic_files.write(file, packed(lines))


def read_learned(file: pathlib.Path) -> dict[tuple[int, int], dict[str, Any]]:
  """Returns the {(group, sample): record} of a file that `write_learned` wrote.

  The result is {} if there is no such file. A record has lists with a value for
  each sampled token of a trajectory: `old_logprobs` of the learner, in nats,
  and `advantages` (None: not known). Both lists are empty if the trajectory was
  left out of the update. `old_logprobs` is also empty if it was not trained on
  because its advantages are 0.
  """
  return {(record['group'], record['sample']): record
          for record in unpacked(file.read_bytes())} if file.exists() else {}


def _rounded(values: Iterable[float], digits: int = 6) -> list[float]:
  return [float(f'{value:.{digits}g}') for value in values]


def packed(lines: Iterable[Any]) -> bytes:
  """Returns a gzip file of JSON lines. Equal lines give equal bytes."""
  text = ''.join(json.dumps(line, ensure_ascii=False) + '\n' for line in lines)
  # Half a surrogate pair is written as JSON's escape.
  return gzip.compress(text.encode(errors='backslashreplace'), mtime=0)


def unpacked(data: bytes) -> list[Any]:
  """Returns the values of the JSON lines that `packed` compressed.

  Raises:
    EOFError, gzip.BadGzipFile, ValueError, zlib.error: The data are damaged.
  """
  if not data:
    raise EOFError('it is empty')
  lines = gzip.decompress(data).decode().split('\n')
  return [json.loads(line) for line in lines if line]
