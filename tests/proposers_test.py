# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""proposers: the table of judged proposals by hand, and every alarm."""

import dataclasses
import math

import pytest

from searchrl.papers.dr_zero import proposals
from searchrl.papers.dr_zero import proposers
from searchrl.rollouts import scoring
from searchrl.trajectory import Question
import proposals_test
import selection_test

LIMITS = dict(unique=0.5, gate=0.5, leaking=0.5, unfinished=0.5, entropy=0.5)
RIGHT = {'Who is the mayor of Albi?': 2}  # of four attempts


def play(questions, attempts):
  return [[dataclasses.replace(
      selection_test.proposal(), question=q, stop_reason='answer', turns=(
          proposals_test.end(q.answers[0] if n < RIGHT.get(q.text, 0) else 'x'),
      )) for n in range(attempts)] for q in questions]


def judged(*found, **options):
  return scoring.Scorer(proposals.judge(play, attempts=4, **options))(
      [dataclasses.replace(one, stop_reason='answer') for one in found])


def test_the_table_is_of_hops_asked_and_of_all():
  found = judged(
      selection_test.proposal(uid='a'),
      selection_test.proposal(uid='b', question='Who else?'),
      selection_test.proposal(uid='c', answer=''),
      selection_test.proposal(uid='d', hops=1, turns=(
          proposals_test.end('Albi', 'Is it Albi?'),)))
  oracle = lambda question: proposers.Truth(
      question.text != 'Who else?', 2 if 'mayor' in question.text else 0)
  one, two, whole = proposers.rows(found, oracle)
  assert one['hops'] == 1 and one['n'] == 1 and one['gate'] == 0
  assert one['leaking'] == 1 and 'true' not in one and 'pass_rate' not in one
  assert two['n'] == 3 and two['gate'] == pytest.approx(2 / 3)
  assert two['pass_rate'] == 0.25 and two['searches'] == 1
  assert two['difficulty'] == pytest.approx((4 - 2) / 3 / 3)  # of three
  assert two['true'] == 0.5 and two['needed'] == 2 and two['leaking'] == 0
  assert whole['tokens'] == (2 + 2 + 2 + 1) / 4 and whole['entropy'] == 1.0
  assert whole['hops'] == 'all' and whole['n'] == 4
  assert whole['reward'] == pytest.approx(sum(t.reward for t in found) / 4)
  assert proposers.histogram(found, 4) == [1, 0, 1, 0, 0]
  assert 'true' not in proposers.rows(found)[-1]
  assert set(whole) <= set(proposers.COLUMNS)


def test_nothing_to_judge_is_finite_and_alarming():
  failed = dataclasses.replace(
      selection_test.proposal(), stop_reason='search_error')
  row, = proposers.rows([failed])
  assert row == {'hops': 'all', 'n': 0}
  assert proposers.histogram([failed], 4) == [0] * 5
  assert proposers.alarms([failed], **LIMITS) == [
      'no proposal was scored: searches fail.']
  none = judged(*(selection_test.proposal(uid=f'{n}', answer='')
                  for n in range(3)))
  assert all(math.isfinite(v) for v in proposers.rows(none)[-1].values()
             if not isinstance(v, str))


def test_a_good_proposer_raises_no_alarm():
  assert not proposers.alarms(judged(selection_test.proposal()), **LIMITS)


RELAXED = dict(unique=0.0, gate=0.0, leaking=1.0, unfinished=1.0, entropy=0.0)


def of_many_documents():
  """The same question, three times, each about another document."""
  return [dataclasses.replace(t, question=Question(
      f'{n}', proposals.ask(f'{proposals_test.DOCUMENT} {n}', 2), (), 2))
          for n, t in enumerate(judged(*(
              selection_test.proposal(uid=f'{n}') for n in range(3))))]


@pytest.mark.parametrize('shown, limit, value, measured', [
    (judged(selection_test.proposal(answer='')), 'gate', 0.5, 0.0),
    (judged(selection_test.proposal(question='Is it Jeanne Roux-Martin?')),
     'leaking', 0.5, 1.0),
    (of_many_documents(), 'unique', 0.5, 0.33),
    ([dataclasses.replace(t, stop_reason='turn_limit')
      for t in judged(selection_test.proposal())], 'unfinished', 0.5, 1.0),
    (judged(selection_test.proposal()), 'entropy', 1.5, 1.0)],
                         ids=['gate', 'leaking', 'unique', 'unfinished',
                              'entropy'])
def test_a_collapse_breaks_the_limit_of_its_kind(
    shown, limit, value, measured):
  calm = set(proposers.alarms(shown, **RELAXED))
  alarm, = set(proposers.alarms(shown, **RELAXED | {limit: value})) - calm
  assert f'{measured:.2f}' in alarm and f'{value}' in alarm


def test_one_question_about_one_document_is_no_collapse():
  same = judged(*(selection_test.proposal(uid=f'{n}') for n in range(3)))
  assert not proposers.alarms(same, **LIMITS)


def test_questions_that_are_never_hard_raise_an_alarm_without_a_limit():
  easy = judged(selection_test.proposal(question='Why?'))
  assert len(proposers.alarms(easy, **RELAXED)) == 1
