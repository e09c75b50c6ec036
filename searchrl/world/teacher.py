# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A scripted agent that searches a generated world, with habits.

The agent knows the facts, plans, searches fact by fact, and answers. Its habits
are the probabilities of errors. A model that learns from it learns every skill,
and also the habits. Reinforcement learning must find out which of them pay.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import NamedTuple

import numpy as np

from searchrl.trajectory import (Passage, Query, Question, SearchError,
                                 SearchFn)
from searchrl.world import facts
from searchrl.world import text


class Piece(NamedTuple):
  """A part of a conversation, as text that is tokenised by itself."""

  text: str
  weight: float  # loss weight of its tokens


@dataclasses.dataclass(frozen=True)
class Classroom:
  """A world, with the passages about it and a search engine for them."""

  world: facts.World
  stated: Mapping[facts.Fact, Passage]  # the passage that states each fact
  search: SearchFn
  eos: str  # text of the token that ends a turn without an action

  def states(self, passages: Sequence[Passage], fact: facts.Fact) -> bool:
    """Returns whether the passage that states a fact is among the passages."""
    return any(p.id == self.stated[fact].id for p in passages)

  def find(self, query: str, top_k: int) -> Sequence[Passage]:
    """Returns the best `top_k` passages that the engine finds."""
    passages = self.search(
        [Query(query, top_k, Question('lesson', query, ()))])[0]
    assert not isinstance(passages, SearchError), passages
    return passages

  def other(self, passages: Sequence[Passage], name: str, rng) -> str:
    """Returns a random name other than `name` that occurs in the passages.

    If there is none, it is any name of the world.
    """
    joined = ' '.join(p.text for p in passages)
    names = [n for n in self.world.kind_of if n in joined and n != name]
    names = names or list(self.world.kind_of)
    return names[rng.integers(len(names))]


@dataclasses.dataclass(frozen=True)
class Habits:
  """Probabilities that an agent errs, at each opportunity.

  The defaults are those of an agent with every skill and little discipline.
  """

  at_once: float = 0.0  # answers before any search: from memory, or a guess
  recite: float = 0.0  # names each fact in its thought, if it remembers
  wrong_plan: float = 0.12  # omits a relation, or has a wrong one
  bad_query: float = 0.25  # queries without a name, or with another one
  wrong_fact: float = 0.30  # reads another name in the passages
  stop_early: float = 0.25  # answers before the plan is done
  give_up: float = 0.5  # answers although the last search missed
  go_on: float = 0.12  # searches although the plan is done
  wrong_answer: float = 0.15  # answers with another name from the passages
  broken: float = 0.07  # writes neither a search nor an answer


def demonstration(
    room: Classroom,
    chain: facts.Chain,
    rng: np.random.Generator,
    dialogue,
    *,
    habits: Habits,
    top_k: int = 2,
    max_turns: int = 6,
) -> list[Piece]:
  """Returns a conversation in which a scripted agent answers a question.

  The agent plans, searches and answers. It errs at random, as its habits say.

  Args:
    room: World with its passages and search engine.
    chain: Facts that lead to the answer, from which the question is written.
    rng: Generator of every choice.
    dialogue: Format of prompts, turns and passages; see `agent.dialogue`.
    habits: Probabilities of errors.
    top_k: Number of passages per search.
    max_turns: Maximum number of actions.

  Returns:
    Pieces of text with loss weights: 1 for the agent's turns, and 0.1 for the
    texts that it reads.
  """
  pieces = [Piece(dialogue.prompt(text.ask(chain, rng)), 0.1)]
  if rng.random() < habits.at_once:
    return [*pieces, _from_memory(room.world, chain, rng, habits.recite)]
  plan = _plan(chain, rng, habits)
  here, note = chain.start, ''
  shown: Sequence[Passage] = ()
  for turn in range(max_turns):
    thought = ', '.join([note, *plan] if note else plan)
    if rng.random() < habits.broken:
      pieces += [Piece(_broken(here, thought, rng, room.eos), 1.0),
                 Piece(dialogue.invalid, 0.1)]
      continue
    done = not plan or turn == max_turns - 1
    if done and rng.random() < habits.go_on and turn < max_turns - 1:
      plan = [str(rng.choice(list(facts.RELATIONS)))]
      thought, done = ', '.join([note, *plan]), False
    hurry = habits.give_up if note == 'nothing' else habits.stop_early
    if done or (turn and rng.random() < hurry):
      if rng.random() < habits.wrong_answer:
        here = room.other(shown, here, rng)
      return [*pieces, _answer(thought, here)]
    name = here if rng.random() >= habits.bad_query else _distraction(room, rng)
    query = f'{name} {plan[0]}'.strip()
    shown = room.find(query, top_k)
    pieces += [Piece(f'<think> {thought}</think>\n<search> {query}</search>',
                     1.0),
               Piece(observation(dialogue, shown), 0.1)]
    value = _read(room, shown, here, plan[0], rng, habits)
    if value is None:
      note = 'nothing'  # the search missed, and the agent tries again
    else:
      note, here, plan = f'{plan[0]} {value}', value, plan[1:]
  return pieces


