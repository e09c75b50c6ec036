# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Questions: reads and writes them, and draws them for each step.

The schema is FlashRAG's: {"id", "question", "golden_answers", "metadata"}. The
hop count is metadata.hops, if the file has it.
"""

from collections.abc import Callable, Container, Iterable, Sequence
import dataclasses
import hashlib
import json
import pathlib
from typing import Any

import numpy as np

from searchrl.data import golds
from searchrl.data import jsonl
from searchrl.data import question_files
from searchrl.trajectory import Question


Admit = Callable[[Question, str], None]  # a question, its place in a file


def admit_all(question: Question, place: str) -> None:
  """Accepts every question."""
  del question, place


def read(path: str | pathlib.Path, *, prefix: str = '', source: str = '',
         needs_golds: bool = True, question_mark: bool = False,
         admit: Admit = admit_all) -> list[Question]:
  """Reads and checks a file of questions, jsonl or parquet.

  A question's uid is its id, with `prefix/` before it if there is a prefix. If
  several data sources share an id, as in Search-R1's merged files, the uid is
  <data source>/<id>, after the prefix.

  Args:
    path: Path of the file.
    prefix: Prefix of the uids.
    source: Data source of all questions; '': each row's own, or the file's
      stem.
    needs_golds: True if a question without golden answers is an error.
    question_mark: True to append a ? to questions that lack it.
    admit: Function that is called with each question and its place, 'FILE, line
      3'. It raises a ValueError for a question that cannot be asked.

  Raises:
    FileNotFoundError: There is no such file.
    ValueError: A row is not a question, or it repeats an id of its data source
      (the error names the row); or the file has no question.
  """
  file = pathlib.Path(path)
  if not file.is_file():
    raise FileNotFoundError(
        f'questions are read from a jsonl or parquet file, but {file} is not a '
        'file. Check the paths under config.data.')
  place_of: dict[tuple[str, str], str] = {}
  result = []
  for place, record in question_files.records(file, needs_golds=needs_golds):
    question = _parse(record, place, question_files.stem(file), needs_golds)
    key = question.data_source, question.uid
    if key in place_of:
      raise ValueError(
          f'question ids must be unique, but {place} repeats '
          f'{question.uid!r} of {place_of[key].rpartition(", ")[2]}.')
    place_of[key] = place
    result.append(question)
  if not result:
    raise ValueError(f'{file} holds no question.')
  repeats = len({q.uid for q in result}) < len(result)
  for n, (question, place) in enumerate(zip(result, place_of.values())):
    parts = prefix, question.data_source if repeats else '', question.uid
    lacks_mark = question_mark and not question.text.endswith('?')
    result[n] = dataclasses.replace(
        question, uid='/'.join(filter(None, parts)),
        text=question.text + '?' * lacks_mark,
        data_source=source or question.data_source)
    admit(result[n], place)
  return result


def _parse(record: question_files.Record, place: str, stem: str,
           needs_golds: bool) -> Question:
  """Returns a row's question, whose source is the file's stem by default."""
  try:
    metadata = (record['metadata'] if 'metadata' in record else None) or {}
    if isinstance(metadata, str):
      metadata = json.loads(metadata)
    hops = metadata.get('hops')
    question = Question(
        uid=_uid(record['id']), text=golds.text(record['question']).strip(),
        answers=golds.read(
            record['golden_answers'] if needs_golds else
            record.get('golden_answers') or (), are_needed=needs_golds),
        hops=1 if hops is None or hops != hops else int(hops),
        data_source=golds.text(str(metadata.get('data_source')
                              or record.get('data_source') or stem)))
  except (ValueError, KeyError, TypeError, AttributeError,
          OverflowError) as error:  # OverflowError: hops are infinite
    raise ValueError(
        f'{place} must be {{"id", "question", "golden_answers"}}, but '
        f'{json.dumps(record, default=str)[:80]!r} is not: '
        f'{type(error).__name__} {error}.') from error
  if not question.text or (needs_golds and not question.answers):
    raise ValueError(
        f'{place} must have a question and at least one golden answer, against '
        'which answers are scored.')
  if question.hops < 1:
    raise ValueError(f'metadata.hops of {place} must be at least 1, but is '
                     f'{question.hops}.')
  return question


def _uid(value: Any) -> str:
  if isinstance(value, float) and value.is_integer():
    value = int(value)  # pandas writes whole numbers so beside a missing one
  if isinstance(value, bool) or not isinstance(value, str | int):
    raise ValueError('id must be a text or a whole number, but is '
                     f'{value!r:.60}')
  return golds.text(str(value))


def write(path: str | pathlib.Path, questions: Sequence[Question]) -> None:
  """Writes questions as jsonl in the form that `read` reads."""
  jsonl.write(path, ({
      'id': q.uid, 'question': q.text, 'golden_answers': q.answers,
      'metadata': {'hops': q.hops, 'data_source': q.data_source}}
                     for q in questions))


def subset(questions: Sequence[Question], count: int, seed: int
          ) -> list[Question]:
  """Returns `count` questions, drawn by the seed, in their original order.

  A question's rank is a hash of seed and uid. So the subset does not depend on
  the order of files, a larger subset includes a smaller one, and one more
  question in a file displaces at most one other.
  """
  ranked = sorted(questions, key=lambda q: hashlib.sha256(
      f'{seed}/{q.uid}'.encode()).digest())
  chosen = {q.uid for q in ranked[:count]}
  return [q for q in questions if q.uid in chosen]


class Stream:
  """An endless stream of questions; each epoch has an order of its own.

  Args:
    pools: Pools of questions; most streams have one.
    seed: Seed of the orders.
    shares: Share of each pool in every draw, as nearly as whole numbers allow;
      () for a single pool.
  """

  def __init__(self, pools: Sequence[Sequence[Question]], *, seed: int,
               shares: Sequence[float] = ()):
    if len(shares or [1.0]) != len(pools):
      raise ValueError(
          f'shares must be as many as pools, {len(pools)}, but are '
          f'{len(shares)}.')
    self._seed, self._pools = seed, pools
    self._shares = [share / sum(shares) for share in shares] or [1.0]
    # Number of an epoch and its order, by pool.
    self._orders: dict[int, tuple[int, np.ndarray]] = {}

  @property
  def start(self) -> tuple[int, ...]:
    """Position of a new run: 0 questions drawn from each pool."""
    return (0,) * len(self._pools)

  def draw(self, position: Sequence[int], count: int
          ) -> tuple[list[Question], tuple[int, ...]]:
    """Draws the next `count` questions in the pools' shares, interleaved.

    Args:
      position: Number of questions drawn from each pool so far.
      count: Number of questions to draw.

    Returns:
      The questions, and the position after them.
    """
    positions, total = list(position), sum(position)
    drawn = []
    for n in range(total, total + count):
      # The pool that is furthest behind its share is next.
      behind = [share * (n + 1) - before if share else -np.inf
                for share, before in zip(self._shares, positions)]
      pool = int(np.argmax(behind))
      drawn.append(self._pick(pool, positions[pool]))
      positions[pool] += 1
    return drawn, tuple(positions)

  def _pick(self, pool: int, position: int) -> Question:
    """Returns the question at a position of a pool's endless order."""
    questions = self._pools[pool]
    epoch, index = divmod(position, len(questions))
    if pool not in self._orders or self._orders[pool][0] != epoch:
      rng = np.random.default_rng([self._seed, pool, epoch])
      self._orders[pool] = epoch, rng.permutation(len(questions))
    return questions[self._orders[pool][1][index]]


