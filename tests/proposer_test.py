# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""proposer: its lessons are proposals that our own judge reads."""

import collections

import numpy as np
import pytest

from searchrl.agent import dialogue as dialogues
from searchrl.papers.dr_zero import proposals
from searchrl.papers.dr_zero import propose
from searchrl.papers.dr_zero import seeds
from searchrl.search import corpus
from searchrl.search import engines
from searchrl.trajectory import Action, Question, Trajectory, Turn
from searchrl.world import facts
from searchrl.world import teacher
from searchrl.world import text
from tools import proposer

FAULTLESS = proposer.Habits(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@pytest.fixture(scope='module')
def room():
  world = facts.make(8, sizes=facts.SMALL_SIZES, common=True)
  passages = corpus.Corpus(tuple(text.passages(world)))
  return teacher.Classroom(world, text.stated(world), engines.make(
      'bm25', passages), '<|endoftext|>')


def written(room, hops, habits, count=60):
  """(what the prompt asks, the turns, the proposal, what is true of it)."""
  rng, dialogue = np.random.default_rng(0), dialogues.tags('{question}')
  for _ in range(count):
    pieces = proposer.propose(
        room, rng, dialogue, hops=[0.0] * (hops - 1) + [1.0], habits=habits)
    turns = [piece.text for piece in pieces if piece.weight == 1.0]
    found = proposals.read(Trajectory(Question('', '', ()), 0, 0, (), (
        Turn((), (), Action('answer'), text=turns[-1]),)))
    yield pieces[0].text, turns, found, propose.truth(
        room.world, Question('q', found.question, (found.answer,)))


@pytest.mark.parametrize('hops', [1, 2, 3])
def test_a_faultless_proposer_asks_what_is_asked_for(room, hops):
  for asked, turns, proposal, truth in written(room, hops, FAULTLESS):
    assert proposal.passes and truth == (True, hops)
    assert len(turns) == hops
    actions = [dialogues.parse_tags(turn).kind for turn in turns]
    assert actions == ['search'] * (hops - 1) + ['answer']
    assert all(turn.startswith('<think>') for turn in turns)
    shown = proposals.document_of(Question('q', asked, ()))
    assert asked == proposals.ask(shown, hops)
    assert asked in {proposals.ask(seeds._document(p, _Tokens, 99), hops)
                     for p in room.stated.values()}


class _Tokens:
  encode_data = staticmethod(lambda text: ())


def test_a_proposer_that_names_the_first_hop_needs_a_fact_less(room):
  habits = proposer.Habits(1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
  assert {truth for *_, truth in written(room, 2, habits)} == {(True, 1)}
  assert {truth for *_, truth in written(room, 1, habits)} == {(True, 1)}


def test_habits_show_in_what_is_written(room):
  of = lambda **habits: [*written(room, 2, proposer.Habits(**dict(
      short=0.0, wrong_question=0.0, wrong_answer=0.0, leak=0.0,
      unsearched=0.0, broken=0.0) | habits))]
  assert not any(truth.true for *_, truth in of(wrong_answer=1.0))
  assert all(not p.passes for *_, p, _ in of(leak=1.0))
  assert {len(turns) for _, turns, *_ in of(unsearched=1.0)} == {1}
  assert all(truth == (True, 1) for *_, truth in of(unsearched=1.0))
  assert all(not (p.question and p.answer) for *_, p, _ in of(broken=1.0))
  true = collections.Counter(t.true for *_, t in of(wrong_question=1.0))
  assert true[False] > true[True]
