# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""advantages: each against its definition, by row and by token.

Entries outside a mask or a baseline are poisoned with NaN and infinities.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from searchrl.rl import advantages

pytestmark = pytest.mark.usefixtures('no_silent_broadcasting')
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


def gae(discount, gae_lambda, index):
  """Returns GAE and its oracle: their advantages (index 0) or returns (1)."""
  options = dict(discount=discount, gae_lambda=gae_lambda)
  return (lambda x: advantages.gae(
              x['token_rewards'], x['values'], x['mask'], **options)[index],
          lambda x: oracles.gae(
              x['token_rewards'], x['values'], x['mask'], **options)[index])


def reinforce_plus_plus(discount):
  return tuple(
      lambda x, f=f: f(x['token_rewards'], x['mask'], discount=discount)
      for f in (advantages.reinforce_plus_plus, oracles.reinforce_plus_plus))


# Each: `token_inputs` -> one value a token.
BY_TOKEN = {
    'token_rewards': tuple(
        lambda x, f=f: f(x['rewards'], x['mask'], x['penalty'])
        for f in (advantages.token_rewards, oracles.token_rewards)),
    'outcome_alone': tuple(
        lambda x, f=f: f(x['rewards'], x['mask'])
        for f in (advantages.token_rewards, oracles.token_rewards)),
    'gae': gae(0.9, 0.8, 0),
    'gae_returns': gae(0.9, 0.8, 1),
    'gae_undiscounted': gae(1.0, 1.0, 0),
    'gae_undiscounted_returns': gae(1.0, 1.0, 1),
    'gae_one_step': gae(0.9, 0.0, 0),
    'whiten': tuple(
        lambda x, f=f: f(x['values'], x['mask'])
        for f in (advantages.whiten, oracles.whiten)),
    'reinforce_plus_plus': reinforce_plus_plus(1.0),
    'reinforce_plus_plus_discounted': reinforce_plus_plus(0.9),
    'reinforce_plus_plus_baseline': tuple(
        lambda x, f=f: f(x['rewards'], x['ids'], x['mask'], x['member'])
        for f in (advantages.reinforce_plus_plus_baseline,
                  oracles.reinforce_plus_plus_baseline)),
}
SMALL, REALISTIC = (7, 6), (16, 200)


def random_groups(seed, rows=13):
  """Groups of 1 to 5 rows, some constant, some rows out of their baseline."""
  rng = np.random.default_rng(seed)
  ids = rng.permutation(np.array([0, 1, 1, 1, 2, 2, 2, 2, 2, 5, 5, 12, 12]))
  rewards = rng.choice([0.0, 0.1, 0.25, 1.0], rows)
  rewards[ids == 5] = 0.1
  member = (rng.random(rows) < 0.8) | (ids == 0)
  return oracles.poison(rng, rewards, member), ids, member