def stream(files: Sequence[Sequence[Question]], *, seed: int,
           mix: Sequence[float] = (), weights: Sequence[float] = (),
           common: float = 0.0, own: bool = False) -> Stream:
  """Returns the stream of the questions of some files.

  Args:
    files: Questions of each file.
    seed: Seed of the orders.
    mix: Shares of 1, 2, ... hops in every draw (hops are stratified). They are
      not used if all questions have one hop count and the mix asks for others.
    weights: Shares of the files in every draw, which replace those of the hops.
      With neither, all questions are drawn alike, in proportion to the files'
      sizes.
    common: Share of the last file in every draw, and in each hop count of it,
      however few its questions are; 0: no such share.
    own: True for a user's files. A mix of equal shares, the default, is then
      not used unless it has a share for each hop count of the files and no
      other. So each question is drawn.

  Raises:
    ValueError: No share is above 0, or a share above 0 has no questions, or
      the user's questions have a hop count without a share.
  """
  if weights:
    _check_shares(weights, files, 'data.weights', [
        f'questions of file {n}' for n in range(1, len(files) + 1)])
    return Stream(files, seed=seed, shares=weights)
  questions = [q for file in files for q in file]
  if own:
    mix = _mix_of_own(questions, mix)
  pools, shares = [questions], [1.0]
  present = {q.hops for q in questions}
  requested = {hops for hops, share in enumerate(mix, start=1) if share}
  if mix and (len(present) != 1 or present >= requested):
    pools, shares = [[q for q in questions if q.hops == hops]
                     for hops in range(1, len(mix) + 1)], list(mix)
    _check_shares(mix, pools, 'data.mix', [
        f'{hops}-hop questions' for hops in range(1, len(mix) + 1)])
  if common:
    pools, shares = _halved(pools, shares, {q.uid for q in files[-1]}, common)
  return Stream(pools, seed=seed, shares=shares)


