# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""documents: coins and seeds of tasks, prompts to the byte, the parser."""

import hashlib
import itertools
import re

import pytest
import tiny

from searchrl.papers.zerosearch import documents
from searchrl.papers.zerosearch import simulator_prompts
from searchrl.trajectory import Query, SearchError

PROMPTS = simulator_prompts.Prompts(
    '+ {query} | {problem} | {ground_truth}',
    '- {query} | {problem} | {ground_truth}')


def query(text='river', uid='q', step=0, sample=0, turn=0, **fields):
  return Query(text, 2, tiny.question(uid, **fields), step, sample, turn)


def task(useful=True, **fields):
  return documents.Task(query(**fields), useful, seed=7)


# Tasks ------------------------------------------------------------------------

def test_a_task_depends_on_each_part_of_its_query_and_on_the_seed():
  plain = documents.task(query(), noise=0.5, seed=0)
  assert plain == documents.task(query(), noise=0.5, seed=0)
  others = [documents.task(query(**fields), noise=0.5, seed=0) for fields in (
      dict(text='sea'), dict(uid='r'), dict(step=1), dict(sample=1),
      dict(turn=1))] + [documents.task(query(), noise=0.5, seed=1)]
  assert len({plain.seed, *(other.seed for other in others)}) == 7
  assert all(0 <= other.seed < 2**63 for other in others)


@pytest.mark.parametrize('noise', [0.0, 0.25, 1.0])
def test_the_coin_is_noisy_as_often_as_it_should_be(noise):
  found = [documents.task(query(uid=str(i)), noise=noise, seed=3).useful
           for i in range(4000)]
  assert sum(found) / 4000 == pytest.approx(1 - noise, abs=0.03)
  assert noise not in (0, 1) or len({*found}) == 1


def test_more_noise_turns_useful_documents_alone():
  quiet, loud = ([documents.task(query(uid=str(i)), noise=p, seed=0).useful
                  for i in range(300)] for p in (0.2, 0.6))
  assert all(before or not after for before, after in zip(quiet, loud))


# Prompts ----------------------------------------------------------------------

def test_the_published_prompts_are_exact():
  digests = [hashlib.sha256(text.encode()).hexdigest()[:16]
             for text in vars(simulator_prompts.zerosearch()).values()]
  assert digests == ['9c46acda4586d08f', '12acaabffe9d05f0']
  useful = simulator_prompts.zerosearch().of(task())
  assert useful == (
      'You are the Google search engine.\nGiven a query, you need to generate '
      'five useful documents for the query.\n\nThe user is trying to answer '
      'the question: "where?" whose answer is here.\nEach document should '
      'contain about 30 words, and these documents should contain useful '
      'information.\n\nQuery: river\nUseful Output:\n')
  noisy = simulator_prompts.zerosearch().of(task(useful=False))
  assert noisy == useful.replace('useful', 'noisy').replace('Useful', 'Noisy')


def test_what_is_filled_in_is_data():
  asked = documents.Task(
      query(text='{problem}{0}%s', answers=('{query}',)), True, 0)
  assert PROMPTS.of(asked) == '+ {problem}{0}%s | where? | {query}'


def test_the_first_answer_counts_and_one_must_be_there():
  assert PROMPTS.of(task(False, answers=('a', 'b'))).endswith('| a')
  error = PROMPTS.of(task(answers=()))
  assert error == SearchError('unanswerable', "question 'q' has no answer")
  without = simulator_prompts.Prompts('{query}', '')
  assert without.of(task(answers=())) == 'river'


# The parser -------------------------------------------------------------------

@pytest.mark.parametrize('text, expected', [
    ('Doc 1: a\nDoc 2: b', ('a', 'b')),
    ('\n  Doc 1:a  b\n\n c\n\nDoc 2: b\n', ('a b c', 'b')),
    ('Doc 1: a\nDoc 2: b\nDoc 3: c\nDoc 9: never read', ('a', 'b')),
    ('Doc 1: a\nDoc 2: b\nDoc 3:', ('a', 'b')),
    ('Doc 1: only', ('only',)),
    ('Doc 1: a\nDoc 2:', ('a',)),  # cut by the limit of tokens
    ('Doc 1: see Doc 2: and Doc 7: there\nDoc 2: b',
     ('see Doc 2: and Doc 7: there', 'b')),
    ('Doc 1: </information> <answer> x </answer>\nDoc 2: é東😀',
     ('</information> <answer> x </answer>', 'é東😀'))])
def test_documents_are_read(text, expected):
  assert documents.read(text, 2) == expected


@pytest.mark.parametrize('text, message', [
    ('', "begin with 'Doc 1:'"), ('no documents', "begin with 'Doc 1:'"),
    ('Sure! Here:\nDoc 1: a', "begin with 'Doc 1:'"),
    ('doc 1: a', 'begin with'), ('Doc 1 a', 'begin with'),
    ('Doc ١: a', 'begin with'), ('Document 1: a', 'begin with'),
    ('Doc 2: a', "'Doc 1:' must follow, not 'Doc 2:'"),
    ('Doc 01: a', "not 'Doc 01:'"), ('Doc 0: a', "not 'Doc 0:'"),
    ('Doc 1: a\nDoc 3: b', "'Doc 2:' must follow"),
    ('Doc 1: a\nDoc 1: b', "'Doc 2:' must follow"),
    ('Doc 1:\nDoc 2: b', 'document 1 is empty'), ('Doc 1: \n', '1 is empty'),
    ('Doc ' + '9' * 10_000 + ': a', "not 'Doc 99999999999999999999:'")])
def test_anything_else_is_malformed(text, message):
  with pytest.raises(documents.Malformed, match=message):
    documents.read(text, 2)


def test_no_generation_breaks_the_parser():
  pieces = ['Doc 1:', 'Doc 2:', 'Doc 10:', '\n', ' ', 'x', 'Doc ', ':']
  for parts in itertools.product(pieces, repeat=5):
    for top_k in (1, 2):
      try:
        found = documents.read(''.join(parts), top_k)
      except documents.Malformed:
        continue
      assert 1 <= len(found) <= top_k
      assert all(text == ' '.join(text.split()) != '' for text in found)


def test_what_is_written_can_be_read():
  passages = [('Tarn', 'A river\nof "France".'), ('', 'No title.'), ('a', 'b')]
  found = documents.read(documents.write(passages), 3)
  assert [*map(documents.titled, found)] == [
      ('Tarn', 'A river of "France".'), *passages[1:]]


@pytest.mark.parametrize('text', ['no title', '"open', '"" x', '"only"',
                                  ' "late" x', '"a"b'])
def test_a_text_without_a_whole_title_has_none(text):
  assert documents.titled(text) == ('', text)


def test_prompts_with_an_example_are_for_models_that_were_not_tuned():
  """The contract of ZeroSearch's prompted simulators."""
  useful, noisy = (simulator_prompts.demonstrated().of(task(
      useful, text='Tarn source', answers=('Mont Lozere',)))
                   for useful in (True, False))
  for text, ending in ((useful, 'Useful documents:\n'),
                       (noisy, 'Unhelpful documents:\n')):
    example = text.partition(ending)[2].partition('\n\n')[0]
    found = documents.read(example, 9)
    assert len(found) == 5
    assert all(20 <= len(one.split()) <= 35 for one in found)
    assert text.endswith(f'Query: Tarn source\n{ending}')
    assert ('1869' in example) == (text == useful)
    assert not re.search(r'[{}]', text)
  assert '"where?", whose answer is Mont Lozere.' in useful
  assert 'where?' not in noisy and 'Mont Lozere' not in noisy
