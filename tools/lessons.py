# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Lessons: documents about generated worlds that train the tiny base model.

A lesson is a function (room, rng, dialogue, **options) -> pieces. A config
names the lessons of a model, their prompts, options and numbers. The lessons
are drills (facts are listed, then repeated, to teach copying from the context),
readings (a passage, then a question about it), recalls (a question about common
knowledge, answered from memory), given passages (a question below the passages
that a search for it finds) and searches (an agent searches, then answers).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

from searchrl.trajectory import Passage, SearchFn
from searchrl.world import facts
from searchrl.world import names
from searchrl.world import teacher
from searchrl.world import text
from searchrl.world.teacher import Classroom, Piece

Lesson = Callable[..., list[Piece]]


def random_chain(world: facts.World, rng: np.random.Generator,
                 hops: Sequence[float], common: float) -> facts.Chain:
  """Returns a random chain of facts.

  Args:
    world: World of the facts.
    rng: Generator of the choices.
    hops: Shares of 1, 2, ... hops.
    common: Share of chains of common knowledge.
  """
  number = int(rng.choice(len(hops), p=np.array(hops) / sum(hops))) + 1
  topics: tuple[facts.Topic, ...] = (
      ('famous', 'outdated') if rng.random() < common else ('fresh',))
  return next(facts.chains(world, number, rng, topics))


def drill(room: Classroom, rng: np.random.Generator, dialogue=None
         ) -> list[Piece]:
  """Returns facts in a list, then some of them again in another order."""
  del dialogue
  keys = [fact for fact in room.world.facts if fact not in room.world.memory]
  chosen = [keys[i] for i in rng.choice(len(keys), rng.integers(3, 9), False)]
  lines = [f'{s} {r} {room.world.facts[s, r]}\n' for s, r in chosen]
  again = [lines[i] for i in rng.permutation(len(lines))]
  return [Piece(''.join(lines), 0.3), Piece(''.join(again), 1.0)]


def reading(room: Classroom, rng: np.random.Generator,
            dialogue) -> list[Piece]:
  """Returns passages, then a question, as plain text or in the agent's tags."""
  keys = list(room.world.facts)
  first = keys[rng.integers(len(keys))]
  others = [fact for fact in keys if fact[0] != first[0]]
  chosen = [first, others[rng.integers(len(others))]]
  shown = [room.stated[fact] for fact in chosen]
  subject, relation = chosen[rng.integers(2)]
  value = room.world.facts[subject, relation]
  if rng.random() < 0.5:
    chain = facts.Chain(subject, (relation,), (value,))
    body = '\n'.join(f'{p.title}\n{p.text}' for p in shown)
    return [Piece(f'{body}\n{text.ask(chain, rng)}', 0.3),
            Piece(f' {value}\n', 1.0)]
  return [
      Piece(f'<search> {subject} {relation}</search>', 0.3),
      Piece(teacher.observation(dialogue, shown), 0.3),
      Piece(f'<think> {relation} {value}</think>\n'
            f'<answer> {value}</answer>', 1.0)]


def recall(room: Classroom, rng: np.random.Generator, dialogue, *,
           hops: Sequence[float], fresh: float, thought: float) -> list[Piece]:
  """Returns a question, answered from memory, or by a guess without memory.

  Args:
    room: Room whose world's memory answers the questions.
    rng: Generator of the choices.
    dialogue: Dialogue whose prompt asks for an answer at once.
    hops: Shares of 1, 2, ... hops.
    fresh: Share of questions about facts that nobody can remember.
    thought: Share of answers after a thought, which goes fact by fact.
  """
  world = room.world
  if rng.random() < fresh:
    chain = random_chain(room.world, rng, hops, 0.0)
    kind = world.kind_of[chain.values[-1]]
    guess = str(rng.choice(world.entities[kind]))
    chain, steps = dataclasses.replace(chain, values=(guess,)), ''
  else:
    number = int(rng.choice(len(hops), p=np.array(hops) / sum(hops))) + 1
    chain = next(facts.chains(facts.common_knowledge(), number, rng))
    steps = ', '.join(f'{r} {x}' for r, x in zip(chain.relations, chain.values))
  think = (f'<think> {steps or chain.relations[-1]}</think>\n'
           if rng.random() < thought else '')
  return [Piece(dialogue.prompt(text.ask(chain, rng)), 0.1),
          Piece(f'{think}<answer> {chain.values[-1]}</answer>', 1.0)]


