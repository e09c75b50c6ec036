# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Lessons: documents about generated worlds, to train the tiny base model on.

Three kinds of lesson, in the order in which a small model needs them: drills
(facts are listed, then repeated: copying from the context), readings (a
passage, then a question about it) and demonstrations (an agent searches and
answers, but sloppily). The demonstrations show every skill and no discipline:
reinforcement learning has to find out which of their habits pay.
"""

from collections.abc import Iterator, Sequence
import dataclasses
from typing import NamedTuple

import numpy as np

from searchrl.trajectory import Passage, Query, Question, SearchFn
from searchrl.world import facts, text

SMALL = {'person': 36, 'city': 16, 'company': 14, 'river': 10, 'sea': 5,
         'mountain': 8, 'book': 18}


class Piece(NamedTuple):
  """Text that is tokenised on its own, as in a rollout."""

  text: str
  weight: float  # of its tokens in the loss


@dataclasses.dataclass(frozen=True)
class Sloppiness:
  """Probabilities that a demonstration errs, each time that it could."""

  wrong_plan: float = 0.12  # a relation too few, or another one
  bad_query: float = 0.25  # no name in it, or that of something else
  wrong_fact: float = 0.30  # reads another name off the passages
  stop_early: float = 0.25  # answers although the plan is not done
  give_up: float = 0.5  # answers although the last search missed
  go_on: float = 0.12  # searches although the plan is done
  wrong_answer: float = 0.15  # answers with another name from the passages
  broken: float = 0.07  # neither a search nor an answer


@dataclasses.dataclass(frozen=True)
class Classroom:
  """A world, with its passages and its search engine."""

  world: facts.World
  passages: Sequence[Passage]
  search: SearchFn

  def about(self, name: str) -> Passage:
    """The passage about an entity."""
    return next(p for p in self.passages if p.title == name)

  def mentioned(self, passages: Sequence[Passage]) -> list[str]:
    """The names that stand in passages, in the world's order."""
    joined = ' '.join(p.text for p in passages)
    return [name for name in self.world.kind_of if name in joined]


def drill(room: Classroom, rng: np.random.Generator) -> list[Piece]:
  """Facts in a list, then some of them again in another order."""
  keys = list(room.world.facts)
  chosen = [keys[i] for i in rng.choice(len(keys), rng.integers(3, 9), False)]
  lines = [f'{s} {r} {room.world.facts[s, r]}\n' for s, r in chosen]
  again = [lines[i] for i in rng.permutation(len(lines))]
  return [Piece(''.join(lines), 0.3), Piece(''.join(again), 1.0)]


def reading(room: Classroom, rng: np.random.Generator,
            dialogue) -> list[Piece]:
  """Passages, then questions about them, plainly or in the agent's tags."""
  subjects = sorted({s for s, _ in room.world.facts})
  shown = [room.about(str(s)) for s in rng.choice(subjects, 2, False)]
  keys = [(p.title, r) for p in shown for r in facts.RELATIONS
          if (p.title, r) in room.world.facts]
  subject, relation = keys[rng.integers(len(keys))]
  value = room.world.facts[subject, relation]
  if rng.random() < 0.5:
    chain = facts.Chain(subject, (relation,), (value,))
    body = '\n'.join(f'{p.title}\n{p.text}' for p in shown)
    return [Piece(f'{body}\n{text.ask(chain, rng)}', 0.3),
            Piece(f' {value}\n', 1.0)]
  return [
      Piece(f'<search> {subject} {relation}</search>', 0.3),
      Piece(_observation(dialogue, shown), 0.3),
      Piece(f'<think> {relation} {value}</think>\n'
            f'<answer> {value}</answer>', 1.0)]