def _mix_of_own(questions: Sequence[Question], mix: Sequence[float]
               ) -> Sequence[float]:
  """Returns the mix if it fits the questions, or () if it is the default."""
  present = {question.hops for question in questions}
  without = sorted(present - {*range(1, len(mix) + 1)})
  if not mix or len(present) == 1:
    return mix
  if min(mix) == max(mix) > 0 and present != {*range(1, len(mix) + 1)}:
    return ()
  if without:
    raise ValueError(
        f'data.mix needs a share for each hop count of data.train, but '
        f'{tuple(mix)} has none for {without[0]} hops. Add it (0 to leave '
        'these questions out), or use () to draw from all questions alike.')
  return mix


def _halved(pools: Sequence[Sequence[Question]], shares: Sequence[float],
            of_common: Container[str], common: float
           ) -> tuple[list[list[Question]], list[float]]:
  """Splits each pool, with its share, into fresh facts and common knowledge."""
  halves, parts = [], []
  for pool, share in zip(pools, shares, strict=True):
    for is_common, part in ((False, share * (1 - common)),
                            (True, share * common)):
      half = [q for q in pool if (q.uid in of_common) == is_common]
      if part and not half:
        raise ValueError(
            f'data.common={common} needs questions of fresh facts and of '
            'common knowledge, of each hop count that data.mix has a share of, '
            f'but {len(pool)} that are drawn together are all of one kind. Set '
            'it to 0, or raise data.limit or data.per_hop.')
      halves.append(half)
      parts.append(part)
  return halves, parts


def _check_shares(shares: Sequence[float], pools: Sequence[Sequence[Question]],
                  field: str, names: Iterable[str]) -> None:
  """Raises a ValueError for a negative share, or one of an empty pool."""
  if sum(shares) <= 0 or min(shares) < 0:
    raise ValueError(
        f'{field} needs a share above 0, and none below, but is '
        f'{tuple(shares)}. Use () to draw from all questions alike.')
  for name, share, pool in zip(names, shares, pools, strict=True):
    if share and not pool:
      raise ValueError(
          f'{field} asks for {share} of {name}, but there is none. Set its '
          f'share to 0, or {field} to ().')
