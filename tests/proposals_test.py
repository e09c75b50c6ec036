# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""proposals: Dr. Zero's rewards as published, and what they must not reward."""

import dataclasses
import itertools
import time

import pytest

from searchrl.papers.dr_zero import proposals
from searchrl.trajectory import Action, Passage, Question, Trajectory, Turn

DOCUMENT = 'The Tarn is a river. It flows past Albi, and rises on Mont Lozere.'
FOUND = (Passage('1', 'Albi', 'The mayor of Albi is Jeanne Roux-Martin.'),)


def search(text='<think> who? </think> <search> mayor of Albi </search>',
           shown=True):
  return Turn((1,), (-1.0,), Action('search', ('mayor of Albi',)),
              (2,) * shown, FOUND * shown, text=text)


def broken(text='<search> a </search> <search> b </search>'):
  """Two calls in one turn are no action."""
  return Turn((1,), (-1.0,), Action('invalid'), (2,), text=text)


def end(answer, question='Who is the mayor of the town on the Tarn?',
        think='<think> so </think> '):
  return Turn((1,), (-1.0,), Action('answer', (answer,)), text=(
      f'{think}<question> {question} </question> '
      f'<answer> {answer} </answer>'))


def score(hops, *turns):
  asked = Question('q', proposals.ask(DOCUMENT, hops), (), hops)
  return proposals.form(Trajectory(asked, 0, 0, (1,), turns)).score


def test_a_thought_that_the_prompt_opens_counts():
  """The template of R1-Distill ends a prompt with <think>."""
  asked = Question('q', proposals.ask(DOCUMENT, 2), (), 2)

  def thoughts(turn, observation):
    turns = (dataclasses.replace(turn, observation=observation),
             end('Jeanne Roux-Martin', think='so </think> '))
    return proposals.form(Trajectory(
        asked, 0, 0, (1,), turns, prompt='Assistant: <think>\n')).think

  opened = search('who? </think> <search> mayor of Albi </search>')
  assert thoughts(opened, 'Albi <think>\n') == 1
  assert thoughts(opened, 'Albi') == 0.5  # the second turn has no <think>
  assert thoughts(search(), 'Albi <think>\n') == 1  # a tag twice is one, too


def test_tags_that_are_never_closed_take_no_time():
  begun = time.process_time()
  turns = (Turn((), (), Action('invalid'), text='<question><answer>' * 10_000),)
  asked = Question('q', proposals.ask(DOCUMENT, 1), ())
  assert proposals.read(Trajectory(asked, 0, 0, (1,), turns)) == (
      proposals.Proposal('', ''))
  assert time.process_time() - begun < 1  # a hundredth of a second


def test_a_leak_is_found_behind_any_number_of_accents_in_no_time():
  begun = time.process_time()
  piled = 'Zo' + 'e' + '\u0327\u0301' * 30_000
  assert proposals.leaks('Zoëli', f'{piled}li?')
  assert not proposals.leaks('Zoëli', f'{piled}la?')
  assert time.process_time() - begun < 1  # a twentieth of a second


@pytest.mark.parametrize('answer, question, is_leak', [
    ('हिन्दुस्तान', 'हिन्दुस्तान कहाँ है?', True), ('कमला दास', 'कमली दासी कौन?', False),
    ('مُحَمَّد', 'من هو محمد؟', True), ('שָׁלוֹם', 'מה זה שלום?', True),
    ('ขนมปัง', 'ขนมปงคืออะไร', False)])
def test_vowel_signs_are_letters_and_points_are_accents(
    answer, question, is_leak):
  assert proposals.leaks(answer, question) == is_leak