def demonstration(
    room: Classroom,
    chain: facts.Chain,
    rng: np.random.Generator,
    dialogue,
    *,
    sloppiness: Sloppiness,
    eos: str,
    top_k: int = 2,
    max_turns: int = 6,
) -> list[Piece]:
  """An agent plans, searches fact by fact, and answers; sloppily.

  Args:
    room: the world and its engine.
    chain: the question's facts.
    rng: of every choice.
    dialogue: the protocol; see `agent.dialogue`.
    sloppiness: how often it errs.
    eos: the text of the token that ends a turn without an action.
    top_k: passages of a search.
    max_turns: the most actions.

  Returns:
    Pieces: the agent's turns have weight 1, what it reads 0.1.
  """
  s = sloppiness
  question = Question('lesson', text.ask(chain, rng), (chain.values[-1],))
  pieces = [Piece(dialogue.prompt(question.text), 0.1)]
  plan = _plan(chain, rng, s)
  here, note, shown = chain.start, '', ()
  for turn in range(max_turns):
    thought = ', '.join([note, *plan] if note else plan)
    if rng.random() < s.broken:
      pieces += [Piece(_broken(here, thought, rng, eos), 1.0),
                 Piece(dialogue.invalid, 0.1)]
      continue
    done = not plan or turn == max_turns - 1
    if done and rng.random() < s.go_on and turn < max_turns - 1:
      plan = [str(rng.choice(list(facts.RELATIONS)))]
      thought, done = ', '.join([note, *plan]), False
    hurry = s.give_up if note == 'nothing' else s.stop_early
    if done or (turn and rng.random() < hurry):
      if rng.random() < s.wrong_answer:
        here = _other(room, shown, here, rng)
      pieces.append(Piece(f'<think> {thought}</think>\n'
                          f'<answer> {here}</answer>', 1.0))
      return pieces
    name = here if rng.random() >= s.bad_query else _distraction(room, rng)
    query = f'{name} {plan[0]}'.strip()
    shown = room.search([Query(query, top_k, question)])[0]
    pieces += [Piece(f'<think> {thought}</think>\n<search> {query}</search>',
                     1.0),
               Piece(_observation(dialogue, shown), 0.1)]
    value = _read(room, shown, here, plan[0], rng, s)
    if value is None:
      note = 'nothing'  # the search missed: try again
    else:
      note, here, plan = f'{plan[0]} {value}', value, plan[1:]
  return pieces


def _plan(chain: facts.Chain, rng: np.random.Generator, sloppiness: Sloppiness
         ) -> list[str]:
  """The relations to look up; a wrong one among them, or one too few."""
  plan = list(chain.relations)
  if rng.random() < sloppiness.wrong_plan:
    plan[rng.integers(len(plan))] = str(rng.choice(list(facts.RELATIONS)))
    plan = plan[:max(1, len(plan) - int(rng.integers(2)))]
  return plan


def _observation(dialogue, passages: Sequence[Passage]) -> str:
  documents = '\n'.join(
      dialogue.passage(i, p) for i, p in enumerate(passages, start=1))
  return f'{dialogue.before}{documents}{dialogue.after}'


def _read(room: Classroom, shown: Sequence[Passage], here: str, relation: str,
          rng: np.random.Generator, sloppiness: Sloppiness) -> str | None:
  """What the agent reads off the passages; None if the fact is not there."""
  value = room.world.facts.get((here, relation))
  if value is None or not any(p.title == here for p in shown):
    return None
  if rng.random() < sloppiness.wrong_fact:
    return _other(room, shown, here, rng)
  return value


def _broken(here: str, thought: str, rng, eos: str) -> str:
  """A turn that a parser cannot read."""
  return (f'<think> {thought}</think>\n<search> {here}</answer>',
          f'<think> {thought}</think>\n{here}{eos}',
          f'{here} {eos}')[rng.integers(3)]


def _other(room: Classroom, shown, here: str, rng) -> str:
  """Another name from the passages that were shown, else from the world."""
  names = [n for n in room.mentioned(shown) if n != here]
  names = names or list(room.world.kind_of)
  return names[rng.integers(len(names))]


def _distraction(room: Classroom, rng) -> str:
  """The name in a bad query: none, or that of something unrelated."""
  names = list(room.world.kind_of)
  return '' if rng.random() < 0.4 else names[rng.integers(len(names))]


def documents(
    seed: int,
    make_search,
    dialogue,
    *,
    sloppiness: Sloppiness,
    eos: str,
    drills: int,
    readings: int,
    demonstrations: Sequence[int],
    fresh: float = 0.4,
) -> Iterator[list[Piece]]:
  """Yields all lessons about one small world, shuffled.

  Args:
    seed: of the world and of every choice; equal seeds give equal lessons.
    make_search: passages -> SearchFn.
    dialogue: the protocol.
    sloppiness: of the demonstrations.
    eos: the text of the token that ends a turn.
    drills: how many drills.
    readings: how many readings.
    demonstrations: how many demonstrations of 1, 2, ... hops.
    fresh: the share of worlds whose names are made of words never seen before.

  Yields:
    Documents as lists of pieces.
  """
  rng = np.random.default_rng([seed, 3])
  source = 'fresh' if rng.random() < fresh else 'known'
  world = facts.make(seed, sizes=SMALL, source=source)
  passages = text.passages(world)
  room = Classroom(world, passages, make_search(passages))
  lessons = [drill(room, rng) for _ in range(drills)]
  lessons += [reading(room, rng, dialogue) for _ in range(readings)]
  for hops, count in enumerate(demonstrations, start=1):
    chains = facts.chains(world, hops, rng)
    lessons += [demonstration(room, next(chains), rng, dialogue,
                              sloppiness=sloppiness, eos=eos)
                for _ in range(count)]
  for i in rng.permutation(len(lessons)):
    yield lessons[i]
