# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Questions: reads and writes them, and draws them for each step.

The schema is FlashRAG's: {"id", "question", "golden_answers", "metadata"}. The
hop count is metadata.hops, or part of the id in MuSiQue, such as 3hop1__13_7.
A pool is a set of questions that a stream draws from, such as the questions of
one hop count. A share is a pool's fraction of the questions that are drawn.
"""

from collections.abc import Callable, Container, Iterable, Sequence
import dataclasses
import functools
import hashlib
import json
import math
import pathlib
import re
from typing import Any

import numpy as np

from searchrl.data import golds
from searchrl.data import jsonl
from searchrl.data import question_files
from searchrl.runtime import processes
from searchrl.trajectory import Question


_MUSIQUE = re.compile(r'([2-4])hop\d?__')
Admit = Callable[[Question, str], None]  # question, place in a file
Stage = tuple[int, Sequence[float]]  # first step, and shares from this step on


def admit_all(question: Question, place: str) -> None:
  """Accepts every question."""
  del question, place


def read(path: str | pathlib.Path, *, prefix: str = '', source: str = '',
         needs_golds: bool = True, question_mark: bool = False,
         admit: Admit = admit_all) -> list[Question]:
  """Reads and checks a file of questions: jsonl, parquet, csv or tsv.

  A question's uid is its id, with `prefix/` before it if there is a prefix. If
  several data sources share an id, as in Search-R1's merged files, the uids are
  <data source>/<id>. Questions that are marked as unanswerable are left out.

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
        'questions are read from a jsonl, csv, tsv or parquet file, but '
        f'{file} is not a file. Check the paths under config.data.')
  place_of: dict[tuple[str, str], str] = {}
  result, left_out = [], 0
  for place, record in question_files.records(file, needs_golds=needs_golds):
    if not question_files.is_answerable(record):
      left_out += 1
      continue
    question = _parse(record, place, question_files.stem(file), needs_golds)
    key = question.data_source, question.uid
    if key in place_of:
      first = place_of[key].rpartition(', ')[2]
      raise ValueError(
          f'question ids must be unique, but {place} repeats {question.uid!r} '
          f'of {first}. Drop one of them, or give them different ids; without '
          'an id, the question itself is the id.')
    place_of[key] = place
    result.append(question)
  if left_out:
    _say_left_out(file, left_out)
  if not result:
    raise ValueError(f'{file} holds no question. Write a question per line, or '
                     'name another file.')
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


@functools.cache  # once, because jobs read a file several times
def _say_left_out(file: pathlib.Path, count: int) -> None:
  processes.say(f'{file}: {count} questions that are marked as unanswerable are '
                'left out.')


def _parse(record: question_files.Record, place: str, stem: str,
           needs_golds: bool) -> Question:
  """Returns a row's question; `stem` is its data source if the row has none."""
  try:
    metadata = (record['metadata'] if 'metadata' in record else None) or {}
    if isinstance(metadata, str):
      metadata = json.loads(metadata)
    uid, hops = _uid(record['id']), metadata.get('hops')
    if hops is None or hops != hops:
      named = _MUSIQUE.match(uid)
      hops = named[1] if named else 1
    if isinstance(hops, bool) or float(hops) != int(hops):
      raise ValueError(f'metadata.hops must be a whole number, but is {hops}')
    question = Question(
        uid=uid, text=golds.text(record['question']).strip(),
        answers=golds.read(
            record['golden_answers'] if needs_golds else
            record.get('golden_answers') or (), are_needed=needs_golds),
        hops=int(hops),
        data_source=golds.text(str(metadata.get('data_source')
                              or record.get('data_source') or stem)),
        gold_passages=golds.passages(record, metadata))
  except (ValueError, LookupError, TypeError, AttributeError,
          OverflowError) as error:  # OverflowError: hops are infinite
    keys = '"id", "question"' + ', "golden_answers"' * needs_golds
    reason = (f'it has no {error}' if isinstance(error, KeyError) else
              f'{error}' if isinstance(error, ValueError) else
              f'{type(error).__name__} {error}')
    raise ValueError(
        f'{place} must be {{{keys}}}, but '
        f'{json.dumps(record, default=str)[:80]!r} is not: {reason}.'
    ) from error
  if not question.text or (needs_golds and not question.answers):
    raise ValueError(
        f'{place} must have a question and at least one golden answer, against '
        'which answers are scored. Write them, or leave the row out.')
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
      'metadata': {'hops': q.hops, 'data_source': q.data_source} | (
          {'passages': q.gold_passages} if q.gold_passages else {})}
                     for q in questions))


def in_order(questions: Sequence[Question], seed: int) -> list[Question]:
  """Returns questions in an order that depends on the seed and their uids."""
  return sorted(questions, key=lambda question: hashlib.sha256(
      f'{seed}/{question.uid}'.encode()).digest())


