# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A scripted proposer: from a passage to a question, fact by fact, with habits.

It starts at a fact of the passage, searches for one fact after the other, and
asks for the last. A model that learns from it learns the form and the habits.
Reinforcement learning has to find out which questions are hard.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np

from searchrl.trajectory import Passage
from searchrl.world import facts
from searchrl.world import teacher
from searchrl.world import text
from searchrl.world.teacher import Classroom, Piece
from tools import lessons


@dataclasses.dataclass(frozen=True)
class Habits:
  """Probabilities of a proposer's deviations, at each opportunity."""

  short: float = 0.25  # question names the first hop: a fact less to find
  wrong_question: float = 0.1  # replaces a relation of the question
  wrong_answer: float = 0.1  # gives another name that it has read
  leak: float = 0.04  # writes the answer into the question
  unsearched: float = 0.04  # writes at once, about the first hop alone
  broken: float = 0.04  # writes no question, or no answer


def propose(room: Classroom, rng: np.random.Generator, dialogue, *,
            hops: Sequence[float], habits: Habits = Habits(), top_k: int = 2
           ) -> list[Piece]:
  """Returns a document in which a proposer asks about a random passage.

  Args:
    room: The world and its engine.
    rng: Generator of every choice.
    dialogue: Dialogue whose prompt asks for a question; see
      `papers.dr_zero.proposals.ask`.
    hops: Shares of 1, 2, ... requested hops.
    habits: Probabilities of deviations.
    top_k: Number of passages per search.

  Returns:
    Pieces. Its turns have weight 1, and the texts that it reads 0.1.
  """
  count = int(rng.choice(len(hops), p=np.array(hops) / sum(hops))) + 1
  shares = [0.0] * (count - 1) + [1.0]  # all chains have this many hops
  chain = lessons.random_chain(room.world, rng, shares, 0.3)
  document = room.stated[chain.facts[0]]
  pieces = [Piece(dialogue.prompt(
      f'Hops: {count}\nDocument: (Title: "{document.title}") {document.text}'
  ), 0.1)]
  known, shown = 1, [document]
  notes = [f'{chain.relations[0]} {chain.values[0]}']
  searches = 0 if rng.random() < habits.unsearched else count - 1
  for fact, value in zip(chain.facts[1:], chain.values[1:1 + searches]):
    passages = room.find(' '.join(fact), top_k)
    pieces += [Piece(f'<think> {", ".join([*notes, fact[1]])}</think>\n'
                     f'<search> {" ".join(fact)}</search>', 1.0),
               Piece(teacher.observation(dialogue, passages), 0.1)]
    shown += passages
    if not room.states(passages, fact):
      break
    known += 1
    notes.append(f'{fact[1]} {value}')
  return [*pieces, Piece(_written(room, _cut(chain, known), notes, shown, rng,
                                  habits), 1.0)]


def _cut(chain: facts.Chain, hops: int) -> facts.Chain:
  return facts.Chain(chain.start, chain.relations[:hops], chain.values[:hops])


def _written(room: Classroom, chain: facts.Chain, notes: Sequence[str],
             shown: Sequence[Passage], rng: np.random.Generator,
             habits: Habits) -> str:
  """Returns the last turn: a thought, the question and the answer."""
  answer = chain.values[-1]
  if rng.random() < habits.wrong_answer:
    answer = room.other(shown, answer, rng)
  if len(chain.values) > 1 and rng.random() < habits.short:
    chain = facts.Chain(chain.values[0], chain.relations[1:], chain.values[1:])
  if rng.random() < habits.wrong_question:
    relations = list(chain.relations)
    relations[rng.integers(len(relations))] = str(
        rng.choice(list(facts.RELATIONS)))
    chain = dataclasses.replace(chain, relations=tuple(relations))
  if rng.random() < habits.leak:
    chain = dataclasses.replace(chain, start=answer)
  question = f'<question> {text.ask(chain, rng)}</question>\n'
  ending = f'<answer> {answer}</answer>'
  if rng.random() < habits.broken:
    question, ending = (('', ending), (question, room.eos))[rng.integers(2)]
  return f'<think> {", ".join(notes)}</think>\n{question}{ending}'
