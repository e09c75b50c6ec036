# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A scripted agent that searches a generated world, with habits.

It knows the facts, plans, searches fact by fact, and answers; its habits decide
how often it errs. Whoever learns from it learns every skill, and the habits:
reinforcement learning has to find out which of them pay.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np

from searchrl.trajectory import Passage
from searchrl.world import facts
from searchrl.world import lessons
from searchrl.world import text
from searchrl.world.lessons import Classroom, Piece


@dataclasses.dataclass(frozen=True)
class Habits:
  """Probabilities that an agent errs, each time that it could.

  The defaults are those of an agent with every skill and little discipline.
  """

  at_once: float = 0.0  # answers before any search: from memory, or a guess
  recite: float = 0.0  # goes fact by fact in its thought, if it remembers
  wrong_plan: float = 0.12  # a relation too few, or another one
  bad_query: float = 0.25  # no name in it, or that of something else
  wrong_fact: float = 0.30  # reads another name off the passages
  stop_early: float = 0.25  # answers although the plan is not done
  give_up: float = 0.5  # answers although the last search missed
  go_on: float = 0.12  # searches although the plan is done
  wrong_answer: float = 0.15  # answers with another name from the passages
  broken: float = 0.07  # neither a search nor an answer


def search(room: Classroom, rng: np.random.Generator, dialogue, *,
           hops: Sequence[float], common: float, habits: Habits, top_k: int = 2,
           max_turns: int = 6) -> list[Piece]:
  """The agent answers a random question.

  Args:
    room: the world and its engine.
    rng: of every choice.
    dialogue: the protocol; see `agent.dialogue`.
    hops: shares of questions of 1, 2, ... hops.
    common: share of questions about common knowledge.
    habits: how often it errs.
    top_k: passages of a search.
    max_turns: the most actions.

  Returns:
    Pieces: the agent's turns have weight 1, what it reads 0.1.
  """
  return demonstration(room, room.chain(rng, hops, common), rng, dialogue,
                       habits=habits, top_k=top_k, max_turns=max_turns)


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
  """An agent plans, searches fact by fact, and answers; sloppily.

  Args:
    room: the world and its engine.
    chain: the question's facts.
    rng: of every choice.
    dialogue: the protocol; see `agent.dialogue`.
    habits: how often it errs.
    top_k: passages of a search.
    max_turns: the most actions.

  Returns:
    Pieces: the agent's turns have weight 1, what it reads 0.1.
  """
  s = habits
  pieces = [Piece(dialogue.prompt(text.ask(chain, rng)), 0.1)]
  if rng.random() < s.at_once:
    return [*pieces, _from_memory(room.world, chain, rng, s.recite)]
  plan = _plan(chain, rng, s)
  here, note, shown = chain.start, '', ()
  for turn in range(max_turns):
    thought = ', '.join([note, *plan] if note else plan)
    if rng.random() < s.broken:
      pieces += [Piece(_broken(here, thought, rng, room.eos), 1.0),
                 Piece(dialogue.invalid, 0.1)]
      continue
    done = not plan or turn == max_turns - 1
    if done and rng.random() < s.go_on and turn < max_turns - 1:
      plan = [str(rng.choice(list(facts.RELATIONS)))]
      thought, done = ', '.join([note, *plan]), False
    hurry = s.give_up if note == 'nothing' else s.stop_early
    if done or (turn and rng.random() < hurry):
      if rng.random() < s.wrong_answer:
        here = room.other(shown, here, rng)
      return [*pieces, _answer(thought, here)]
    name = here if rng.random() >= s.bad_query else _distraction(room, rng)
    query = f'{name} {plan[0]}'.strip()
    shown = room.find(query, top_k)
    pieces += [Piece(f'<think> {thought}</think>\n<search> {query}</search>',
                     1.0),
               Piece(lessons.observation(dialogue, shown), 0.1)]
    value = _read(room, shown, here, plan[0], rng, s)
    if value is None:
      note = 'nothing'  # the search missed: try again
    else:
      note, here, plan = f'{plan[0]} {value}', value, plan[1:]
  return pieces


def _plan(chain: facts.Chain, rng: np.random.Generator, habits: Habits
         ) -> list[str]:
  """The relations to look up; a wrong one among them, or one too few."""
  plan = list(chain.relations)
  if rng.random() < habits.wrong_plan:
    plan[rng.integers(len(plan))] = str(rng.choice(list(facts.RELATIONS)))
    plan = plan[:max(1, len(plan) - int(rng.integers(2)))]
  return plan


def _read(room: Classroom, shown: Sequence[Passage], here: str, relation: str,
          rng: np.random.Generator, habits: Habits) -> str | None:
  """What the agent reads off the passages; None if the fact is not there."""
  value = room.world.facts.get((here, relation))
  if value is None or not room.states(shown, (here, relation)):
    return None
  if rng.random() < habits.wrong_fact:
    return room.other(shown, here, rng)
  return value


def _broken(here: str, thought: str, rng, eos: str) -> str:
  """A turn that a parser cannot read."""
  return (f'<think> {thought}</think>\n<search> {here}</answer>',
          f'<think> {thought}</think>\n{here}{eos}',
          f'{here} {eos}')[rng.integers(3)]


def _answer(thought: str, name: str) -> Piece:
  return Piece(f'<think> {thought}</think>\n<answer> {name}</answer>', 1.0)


def _from_memory(world: facts.World, chain: facts.Chain, rng, recite: float
                ) -> Piece:
  """The agent answers what it remembers; a fresh question with a guess."""
  steps = list(chain.relations)
  if facts.topic(world, chain) == 'fresh':
    names = world.entities[world.kind_of[chain.values[-1]]]
    return _answer(', '.join(steps), str(rng.choice(names)))
  values = facts.remembered(world, chain)
  if rng.random() < recite:
    steps = [f'{relation} {value}' for relation, value in zip(steps, values)]
  return _answer(', '.join(steps), values[-1])


def _distraction(room: Classroom, rng) -> str:
  """The name in a bad query: none, or that of something unrelated."""
  names = list(room.world.kind_of)
  return '' if rng.random() < 0.4 else names[rng.integers(len(names))]