def subset(questions: Sequence[Question], count: int, seed: int
          ) -> list[Question]:
  """Returns `count` random questions, in their original order.

  They are the first questions of `in_order`. The order of files therefore does
  not matter, and a larger subset includes a smaller one. One more question in a
  file displaces at most one question of the subset.
  """
  chosen = {q.uid for q in in_order(questions, seed)[:count]}
  return [q for q in questions if q.uid in chosen]


def is_mix(value: Sequence[Any]) -> bool:
  """Returns whether a value is valid as the config field data.mix.

  The field is a tuple of shares (numbers from 0 on, one per hop count), or a
  tuple of pairs (step, shares). The steps of the pairs begin at 0 and rise, and
  all pairs have equally many shares.
  """
  if not _is_schedule(value):
    return _are_shares(value)
  if not all(isinstance(entry, list | tuple) and len(entry) == 2
             and isinstance(entry[0], int) and entry[1]
             and isinstance(entry[1], list | tuple) and _are_shares(entry[1])
             for entry in value):
    return False
  steps = [step for step, _ in value]
  return (steps[0] == 0 and steps == sorted({*steps})
          and len({len(shares) for _, shares in value}) == 1)


def _is_schedule(mix: Sequence[Any]) -> bool:
  return any(isinstance(entry, list | tuple) for entry in mix)


def _are_shares(values: Sequence[Any]) -> bool:
  return all(isinstance(value, int | float) and 0 <= value < math.inf
             for value in values)


class Stream:
  """An endless stream of questions. Each epoch has a different order.

  Args:
    pools: Pools of questions; most streams have one.
    seed: Seed of the orders.
    stages: Pairs (step, shares), in order of steps. From this step of the run
      on, each draw takes these shares of its questions from the pools. The
      shares are rounded to whole questions.
  """

  def __init__(self, pools: Sequence[Sequence[Question]], *, seed: int,
               stages: Sequence[Stage] = ((0, (1.0,)),)):
    for _, shares in stages:
      if len(shares) != len(pools):
        raise ValueError(
            f'shares must be as many as pools, {len(pools)}, but are '
            f'{len(shares)}.')
    self._seed, self._pools = seed, pools
    self._stages = [(step, [share / sum(shares) for share in shares])
                    for step, shares in stages]
    # Number of an epoch and its order, by pool.
    self._orders: dict[int, tuple[int, np.ndarray]] = {}

  @property
  def start(self) -> tuple[int, ...]:
    """Position of a new run: no question drawn, in any stage from any pool."""
    return (0,) * len(self._stages) * len(self._pools)

  def draw(self, position: Sequence[int], count: int, step: int = 0
          ) -> tuple[list[Question], tuple[int, ...]]:
    """Draws the next `count` questions from the pools, in their shares.

    Args:
      position: Number of questions drawn so far from each pool in each stage.
        It may lack stages that were added to the run later.
      count: Number of questions to draw.
      step: Step of the run, which determines the stage.

    Returns:
      The questions, and the position after them.
    """
    position = [*position, *self.start[len(position):]]
    number = sum(first <= step for first, _ in self._stages) - 1
    shares, size = self._stages[number][1], len(self._pools)
    here = slice(number * size, (number + 1) * size)
    taken, totals = position[here], [sum(position[n::size]) for n in range(size)]
    drawn = []
    for n in range(sum(taken), sum(taken) + count):
      # The pool that is furthest behind its share is next.
      behind = [share * (n + 1) - before if share else -np.inf
                for share, before in zip(shares, taken, strict=True)]
      pool = int(np.argmax(behind))
      drawn.append(self._pick(pool, totals[pool]))
      taken[pool] += 1
      totals[pool] += 1
    position[here] = taken
    return drawn, tuple(position)

  def _pick(self, pool: int, position: int) -> Question:
    """Returns the question at a position of a pool's endless order."""
    questions = self._pools[pool]
    epoch, index = divmod(position, len(questions))
    if pool not in self._orders or self._orders[pool][0] != epoch:
      rng = np.random.default_rng([self._seed, pool, epoch])
      self._orders[pool] = epoch, rng.permutation(len(questions))
    return questions[self._orders[pool][1][index]]


