# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Training data for simulated engines: queries and a real engine's documents.

A simulated engine is tuned on these pairs. Documents of trajectories with a
right answer count as useful, and documents of all others as noise.

Source: ZeroSearch, arXiv:2505.04588, section 3.2.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import hashlib
import json
import pathlib
from typing import Any

from searchrl.data import jsonl
from searchrl.papers.zerosearch import documents
from searchrl.papers.zerosearch.simulator_prompts import Prompts
from searchrl.rollouts import records
from searchrl.trajectory import (Passage, Passages, Query, Question,
                                 SearchError, Trajectory)


@dataclasses.dataclass(frozen=True)
class Pair:
  """A query and the passages that a real engine found for it."""

  question: Question
  query: str
  passages: Passages
  useful: bool  # True: a trajectory with this query has a right answer
  hop: int = 1  # number of the search in its trajectory, from 1


def pairs(trajectories: Iterable[Trajectory],
          is_right: Callable[[Trajectory], bool]) -> list[Pair]:
  """Returns the queries of some trajectories, each with its passages.

  Passages without title and text are left out, and searches that found only
  such passages. Turns with several queries are left out, because the passages
  cannot be assigned to a query. So are trajectories that a failed search ended.

  Args:
    trajectories: Trajectories of the policy.
    is_right: Function that returns whether a trajectory's answer is right,
      which is recorded with its queries.
  """
  return [Pair(trajectory.question, turn.action.texts[0], passages,
               is_right(trajectory), hop)
          for trajectory in trajectories
          if trajectory.stop_reason != 'search_error'
          for hop, turn in enumerate((  # searches that were carried out
              turn for turn in trajectory.turns
              if turn.action.is_search and turn.observation_tokens), 1)
          if len(turn.action.texts) == 1 and (passages := tuple(
              p for p in turn.passages if p.title.strip() or p.text.strip()))]


def distinct(pairs: Iterable[Pair]) -> list[Pair]:
  """Returns the first pair of each query, in the order of the pairs.

  Queries are equal if their texts and their questions are equal. The pair that
  is kept counts as useful if any pair with the same query is useful.
  """
  firsts: dict[tuple[str, str], Pair] = {}
  for pair in pairs:
    name = pair.question.uid, pair.query
    first = firsts.setdefault(name, pair)
    if pair.useful:
      firsts[name] = dataclasses.replace(first, useful=True)
  return list(firsts.values())


def split(pairs: Sequence[Pair], share: float, seed: int
         ) -> tuple[list[Pair], list[Pair]]:
  """Returns (training pairs, validation pairs), split by question.

  All pairs of a question are on the same side. A question's side depends only
  on the seed and the question's uid.

  Args:
    pairs: The pairs.
    share: Expected fraction of the questions for validation, in [0, 1).
    seed: Seed of the split.
  """
  sides: tuple[list[Pair], list[Pair]] = [], []
  for pair in pairs:  # by another hash than in `questions.subset`
    name = f'validation/{seed}/{pair.question.uid}'.encode()
    draw = int.from_bytes(hashlib.sha256(name).digest()[:8], 'big') / 2**64
    sides[draw < share].append(pair)
  return sides


def example(pair: Pair, prompts: Prompts, *, titled: bool,
            chat: bool = False) -> dict[str, Any]:
  """Returns a record for fine-tuning that trains only on the documents.

  Args:
    pair: A query and its passages, which are the documents to write.
    prompts: Prompts of the simulated engine, of which one fits the pair.
    titled: If True, the documents begin with their titles.
    chat: If True, the prompt is a user message after an empty system message,
      as in ZeroSearch's code. If False, the documents continue the prompt.

  Raises:
    ValueError: The prompt has the question's answer, but there is none.
  """
  query = Query(pair.query, len(pair.passages), pair.question)
  prompt = prompts.of(documents.Task(query, pair.useful, 0))
  if isinstance(prompt, SearchError):
    raise ValueError(f'collect.prompts cannot be used: {prompt.detail}.')
  answer = documents.write_passages(pair.passages, titled=titled)
  text = {'messages': [
      {'role': 'system', 'content': ''}, {'role': 'user', 'content': prompt},
      {'role': 'assistant', 'content': answer}]} if chat else {
          'prompt': prompt, 'completion': answer}
  return text | {
      'query': pair.query, 'hop': pair.hop, 'useful': pair.useful,
      'question': dataclasses.asdict(pair.question)}


def read(path: str | pathlib.Path) -> list[Pair]:
  """Loads the pairs of a query and its documents from a file of training data.

  The lines of the file are as `example` returns them. Titles stay in the texts
  of the passages.

  Raises:
    FileNotFoundError: There is no such file.
    ValueError: A line is not such an example, or the file is empty.
  """
  file = pathlib.Path(path)
  if not file.is_file():
    raise FileNotFoundError(
        f'simulator.data must be a file of collected queries, but {file} is '
        'none. configs/collect_simulation_data.py writes validation.jsonl.')
  pairs = []
  for place, line in jsonl.lines(file):
    try:
      pairs.append(_parse(json.loads(line)))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
      raise ValueError(
          'simulator.data must have lines of configs/collect_simulation_data.py'
          f', but {place} is none: {type(error).__name__} {error}.') from error
  if not pairs:
    raise ValueError(f'simulator.data must have queries, but {file} is empty.')
  return pairs


def _parse(record: Mapping[str, Any]) -> Pair:
  text = (record['messages'][-1]['content'] if 'messages' in record
          else record['completion'])
  passages = tuple(Passage('', '', document) for document in
                   documents.read(text, top_k=len(text)))  # no limit
  return Pair(records.question(record['question']), record['query'], passages,
              record['useful'], record['hop'])
