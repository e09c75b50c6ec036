# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""world: facts, passages and questions agree with each other."""

import re

import numpy as np
import pytest

from searchrl.world import facts
from searchrl.world import names
from searchrl.world import text

# Words of names and sentences that every world shares.
_FORMS = {'River', 'Sea', 'Mount', 'The', 'Of', 'Works', 'Group', 'Lines',
          'Foods', 'Motors', 'Press', 'Garden', 'Winter', 'Letter', 'Harbour',
          'Mirror', 'Orchard', 'Lantern', 'Bridge'}


@pytest.fixture(scope='module')
def world():
  return facts.make(3, sizes=facts.SMALL_SIZES)


def words_of(world):
  return {word for name in world.kind_of for word in name.split()} - _FORMS


@pytest.mark.parametrize('source', ['known', 'fresh', 'unseen'])
def test_equal_seeds_make_equal_worlds(source):
  def make(seed):
    world = facts.make(seed, sizes=facts.SMALL_SIZES, source=source)
    return world, text.passages(world), text.questions(world, (6, 5, 4, 3))
  assert make(7) == make(7)
  (one, passages, questions), (two, *others) = make(7), make(8)
  assert one.facts != two.facts
  assert passages != others[0] and questions != others[1]


def test_every_subject_has_one_object_of_the_right_kind(world):
  kind_of = world.kind_of
  assert len(kind_of) == sum(facts.SMALL_SIZES.values())  # names are unique
  for relation, (subject, value) in facts.RELATIONS.items():
    for name in world.entities[subject]:
      assert kind_of[world.facts[name, relation]] == value
  assert len(world.facts) == sum(
      facts.SMALL_SIZES[kind] for kind, _ in facts.RELATIONS.values())


def test_passages_state_each_fact_of_their_subject(world):
  about = {p.title: p.text for p in text.passages(world)}
  assert set(about) == set(world.kind_of)
  for (subject, _), value in world.facts.items():
    assert any(subject in sentence and value in sentence
               for sentence in re.split(r'(?<=\.) ', about[subject]))


def test_passages_have_ids_of_their_own_and_another_order_each_world(world):
  passages = text.passages(world)
  assert [p.id for p in passages] == [str(n) for n in range(len(passages))]
  assert [p.title for p in passages] != list(world.kind_of)


def test_chains_follow_facts_and_never_return(world):
  rng = np.random.default_rng(0)
  for hops in range(1, 5):
    chains = facts.chains(world, hops, rng)
    for _ in range(100):
      chain = next(chains)
      here = chain.start
      for relation, value in zip(chain.relations, chain.values, strict=True):
        here = world.facts[here, relation]
        assert here == value
      assert len({chain.start, *chain.values}) == hops + 1


def follow(world, question):
  """Answers a question by reading it: the start, then relations backwards."""
  phrase = next(question[len(a):-len(b)] for a, b in (
      form.split('{}') for form in text.ASKS)
                if question.startswith(a) and question.endswith(b))
  relations = []
  while phrase not in world.kind_of:
    read = [(relation, phrase[len(p):].strip())
            for relation, phrases in text.PHRASES.items() for p in phrases
            if phrase.startswith(f'{p} ')]
    assert len(read) == 1, f'{phrase!r} can be read in {len(read)} ways'
    relation, phrase = read[0]
    relations.append(relation)
    if phrase not in world.kind_of:
      phrase = phrase.removeprefix('the ')
  here = phrase
  for relation in reversed(relations):
    here = world.facts[here, relation]
  return here, len(relations)


@pytest.mark.parametrize('source', ['known', 'unseen'])
def test_following_the_facts_answers_every_question(source):
  world = facts.make(5, source=source)
  questions = text.questions(world, (80, 80, 80, 80), data_source='d')
  for q in questions:
    answer, hops = follow(world, q.text)
    assert (q.answers[0], q.hops) == (answer, hops)
    assert q.answers == world.answers(answer)
    assert q.data_source == f'd_{hops}hop'


def test_questions_are_distinct_in_text_and_uid(world):
  questions = text.questions(world, (60, 60, 60, 60))
  more = text.questions(world, (60, 60), seed=1)
  assert len({q.text for q in questions}) == 240
  assert len({q.uid for q in [*questions, *more]}) == 360
  assert [q.text for q in questions[:60]] != [q.text for q in more[:60]]


def test_aliases_count_as_right():
  assert names.aliases('river', 'Elbava River') == ('Elbava',)
  assert names.aliases('sea', 'Brolic Sea') == ('Sea of Brolic',)
  assert names.aliases('mountain', 'Mount Torhorn') == ('Torhorn',)
  assert names.aliases('company', 'Saltex Works') == ('Saltex',)
  assert names.aliases('person', 'Mirela Torsen') == ()
  assert names.aliases('city', 'Korvik') == ()


