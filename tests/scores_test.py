# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""scores: a trajectory's, by hand; exact match of adversarial answers."""

import dataclasses
import json

import pytest

from searchrl.evaluation import scores
from searchrl.trajectory import Action, Passage, Question, Trajectory, Turn


def trajectory(*turns, golds=('Elba',), stop='answer'):
  return Trajectory(Question('q', 'which?', golds, 2), 0, 0, (1,), turns, stop)


def search(*passages, queries=('x',), shown=True):
  return Turn((1, 2, 3), (0.0,) * 3, Action('search', queries), (9,) * shown,
              tuple(Passage(str(n), '', text, score)
                    for n, (text, score) in enumerate(passages)) * shown)


def answer(text):
  return Turn((4, 5), (0.0,) * 2, Action('answer', (text,)))


def test_a_search_an_answer_and_what_they_are_worth():
  found = scores.score_trajectory(trajectory(
      search(('The Oder flows.', 2.0), ('It is the Elba!', 1.0)),
      search(('Here', 3.0), ('more', 2.0), ('Elba first', 5.0),
             queries=('a', 'b')), answer('the elba')))
  assert found.values == dict(
      em=1, subem=1, f1=1, recall=1, searches=2, queries=3, answered=1,
      finished=1, tokens=8) | {'hit@1': 1}
  assert (found.uid, found.hops, found.answer, found.failed) == (
      'q', 2, 'elba', False)


def test_the_best_passage_of_a_query_is_its_first():
  found = scores.score_trajectory(trajectory(search(('Oder', 2.0), ('Elba', 1.0))))
  assert found.values['recall'] == 1 and found.values['hit@1'] == 0
  assert found.values['answered'] == 0 and found.answer == ''


def test_the_first_passage_of_each_query_may_have_any_score():
  two = dict(queries=('a', 'b'))
  for passages, queries, hit in (
      ((('x', .9), ('y', .8), ('Elba', .7), ('z', .6)), two, 1),
      ((('x', .9), ('Elba', .8), ('y', .7), ('z', .6)), two, 0),
      ((('x', .1), ('Elba', .8)), {}, 0),  # one query, whose scores rise
      ((('x', .9), ('y', .8), ('Elba', .95)), two, 1),  # 2 and 1
      ((('Elba', .9),), two, 1), ((), two, 0)):
    found = scores.score_trajectory(trajectory(search(*passages, **queries)))
    assert found.values['hit@1'] == hit, passages


def test_a_search_that_was_not_carried_out_is_none():
  found = scores.score_trajectory(trajectory(
      search(('Elba', 1.0), shown=False), stop='turn_limit'))
  assert not any(found.values[name] for name in (
      'recall', 'hit@1', 'searches', 'queries', 'finished'))


def test_a_failed_search_is_wrong_and_said_to_be_failed():
  found = scores.score_trajectory(trajectory(stop='search_error'))
  assert found.failed and not any(found.values.values())


def test_a_score_survives_json():
  found = scores.score_trajectory(trajectory(answer('é')))
  assert scores.Score(**json.loads(json.dumps(dataclasses.asdict(found)))) == found


@pytest.mark.parametrize('text, golds, em, subem', [
    ('The  Elba.', ('elba',), 1, 1), ('an Elba', ('the Elba',), 1, 1),
    ('ELBA!', ('Elba',), 1, 1), ('Elba river', ('Elba',), 0, 1),
    ('Elb', ('Elba',), 0, 0), ('Elba', ('Oder', 'Elba'), 1, 1),
    ('Elba', ('',), 0, 0), ('the', ('the',), 0, 0), ('x', ('The',), 0, 0),
    ('São Tomé', ('Sao Tome',), 0, 0), ('São Tomé', ('são tomé',), 1, 1),
    ('New-York', ('New York',), 0, 0), ('New-York', ('newyork',), 1, 1),
    ('U.S.A.', ('usa',), 1, 1), ("O'Neill", ('ONeill',), 1, 1),
    ('<answer>Elba', ('answerElba',), 1, 1), ('1,000', ('1000',), 1, 1),
    ('\u00a0Elba\u00a0', ('Elba',), 1, 1), ('Éire', ('éire',), 1, 1),
    ('theatre', ('atre',), 0, 1), ('A', ('b',), 0, 0)])
def test_matches_on_an_adversarial_table(text, golds, em, subem):
  found = scores.score_trajectory(trajectory(answer(text), golds=golds)).values
  assert (found['em'], found['subem']) == (em, subem)
