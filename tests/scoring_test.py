# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""scoring: who is judged, by which process, and what is refused by name."""

import dataclasses
import json
import math
import re

import fakes
import loopback
import numpy as np
import pytest

from searchrl.agent import rewards
from searchrl.rollouts import scoring
from searchrl.runtime import processes
from searchrl.trajectory import Action, Question, Request, Scores, Turn

FAILED = (2, 1)  # question, sample


def round_of(groups=3, size=2):
  """The trajectories of a round; the search of one failed."""
  sampler = fakes.Sampler(lambda n, k: None if (n, k) == FAILED else n + k / 10)
  return [dataclasses.replace(
      sampler.trajectory(Request(Question(f'q{n}', 'x', ('y',)), k, n)),
      reward=None, outcome_reward=None)
          for n in range(groups) for k in range(size)]


def scored(score, trajectories=None, *, outcome=lambda t: 0.25, **options):
  judge = rewards.Judge(score, **options)
  return scoring.Scorer(judge, outcome, 'mine:judge')(
      round_of() if trajectories is None else trajectories)


def test_a_judge_sees_the_groups_of_a_round_and_no_failed_search():
  def best_of_group(trajectories):
    assert FAILED not in [(t.group, t.sample) for t in trajectories]
    sizes = [sum(o.group == t.group for o in trajectories)
             for t in trajectories]
    return [Scores(size + t.sample / 10, outcome=size, parts={'size': size})
            for size, t in zip(sizes, trajectories)]

  found = scored(best_of_group)
  assert [(t.group, t.sample) for t in found] == [
      (n, k) for n in range(3) for k in range(2)]
  assert [t.reward for t in found] == [2.0, 2.1, 2.0, 2.1, 1.0, None]
  assert [t.outcome_reward for t in found] == [2, 2, 2, 2, 1, None]
  assert found[0].parts == {'size': 2.0} and found[-1].parts == {}


def test_without_an_outcome_the_judges_trajectories_get_the_configs():
  found = scored(lambda ts: [Scores(1.0, 0.5 if t.sample else None)
                             for t in ts])
  assert [t.outcome_reward for t in found] == [.25, .5, .25, .5, .25, None]


def test_rewards_of_turns_are_the_judges_or_those_of_the_config():
  turn = Turn((1,), (0.0,), Action('invalid'))
  trajectories = [dataclasses.replace(t, turns=(turn,) * (2 + t.sample))
                  for t in round_of()]
  of_config = scoring.Scorer(
      rewards.Judge(lambda ts: [
          Scores(1.0, turns=[7] * len(t.turns) if t.sample else None)
          for t in ts]), lambda t: 0.0, 'mine:judge',
      lambda t: [None] + [t.group] * (len(t.turns) - 1))
  for t in of_config(trajectories):
    expected = (7.0,) * len(t.turns) if t.sample else (
        None,) + (float(t.group),) * (len(t.turns) - 1)
    assert t.turn_rewards == (
        None if (t.group, t.sample) == FAILED else expected)
    hash(t)
  assert scored(lambda ts: [Scores(1.0)] * len(ts))[0].turn_rewards is None


@pytest.mark.parametrize('turns, message', [
    ([1.0], r'must have a reward or None for each of 0 turns, but are \[1.0\]'),
    (1.0, 'for each of 0 turns, but are 1.0 for'),
    ([math.nan], 'mine:judge: turn 1 must be a finite number, but is nan')])
def test_rewards_of_turns_that_do_not_fit_are_refused(turns, message):
  trajectories = round_of()
  if 'turn 1' in message:
    trajectories = [dataclasses.replace(t, turns=(
        Turn((1,), (0.0,), Action('invalid')),)) for t in trajectories]
  with pytest.raises(ValueError, match=message):
    scored(lambda ts: [Scores(1.0, turns=turns) for _ in ts], trajectories)


@pytest.mark.parametrize('turns', [
    {0: .5, 1: .7}, {.5, .7}, {.5: 0, .7: 1}.keys(), (r for r in (.5, .7))])
