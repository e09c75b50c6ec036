# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""turn_advantages: in float64 against plain loops, and by hand."""

import functools

import jax
import numpy as np
import oracles
import pytest

from searchrl.rl import turn_advantages


def random_inputs(seed, rows=9, length=17):
  """Turns with holes between some; one row is empty, one has no baseline."""
  rng = np.random.default_rng(seed)
  steps = rng.integers(3, size=(rows, length))  # same turn, next turn, a hole
  turn_ids = np.where(steps == 2, 0, 1 + np.cumsum(steps > 0, axis=1))
  turn_ids[0] = 0
  rewards = rng.normal(size=rows)
  in_baseline = np.arange(rows) != 1
  rewards[1] = np.nan
  per_turn = rng.choice([0.0, 1.0, 0.3, np.nan], size=turn_ids.shape)
  ends = np.zeros(turn_ids.shape, bool)
  for i, row in enumerate(oracles.turns(turn_ids)):
    for places in row.values():
      ends[i, places[-1]] = True
  group_ids = rng.integers(3, size=rows)
  # The state follows from the group and the turn, and sometimes from the row.
  state_ids = np.where(
      turn_ids > 0, group_ids[:, None] * 20 + turn_ids % 4, 0)
  return dict(
      rewards=rewards, turn_rewards=oracles.poison(rng, per_turn, ends),
      turn_ids=turn_ids, group_ids=group_ids, in_baseline=in_baseline
  ), state_ids


@pytest.mark.parametrize('normalize_std', [True, False])
@pytest.mark.parametrize('seed', range(4))
def test_agree_with_loops_in_float64(seed, normalize_std):
  inputs, state_ids = random_inputs(seed)
  cases = [
      (turn_advantages.mt_grpo, oracles.mt_grpo, inputs, dict(turn_coef=0.7)),
      (turn_advantages.gigpo, oracles.gigpo, inputs | dict(state_ids=state_ids),
       dict(step_coef=0.7, discount=0.9))]
  with jax.enable_x64(True):
    for ours, by_loops, arrays, options in cases:
      expected = by_loops(**arrays, **options, normalize_std=normalize_std)
      assert np.unique(expected).size > 10
      function = functools.partial(
          ours, **options, normalize_std=normalize_std)
      for found in function(**arrays), jax.jit(function)(**arrays):
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)
    found = jax.jit(turn_advantages.rewards_at_ends)(
        inputs['turn_rewards'], inputs['turn_ids'])
    np.testing.assert_array_equal(found, oracles.turn_rewards_at_ends(
        inputs['turn_rewards'], inputs['turn_ids']))


TWO = dict(  # two samples that search, then answer; only the first search finds
    rewards=np.array([1.0, 0.0], np.float32),
    turn_ids=np.array([[0, 1, 1, 0, 2], [0, 1, 0, 2, 2]]),
    turn_rewards=np.array([[9, 9, 1, 9, np.nan], [9, 0, 9, 9, np.nan]],
                          np.float32),
    group_ids=np.zeros(2, int), in_baseline=np.ones(2, bool))


@pytest.mark.parametrize('name', ['mt_grpo', 'gigpo'])
def test_advantages_are_constants(name):
  inputs, state_ids = random_inputs(0)
  more = dict(state_ids=state_ids) if name == 'gigpo' else {}
  inputs['rewards'][1] = 0.5
  gradient = jax.grad(lambda rewards: getattr(turn_advantages, name)(
      **inputs | more | dict(rewards=rewards)).sum())(inputs['rewards'])
  np.testing.assert_array_equal(gradient, 0)


def test_mt_grpo_by_hand():
  # Deviations from the mean are +-1/2. The answers have no reward of turns.
  found = turn_advantages.mt_grpo(**TWO, turn_coef=2.0, normalize_std=False)
  np.testing.assert_allclose(
      found, [[0, 1.5, 1.5, 0, 0.5], [0, -1.5, 0, -0.5, -0.5]])


def test_gigpo_by_hand():
  # Episodes: 2 and 0. Returns at the first turn, which both began alike:
  # 1 + 1/2 and 0. The answers began in different states.
  state_ids = np.array([[0, 0, 0, 0, 1], [0, 0, 0, 2, 2]])
  found = turn_advantages.gigpo(
      **TWO, state_ids=state_ids, step_coef=2.0, discount=0.5,
      normalize_std=False)
  np.testing.assert_allclose(
      found, [[0, 2.5, 2.5, 0, 1], [0, -2.5, 0, -1, -1]])


def test_a_turn_ends_where_the_next_token_is_of_another():
  np.testing.assert_array_equal(
      turn_advantages.turn_ends(np.array([[0, 1, 1, 2, 0, 3], [0] * 6])),
      [[0, 0, 1, 1, 0, 1], [0] * 6])
