# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""hard: namesakes, several passages an entity, and wordings of their own."""

import collections
import re

import numpy as np
import pytest

from searchrl.search.corpus import Corpus
from searchrl.search.index import bm25
from searchrl.trajectory import Query, Question
from searchrl.world import facts
from searchrl.world import hard
from searchrl.world import names
from searchrl.world import text

LARGE = {kind: int(4.4 * size) for kind, size in facts.SIZES.items()}


@pytest.fixture(scope='module', params=['known', 'fresh', 'unseen'])
def world(request):
  return facts.make(3, sizes=facts.SMALL_SIZES, source=request.param, hard=True)


def templates():
  groups = [*hard.STATEMENTS.values(), *hard.DISTRACTORS.values(),
            hard._NAMESAKE]
  return [re.sub(r'\{\w+\}', '', form) for group in groups for form in group]


def test_no_sentence_has_a_word_of_a_relation_or_of_a_question():
  asked = {term for phrases in text.PHRASES.values() for phrase in phrases
           for term in bm25.analyze(phrase)}
  asked |= {term for relation in facts.RELATIONS
            for term in bm25.analyze(relation)}
  said = {term for form in templates() for term in bm25.analyze(form)}
  assert len(asked) > 30 and len(said) > 50
  assert not asked & said


def test_equal_seeds_make_equal_hard_worlds_and_no_plain_one():
  def make(seed, **options):
    made = facts.make(seed, sizes=facts.SMALL_SIZES, **options)
    return made, text.passages(made), text.questions(made, (6, 5, 4, 3))
  assert make(7, hard=True) == make(7, hard=True)
  assert make(7, hard=True)[1] != make(8, hard=True)[1]
  assert make(7, hard=False) == make(7)
  assert not set(make(7)[1]) & set(make(7, hard=True)[1])


def test_each_fact_stands_on_a_passage_of_its_own(world):
  stated = text.stated(world)
  assert set(stated) == set(world.facts)
  assert len({p.id for p in stated.values()}) == len(stated)
  for (subject, relation), passage in stated.items():
    assert passage.title == subject
    value = world.facts[subject, relation]
    assert any(subject in sentence and value in sentence
               for sentence in re.split(r'(?<=\.) ', passage.text))
  assert set(stated.values()) <= set(text.passages(world))


def test_an_entity_with_facts_has_two_or_three_passages(world):
  counts = collections.Counter(p.title for p in text.passages(world))
  assert set(counts) == set(world.kind_of)
  subjects = {subject for subject, _ in world.facts}
  assert {counts[name] for name in subjects} == {2, 3}


def test_names_are_unique_and_many_have_namesakes(world):
  kind_of = world.kind_of
  assert len(kind_of) == sum(facts.SMALL_SIZES.values())
  groups = collections.Counter(
      (kind, names.stem(kind, name)) for name, kind in kind_of.items())
  shared = sum(count for count in groups.values() if count > 1)
  assert .5 < shared / len(kind_of) < .95


@pytest.mark.parametrize('kind, stem, form', [
    ('person', 'Mirela Torsen', 'Mirela Torsen the Younger'),
    ('city', 'Korvik', 'New Korvik'), ('city', 'Korvik', 'Korvik Falls'),
    ('company', 'Saltex Works', 'Royal Saltex Works'),
    ('river', 'Elbava River', 'Upper Elbava River'),
    ('mountain', 'Mount Torhorn', 'Mount Torhorn East')])
def test_a_namesake_has_the_stem_and_aliases_of_its_entity(kind, stem, form):
  assert names.stem(kind, form) == names.stem(kind, stem) == stem
  assert names.aliases(kind, form) == names.aliases(kind, stem)


def test_no_alias_belongs_to_two_entities(world):
  owners = collections.Counter(
      (kind, alias) for name, kind in world.kind_of.items()
      for alias in world.answers(name))
  assert set(owners.values()) == {1}


def test_plain_names_are_their_own_stems():
  for source in ('known', 'unseen'):
    for name, kind in facts.make(4, source=source).kind_of.items():
      assert names.stem(kind, name) == name


@pytest.mark.parametrize('source', ['known', 'unseen'])
def test_known_parts_suffice_for_five_thousand_passages(source):
  large = facts.make(1, sizes=LARGE, source=source, hard=True)
  assert 4_800 < len(text.passages(large)) < 5_200
  assert len(large.kind_of) == sum(LARGE.values())


def test_common_knowledge_is_written_in_the_same_way():
  both = facts.make(3, sizes=facts.SMALL_SIZES, common=True, hard=True)
  stated = text.stated(both)
  assert both.hard and len(both.memory) == 200
  assert all(stated[fact].title == fact[0] for fact in both.memory)
  assert not any(names.stem(kind, name) != name for name, kind in
                 facts.common_knowledge().kind_of.items())


def test_words_alone_find_about_two_facts_of_three():
  """Recall@2 of BM25 by an agent's right query, on unseen names."""
  world = facts.make(77, source='unseen', hard=True)
  stated = text.stated(world)
  search = bm25.bm25(Corpus(tuple(text.passages(world))))
  keys = list(stated)
  found = search([Query(f'{subject} {relation}', 2, Question('', '', ()))
                  for subject, relation in keys])
  recall = np.mean([stated[key].id in {p.id for p in passages}
                    for key, passages in zip(keys, found)])
  assert .62 < recall < .78
