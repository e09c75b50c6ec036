# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""rivals: majorities, agreement, BLEU and repetitions, by hand."""

import math

import pytest
import tiny

from configs import drzero
from configs import drzero_rivals
from searchrl.papers.dr_zero import proposals
from searchrl.papers.dr_zero import rivals
from searchrl.trajectory import Action, Question, Trajectory, Turn


def said(answer, group=0, sample=0, gold='x'):
  action = Action('answer', (answer,)) if answer else Action('invalid')
  return Trajectory(
      tiny.question(f'q{group}', answers=(gold,)), sample, 0, (1,),
      (Turn((), (), action),), stop_reason='answer', group=group)


@pytest.mark.parametrize('answers, expected', [
    (['Rome', 'the rome!', 'Oslo', None], ('Rome', 2 / 4)),
    (['Oslo', 'Rome', 'Rome', 'Oslo'], ('Oslo', 2 / 4)),  # the first of equals
    ([None, None], ('', 0.0)), (['the', None], ('', 0.0)), ([], ('', 0.0))])
def test_a_majority_is_of_normalised_answers(answers, expected):
  assert rivals.majority([said(answer) for answer in answers]) == expected


def test_sqlms_solver_is_right_where_its_group_agrees():
  group = [said(answer, sample=n) for n, answer in enumerate(
      ['Rome', 'Oslo', 'rome', None])]
  other = [said(None, group=1), said('Bern', group=1, gold='Bern')]
  scores = rivals.agreement([*group, *other, said(None, group=2)])
  assert [one.reward for one in scores] == [1, 0, 1, 0, 0, 1, 0]


def test_bleu_is_that_of_the_definition():
  one, two = 'the river flows past the town'.split(), 'the river flows'.split()
  assert rivals.bleu(one, one) == 1.0
  assert rivals.bleu(one, ['a', 'mill']) == 0.0
  # 3 of 3 words, 2 of 2 pairs, 1 of 1 triple, and no four words: 0.1 of 1.
  assert rivals.bleu(one, two) == pytest.approx(
      math.exp(1 - 6 / 3) * (1 * 1 * 1 * .1) ** .25)
  # 2 of 3 words, 1 of 2 pairs, 0.1 of 1 triple, 0.1 of none.
  assert rivals.bleu(two, ['the', 'river', 'Lot']) == pytest.approx(
      (2 / 3 * 1 / 2 * .1 * .1) ** .25)


def test_a_repeated_question_is_as_bad_as_it_is_frequent():
  same = 'what is the capital of the country of the Tarn?'
  found = rivals.repetition([
      same, 'who wrote the book on mills and rivers?', same,
      same.replace('Tarn', 'Lot')])
  assert found == [3 / 4, 1 / 4, 3 / 4, 3 / 4]
  assert rivals.repetition(['one?']) == [1.0] and rivals.repetition([]) == []


def proposal(question, answer, number):
  text = (f'<think> so </think> <question> {question} </question> '
          f'<answer> {answer} </answer>')
  asked = Question(f's{number}', proposals.ask('Albi: Albi is a town.', 1), (),
                   1)
  return Trajectory(asked, 0, number, (1,), (Turn(
      (1,), (0.0,), Action('answer', (answer,)), text=text),),
                    stop_reason='answer')


def test_r_zero_rewards_uncertain_majorities_less_repetitions():
  options = dict(
      drzero_rivals.get_config('r_zero').proposer.reward_options)
  answers = {'Which town?': ['Lyon', 'Lyon', 'Albi', 'Pau'],
             'Which river is it?': ['Tarn'] * 4, 'Which one is it?': [
                   'e', 'e', 'b', 'c']}

  def play(questions, attempts):
    assert attempts == 4
    return [[said(answer, gold=q.answers[0]) for answer in answers[q.text]]
            for q in questions]

  judge = proposals.judge(play, **options)
  written = [proposal(question, 'Albi', n) for n, question in enumerate(answers)]
  scores = judge.score([*written, proposal('', 'Albi', 9)])
  # Half agree, of whom none has the proposer's answer: 1. All agree: 0.
  shares = rivals.repetition([*answers])
  assert [one.reward for one in scores] == pytest.approx([
      1 - shares[0], max(0 - shares[1], 0), 1 - shares[2], 0])
  plain = proposals.judge(play, **options | dict(golds='proposer')).score(written)
  assert plain[0].parts['pass_rate'] == 1 / 4
  for change in (dict(golds='mine'), dict(repetition=-1)):
    with pytest.raises(ValueError, match='reward_options'):
      proposals.judge(play, **options | change)


@pytest.mark.parametrize('size', ['laptop', 'qwen2.5-3b'])
def test_the_rivals_learn_from_majorities(size):
  r_zero = drzero_rivals.get_config(f'r_zero/{size}')
  majority = r_zero.proposing.majority
  assert (majority.attempts, majority.least, majority.most) == (10, .25, .75)
  sqlm = drzero_rivals.get_config(f'sqlm/{size}')
  assert sqlm.solver.reward == 'searchrl.papers.dr_zero.rivals:agreement'
  assert not sqlm.proposing.majority.attempts and sqlm.selfplay.one_model
  plus = drzero_rivals.get_config(f'reinforce_plus_plus/{size}').proposer
  assert plus.algorithm.name.endswith(':reinforce_plus_plus')
  assert plus.rollout.group_size == 1


@pytest.mark.parametrize('rival, iterations', [
    ('one_iteration', 1), ('parabola', 1), ('longer', 1), ('without_format', 1),
    ('without_document', 1), ('ratio_1111', 3), ('nested_grpo', 3)])
def test_table_7_has_one_iteration(rival, iterations):
  config = drzero_rivals.get_config(f'{rival}/qwen2.5-3b-instruct')
  assert config.selfplay.iterations == iterations


@pytest.mark.parametrize('rival, steps, warm_up', [
    ('one_iteration', 50, 1), ('longer', 100, 3)])
def test_the_warm_up_is_a_share_of_the_steps(rival, steps, warm_up):
  """Tables 5 and 6: a ratio of 0.03, of which whole steps count."""
  config = drzero_rivals.get_config(f'{rival}/qwen2.5-3b-instruct')
  for role in (config.proposer, config.solver):
    assert role.learner.minibatches == 1
    assert (role.train.num_steps, role.optimizer.warmup_steps) == (
        steps, warm_up)
  laptop = drzero_rivals.get_config(rival)
  assert laptop.solver.optimizer.warmup_steps == (
      drzero.get_config('').solver.optimizer.warmup_steps)