def token_inputs(seed=0, dtype=np.float64, shape=SMALL):
  """Rewards by row and by token, a critic's values, and groups of 1 to 4."""
  rng = np.random.default_rng(seed)
  mask = oracles.ragged_mask(rng, *shape)
  rows = mask.any(-1)
  member = rows & (rng.random(len(mask)) < 0.8)
  by_token = {
      'token_rewards': rng.normal(size=shape) * (rng.random(shape) < 0.2),
      'values': rng.normal(size=shape),
      'penalty': 0.1 * rng.normal(size=shape),
  }
  return {
      'rewards': oracles.poison(
          rng, rng.choice([0.0, 0.1, 1.0], len(mask)), rows).astype(dtype),
      'ids': rng.permutation(np.arange(len(mask)) ** 2 // len(mask)),
      'member': member, 'mask': mask,
      **{name: oracles.poison(rng, x, mask).astype(dtype)
         for name, x in by_token.items()}}


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
def test_large_groups_keep_their_precision_in_float32(name):
  rng = np.random.default_rng(0)  # hop counts form groups of this size
  rewards = rng.choice([0.0, 0.1, 1.0], 4096).astype(np.float32)
  ids = (rng.random(4096) < 0.1).astype(int)
  ours, _ = BASELINES[name]
  np.testing.assert_allclose(  # the host's float64 agrees with loops, above
      jax.jit(ours)(jnp.asarray(rewards), jnp.asarray(ids)),
      ours(rewards, ids), rtol=1e-5, atol=1e-6)


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


def test_without_a_delta_constant_hops_have_no_advantage():
  rewards, ids = np.array([1.0, 1.0, 0.5, 0.0, 2.0]), np.array([0, 0, 1, 2, 2])
  for array in (np.asarray, jnp.asarray):
    np.testing.assert_allclose(advantages.hop_group_relative(
        array(rewards), array(ids), delta=0.0), [0, 0, 0, -1, 1])


def test_estimates_of_bfloat16_are_summed_in_float32():
  rewards = jnp.full((1, 2000), 0.01, jnp.bfloat16)
  mask = jnp.ones((1, 2000), bool)
  estimate = advantages.gae(rewards, 0 * rewards, mask)
  np.testing.assert_allclose(
      estimate.returns[0, 0], 2000 * float(jnp.bfloat16(0.01)), rtol=1e-4)
  plain = advantages.gae(rewards, 0 * rewards, mask, discount=0.9)
  scalar = advantages.gae(
      rewards, 0 * rewards, mask, discount=np.float64(0.9))
  np.testing.assert_array_equal(plain.returns, scalar.returns)


def test_equal_groups_have_equal_advantages():
  rewards, ids = np.array([0.1, 1.0, 0.3] * 2), np.array([0, 0, 0, 4, 4, 4])
  for ours, _ in BASELINES.values():
    for array in (np.asarray, jnp.asarray):
      got = np.array(ours(array(rewards), array(ids)))
      np.testing.assert_array_equal(got[:3], got[3:])
      assert (np.sign(got[:3]) == [-1, 1, -1]).all()


def test_rows_out_of_the_baseline_do_not_move_it():
  rewards = np.array([0.0, 1.0, np.nan])
  member = np.array([True, True, False])
  got = advantages.group_relative(rewards, np.zeros(3, int), member)
  np.testing.assert_array_equal(
      got[:2], advantages.group_relative(rewards[:2], np.zeros(2, int)))
  assert got[2] == 0


@pytest.mark.parametrize('array', [np.asarray, jnp.asarray])
def test_a_reward_that_is_not_finite_is_named_outside_jit(array):
  ids = array([0, 0, 1, 1])
  for value, name in ((-np.inf, '-inf'), (np.inf, 'inf'), (np.nan, 'NaN')):
    rewards = array([0.0, value, 1.0, 0.0])
    for ours, _ in BASELINES.values():
      with pytest.raises(ValueError, match='^rewards must be finite numbers, '
                         f'but that of row 1 is {name}'):
        ours(rewards, ids)
  got = jax.jit(advantages.group_relative)(rewards, ids)  # values are unknown
  np.testing.assert_array_equal(got[:2], 0)
  assert got[2] > 0 > got[3]


def test_every_row_of_a_group_gets_its_spread():
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


# By token.


@pytest.mark.parametrize('name', BY_TOKEN)
def test_tokens_in_x64_agree_with_loops(name):
  ours, oracle = BY_TOKEN[name]
  run = jax.jit(ours)
  for seed in range(3):
    inputs = token_inputs(seed)
    with jax.enable_x64(True):
      got = run(jax.tree.map(jnp.asarray, inputs))
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, oracle(inputs), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize('name', BY_TOKEN)
@pytest.mark.parametrize('transform, shape', [
    (lambda f: f, SMALL), (jax.jit, REALISTIC)], ids=['eager', 'jit'])
def test_tokens_in_float32_agree_with_loops(name, transform, shape):
  ours, oracle = BY_TOKEN[name]
  inputs = token_inputs(dtype=np.float32, shape=shape)
  got = transform(ours)(jax.tree.map(jnp.asarray, inputs))
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, oracle(inputs), rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(got[~inputs['mask']], 0)


@pytest.mark.parametrize('name', BY_TOKEN)
def test_tokens_are_constants(name):
  ours, _ = BY_TOKEN[name]
  inputs = jax.tree.map(jnp.asarray, token_inputs(dtype=np.float32))
  floats = {k: x for k, x in inputs.items() if x.dtype == jnp.float32}
  gradients = jax.grad(lambda floats: ours(inputs | floats).sum())(floats)
  for gradient in gradients.values():
    np.testing.assert_array_equal(gradient, 0)


def random_layouts(seed=0):
  """The same policy tokens, back to back and with observations in between."""
  rng = np.random.default_rng(seed)
  counts = np.array([4, 1, 0, 3])
  tight = np.arange(4)[None, :] < counts[:, None]
  wide = np.zeros((4, 9), bool)
  wide[0, [0, 1, 5, 8]] = True  # in between
  wide[1, 3] = True  # before and after
  wide[3, [2, 4, 5]] = True  # anywhere

  def lay(x):  # row by row, each token where the mask has a place for it
    out = rng.choice([np.nan, np.inf, -np.inf], wide.shape).astype(np.float32)
    out[wide] = x[tight]
    return jnp.asarray(out)

  return tight, wide, lay


def test_observations_and_padding_change_nothing():
  tight, wide, lay = random_layouts()
  rng = np.random.default_rng(1)
  outcome = jnp.array([1.0, 0.5, np.nan, 0.0])
  penalty, values = rng.normal(size=(2, 4, 4)).astype(np.float32)
  rewards = advantages.token_rewards(outcome, tight, jnp.asarray(penalty))
  wide_rewards = advantages.token_rewards(outcome, wide, lay(penalty))
  np.testing.assert_array_equal(wide_rewards[wide], rewards[tight])

  options = dict(discount=0.9, gae_lambda=0.8)
  got = advantages.gae(lay(np.array(rewards)), lay(values), wide, **options)
  expected = advantages.gae(rewards, jnp.asarray(values), tight, **options)
  for a, b in zip(got, expected):
    np.testing.assert_allclose(a[wide], b[tight], rtol=1e-6)
    np.testing.assert_array_equal(a[~wide], 0)
  np.testing.assert_allclose(
      advantages.reinforce_plus_plus(wide_rewards, wide, discount=0.9)[wide],
      advantages.reinforce_plus_plus(rewards, tight, discount=0.9)[tight],
      rtol=1e-5, atol=1e-6)


def test_undiscounted_gae_is_the_reward_less_the_value():
  tight, wide, lay = random_layouts()
  outcome = jnp.array([1.0, 0.1, 0.0, 0.7])
  values = lay(np.random.default_rng(2).normal(size=tight.shape))
  got = advantages.gae(
      advantages.token_rewards(outcome, wide), values, wide,
      discount=1.0, gae_lambda=1.0)
  np.testing.assert_array_equal(
      got.advantages, jnp.where(wide, outcome[:, None] - values, 0))
  np.testing.assert_array_equal(
      got.returns, jnp.where(wide, outcome[:, None], 0))


def test_gae_of_mixed_precision():
  ours, oracle = BY_TOKEN['gae']
  inputs = token_inputs()
  inputs['values'] = inputs['values'].astype(np.float32)
  with jax.enable_x64(True):
    got = ours(jax.tree.map(jnp.asarray, inputs))
  np.testing.assert_allclose(got, oracle(inputs), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize('dtype', [np.float32, np.float64])
def test_whitened_constants_are_exactly_zero(dtype):
  inputs = token_inputs(shape=REALISTIC)
  constant = np.where(inputs['mask'], 0.1, np.nan).astype(dtype)
  with jax.enable_x64(dtype == np.float64):
    for transform in (jax.jit, lambda f: f):
      got = transform(advantages.whiten)(jnp.asarray(constant), inputs['mask'])
      assert got.dtype == dtype
      np.testing.assert_array_equal(got, 0)


def test_a_constant_outcome_of_a_tenth_teaches_nothing():
  mask = jnp.asarray(token_inputs(shape=REALISTIC)['mask'])
  rewards = jnp.full(len(mask), 0.1)
  np.testing.assert_array_equal(advantages.reinforce_plus_plus(
      advantages.token_rewards(rewards, mask), mask), 0)
  np.testing.assert_array_equal(advantages.reinforce_plus_plus_baseline(
      rewards, jnp.zeros(len(mask), int), mask), 0)


@pytest.mark.parametrize('offset, spread', [
    (0.0, 1.0), (0.0, 1e-3), (100.0, 0.01), (1000.0, 0.01), (-5.0, 1e-4)])
def test_whiten_keeps_its_precision_in_float32(offset, spread):
  rng = np.random.default_rng(0)
  mask = oracles.ragged_mask(rng, *REALISTIC)
  x = (offset + spread * rng.normal(size=mask.shape)).astype(np.float32)
  for transform in (jax.jit, lambda f: f):
    np.testing.assert_allclose(
        transform(advantages.whiten)(jnp.asarray(x), mask),
        oracles.whiten(x, mask), rtol=1e-5, atol=1e-6)


def test_reinforce_plus_plus_baseline_of_groups_of_one_and_equal_groups():
  mask = jnp.array([[True, False, True, True]] * 4)
  rewards = jnp.array([0.1, 1.0, 0.3, 0.1])
  alone = advantages.reinforce_plus_plus_baseline(
      rewards, jnp.arange(4), mask)
  np.testing.assert_array_equal(alone, 0)
  pair = advantages.reinforce_plus_plus_baseline(
      jnp.array([0.1, 1.0, 0.1, 1.0]), jnp.array([2, 2, 0, 0]), mask)
  np.testing.assert_array_equal(pair[:2], pair[2:])
  np.testing.assert_array_equal(np.sign(pair[:2, 0]), [-1, 1])


def test_rewards_of_tokens_need_a_mask_of_booleans():
  with pytest.raises(ValueError, match='^loss_mask must be a mask of booleans'):
    advantages.token_rewards(jnp.ones(2), jnp.ones((2, 3), jnp.int32))


def test_nothing_to_train_on_is_zero():
  for shape in ((2, 3), (1, 1)):
    inputs = token_inputs(shape=shape)
    inputs['mask'] = np.zeros(shape, bool)
    inputs['rewards'] = np.full(shape[0], np.nan)
    inputs['member'] = np.zeros(shape[0], bool)
    for ours, _ in BY_TOKEN.values():
      got = ours(jax.tree.map(jnp.asarray, inputs))
      np.testing.assert_array_equal(got, np.zeros(shape))


# Two sampled tokens, with one retrieved token between and one after them.
TURNS = np.array([[True, False, True, False]])
VALUES = np.array([[0.5, np.nan, 0.25, np.inf]])


def test_token_rewards_by_hand():
  got = advantages.token_rewards(
      jnp.array([1.0, 7.0]), jnp.array([*TURNS, [False] * 4]),
      jnp.array([[0.25, 9.0, 0.25, 9.0]] * 2))
  np.testing.assert_array_equal(got, [[-0.25, 0, 0.75, 0], [0, 0, 0, 0]])


def test_gae_by_hand():
  # lambda 1/2: A = 1 - 1/4 = 3/4 for the second, 1/4 - 1/2 + half of 3/4 for
  # the first. discount 1/2: the reward is worth 1/2 one policy token earlier.
  rewards = advantages.token_rewards(jnp.ones(1), jnp.asarray(TURNS))
  for options, advs, returns in (
      (dict(gae_lambda=0.5), [0.125, 0, 0.75, 0], [0.625, 0, 1, 0]),
      (dict(discount=0.5), [0, 0, 0.75, 0], [0.5, 0, 1, 0])):
    got = advantages.gae(
        rewards, jnp.asarray(VALUES), jnp.asarray(TURNS), **options)
    np.testing.assert_allclose(got.advantages, [advs], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(got.returns, [returns], rtol=1e-6)


def test_reinforce_plus_plus_by_hand():
  # Returns 1, 2 and 3: their mean is 2, their sample deviation 1.
  rewards = jnp.array([[0.0, jnp.nan, 2.0], [3.0, 9.0, 9.0]])
  mask = jnp.array([[True, False, True], [True, False, False]])
  got = advantages.reinforce_plus_plus(rewards, mask, discount=0.5)
  np.testing.assert_allclose(got, [[-1, 0, 0], [1, 0, 0]], rtol=1e-6)


def test_reinforce_plus_plus_baseline_by_hand():
  # Minus their group's mean: -1, 1, and 0 for the group of one.
  got = advantages.reinforce_plus_plus_baseline(
      jnp.array([0.0, 2.0, 5.0]), jnp.array([0, 0, 1]),
      jnp.array([[True, False], [False, True], [True, False]]))
  np.testing.assert_allclose(got, [[-1, 0], [0, 1], [0, 0]], rtol=1e-6)


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_whiten_sums_short_floats_in_float32(dtype):
  """A count in bfloat16 ends at 256, and a square in float16 at 65,504."""
  x = (100 * jax.random.normal(jax.random.key(0), (64, 64))).astype(dtype)
  got = advantages.whiten(x, jnp.ones(x.shape, bool))
  np.testing.assert_allclose(
      got, oracles.whiten(np.asarray(x, float), np.ones(x.shape, bool)),
      rtol=1e-5, atol=1e-5)


def test_whiten_by_hand():
  # 1 and 5: the mean is 3, the sample variance (4 + 4) / 1. One entry gives 0.
  x, where = jnp.array([1.0, 9.0, 5.0]), jnp.array([True, False, True])
  np.testing.assert_allclose(
      advantages.whiten(x, where), [-0.5**0.5, 0, 0.5**0.5], rtol=1e-6)
  np.testing.assert_array_equal(advantages.whiten(x, x > 6), 0)


def test_refuses_bad_input_by_token():
  x, mask, row = jnp.zeros((2, 3)), jnp.ones((2, 3), bool), jnp.zeros(2)
  with pytest.raises(
      ValueError, match=r'one per row, \(2,\).*\(2, 3\). Reduce'):
    advantages.token_rewards(x, mask)
  with pytest.raises(ValueError, match=r'penalty must .*\(2, 3\).*\(2,\). Al'):
    advantages.token_rewards(row, mask, row)
  with pytest.raises(ValueError, match=r'values must .*\(2, 3\).*\(2,\). Al'):
    advantages.gae(x, row, mask)
  with pytest.raises(ValueError, match=r'loss_mask must .*\(2, 3\).*\(3,\)'):
    advantages.reinforce_plus_plus(x, mask[0])
  with pytest.raises(ValueError, match=r'where must .*\(2, 3\).*\(3,\)'):
    advantages.whiten(x, mask[0])
  one = jnp.zeros(1)  # would fit every row if it were broadcast
  with pytest.raises(ValueError, match=r'one per row, \(2,\).*\(1,\). Reduce'):
    advantages.reinforce_plus_plus_baseline(one, one.astype(int), mask)
  with pytest.raises(ValueError, match=r'\[0, 2\), but row 1 holds 2.*unique'):
    advantages.reinforce_plus_plus_baseline(row, jnp.array([0, 2]), mask)


@pytest.mark.parametrize('array', [np.asarray, jnp.asarray])
def test_refuses_bad_input(array):
  with pytest.raises(ValueError, match=r'\[0, 2\), but row 1 holds 2.*unique'):
    advantages.group_relative(array([0.0, 1.0]), array([0, 2]))
  with pytest.raises(ValueError, match=r'row 0 holds -1'):
    advantages.leave_one_out(array([0.0, 1.0]), array([-1, 0]))
  with pytest.raises(ValueError, match=r'group_ids must have the shape'):
    advantages.hop_group_relative(array([0.0, 1.0]), array([0]))
  with pytest.raises(ValueError, match=r'in_baseline must have .*\(2,\).*\(1,'):
    advantages.group_relative(
        array([0.0, 1.0]), array([0, 1]), array([True]))
  with pytest.raises(ValueError, match=r'\[0, 2\).* 1 holds 7.*num_groups'):
    advantages.group_spread(array([0.0, 1.0]), array([0, 7]), num_groups=2)


@pytest.mark.parametrize('function', [
    advantages.group_relative, advantages.leave_one_out,
    advantages.hop_group_relative])
def test_under_jit_rows_without_a_valid_group_have_nan(function):
  rewards = np.array([0.0, 1.0, 0.5, 0.25, 9.0], np.float32)
  ids = np.array([0, 0, 5, -1, 7])  # the last row is in no baseline
  got = jax.jit(function)(rewards, ids, np.arange(5) < 4)
  np.testing.assert_array_equal(np.isnan(got), [False, False, True, True, False])
  np.testing.assert_allclose(got[:2], function(rewards[:2], ids[:2]), rtol=1e-6)
  assert got[4] == 0


def test_rows_of_devices_have_the_advantages_of_one():
  rows = [np.random.default_rng(0).normal(size=(8, 5)) for _ in range(2)]
  mask = np.arange(5) < np.arange(8)[:, None]
  split = jax.shard_map(
      lambda *x: advantages.gae(*x, gae_lambda=0.9).advantages,
      mesh=jax.make_mesh((8,), 'd', (jax.sharding.AxisType.Auto,)),
      in_specs=(jax.P('d'),) * 3, out_specs=jax.P('d'))
  np.testing.assert_allclose(
      split(*rows, mask),
      advantages.gae(*rows, mask, gae_lambda=0.9).advantages, rtol=1e-5)
