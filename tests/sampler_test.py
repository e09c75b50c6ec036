# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""player: failed searches are played again, and trajectories say how often."""

import types

import pytest
import tiny

from searchrl.rollouts import driver
from searchrl.rollouts import sampler as samplers
from searchrl.trajectory import Trajectory

# Question -> how it ends each time that it is played.
ENDS = {'fine': ['answer'], 'late': ['search_error', 'turn_limit'],
        'never': ['search_error'] * 9}


@pytest.fixture
def play(monkeypatch):
  """Plays ENDS instead of a model; the requests of each pass are kept."""
  passes = []

  def scripted(requests, **_):
    passes.append([question.uid for question, _ in requests])
    return [Trajectory(question, sample, 0, (1,),
                       stop_reason=ENDS[question.uid][len(passes) - 1])
            for question, sample in requests]

  monkeypatch.setattr(driver, 'play', scripted)
  engine = types.SimpleNamespace(
      load=lambda *_: None, unload=lambda: None)

  def run(**options):
    trajectories = samplers.Sampler(None, None, None, None, engine, lambda p: p).play(
        None, [(tiny.question(uid), 0) for uid in ENDS], search=None,
        reward=lambda trajectory: 0.5, outcome=lambda trajectory: 1.0, temperature=1.0,
        step=0, **options)
    return trajectories, passes

  return run


@pytest.mark.parametrize('search_retries, passes, retries, last', [
    (0, [[*ENDS]], [0, 0, 0], ['answer', 'search_error', 'search_error']),
    (1, [[*ENDS], ['late', 'never']], [0, 1, 1],
     ['answer', 'turn_limit', 'search_error']),
    (3, [[*ENDS], ['late', 'never'], ['never'], ['never']], [0, 1, 3],
     ['answer', 'turn_limit', 'search_error'])])
def test_failed_searches_are_played_again(
    play, search_retries, passes, retries, last):
  trajectories, seen = play(search_retries=search_retries)
  assert seen == passes
  assert [g.question.uid for g in trajectories] == [*ENDS]
  assert [g.retries for g in trajectories] == retries
  assert [g.stop_reason for g in trajectories] == last
  for trajectory in trajectories:
    scored = trajectory.stop_reason != 'search_error'
    assert trajectory.reward == (0.5 if scored else None)
    assert trajectory.outcome_reward == (1.0 if scored else None)


def test_what_is_not_needed_any_more_is_left_out(monkeypatch):
  seen = []

  def scripted(requests, *, enough, **_):
    done = {row: Trajectory(question, sample, 0, (1,), stop_reason='answer')
            for row, (question, sample) in enumerate(requests[:2])}
    seen.append(enough(done))
    return [done.get(row) for row in range(len(requests))]

  monkeypatch.setattr(driver, 'play', scripted)
  engine = types.SimpleNamespace(
      load=lambda *_: None, unload=lambda: None)
  judged = []
  trajectories = samplers.Sampler(None, None, None, None, engine, lambda p: p).play(
      None, [(tiny.question(f'{n}'), 0) for n in range(4)], search=None,
      reward=lambda trajectory: judged.append(trajectory) or 0.5, step=0, temperature=1.0,
      outcome=lambda trajectory: 1.0, enough=lambda trajectories: len(trajectories) == 2 and all(
          g.outcome_reward == 1.0 for g in trajectories))
  assert seen == [True]
  assert [g.question.uid for g in trajectories] == ['0', '1']
  assert [g.reward for g in trajectories] == [0.5, 0.5] and len(judged) == 2


def test_who_watches_is_shown_what_grows(monkeypatch):
  grown = Trajectory(tiny.question(), 0, 0, (1,), stop_reason='answer')

  def scripted(requests, *, watch, **_):
    watch(grown)
    return [grown for _ in requests]

  monkeypatch.setattr(driver, 'play', scripted)
  engine, seen = types.SimpleNamespace(
      load=lambda *_: None, unload=lambda: None), []
  samplers.Sampler(None, None, None, None, engine, lambda p: p).play(
      None, [(tiny.question(), 0)], search=None, reward=lambda trajectory: 0.5, step=0,
      temperature=1.0, outcome=lambda trajectory: 1.0, watch=seen.append)
  assert seen == [grown]
