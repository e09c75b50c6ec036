# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""oracle: it understands every question of a world, and nothing else."""

import dataclasses

import numpy as np
import pytest

from searchrl.papers.dr_zero import oracle
from searchrl.papers.dr_zero import propose
from searchrl.trajectory import Question
from searchrl.world import facts
from searchrl.world import text

WORLD = facts.make(5, common=True)


@pytest.mark.parametrize('hard', [False, True])
def test_every_question_of_a_world_is_understood(hard):
  world = facts.make(6, common=True, hard=hard)
  rng = np.random.default_rng(0)
  for hops in (1, 2, 3, 4):
    found = facts.chains(world, hops, rng, ('fresh', 'famous', 'outdated'))
    for _ in range(200):
      chain = next(found)
      assert oracle.understand(world, text.ask(chain, rng)) == chain


@pytest.mark.parametrize('change', [
    lambda q: q + ' now', lambda q: q.replace('the ', ''),
    lambda q: q.replace('What', 'Who'), lambda q: q[:-1], lambda q: '',
    lambda q: 'What is the author of the river?',
    lambda q: 'What is the Tarn?', lambda q: 'What is the birthplace of Nobody?'])
def test_what_is_no_question_of_the_world_is_not_understood(change):
  rng = np.random.default_rng(1)
  chain = next(facts.chains(WORLD, 2, rng))
  relations = [text.PHRASES[r][0] for r in chain.relations]
  question = f'What is the {relations[1]} the {relations[0]} {chain.start}?'
  assert oracle.understand(WORLD, question) == chain
  assert oracle.understand(WORLD, change(question)) is None


def test_a_relation_that_the_subject_has_not_is_no_question():
  city = WORLD.entities['city'][0]
  assert oracle.understand(WORLD, f'What is the birthplace of {city}?') is None


def test_truth_is_of_the_last_fact_and_counts_the_hops():
  chain = next(facts.chains(WORLD, 3, np.random.default_rng(2)))
  asked = Question('q', text.ask(chain, np.random.default_rng(0)),
                   (chain.values[-1],), 1)
  assert propose.truth(WORLD, asked) == (True, 3)
  for wrong in (chain.values[0], chain.start, ''):
    assert propose.truth(
        WORLD, dataclasses.replace(asked, answers=(wrong,))) == (False, 3)
  assert propose.truth(
      WORLD, dataclasses.replace(asked, text='Why?')) == (False, 0)
