# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""teacher: a careful agent is right, and each habit shows."""

import dataclasses

import numpy as np
import pytest

from searchrl.agent import dialogue as dialogues
from searchrl.agent import rewards
from searchrl.search.corpus import Corpus
from searchrl.search.index import bm25
from searchrl.world import facts
from searchrl.world import teacher
from searchrl.world import text

DIALOGUE = dialogues.tags()
CAREFUL = teacher.Habits(**{
    f.name: 0.0 for f in dataclasses.fields(teacher.Habits)})


@pytest.fixture(scope='module')
def room():
  world = facts.make(3, sizes=facts.SMALL_SIZES, common=True)
  return teacher.Classroom(world, text.stated(world), bm25.bm25(
      Corpus(tuple(text.passages(world)))), '<|eos|>')


def played(room, habits, hops=2, count=60, topics=('fresh',)):
  """(chain, actions) of demonstrations."""
  rng = np.random.default_rng(hops)
  chains = facts.chains(room.world, hops, rng, topics)
  for chain, _ in zip(chains, range(count)):
    pieces = teacher.demonstration(room, chain, rng, DIALOGUE, habits=habits)
    yield chain, [DIALOGUE.parse(piece.text) for piece in pieces[1::2]], pieces


def is_right(chain, actions):
  return actions[-1].kind == 'answer' and rewards.exact_match(
      actions[-1].texts[0], chain.values[-1:])


@pytest.mark.parametrize('hops', [1, 2, 3, 4])
def test_a_careful_demonstration_follows_the_facts_to_the_answer(room, hops):
  for chain, actions, pieces in played(room, CAREFUL, hops, count=20):
    assert [a.kind for a in actions] == ['search'] * hops + ['answer']
    subjects = (chain.start, *chain.values)
    for action, subject, relation in zip(actions, subjects, chain.relations):
      assert action.texts == (f'{subject} {relation}',)
    assert is_right(chain, actions)
    for piece in pieces[2::2]:
      assert piece.text.startswith(DIALOGUE.before)
      assert piece.text.endswith(DIALOGUE.after)


def test_the_agents_turns_are_learned_and_what_it_reads_hardly(room):
  for _, _, pieces in played(room, teacher.Habits()):
    weights = [piece.weight for piece in pieces]
    count = len(weights)
    assert weights == [0.1, *[1.0, 0.1] * (count // 2)][:count]


def test_sloppy_demonstrations_err_in_every_way(room):
  runs = list(played(room, teacher.Habits(), count=200))
  kinds = [[a.kind for a in actions] for _, actions, _ in runs]
  assert any('invalid' in k for k in kinds)
  assert {len(k) for k in kinds} >= {2, 3, 4}
  right = np.mean([is_right(chain, actions) for chain, actions, _ in runs])
  assert 0.05 < right < 0.8  # room for reinforcement learning


def with_habit(**habits):
  return dataclasses.replace(CAREFUL, **habits)


def test_who_answers_at_once_remembers_what_was_common_knowledge(room):
  habits = with_habit(at_once=1.0)
  for topics, expected in ((('famous',), True), (('outdated',), False)):
    for chain, actions, _ in played(room, habits, topics=topics, count=10):
      assert [a.kind for a in actions] == ['answer']
      assert is_right(chain, actions) == expected
      assert actions[0].texts == (facts.remembered(room.world, chain)[-1],)
  guesses = [is_right(chain, actions)
             for chain, actions, _ in played(room, habits)]
  assert np.mean(guesses) < 0.3  # a name of the right kind


@pytest.mark.parametrize('recite', [0.0, 1.0])
def test_who_recites_goes_fact_by_fact_through_what_it_remembers(room, recite):
  habits = with_habit(at_once=1.0, recite=recite)
  for chain, _, pieces in played(room, habits, topics=('outdated',), count=10):
    steps = zip(chain.relations, facts.remembered(room.world, chain))
    recited = ', '.join(f'{relation} {value}' for relation, value in steps)
    assert recited != ', '.join(chain.relations)
    assert pieces[1].text.startswith(
        f'<think> {recited if recite else ", ".join(chain.relations)}</think>')
  for chain, _, pieces in played(room, habits, count=10):  # nothing to recite
    assert pieces[1].text.startswith(
        f'<think> {", ".join(chain.relations)}</think>')


def test_who_stops_early_searches_once(room):
  for chain, actions, _ in played(room, with_habit(stop_early=1.0), hops=3):
    assert [a.kind for a in actions] == ['search', 'answer']
    assert actions[-1].texts == (chain.values[0],)


def test_who_breaks_the_format_never_acts(room):
  for _, actions, _ in played(room, with_habit(broken=1.0), count=20):
    assert {a.kind for a in actions} == {'invalid'}