@pytest.mark.parametrize('hops, turns, expected', [
    (1, [end('Albi', 'Which town?')], 1.0),
    (2, [search(), end('Jeanne Roux-Martin')], 1.0),
    (3, [search(), end('Jeanne Roux-Martin')], 0.9167),
    (4, [search(), end('Jeanne Roux-Martin')], 0.875),
    (2, [end('Albi', 'Which town?')], 0.75),
    # Half of the turns think: 0.625 where the published case's both do.
    (2, [broken(), end('Jeanne Roux-Martin')], 0.375),
    (2, [broken('<think> x </think> <search> a </search> <search>'),
         end('Jeanne Roux-Martin')], 0.5),
    (1, [end('the TARN', 'What is the Tarn?')], 0.0),
    (1, [end('Toulouse', 'Which town?')], 0.75),
    (1, [end('Tarn is a river. It flows past Albi', 'What?')], 0.875),
    (1, [end('Albi', 'Which town?', think='')], 0.75),
    (1, [end('yes', 'Is it a river?')], 1.0),
])
def test_the_format_reward_of_the_appendix(hops, turns, expected):
  assert score(hops, *turns) == pytest.approx(expected, abs=1e-4)


def test_a_search_that_was_not_carried_out_counts_for_nothing():
  """The fifth turn's call is not executed: calls and results differ."""
  assert score(2, search(), end('Jeanne Roux-Martin'), search(shown=False)) == (
      pytest.approx((1 + 1 + 0 + 0) / 4))


def test_more_searches_than_hops_are_no_better():
  for count in range(1, 6):
    assert score(2, *[search()] * count, end('Jeanne Roux-Martin')) == 1.0


@pytest.mark.parametrize(
    'k, expected', [(0, 0), (1, 1), (2, .75), (3, .5), (4, .25), (5, 0)])
def test_the_difficulty_of_the_appendix(k, expected):
  assert proposals.difficulty(k, 5) == expected


