# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Queries and the documents that a real engine found for them, to learn from.

A simulated engine is tuned on them: documents of trajectories that ended right
count as useful, those of others as noise.

Source: ZeroSearch, arXiv:2505.04588, section 3.2.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import hashlib
import json
import pathlib
from typing import Any

from searchrl.data import jsonl
from searchrl.search.simulated import simulated_documents
from searchrl.trajectory import (Passage, Passages, Query, Question,
                                 Trajectory, Turn)


@dataclasses.dataclass(frozen=True)
class Pair:
  """A query, and what was found for it."""

  question: Question
  query: str
  passages: Passages
  useful: bool  # a trajectory that searched for it ended right
  hop: int = 1  # which of the trajectory's searches it was, from 1


def pairs(trajectories: Iterable[Trajectory],
          is_right: Callable[[Trajectory], bool]) -> list[Pair]:
  """The searches that trajectories carried out and that found something.

  A turn with several queries is left out: its passages are not told apart. So
  is a trajectory whose search failed.
  """
  return [Pair(one.question, turn.action.texts[0], turn.passages,
               is_right(one), hop)
          for one in trajectories if one.stop_reason != 'search_error'
          for hop, turn in enumerate(_searches(one), start=1)
          if turn.passages and len(turn.action.texts) == 1]


def _searches(trajectory: Trajectory) -> list[Turn]:
  """The turns whose search was carried out."""
  return [turn for turn in trajectory.turns
          if turn.action.kind == 'search' and turn.observation_tokens]


def distinct(found: Iterable[Pair]) -> list[Pair]:
  """Each question's query once, in order; useful if it was once."""
  kept = {}
  for pair in found:
    name = pair.question.uid, pair.query
    useful = pair.useful or name in kept and kept[name].useful
    kept[name] = dataclasses.replace(kept.get(name, pair), useful=useful)
  return list(kept.values())


def split(found: Sequence[Pair], share: float, seed: int
         ) -> tuple[list[Pair], list[Pair]]:
  """Pairs to train on and to validate on; a question's are on one side.

  Args:
    found: the pairs.
    share: of the questions that are validated on, in [0, 1).
    seed: of the choice, which depends on the question's uid alone besides.
  """
  def is_aside(pair):  # not the hash by which `questions.subset` draws
    name = f'validation/{seed}/{pair.question.uid}'.encode()
    draw = int.from_bytes(hashlib.sha256(name).digest()[:8], 'big') / 2**64
    return draw < share

  sides = [is_aside(pair) for pair in found]
  return ([p for p, aside in zip(found, sides) if not aside],
          [p for p, aside in zip(found, sides) if aside])


def example(pair: Pair, prompts: simulated_documents.Prompts, *, titled: bool,
            chat: bool = False) -> dict[str, Any]:
  """A line for supervised fine-tuning: trained on the documents alone.

  Args:
    pair: what was asked and found.
    prompts: as the simulated engine will be asked.
    titled: whether documents begin with their titles.
    chat: whether the prompt is a user's message, after an empty one of the
      system, as published; else the documents continue its text.
  """
  query = Query(pair.query, len(pair.passages), pair.question)
  prompt = prompts.of(simulated_documents.Task(query, pair.useful, 0))
  found = simulated_documents.write([
      (p.title if titled else '', p.text) for p in pair.passages])
  text = {'messages': [
      {'role': 'system', 'content': ''}, {'role': 'user', 'content': prompt},
      {'role': 'assistant', 'content': found}]} if chat else {
          'prompt': prompt, 'completion': found}
  return text | {
      'query': pair.query, 'hop': pair.hop, 'useful': pair.useful,
      'question': dataclasses.asdict(pair.question)}


def read(path: str | pathlib.Path) -> list[Pair]:
  """The pairs of a file of `example`s; a document's title stays in its text.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: a line is no such example.
  """
  file = pathlib.Path(path)
  if not file.is_file():
    raise FileNotFoundError(
        f'simulator.data must be a file of collected queries, but {file} is '
        'none. configs/collect_simulation_data.py writes validation.jsonl.')
  result = []
  for place, line in jsonl.lines(file):
    try:
      result.append(_parse(json.loads(line)))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
      raise ValueError(
          'simulator.data must have lines of configs/collect_simulation_data.py'
          f', but {place} is none: {type(error).__name__} {error}.') from error
  if not result:
    raise ValueError(f'simulator.data must have queries, but {file} is empty.')
  return result


def _parse(record: Mapping[str, Any]) -> Pair:
  text = (record['messages'][-1]['content'] if 'messages' in record
          else record['completion'])
  question = dict(record['question'])
  question['answers'] = tuple(question['answers'])
  found = simulated_documents.read(text, top_k=len(text))  # all of them
  return Pair(
      Question(**question), record['query'],
      tuple(Passage('', '', one) for one in found), record['useful'],
      record['hop'])