def stream(files: Sequence[Sequence[Question]], *, seed: int,
           mix: Sequence[Any] = (), weights: Sequence[float] = (),
           common: float = 0.0, own: bool = False) -> Stream:
  """Returns an endless stream of questions, drawn from files in given shares.

  Args:
    files: Questions of each file.
    seed: Seed of the orders.
    mix: Shares of the questions with 1, 2, ... hops in every draw. It may also
      be pairs (step, shares), whose shares apply to draws from this step of the
      run on. A mix without steps is ignored if all questions have the same hop
      count and the mix has shares of other hop counts.
    weights: Shares of the files in every draw, which replace the mix. Without
      mix and weights, each question has the same probability.
    common: Part of the share of each hop count that is drawn from the last
      file, which has the questions about common knowledge. 0: the questions of
      this file are drawn like all others.
    own: Whether the files are a user's own. If so, a mix of equal shares, the
      default, is used only if the files have exactly the hop counts of the mix.
      Otherwise this mix is ignored, so that every question is drawn.

  Raises:
    ValueError: No share is above 0, a share is negative, there are no questions
      for a share above 0, the user's questions have a hop count without a
      share, or weights are given with a mix that has several steps.
  """
  questions = [q for file in files for q in file]
  stages: Sequence[Stage] = mix if _is_schedule(mix) else ((0, mix),)
  if weights:
    if len(stages) > 1:
      raise ValueError(
          'data.mix must not change over steps where data.weights are given, '
          f'which replace it, but is {mix}. Use one of the two.')
    _check_shares(weights, files, 'data.weights', [
        f'questions of file {n}' for n in range(1, len(files) + 1)])
    return Stream(files, seed=seed, stages=((0, weights),))
  if own:
    stages = _mix_of_own(questions, stages)
  pools: Sequence[Sequence[Question]] = [questions]
  present = {q.hops for q in questions}
  requested = {hops for _, shares in stages
               for hops, share in enumerate(shares, start=1) if share}
  if stages[0][1] and (
      len(present) != 1 or present >= requested or len(stages) > 1):
    hop_counts = range(1, len(stages[0][1]) + 1)
    pools = [[q for q in questions if q.hops == hops] for hops in hop_counts]
    for _, shares in stages:
      _check_shares(shares, pools, 'data.mix',
                    [f'{hops}-hop questions' for hops in hop_counts])
  else:
    stages = ((0, (1.0,)),)
  if common:
    pools, stages = _halved(pools, stages, {q.uid for q in files[-1]}, common)
  return Stream(pools, seed=seed, stages=stages)


def _mix_of_own(questions: Sequence[Question], stages: Sequence[Stage]
               ) -> Sequence[Stage]:
  """Returns the stages of the mix with which a user's own questions are drawn.

  A mix of one stage with equal shares, the default, is replaced by one stage
  without shares if the questions have several hop counts, and these differ from
  the hop counts of the mix.

  Raises:
    ValueError: Another mix has no share for one of several hop counts.
  """
  present, shares = {question.hops for question in questions}, stages[0][1]
  if not shares or len(present) == 1:
    return stages
  hop_counts = {*range(1, len(shares) + 1)}
  is_even = len(stages) == 1 and min(shares) == max(shares) > 0
  if is_even and present != hop_counts:
    return ((0, ()),)
  if without := sorted(present - hop_counts):
    raise ValueError(
        f'data.mix needs a share for each hop count of data.train, but '
        f'{tuple(shares)} has none for {without[0]} hops. Add it (0 to leave '
        'these questions out), or use () to draw from all questions alike.')
  return stages


def _halved(pools: Sequence[Sequence[Question]], stages: Sequence[Stage],
            of_common: Container[str], common: float
           ) -> tuple[Sequence[Sequence[Question]], Sequence[Stage]]:
  """Splits each pool and its share into fresh facts and common knowledge.

  Args:
    pools: Pools of questions, such as one pool for each hop count.
    stages: Pairs (step, shares of the pools).
    of_common: Uids of the questions about common knowledge.
    common: Fraction of each share that goes to common knowledge, in [0, 1].

  Returns:
    Two pools for each pool, with fresh facts first, and the stages with two
    shares for each share.

  Raises:
    ValueError: A new pool has a share above 0, but no questions.
  """
  halves = [[q for q in pool if (q.uid in of_common) == is_common]
            for pool in pools for is_common in (False, True)]
  halved = [(step, [share * part for share in shares
                    for part in (1 - common, common)])
            for step, shares in stages]
  for _, parts in halved:
    for number, (half, part) in enumerate(zip(halves, parts, strict=True)):
      if part and not half:
        raise ValueError(
            f'data.common={common} needs questions of fresh facts and of '
            'common knowledge for each hop count that data.mix has a share of, '
            f'but all {len(pools[number // 2])} that are drawn together are of '
            f'{"fresh facts" if number % 2 else "common knowledge"}. Set it to '
            '0, or raise data.limit or data.per_hop.')
  return halves, halved


def _check_shares(shares: Sequence[float], pools: Sequence[Sequence[Question]],
                  field: str, names: Iterable[str]) -> None:
  """Raises a ValueError if shares are negative, all 0, or of an empty pool."""
  if sum(shares) <= 0 or min(shares) < 0:
    raise ValueError(
        f'{field} needs a share above 0, and none below, but is '
        f'{tuple(shares)}. Use () to draw from all questions alike.')
  for name, share, pool in zip(names, shares, pools, strict=True):
    if share and not pool:
      raise ValueError(
          f'{field} asks for {share} of {name}, but there is none. Set its '
          f'share to 0, or {field} to ().')