def test_rewards_of_turns_without_an_order_are_refused(turns):
  turn = Turn((1,), (0.0,), Action('invalid'))
  one = dataclasses.replace(round_of()[0], turns=(turn, turn))
  message = ('the turns must have a reward or None for each of 2 turns, but are '
             f'{turns!r} for question')
  with pytest.raises(ValueError, match=re.escape(message)):
    scored(lambda ts: [Scores(1.0, turns=turns)], [one])
  with pytest.raises(ValueError, match=re.escape(message)):
    scoring.Scorer(rewards.Judge(lambda ts: [Scores(1.0)]), lambda t: 0.0,
                   turns=lambda t: turns)([one])


def test_a_function_of_one_trajectory_gives_a_number_or_scores():
  judge = rewards.each(
      lambda t: Scores(2, parts={'fee': np.float32(.5)}) if t.sample else True)
  found = scoring.Scorer(judge, lambda t: np.float64(1.5))(round_of())
  assert [t.reward for t in found] == [1, 2, 1, 2, 1, None]
  assert [t.parts for t in found][:2] == [{}, {'fee': .5}]
  assert {type(t.reward) for t in found[:-1]} == {float}
  assert found[0].outcome_reward == 1.5
  assert json.loads(json.dumps(found[1].parts)) == {'fee': .5}


def test_a_round_of_failed_searches_is_not_judged():
  failed = [round_of()[-1]] * 2
  assert scored(lambda ts: 1 / 0, failed) == failed
  assert scored(lambda ts: 1 / 0, []) == []


def for_one(value):
  """A score that is legal but for question q1, sample 1."""
  def score(trajectories):
    return [value() if (t.group, t.sample) == (1, 1) else Scores(1.0)
            for t in trajectories]
  return score


@pytest.mark.parametrize('value, message', [
    (lambda: Scores(math.nan), 'mine:judge: the reward must be a finite '
     'number, but is nan for question .q1., sample 1. Correct it'),
    (lambda: Scores(math.inf), 'the reward .* is inf for question .q1.'),
    (lambda: Scores(None), 'the reward .* is None for question .q1.'),
    (lambda: Scores('1'), "the reward .* is '1' for question .q1."),
    (lambda: Scores(np.ones(2)), 'the reward .* for question .q1., sample 1'),
    (lambda: Scores(1, -math.inf), 'the outcome .* is -inf for question .q1.'),
    (lambda: Scores(1, parts={'fee': math.nan}),
     "the part 'fee' must be a finite number, but is nan for question .q1."),
    (lambda: Scores(1, parts={'fee': None}), "'fee' .* None for question .q1."),
    (lambda: Scores(1, parts=[1]), 'parts. must be .* for question .q1.'),
    (lambda: 1.0, 'must return Scores, but returned 1.0 for question .q1.'),
    (lambda: {}['a'], 'must score question .q1., sample 1, but raised '
     'KeyError: .a.. Correct it'),
])
@pytest.mark.parametrize('one_by_one', [True, False])
def test_what_is_no_finite_number_is_an_error_that_names_the_trajectory(
    value, message, one_by_one):
  if 'KeyError' in message and not one_by_one:
    message = 'must score question .q0., sample 0, and 4 more, but raised Key'
  with pytest.raises(ValueError, match=message):
    scored(for_one(value), one_by_one=one_by_one)


def test_a_reward_that_raises_stop_iteration_is_named():
  with pytest.raises(ValueError, match=(
      'must score question .q0., sample 0, but raised StopIteration. Correct it'
      )) as error:
    scoring.Scorer(rewards.each(lambda t: next(iter(()))))(round_of())
  assert isinstance(error.value.__cause__, StopIteration)


