# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""lessons: what each kind of lesson teaches is true, or is meant not to be."""

import re

import numpy as np
import pytest

from searchrl.agent import dialogue as dialogues
from searchrl.search.corpus import Corpus
from searchrl.search.index import bm25
from searchrl.world import facts
from searchrl.world import teacher
from searchrl.world import text
from tools import lessons

ANSWER = dialogues.tags('Answer: {question}\n')
READ = dialogues.tags('Read, then answer: {question}\n')


def engine(passages):
  return bm25.bm25(Corpus(tuple(passages)))


@pytest.fixture(scope='module', params=[False, True], ids=['plain', 'hard'])
def room(request):
  world = facts.make(3, sizes=facts.SMALL_SIZES, common=True,
                     hard=request.param)
  return teacher.Classroom(
      world, text.stated(world), engine(text.passages(world)), '<|eos|>')


def answer_of(piece):
  return re.search('<answer> (.*)</answer>', piece.text)[1]


def test_a_reading_asks_what_its_passages_state(room):
  rng = np.random.default_rng(0)
  for _ in range(30):
    *shown, told = lessons.reading(room, rng, dialogues.tags())
    value = (answer_of(told) if '<answer>' in told.text else told.text.strip())
    assert value in ' '.join(piece.text for piece in shown)
    assert told.weight == 1.0 > max(piece.weight for piece in shown)


def test_a_recall_answers_from_memory_even_if_the_world_has_changed(room):
  rng = np.random.default_rng(0)
  thoughts = 0
  for _ in range(60):
    prompt, told = lessons.recall(
        room, rng, ANSWER, hops=(1,), fresh=0.0, thought=0.5)
    assert prompt.text.startswith('Answer: ')
    assert answer_of(told) in {
        value for (subject, _), value in room.world.memory.items()
        if subject in prompt.text}
    thoughts += '<think>' in told.text
  assert 15 < thoughts < 45


def test_a_recall_of_what_nobody_remembers_is_a_guess_of_the_right_kind(room):
  rng = np.random.default_rng(0)
  kinds = {room.world.kind_of[answer_of(lessons.recall(
      room, rng, ANSWER, hops=(1,), fresh=1.0, thought=0.0)[1])]
           for _ in range(40)}
  assert kinds <= {kind for _, kind in facts.RELATIONS.values()}


def test_who_reads_given_passages_goes_as_far_as_they_go(room):
  rng = np.random.default_rng(1)
  complete = 0
  for _ in range(40):
    prompt, told = lessons.given(room, rng, READ, hops=(2, 1), common=0.2,
                                 top_k=3)
    assert prompt.text.count('Doc ') == 3
    assert prompt.text.startswith('Read, then answer: Doc 1(Title: ')
    if '<think> nothing' not in told.text:
      assert answer_of(told) in prompt.text
      complete += 1
  assert complete > 10


def test_documents_of_equal_seeds_are_equal():
  taught = {
      'drill': (lessons.drill, None, {}),
      'reading': (lessons.reading, dialogues.tags(), {}),
      'search': (lessons.search, dialogues.tags(), dict(
          hops=(2, 1), common=0.1, habits=teacher.Habits()))}
  def documents(seed):
    return list(lessons.documents(
        seed, engine, taught, dict(drill=2, reading=2, search=3),
        eos='<|eos|>', fresh=0.5, hard=0.5, common=True))
  assert documents(1) == documents(1)
  assert documents(1) != documents(2)
  assert len(documents(1)) == 7


def test_searches_follow_the_shares_of_hops_and_of_common_knowledge(room):
  rng = np.random.default_rng(0)
  chains = [lessons.random_chain(room.world, rng, (3, 0, 1), 0.5)
            for _ in range(300)]
  hops = np.array([len(chain.relations) for chain in chains])
  assert set(hops) == {1, 3} and 0.65 < np.mean(hops == 1) < 0.85
  common = [facts.topic(room.world, c) != 'fresh' for c in chains]
  assert 0.4 < np.mean(common) < 0.6
