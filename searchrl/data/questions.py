# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Questions: reads and writes them as jsonl, and draws them for each step.

The schema is FlashRAG's: {"id", "question", "golden_answers", "metadata"}; the
hop count, where there is one, is metadata.hops.
"""

from collections.abc import Sequence
import json
import pathlib

import numpy as np

from searchrl.trajectory import Question


def read(path: str) -> list[Question]:
  """Reads and checks a file of questions.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: a line is no question or repeats an id, which the error names;
      or the file has no question.
  """
  file = pathlib.Path(path)
  if not file.is_file():
    raise FileNotFoundError(
        f'questions are read from a jsonl file, but {file} is none. Check the '
        'paths under config.data.')
  result, line_of = [], {}
  with file.open(encoding='utf-8') as lines:
    for number, line in enumerate(lines, start=1):
      if not line.strip():
        continue
      question = _parse(line, f'{file}, line {number}', file.stem)
      if question.uid in line_of:
        raise ValueError(
            f'question ids must be unique, but {file}, line {number} repeats '
            f'{question.uid!r} of line {line_of[question.uid]}.')
      line_of[question.uid] = number
      result.append(question)
  if not result:
    raise ValueError(f'{file} holds no question.')
  return result


def _parse(line: str, place: str, stem: str) -> Question:
  """The question of a line; `place` is for messages, `stem` its data source."""
  try:
    record = json.loads(line)
    answers = record['golden_answers']
    if isinstance(answers, str):
      answers = [answers]
    metadata = record.get('metadata') or {}
    question = Question(
        uid=str(record['id']), text=record['question'].strip(),
        answers=tuple(map(str, answers)), hops=int(metadata.get('hops', 1)),
        data_source=str(metadata.get('data_source', stem)))
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError(
        f'{place} must be {{"id", "question", "golden_answers"}}, but '
        f'{line.strip()[:80]!r} is not: {type(error).__name__} {error}.') from (
            error)
  if not question.text or not question.answers:
    raise ValueError(
        f'{place} must have a question and at least one golden answer.')
  return question


def write(path: str, questions: Sequence[Question]) -> None:
  """Writes questions as `read` reads them."""
  with pathlib.Path(path).open('w', encoding='utf-8') as file:
    for q in questions:
      file.write(json.dumps({
          'id': q.uid, 'question': q.text, 'golden_answers': list(q.answers),
          'metadata': {'hops': q.hops, 'data_source': q.data_source}},
                            ensure_ascii=False) + '\n')


class Stream:
  """Draws questions, epoch after epoch, each in an order of its own.

  Args:
    questions: all there are.
    seed: of the orders.
    mix: shares of 1, 2, ... hops in every draw, as nearly as whole numbers
      allow (hops are stratified); () draws from all questions alike.

  Raises:
    ValueError: no share of the mix is above 0, or one has no question.
  """

  def __init__(self, questions: Sequence[Question], *, seed: int,
               mix: Sequence[float] = ()):
    self._seed = seed
    self._shares, self._pools = [1.0], [list(questions)]
    if mix:
      self._pools = [[q for q in questions if q.hops == hops]
                     for hops in range(1, len(mix) + 1)]
      _check_mix(mix, self._pools)
      self._shares = [share / sum(mix) for share in mix]

  @property
  def start(self) -> tuple[int, ...]:
    """The position of a run that begins: questions drawn of each pool."""
    return (0,) * len(self._pools)

  def draw(self, position: Sequence[int], count: int
          ) -> tuple[list[Question], tuple[int, ...]]:
    """The next `count` questions in the mix's shares, hops interleaved.

    Args:
      position: questions drawn of each pool so far.
      count: how many questions.

    Returns:
      The questions, and the position after them.
    """
    position, total = list(position), sum(position)
    drawn = []
    for n in range(total, total + count):
      # The pool that is furthest behind its share is next.
      behind = [share * (n + 1) - before if share else -np.inf
                for share, before in zip(self._shares, position)]
      pool = int(np.argmax(behind))
      drawn.append(self._pick(pool, position[pool]))
      position[pool] += 1
    return drawn, tuple(position)

  def _pick(self, pool: int, position: int) -> Question:
    """The question at a position of a pool's endless order."""
    epoch, index = divmod(position, len(self._pools[pool]))
    order = np.random.default_rng([self._seed, pool, epoch]).permutation(
        len(self._pools[pool]))
    return self._pools[pool][order[index]]


def _check_mix(mix: Sequence[float], pools: Sequence[Sequence[Question]]
              ) -> None:
  """Raises a ValueError for a mix that cannot be drawn from these pools."""
  if sum(mix) <= 0:
    raise ValueError(
        f'data.mix needs a share above 0, but is {tuple(mix)}. Use () to draw '
        'from all questions alike.')
  for hops, (share, pool) in enumerate(zip(mix, pools), start=1):
    if share and not pool:
      raise ValueError(
          f'data.mix asks for {share} of {hops}-hop questions, but there is '
          'none. Set its share to 0, or data.mix to ().')