def _plan(chain: facts.Chain, rng: np.random.Generator, habits: Habits
         ) -> list[str]:
  """Returns the relations that the agent looks up, in order.

  They are usually the chain's relations. With probability `habits.wrong_plan`,
  a random relation replaces one of them, and the last may then be left out.
  """
  plan = list(chain.relations)
  if rng.random() < habits.wrong_plan:
    plan[rng.integers(len(plan))] = str(rng.choice(list(facts.RELATIONS)))
    plan = plan[:max(1, len(plan) - int(rng.integers(2)))]
  return plan


def _read(room: Classroom, shown: Sequence[Passage], here: str, relation: str,
          rng: np.random.Generator, habits: Habits) -> str | None:
  """Returns the name that the agent takes from passages as a fact's object.

  It may be a wrong one. It is None if the passages do not contain the fact.

  Args:
    room: World with its passages.
    shown: Passages that the agent reads.
    here: Subject of the fact.
    relation: Relation of the fact.
    rng: Generator of the error.
    habits: Probabilities of errors.
  """
  value = room.world.facts.get((here, relation))
  if value is None or not room.states(shown, (here, relation)):
    return None
  if rng.random() < habits.wrong_fact:
    return room.other(shown, here, rng)
  return value


def _broken(here: str, thought: str, rng, eos: str) -> str:
  """Returns a turn that is an invalid action, in one of three forms."""
  return (f'<think> {thought}</think>\n<search> {here}</answer>',
          f'<think> {thought}</think>\n{here}{eos}',
          f'{here} {eos}')[rng.integers(3)]


def _answer(thought: str, name: str) -> Piece:
  return Piece(f'<think> {thought}</think>\n<answer> {name}</answer>', 1.0)


def _from_memory(world: facts.World, chain: facts.Chain, rng, recite: float
                ) -> Piece:
  """Returns an answer from memory, or a guess if the facts are fresh.

  `recite` is the probability that the thought has the facts of the chain.
  """
  steps = list(chain.relations)
  if facts.topic(world, chain) == 'fresh':
    names = world.entities[world.kind_of[chain.values[-1]]]
    return _answer(', '.join(steps), str(rng.choice(names)))
  values = facts.remembered(world, chain)
  if rng.random() < recite:
    steps = [f'{relation} {value}' for relation, value in zip(steps, values)]
  return _answer(', '.join(steps), values[-1])


def _distraction(room: Classroom, rng) -> str:
  """Returns the name for a bad query: '', or a random name of the world."""
  names = list(room.world.kind_of)
  return '' if rng.random() < 0.4 else names[rng.integers(len(names))]


def observation(dialogue, passages: Sequence[Passage]) -> str:
  """Returns passages as the text that an agent reads after a search."""
  documents = '\n'.join(
      dialogue.passage(i, p) for i, p in enumerate(passages, start=1))
  return f'{dialogue.before}{documents}{dialogue.after}'