def test_an_outcome_that_raises_is_named_too():
  with pytest.raises(ValueError, match=(
      'the outcome must score question .q0., sample 0, but raised Zero')) as error:
    scored(lambda ts: [Scores(1.0)] * len(ts), outcome=lambda t: 1 / 0)
  assert isinstance(error.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize('field', ['reward', 'outcome', 'part', 'turn'])
@pytest.mark.parametrize('value', [
    0.0, 3.4028234e38, 3.4028235677973362e38, 3.4028235677973366e38, 1e39,
    10 ** 400])
def test_a_score_is_finite_in_float32(field, value):
  one = dataclasses.replace(round_of()[0], turns=(
      Turn((1,), (0.0,), Action('invalid')),))
  with np.errstate(over='ignore'):
    is_finite = value < 1e300 and bool(np.isfinite(np.float32(value)))
  for number in (value, -value):
    score = dict(reward=Scores(number), outcome=Scores(1, number),
                 part=Scores(1, parts={'fee': number}),
                 turn=Scores(1, turns=[number]))[field]
    if is_finite:
      scored(lambda ts: [score], [one])
    else:
      with pytest.raises(ValueError, match=f'{field}.* must be a finite number, '
                         f'but is {re.escape(repr(number))} for question'):
        scored(lambda ts: [score], [one])


@pytest.mark.parametrize('returned, found', [
    ([Scores(1.0)] * 4, '4'), ([], '0'), (None, 'None'), (1.0, '1.0')])
def test_a_judge_gives_as_many_scores_as_it_got_trajectories(returned, found):
  with pytest.raises(ValueError, match=(
      'one for each of 5 trajectories, but returned '
      f'{found} for question .q0., sample 0, and 4 more')):
    scored(lambda ts: returned)


def test_once_scores_a_trajectory_once():
  asked = []
  score = scoring.once(scoring.Scorer(rewards.each(
      lambda t: asked.append((t.group, t.sample)) or len(asked))))
  half, whole = round_of()[:3], round_of()
  first, second = score(half), score(whole)
  assert second[:3] == first and score(whole) == second
  assert asked == [(n, k) for n in range(3) for k in range(2)
                   if (n, k) != FAILED]


class Processes:
  """Two processes' meetings, one after the other: the first is always met."""

  def __init__(self, monkeypatch):
    self.index, self.sent = 0, []
    monkeypatch.setattr(processes, 'is_first', lambda: self.index == 0)
    monkeypatch.setattr(processes, 'exchange', self._exchange)

  def _exchange(self, tag, payload, timeout_secs):
    assert tag == 'scores' and timeout_secs > 3600
    self.sent.append(payload)
    return self.sent


def test_the_first_process_judges_and_all_have_its_scores(monkeypatch):
  both, calls = Processes(monkeypatch), []
  for collective, wanted in ((False, 1), (True, 2)):
    both.index, both.sent = 0, []
    calls.clear()
    judge = lambda ts: calls.append(1) or [Scores(len(calls) / 3)] * len(ts)
    first = scored(judge, collective=collective)
    both.index = 1
    assert scored(judge, collective=collective) == first
    assert first[0].reward == 1 / 3 and len(calls) == wanted


@pytest.mark.slow
def test_two_processes_have_one_score_or_end_alike():
  found = loopback.outputs(2, r'''
from searchrl.agent import rewards
from searchrl.rollouts import scoring
from searchrl.runtime import processes
from searchrl.trajectory import Question, Scores, Trajectory

processes.initialize()
own = processes.index()
round_ = [Trajectory(Question(f'q{n}', 'x', ('y',)), 0, 0, (1,),
                     stop_reason='answer') for n in range(3)]
judge = lambda trajectories: [Scores(own + 0.1)] * len(trajectories)
broken = lambda trajectories: 1 / 0
for collective in (False, True):
  make = lambda score: scoring.Scorer(rewards.Judge(score, False, collective))
  out(f'scores {collective}', [t.reward for t in make(judge)(round_)])
  try:
    make(broken if own == 0 else judge)(round_)
  except ValueError as error:
    out(f'error {collective}', str(error))
''')
  for collective in (False, True):
    assert found[f'scores {collective}'] == [[0.1] * 3] * 2
    first, second = found[f'error {collective}']
    assert first == second and 'raised ZeroDivisionError' in first


def test_an_error_of_any_process_ends_all(monkeypatch):
  both = Processes(monkeypatch)
  with pytest.raises(ValueError, match='raised ZeroDivisionError'):
    scored(lambda ts: 1 / 0)
  both.index = 1  # which does not judge, and is told
  with pytest.raises(ValueError, match='sample 0.*raised ZeroDivisionError'):
    scored(lambda ts: [Scores(1.0)] * len(ts))
  assert len(both.sent) == 2