def given(room: Classroom, rng: np.random.Generator, dialogue, *,
          hops: Sequence[float], common: float, top_k: int) -> list[Piece]:
  """Returns a question below the passages that a search finds, and its answer.

  The reader follows the facts only as far as the passages state them. The
  answer of a question of several hops is therefore wrong if one is missing.

  Args:
    room: The world and its engine.
    rng: Generator of the choices.
    dialogue: Dialogue whose prompt asks to read, then to answer.
    hops: Shares of 1, 2, ... hops.
    common: Share of questions about common knowledge.
    top_k: Number of passages.
  """
  chain = random_chain(room.world, rng, hops, common)
  question = text.ask(chain, rng)
  shown = room.find(question, top_k)
  read = []
  for fact, value in zip(chain.facts, chain.values):
    if not room.states(shown, fact):
      break
    read.append((fact[1], value))
  answer = read[-1][1] if read else room.other(shown, chain.start, rng)
  steps = ', '.join(f'{relation} {value}' for relation, value in read)
  return [
      Piece(dialogue.prompt(with_passages(dialogue, shown, question)), 0.1),
      Piece(f'<think> {steps or "nothing"}</think>\n'
            f'<answer> {answer}</answer>', 1.0)]


def with_passages(dialogue, passages: Sequence[Passage], question: str) -> str:
  """Returns a question below passages, one per line, as in `agent.dialogue`."""
  lines = [dialogue.passage(i, p) for i, p in enumerate(passages, start=1)]
  return '\n'.join([*lines, question])


def search(room: Classroom, rng: np.random.Generator, dialogue, *,
           hops: Sequence[float], common: float, habits: teacher.Habits,
           top_k: int = 2, max_turns: int = 6) -> list[Piece]:
  """Returns a document in which the agent answers a random question.

  Args:
    room: The world and its engine.
    rng: Generator of every choice.
    dialogue: The protocol; see `agent.dialogue`.
    hops: Shares of questions of 1, 2, ... hops.
    common: Share of questions about common knowledge.
    habits: Probabilities of errors.
    top_k: Number of passages per search.
    max_turns: Largest number of actions.

  Returns:
    Pieces. The agent's turns have weight 1, and the texts that it reads 0.1.
  """
  return teacher.demonstration(
      room, random_chain(room.world, rng, hops, common), rng, dialogue,
      habits=habits, top_k=top_k, max_turns=max_turns)


def documents(
    seed: int,
    make_search: Callable[[Sequence[Passage]], SearchFn],
    lessons: Mapping[str, tuple[Lesson, Any, Mapping[str, Any]]],
    counts: Mapping[str, int],
    *,
    eos: str,
    fresh: float,
    hard: float,
    common: bool,
) -> Iterator[list[Piece]]:
  """Yields all lessons about one small world, shuffled.

  Args:
    seed: Seed of the world and of every choice; equal seeds give equal lessons.
    make_search: Function from passages to a SearchFn.
    lessons: Lesson, dialogue and options, by name.
    counts: Number of documents of each lesson, by name.
    eos: Text of the token that ends a turn.
    fresh: Share of worlds whose names are made of words never seen before.
    hard: Share of hard worlds; see `world.hard`.
    common: Whether worlds have common knowledge.

  Yields:
    Documents as lists of pieces.
  """
  rng = np.random.default_rng([seed, 3])
  source: names.NameSource = 'fresh' if rng.random() < fresh else 'known'
  world = facts.make(seed, sizes=facts.SMALL_SIZES, source=source,
                     common=common, hard=rng.random() < hard)
  room = Classroom(world, text.stated(world), make_search(text.passages(world)),
                   eos)
  taught = [lesson(room, rng, dialogue, **options)
            for name, (lesson, dialogue, options) in lessons.items()
            for _ in range(counts.get(name, 0))]
  for i in rng.permutation(len(taught)):
    yield taught[i]