def test_aliases_name_one_entity():
  """Otherwise a wrong answer could count as right."""
  big = facts.make(1)
  owners = {}
  for name, kind in big.kind_of.items():
    for alias in big.answers(name):
      owners.setdefault((kind, alias), set()).add(name)
  assert not {a for a, group in owners.items() if len(group) > 1}
  assert any(len(big.answers(n)) > 1 for n in big.entities['company'])


def test_impossible_worlds_and_questions_are_refused():
  with pytest.raises(ValueError, match='citty'):
    facts.make(0, sizes={'citty': 3})
  with pytest.raises(ValueError, match='names'):
    facts.make(0, sizes={'city': 1000})
  one = facts.make(0, sizes={kind: 1 for kind in facts.SIZES})
  with pytest.raises(ValueError, match='7 hops'):
    text.questions(one, (0, 0, 0, 0, 0, 0, 1))


def test_unseen_worlds_share_no_name_part_with_the_others():
  unseen, others = set(), set()
  for seed in range(6):
    unseen |= words_of(facts.make(seed, source='unseen'))
  for seed in range(12):
    for source in ('known', 'fresh'):
      world = facts.make(seed, source=source)
      others |= words_of(world)
      for passage in text.passages(world):
        others |= set(re.findall(r'\w+', passage.text)) - _FORMS
  others |= {word for words in names.INVENTORY.values() for word in words}
  assert len(unseen) > 500
  lower = {word.lower() for word in others}
  assert not {word for word in unseen if word.lower() in lower}


def test_fresh_worlds_have_words_that_known_ones_lack():
  known = {word for words in names.INVENTORY.values() for word in words}
  fresh = words_of(facts.make(0, source='fresh'))
  assert len(fresh - known) > 0.5 * len(fresh)
  assert words_of(facts.make(0)) <= known


@pytest.mark.parametrize('sizes', [{'city': 91}, {'sea': 25},
                                   {'company': 60 * 6 + 1}])
def test_more_entities_than_names_are_refused(sizes):
  (kind, size), = sizes.items()
  message = rf"sizes\['{kind}'\] is {size}, but the 'known' source has only"
  with pytest.raises(ValueError, match=f'{message}.*use source="fresh"'):
    facts.make(0, sizes=sizes)


def test_more_questions_than_chains_are_refused(world):
  with pytest.raises(ValueError, match=r'per_hop\[0\] asks for 900 questions'):
    text.questions(world, (900,))


@pytest.fixture(scope='module')
def knowing():
  return facts.make(3, sizes=facts.SMALL_SIZES, common=True)


def test_common_knowledge_leaves_the_rest_of_a_world_as_it_was(world, knowing):
  own = {fact: value for fact, value in knowing.facts.items()
         if fact not in knowing.memory}
  assert own == world.facts
  assert text.questions(knowing, (6, 5, 4, 3)) == text.questions(
      world, (6, 5, 4, 3))


def test_common_knowledge_is_the_same_in_every_world_but_for_what_changed():
  one, two = (facts.make(n, sizes=facts.SMALL_SIZES, common=True)
              for n in (3, 4))
  assert one.memory == two.memory and len(one.memory) == 200
  changed = [{f for f in w.memory if w.memory[f] != w.facts[f]}
             for w in (one, two)]
  assert [len(c) for c in changed] == [30, 30] and changed[0] != changed[1]
  kind_of = one.kind_of
  for fact, value in one.memory.items():
    assert kind_of[one.facts[fact]] == kind_of[value]


@pytest.mark.parametrize('source', ['known', 'fresh', 'unseen'])
def test_no_other_name_has_a_part_of_common_knowledge(source):
  common = words_of(facts.common_knowledge())
  assert not common & words_of(facts.make(5, source=source))


@pytest.mark.parametrize('topic', ['famous', 'outdated'])
@pytest.mark.parametrize('hops', [1, 2, 3])
def test_a_topic_says_what_memory_answers(knowing, topic, hops):
  chains = facts.chains(knowing, hops, np.random.default_rng(0), (topic,))
  for chain, _ in zip(chains, range(20)):
    here = chain.start
    for relation in chain.relations:
      here = knowing.memory[here, relation]
    assert (here == chain.values[-1]) == (topic == 'famous')
    assert chain.start in facts.common_knowledge().kind_of


def test_test_questions_end_in_facts_that_training_never_asks(knowing):
  def asked(split):
    return {q.text: q for q in text.questions(
        knowing, (300, 60), topics=('famous', 'outdated'), split=split)}
  train, test = asked('train'), asked('test')
  assert len(train) > 100 and len(test) > 40
  def relations(texts):  # one hop: the question names subject and relation
    return {(q.answers[0], q.text.rstrip('.?').split(' of ')[-1])
            for q in texts.values() if q.hops == 1}
  assert not relations(train) & relations(test)
