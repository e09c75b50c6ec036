# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""advantages: each baseline against its definition, on host and device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from searchrl.rl import advantages

BASELINES = {
    'group_relative': (advantages.group_relative, oracles.group_relative),
    'population_std': tuple(
        functools.partial(f, ddof=0)
        for f in (advantages.group_relative, oracles.group_relative)),
    'mean_only': tuple(
        functools.partial(f, normalize_std=False)
        for f in (advantages.group_relative, oracles.group_relative)),
    'leave_one_out': (advantages.leave_one_out, oracles.leave_one_out),
    'hop': (advantages.hop_group_relative, oracles.hop_group_relative),
}


@pytest.fixture(autouse=True)
def _no_silent_broadcasting():
  with jax.numpy_rank_promotion('raise'):
    yield


def random_groups(seed, rows=13):
  """Groups of 1 to 5 rows, some constant, some rows out of their baseline."""
  rng = np.random.default_rng(seed)
  ids = rng.permutation(np.array([0, 1, 1, 1, 2, 2, 2, 2, 2, 5, 5, 12, 12]))
  rewards = rng.choice([0.0, 0.1, 0.25, 1.0], rows)
  rewards[ids == 5] = 0.1
  member = (rng.random(rows) < 0.8) | (ids == 0)
  return oracles.poison(rng, rewards, member), ids, member


@pytest.mark.parametrize('name', BASELINES)
@pytest.mark.parametrize('seed', range(5))
@pytest.mark.filterwarnings('error')  # a poisoned reward is never computed with
def test_host_agrees_with_loops(name, seed):
  ours, oracle = BASELINES[name]
  rewards, ids, member = random_groups(seed)
  got = ours(rewards, ids, member)
  assert isinstance(got, np.ndarray) and got.dtype == np.float64
  np.testing.assert_allclose(
      got, oracle(rewards, ids, member), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize('name', BASELINES)
@pytest.mark.parametrize('transform', [jax.jit, lambda f: f])
def test_device_agrees_with_loops(name, transform):
  ours, oracle = BASELINES[name]
  for seed in range(2):
    rewards, ids, member = random_groups(seed)
    rewards = rewards.astype(np.float32)
    got = transform(ours)(*map(jnp.asarray, (rewards, ids, member)))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(
        got, oracle(rewards, ids, member), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('name', BASELINES)
def test_device_in_x64_agrees_with_loops(name):
  ours, oracle = BASELINES[name]
  rewards, ids, member = random_groups(0)
  with jax.enable_x64(True):
    got = jax.jit(ours)(*map(jnp.asarray, (rewards, ids, member)))
  assert got.dtype == np.float64
  np.testing.assert_allclose(
      got, oracle(rewards, ids, member), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize('name', BASELINES)
@pytest.mark.parametrize('size', [1, 3])
def test_constant_groups_give_exactly_zero_in_float32(name, size):
  rewards = np.full(size, 0.1, np.float32)
  ids = np.zeros(size, np.int32)
  ours, _ = BASELINES[name]
  np.testing.assert_array_equal(ours(rewards, ids), 0)
  np.testing.assert_array_equal(ours(jnp.asarray(rewards), ids), 0)


def test_rounding_of_a_constant_reward_is_no_spread():
  rewards = np.array([0.1, 0.1 + 5e-7, 0.1], np.float32)
  assert rewards[0] != rewards[1]
  for array in (np.asarray, jnp.asarray):
    got = advantages.group_relative(array(rewards), np.zeros(3, np.int32))
    np.testing.assert_array_equal(got, 0)


def test_close_rewards_keep_their_precision_in_float32():
  rewards = np.array([1000.0, 1000.001, 1000.0, 1000.002], np.float32)
  ids = np.zeros(4, np.int32)
  np.testing.assert_allclose(
      advantages.group_relative(jnp.asarray(rewards), ids),
      oracles.group_relative(rewards, ids), rtol=1e-5)


def test_two_pairs_by_hand():
  # Pair (0, 1): mean 1/2, sample std sqrt(1/2). Pair (3, 1): mean 2, sqrt(2).
  rewards, ids = np.array([0.0, 3.0, 1.0, 1.0]), np.array([0, 1, 0, 1])
  half = 0.5 / (0.5**0.5 + 1e-6)
  one = 1 / (2**0.5 + 1e-6)
  np.testing.assert_allclose(
      advantages.group_relative(rewards, ids), [-half, one, half, -one])
  np.testing.assert_allclose(
      advantages.group_relative(rewards, ids, normalize_std=False),
      [-0.5, 1, 0.5, -1])
  np.testing.assert_allclose(
      advantages.leave_one_out(rewards, ids), [-1, 2, 1, -2])
  np.testing.assert_allclose(
      advantages.hop_group_relative(rewards, ids, delta=0.75),
      [-0.5, 1 / 1.75**0.5, 0.5, -1 / 1.75**0.5])


def test_rows_out_of_the_baseline_do_not_move_it():
  rewards = np.array([0.0, 1.0, np.nan])
  member = np.array([True, True, False])
  got = advantages.group_relative(rewards, np.zeros(3, int), member)
  np.testing.assert_array_equal(
      got[:2], advantages.group_relative(rewards[:2], np.zeros(2, int)))
  assert got[2] == 0


def test_spread_is_told_to_every_row_of_the_group():
  rewards, ids = np.array([0.0, 0.7, np.nan, 5.0]), np.array([0, 0, 0, 1])
  spread = advantages.group_spread(rewards, ids, ~np.isnan(rewards))
  np.testing.assert_array_equal(spread, [0.7, 0.7, 0.7, 0.0])


def test_num_groups_may_exceed_the_rows():
  rewards, ids = np.array([0.0, 1.0]), np.array([7, 7])
  got = advantages.leave_one_out(rewards, ids, num_groups=8)
  np.testing.assert_array_equal(got, [-1, 1])
  got = jax.jit(functools.partial(advantages.leave_one_out, num_groups=8))(
      jnp.asarray(rewards), jnp.asarray(ids))
  np.testing.assert_array_equal(got, [-1, 1])


@pytest.mark.parametrize('array', [np.asarray, jnp.asarray])
def test_refuses_bad_input(array):
  with pytest.raises(ValueError, match=r'\[0, 2\), but row 1 holds 2.*unique'):
    advantages.group_relative(array([0.0, 1.0]), array([0, 2]))
  with pytest.raises(ValueError, match=r'row 0 holds -1'):
    advantages.leave_one_out(array([0.0, 1.0]), array([-1, 0]))
  with pytest.raises(ValueError, match=r'group_ids must have the shape'):
    advantages.hop_group_relative(array([0.0, 1.0]), array([0]))
