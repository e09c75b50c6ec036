# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""statistics: every figure of three small trajectories, worked out by hand."""

import dataclasses
import math

import pytest
import tiny

from searchrl.agent import statistics
from searchrl.trajectory import (Action, Passage, STOP_REASONS, Trajectory,
                                 Turn)


def turn(kind, text='', *, tokens, shown=0, passages=(), cut=0):
  """A turn of so many sampled and so many inserted tokens."""
  texts = () if kind == 'invalid' else (text,)
  return Turn((1,) * tokens, (-1.0,) * tokens, Action(kind, texts),
              (2,) * shown, tuple(Passage('1', '', p) for p in passages), cut,
              observation=' '.join(passages) if shown else '')


def trajectory(*turns, source='nq', prompt=4, **fields):
  return Trajectory(
      tiny.question(answers=('the river Tarn',), data_source=source), 0, 0,
      (3,) * prompt, turns, **fields)


RIGHT = trajectory(
    turn('search', 'x', tokens=3, shown=10, passages=('A river.', 'Tarn.'),
         cut=1),
    turn('search', 'y', tokens=2, shown=8, passages=('River Tarn.', 'Hill.')),
    turn('answer', 'River Tarn', tokens=5),
    stop_reason='answer', reward=0.75, outcome_reward=1.0)
WRONG = trajectory(
    turn('invalid', tokens=6, shown=2), turn('answer', 'river', tokens=2),
    source='hotpotqa', prompt=6, stop_reason='answer', reward=-0.25,
    outcome_reward=0.0, retries=1)
CUT = trajectory(  # its second passages did not fit: the policy never saw them
    turn('search', 'x', tokens=1, shown=5, passages=('A hill.',), cut=1),
    turn('search', 'y', tokens=1, passages=('river tarn',) * 5, cut=5),
    prompt=5, stop_reason='length_limit', reward=0.25, outcome_reward=0.0)
FAILED = trajectory(
    turn('search', 'x', tokens=4), source='nq', prompt=5,
    stop_reason='search_error', retries=1)


def test_every_figure_of_three_trajectories():
  found = statistics.describe([RIGHT, WRONG, CUT])
  wanted = {
      'critic/score': (1 / 3, 1, 0),
      'critic/rewards': (0.25, 0.75, -0.25),
      'prompt_length': (5, 6, 4),
      'response_length': (15, 28, 7),
      'num_turns': (7 / 3, 3, 2),
      'env/number_of_actions': (7 / 3, 3, 2),
      'tool_call_counts': (1, 2, 0),
  }
  wanted = {f'{name}/{which}': value for name, values in wanted.items()
            for which, value in zip(('mean', 'max', 'min'), values)}
  wanted |= {
      'em/nq': 1 / 2, 'subem/nq': 1 / 2, 'f1/nq': 1 / 2,
      'em/hotpotqa': 0, 'subem/hotpotqa': 0, 'f1/hotpotqa': 2 / 3,
      'train/stop_answer': 2 / 3, 'train/stop_turn_limit': 0,
      'train/stop_length_limit': 1 / 3, 'train/stop_search_error': 0,
      'response_length/clip_ratio': 1 / 3,
      'actor/masked_token_frac': 1 - 20 / 60,
      'env/finish_ratio': 2 / 3,
      'env/number_of_valid_action': 2,
      'env/ratio_of_valid_action': 6 / 7, 'format/valid_rate': 6 / 7,
      'env/number_of_valid_search': 1, 'search/calls_per_traj': 1,
      'search/error_rate': 0,
      'search/retries': 1 / 3,
      'search/obs_tokens': 25 / 3,
      'search/obs_truncated_rate': 2 / 5,
      'search/answer_in_context_rate': 1 / 3,
      'search/answer_rate_last_hop': 0, 'search/leak_rate': 0,
  }
  assert found == pytest.approx(wanted)


def test_parts_of_rewards_are_means_over_those_that_have_them():
  parts = lambda t, **values: dataclasses.replace(t, parts=values)
  found = statistics.describe([
      parts(RIGHT, em=1.0, format=0.0), parts(WRONG, em=0.0), CUT, FAILED])
  assert found['reward/em/mean'] == 0.5
  assert found['reward/format/mean'] == 0.0
  assert not any(name.startswith('reward/')
                 for name in statistics.describe([CUT]))


def test_answers_are_found_for_the_last_hop_or_leak_before():
  def rates(hops, *found, **fields):
    turns = [turn('search', 'x', tokens=1, shown=1, passages=(
        'The Tarn', 'a river, Tarn' if hit else 'A hill.')) for hit in found]
    one = trajectory(turn('invalid', tokens=1, shown=1), *turns, **fields)
    one = dataclasses.replace(one, question=dataclasses.replace(
        one.question, hops=hops))
    values = statistics.describe([one])
    return values['search/answer_rate_last_hop'], values['search/leak_rate']

  assert rates(1, True) == (1, 0) and rates(1, False, True) == (0, 0)
  assert rates(2, False, True) == (1, 0) and rates(2, True, False) == (0, 1)
  assert rates(3, True, False, True, True) == (1, 1 / 2)
  assert rates(3, True) == (0, 1)  # it stopped before the last hop


def test_a_failed_search_has_no_score_and_counts_in_all_else():
  found = statistics.describe([RIGHT, FAILED])
  assert found['critic/score/mean'] == found['critic/score/min'] == 1
  assert found['em/nq'] == found['f1/nq'] == 1
  assert found['search/error_rate'] == found['train/stop_search_error'] == 0.5
  assert found['search/retries'] == 0.5
  assert found['search/calls_per_traj'] == 1
  assert found['response_length/min'] == 4


def test_a_passage_that_was_not_read_is_not_in_the_context():
  assert statistics.describe([CUT])['search/answer_in_context_rate'] == 0
  for observation, share in (('river tarn', 1), ('a river, and', 0)):
    read = dataclasses.replace(CUT.turns[1], observation_tokens=(2,),
                               observation=observation)
    seen = dataclasses.replace(CUT, turns=(CUT.turns[0], read))
    assert statistics.describe([seen])['search/answer_in_context_rate'] == share


def test_a_summary_is_no_turn():
  summary = turn('summary', 'So far: a river.', tokens=9, shown=3)
  found = statistics.describe([dataclasses.replace(
      RIGHT, turns=(RIGHT.turns[0], summary, *RIGHT.turns[1:]))])
  plain = statistics.describe([RIGHT])
  for name in ('num_turns/mean', 'env/number_of_actions/max',
               'env/number_of_valid_action', 'format/valid_rate'):
    assert found[name] == plain[name]


@pytest.mark.parametrize('trajectories', [
    [], [FAILED] * 2, [trajectory(stop_reason='length_limit', reward=0.0,
                                  outcome_reward=0.0, prompt=0)]],
    ids=['none', 'all failed', 'no turn'])
def test_the_mean_of_nothing_is_zero(trajectories):
  found = statistics.describe(trajectories)
  assert all(map(math.isfinite, found.values()))
  for name in ('critic/score/mean', 'critic/rewards/max', 'critic/score/min',
               'search/obs_truncated_rate', 'search/obs_tokens',
               'tool_call_counts/max'):
    assert found[name] == 0, name
  if trajectories:
    assert found['em/nq'] == found['subem/nq'] == found['f1/nq'] == 0
  assert {f'train/stop_{reason}' for reason in STOP_REASONS} <= set(found)