def test_difficulties_are_finite_for_any_number_of_attempts():
  for n, reward in itertools.product(range(1, 9), (
      proposals.difficulty, proposals.parabola, proposals.uncertainty)):
    values = [reward(k, n) for k in range(n + 1)]
    assert values[0] == values[-1] == 0 and all(0 <= v <= 1 for v in values)
    assert n % 2 or reward is proposals.difficulty or values[n // 2] == 1


@pytest.mark.parametrize('answer, question', [
    ('Paris', 'Is Paris, the city, in France?'), ('paris', 'What is PARIS?'),
    ('New-York', 'Where is New York?'), ('New York', 'What is New-York?'),
    ('Beyonce', 'Who is Beyoncé?'), ('U.S.A.', 'What is the USA?'),
    ('P a r i s', 'What is Paris?'), ('the', 'What is it?'), ('?', 'What?'),
    ('ﬁnland', 'Where is Finland?'), ('1,869', 'What was in 1869?'),
    ('an  answer', 'Give an answer.')])
def test_no_answer_gets_through_in_disguise(answer, question):
  assert proposals.leaks(answer, question)
  assert not proposals.Proposal(question, answer).passes
  assert score(1, end(answer, question)) == 0


@pytest.mark.parametrize('answer, question', [
    ('Rome', 'Is Paris in France?'), ('no', 'Is it a river?'),
    ('Art', 'Which game has a p a r t?')])
def test_an_honest_question_passes(answer, question):
  assert proposals.Proposal(question, answer).passes


def test_the_last_blocks_count_and_both_are_needed():
  turns = (end('a', 'b?'), end(' c ', ' d? '))
  asked = Question('q', proposals.ask(DOCUMENT, 1), (), 1)
  assert proposals.read(Trajectory(asked, 0, 0, (1,), turns)) == (
      proposals.Proposal('d?', 'c'))
  assert proposals.read(Trajectory(asked, 0, 0, (1,))) == (
      proposals.Proposal('', ''))
  for text in ('<question> q? </question>', '<answer> Albi </answer>',
               '<question> </question> <answer> Albi </answer>'):
    turn = Turn((1,), (-1.0,), Action('invalid'), text=text)
    assert score(1, turn) == 0


def test_the_document_is_read_back_and_nothing_around_it():
  for document in (DOCUMENT, 'Hops: 3\nDocument: x', 'a\n\nb', ''):
    asked = Question('q', proposals.ask(document, 2), (), 2)
    assert proposals.document_of(asked) == document
  assert score(2, end('Hops', 'What?')) == pytest.approx(0.5)  # is no grounding
  with pytest.raises(ValueError, match="but 'q' is 'who\\?'"):
    proposals.document_of(Question('q', 'who?', ()))


# The judge --------------------------------------------------------------------

class Solver:
  """Answers some of its attempts at each question rightly."""

  def __init__(self, right, failed=0):
    self.right, self.failed, self.asked = right, failed, []

  def __call__(self, questions, attempts):
    self.asked += questions
    return [[self._try(q, n) for n in range(attempts)] for q in questions]

  def _try(self, question, n):
    answer = question.answers[0] if n < self.right else 'something else'
    reason = 'search_error' if n >= 5 - self.failed else 'answer'
    turn = Turn((1,), (-1.0,), Action('answer', (answer,)))
    return Trajectory(question, n, 0, (1,), (turn,), stop_reason=reason)


def proposed(hops, *turns, uid='d', sample=0):
  asked = Question(uid, proposals.ask(DOCUMENT, hops), (), hops)
  return Trajectory(asked, sample, 0, (1,), turns, stop_reason='answer')


GOOD = (search(), end('Jeanne Roux-Martin'))


@pytest.mark.parametrize('right, expected', [
    (0, 0.5), (1, 1.5), (2, 1.25), (3, 1.0), (4, 0.75), (5, 0.5)])
def test_a_reward_is_half_the_form_and_the_difficulty(right, expected):
  scores, = proposals.judge(Solver(right))([proposed(2, *GOOD)])
  assert scores.reward == expected and scores.outcome == expected - 0.5
  assert scores.parts == dict(
      gate=1, think=1, tool=1, grounding=1, difficulty=expected - 0.5,
      pass_rate=right / 5, attempts=5)


def test_only_what_passes_the_gate_is_played_and_under_its_own_name():
  solver = Solver(1)
  scores = proposals.judge(solver)([
      proposed(2, *GOOD, uid='a'), proposed(1, end('Tarn', 'The Tarn?')),
      proposed(2, *GOOD, uid='a', sample=1)])
  assert [s.reward for s in scores] == [1.5, 0, 1.5]
  assert [q.uid for q in solver.asked] == ['proposal:a:0', 'proposal:a:1']
  assert {q.answers for q in solver.asked} == {('Jeanne Roux-Martin',)}
  assert scores[1].parts == dict(
      gate=0, think=1, tool=1, grounding=1, difficulty=0)


def test_a_batch_without_a_valid_question_is_not_played():
  solver = Solver(1)
  judge = proposals.judge(solver)
  assert [s.reward for s in judge([proposed(1, broken())] * 3)] == [0, 0, 0]
  assert solver.asked == [] and judge([]) == [] and judge.collective


def test_attempts_whose_search_failed_are_none():
  scores, = proposals.judge(Solver(1, failed=2))([proposed(2, *GOOD)])
  assert scores.parts['attempts'] == 3 and scores.outcome == 1.0
  assert scores.parts['pass_rate'] == pytest.approx(1 / 3)
  for failed in (4, 5):
    scores, = proposals.judge(Solver(1, failed=failed))([proposed(2, *GOOD)])
    assert scores.reward == 0.5 and 'pass_rate' not in scores.parts


def test_ablations_are_options():
  def reward(right, **options):
    return proposals.judge(Solver(right), **options)(
        [proposed(2, *GOOD)])[0].reward
  assert reward(2, difficulty='parabola') == pytest.approx(0.5 + 0.96)
  assert reward(2, difficulty='uncertainty') == pytest.approx(0.5 + 0.8)
  assert reward(2, format_weight=0.0) == 0.75
  for options, message in ((dict(attempts=1), 'attempts must be at least 2'),
                           (dict(format_weight=-1), 'format_weight must be'),
                           (dict(difficulty='easy'), "but is 'easy'")):
    with pytest.raises(ValueError, match=message):
      reward(2, **options)
