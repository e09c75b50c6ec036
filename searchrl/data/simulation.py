# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Queries and the documents that a real engine found for them, to learn from.

A simulated engine is tuned on them: documents of trajectories that ended right
count as useful, those of others as noise.

Source: ZeroSearch, arXiv:2505.04588, section 3.2.
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import hashlib
from typing import Any

from searchrl.search.simulated import documents
from searchrl.trajectory import Passages, Query, Question, Trajectory


@dataclasses.dataclass(frozen=True)
class Pair:
  """A query, and what was found for it."""

  question: Question
  query: str
  passages: Passages
  useful: bool  # a trajectory that searched for it ended right


def pairs(trajectories: Iterable[Trajectory],
          is_right: Callable[[Trajectory], bool]) -> list[Pair]:
  """The searches that trajectories carried out and that found something.

  A turn with several queries is left out: its passages are not told apart. So
  is a trajectory whose search failed.
  """
  return [Pair(one.question, turn.action.texts[0], turn.passages, is_right(one))
          for one in trajectories if one.stop_reason != 'search_error'
          for turn in one.turns
          if turn.action.kind == 'search' and turn.passages
          and turn.observation_tokens and len(turn.action.texts) == 1]


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


def example(pair: Pair, prompts: documents.Prompts, *, titled: bool
           ) -> dict[str, Any]:
  """A line for supervised fine-tuning: trained on the documents alone.

  Args:
    pair: what was asked and found.
    prompts: as the simulated engine will be asked.
    titled: whether documents begin with their titles.
  """
  query = Query(pair.query, len(pair.passages), pair.question)
  return {
      'prompt': prompts.of(documents.Task(query, pair.useful, 0)),
      'completion': documents.write([
          (p.title if titled else '', p.text) for p in pair.passages]),
      'question': pair.question.uid, 'query': pair.query,
      'useful': pair.useful}
