# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Shows one trajectory in the terminal: roles, log-probs and the loss mask."""

from collections.abc import Iterator
import pathlib

from searchrl.evaluation import figures
from searchrl.evaluation.report import reading
from searchrl.evaluation.report import tokens
from searchrl.experiment import policy
from searchrl.runtime import processes

_NUMBERS = (('log-prob', 'logprobs', '.4f'), ('ratio', 'ratios', '.4f'),
            ('advantage', 'advantages', '+.4f'))


def run(config, workdir: str) -> None:
  """Prints the trajectory that `show.trajectory` names.

  Raises:
    ValueError, FileNotFoundError: The file or line does not exist.
  """
  del workdir  # nothing is written
  entry = find(config.show.trajectory)
  if processes.is_first():
    for line in lines(entry, config.show.observations):
      print(figures.plain(line))


def find(name: str) -> reading.Entry:
  """Returns the recorded trajectory at a line of a file, with its run.

  Args:
    name: Path of the file and number of the line from 1, as 'FILE:LINE'.

  Raises:
    ValueError, FileNotFoundError: The file or line does not exist.
  """
  file, _, number = name.rpartition(':')
  if not number.isdecimal() or int(number) < 1:
    raise ValueError(
        '--trajectory must be FILE:LINE with a line from 1 on, as in '
        'runs/dspo/trajectories/step_000012.jsonl.gz:3, but is '
        f'{name!r}.')
  return reading.entry(pathlib.Path(file), int(number))


def lines(entry: reading.Entry, observations: bool) -> Iterator[str]:
  """Yields the lines of a text that shows a trajectory.

  These are question, gold answers, answer and score, and then each part of the
  conversation, with a line for each token of the policy.

  Args:
    entry: Trajectory, with its run.
    observations: Whether the texts of observations are shown.
  """
  trajectory, start = entry.trajectory, 0
  question, answer = trajectory.question, trajectory.answer
  yield f'Question  {question.text}'
  yield f'Golds     {" | ".join(question.answers) or "none"}'
  yield f'Answer    {"none" if answer is None else answer}'
  parts = ''.join(f', {name} {value:.4g}'
                  for name, value in trajectory.parts.items())
  score = 'none' if entry.score is None else f'{entry.score:.4g}'
  yield (f'Score     {score}{parts}; ended by '
         f'{trajectory.stop_reason}, {trajectory.searches} searches')
  for segment in tokens.segments(
      trajectory, policy.tokenizer_of(entry.run.folder), entry.learned):
    yield ''
    yield from _segment(segment, start, observations)
    start += len(segment.texts)


def _segment(segment: tokens.Segment, start: int, observations: bool
            ) -> Iterator[str]:
  end = start + len(segment.texts) - 1
  mask = {True: 'in the loss', False: 'not in the loss',
          None: 'in the loss, unless the update left it out'}[segment.trained]
  kind = (f', {segment.turn.action.kind}'
          if segment.role == tokens.POLICY and segment.turn else '')
  yield f'{segment.role}{kind}: tokens {start} to {end}, {mask}'
  if segment.role != tokens.POLICY:
    if observations or segment.role == tokens.PROMPT:
      yield from ('  ' + line for line in ''.join(segment.texts).splitlines())
    return
  shown = [(title, getattr(segment, name), form)
           for title, name, form in _NUMBERS if getattr(segment, name)]
  yield '  token' + ''.join(f'{title:>11}' for title, _, _ in shown)
  for n, text in enumerate(segment.texts):
    numbers = ''.join(
        f'{format(values[n], form):>11}' for _, values, form in shown)
    yield f'{start + n:>7}{numbers}  {text!r}'
