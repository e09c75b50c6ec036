# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""simulation: which searches are kept, how they are labelled and split."""

import dataclasses
import json

import pytest
import tiny

from searchrl.data import questions
from searchrl.papers.zerosearch import documents
from searchrl.papers.zerosearch import query_pairs
from searchrl.papers.zerosearch.simulator_prompts import Prompts
from searchrl.trajectory import Action, Passage, Trajectory, Turn

PASSAGES = (Passage('1', 'Tarn', 'A river.'), Passage('2', '', 'A hill.'))


def search(*texts, passages=PASSAGES, shown=3):
  return Turn((1,), (-1.0,), Action('search', texts), (2,) * shown, passages)


def trajectory(*turns, uid='q', stop_reason='answer'):
  return Trajectory(tiny.question(uid), 0, 0, (3,), turns,
                    stop_reason=stop_reason)


def test_searches_that_found_something_are_pairs_of_their_trajectory():
  right = trajectory(
      search('a'), Turn((1,), (-1.0,), Action('invalid'), (2,)), search('b'),
      Turn((1,), (-1.0,), Action('answer', ('x',))))
  wrong = trajectory(search('c'), uid='r')
  found = query_pairs.pairs([right, wrong], lambda t: t is right)
  assert [(p.question.uid, p.query, p.useful, p.hop) for p in found] == [
      ('q', 'a', True, 1), ('q', 'b', True, 2), ('r', 'c', False, 1)]
  assert all(p.passages == PASSAGES for p in found)
  for left_out in (search('a', passages=()), search('a', 'b'),
                   search('a', shown=0)):
    assert query_pairs.pairs([trajectory(left_out)], lambda t: True) == []
  assert query_pairs.pairs(
      [trajectory(search('a'), stop_reason='search_error')], bool) == []


def pair(uid='q', query='a', useful=False):
  return query_pairs.Pair(tiny.question(uid), query, PASSAGES, useful)


def test_a_query_stands_once_a_question_and_is_useful_if_it_was_once():
  found = query_pairs.distinct([
      pair(), pair(query='b', useful=True), pair(useful=True),
      pair(query='b'), pair('r')])
  assert [(p.question.uid, p.query, p.useful) for p in found] == [
      ('q', 'a', True), ('q', 'b', True), ('r', 'a', False)]


def test_a_question_is_on_one_side_whatever_else_there_is():
  found = [pair(str(i % 400), str(i)) for i in range(1200)]
  train, aside = query_pairs.split(found, 0.25, seed=0)
  uids = [{p.question.uid for p in side} for side in (train, aside)]
  assert not uids[0] & uids[1] and 70 < len(uids[1]) < 130
  assert len(train) + len(aside) == 1200
  few = questions.subset([p.question for p in found[:400]], 100, seed=0)
  drawn = [pair(question.uid) for question in few]  # by another hash
  assert 10 < len(query_pairs.split(drawn, 0.25, seed=0)[1]) < 40
  half, _ = query_pairs.split(found[:600], 0.25, seed=0)
  assert half == [p for p in train if int(p.query) < 600]
  assert query_pairs.split(found, 0.0, seed=0) == (found, [])
  assert query_pairs.split(found, 0.25, seed=1)[1] != aside


def test_an_example_is_what_the_engine_will_be_asked_and_should_say():
  prompts = Prompts('+ {query} {ground_truth}\n', '- {query}\n')
  titled = query_pairs.example(pair(useful=True), prompts, titled=True)
  assert titled == {
      'prompt': '+ a here\n',
      'completion': 'Doc 1: "Tarn" A river.\nDoc 2: A hill.',
      'query': 'a', 'hop': 1, 'useful': True,
      'question': vars(tiny.question())}
  plain = query_pairs.example(pair(), prompts, titled=False)
  assert plain['prompt'] == '- a\n'
  assert documents.read(plain['completion'], 5) == ('A river.', 'A hill.')


def test_an_example_for_a_chat_is_as_the_engine_asks_in_one():
  prompts = Prompts('+ {query}\n', '- {query}\n')
  chat = query_pairs.example(pair(), prompts, titled=False, chat=True)
  assert chat['messages'] == [
      {'role': 'system', 'content': ''}, {'role': 'user', 'content': '- a\n'},
      {'role': 'assistant', 'content': 'Doc 1: A river.\nDoc 2: A hill.'}]
  assert 'prompt' not in chat


@pytest.mark.parametrize('chat', [False, True])
def test_a_file_is_read_as_it_was_written(tmp_path, chat):
  prompts = Prompts('+ {query}', '- {query}')
  pairs = [pair(useful=True), dataclasses.replace(pair('r', 'é'), hop=3)]
  file = tmp_path / 'pairs.jsonl'
  file.write_text(''.join(json.dumps(query_pairs.example(
      one, prompts, titled=True, chat=chat)) + '\n' for one in pairs))
  found = query_pairs.read(file)
  assert [dataclasses.replace(one, passages=PASSAGES) for one in found] == pairs
  assert [p.text for p in found[0].passages] == ['"Tarn" A river.', 'A hill.']


@pytest.mark.parametrize('titled, texts', [
    (False, ['A river.', 'Lot', 'A hill.']),
    (True, ['"Tarn" A river.', '"Lot"', 'A hill.'])])
def test_passages_without_a_text_are_read_again(tmp_path, titled, texts):
  """A corpus line of one line is a title without a text."""
  found = (PASSAGES[0], Passage('3', 'Lot', ' '), Passage('4', '', '\n'),
           PASSAGES[1])
  one, = query_pairs.pairs([trajectory(
      search('a', passages=found), search('b', passages=found[2:3]))], bool)
  assert one.passages == (*found[:2], found[3])
  file = tmp_path / 'pairs.jsonl'
  file.write_text(json.dumps(query_pairs.example(
      one, Prompts('+ {query}', '- {query}'), titled=titled)))
  again, = query_pairs.read(file)
  assert [p.text for p in again.passages] == texts


@pytest.mark.parametrize('text, message', [
    ('', 'is empty'), ('{}', 'line 1 is none: KeyError'),
    ('[', 'line 1 is none'), ('[]', 'line 1 is none: TypeError'),
    ('{"completion": "hello", "question": {"answers": []}}',
     'line 1 is none: Malformed the text must')])
def test_a_file_of_something_else_is_refused_by_its_line(
    tmp_path, text, message):
  file = tmp_path / 'pairs.jsonl'
  file.write_text(text)
  with pytest.raises(ValueError, match=message):
    query_pairs.read(file)
