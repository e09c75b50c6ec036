# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""losses: each against its definition, in value and in gradient.

Whatever lies outside the mask is poisoned with NaN and infinities throughout.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from searchrl.rl import losses
from searchrl.rl.masked import Mean

CLIP = dict(clip_low=0.2, clip_high=0.3)
LOW_HIGH = tuple(CLIP.values())


@pytest.fixture(autouse=True)
def _no_silent_broadcasting():
  with jax.numpy_rank_promotion('raise'):
    yield


def random_inputs(seed=0, dtype=np.float64, gap=0.4, poisoned=True):
  """logprobs, old_logprobs, advantages [B], mask."""
  rng = np.random.default_rng(seed)
  mask = oracles.ragged_mask(rng, 7, 6)
  old = -rng.exponential(size=mask.shape)
  logprobs = old + gap * rng.normal(size=mask.shape)
  advs = rng.normal(size=len(mask))
  if poisoned:
    logprobs = oracles.poison(rng, logprobs, mask)
    old = oracles.poison(rng, old, mask)
    advs = oracles.poison(rng, advs, mask.any(-1))
  return *(x.astype(dtype) for x in (logprobs, old, advs)), mask


def token_loss(logprobs, old, advs, mask):
  return losses.token_ratio_loss(logprobs, old, advs, mask, **CLIP)


def sequence_loss(logprobs, old, advs, mask):
  return losses.sequence_ratio_loss(logprobs, old, advs, mask, **CLIP)


def kl_with(estimator):
  return (
      lambda logp, ref, advs, mask: losses.kl(
          logp, ref, mask, estimator=estimator),
      lambda logp, ref, advs, mask: oracles.kl(logp, ref, mask, estimator))


def aggregated(how):
  def ours(logp, old, advs, mask):
    per_token = token_loss(logp, old, advs, mask)
    return losses.aggregate(per_token, mask, how=how).value

  def oracle(logp, old, advs, mask):
    per_token = oracles.token_ratio_loss(logp, old, advs, mask, *LOW_HIGH)
    total, count = oracles.aggregate(per_token, mask, how)
    return total / count

  return ours, oracle


# Each: logprobs, old (or reference) log-probs, advantages, mask -> values.
FUNCTIONS = {
    'token_ratio': (
        lambda logp, old, advs, mask: losses.token_ratio(logp, old, mask),
        lambda logp, old, advs, mask: oracles.token_ratio(logp, old, mask)),
    'sequence_ratio': (
        lambda logp, old, advs, mask: losses.sequence_ratio(logp, old, mask),
        lambda logp, old, advs, mask: oracles.sequence_ratio(logp, old, mask)),
    'token_ratio_loss': (
        token_loss, lambda *args: oracles.token_ratio_loss(*args, *LOW_HIGH)),
    'sequence_ratio_loss': (
        sequence_loss,
        lambda *args: oracles.sequence_ratio_loss(*args, *LOW_HIGH)),
    **{how: aggregated(how) for how in losses.AGGREGATIONS},
    **{name: kl_with(name) for name in losses.KL_ESTIMATORS},
}


@pytest.mark.parametrize('name', FUNCTIONS)
def test_agrees_with_loops_in_x64_value_and_gradient(name):
  ours, oracle = FUNCTIONS[name]
  by_row, by_token = np.random.default_rng(9).normal(size=(2, 7, 6))

  def weigh(values):  # any cotangent, also where the mask is False
    return (values * {0: 1.0, 1: by_row[:, 0], 2: by_token}[values.ndim]).sum()

  gradient_of = jax.jit(jax.grad(lambda *args: weigh(ours(*args))))
  for seed in range(3):
    logprobs, old, advs, mask = inputs = random_inputs(seed)
    with jax.enable_x64(True):
      value = ours(*map(jnp.asarray, inputs))
      gradient = np.array(gradient_of(*map(jnp.asarray, inputs)))
    np.testing.assert_allclose(value, oracle(*inputs), rtol=1e-9, atol=1e-12)
    expected = oracles.gradient(
        lambda x: weigh(np.array(oracle(x, *inputs[1:]))), logprobs, mask)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-8)
    np.testing.assert_array_equal(gradient[~mask], 0)


@pytest.mark.parametrize('name', FUNCTIONS)
@pytest.mark.parametrize('transform', [jax.jit, lambda f: f])
def test_agrees_with_loops_in_float32(name, transform):
  ours, oracle = FUNCTIONS[name]
  inputs = random_inputs(dtype=np.float32)
  got = transform(ours)(*map(jnp.asarray, inputs))
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, oracle(*inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('name', FUNCTIONS)
def test_only_logprobs_are_differentiated(name):
  ours, _ = FUNCTIONS[name]
  logprobs, old, advs, mask = random_inputs(dtype=np.float32)
  gradients = jax.grad(
      lambda old, advs: ours(logprobs, old, advs, mask).sum(), (0, 1))(
          jnp.asarray(old), jnp.asarray(advs))
  for gradient in gradients:
    np.testing.assert_array_equal(gradient, 0)


def test_advantages_may_belong_to_tokens():
  rng = np.random.default_rng(3)
  logprobs, old, _, mask = random_inputs()
  advs = oracles.poison(rng, rng.normal(size=mask.shape), mask)
  with jax.enable_x64(True):
    got = token_loss(*map(jnp.asarray, (logprobs, old, advs, mask)))
  np.testing.assert_allclose(
      got, oracles.token_ratio_loss(logprobs, old, advs, mask, *LOW_HIGH),
      rtol=1e-9)


def test_two_tokens_by_hand():
  # Gaps ln 2 and ln 8: s = exp(ln 16 / 2) = 4, clipped for A = +1 alone.
  logprobs = jnp.log(jnp.array([[2.0, 8.0, 5.0]] * 2))
  mask = jnp.array([[True, True, False]] * 2)
  args = logprobs, jnp.zeros((2, 3)), jnp.array([1.0, -1.0]), mask
  clip = dict(clip_low=0.2, clip_high=0.2)
  np.testing.assert_allclose(
      losses.sequence_ratio_loss(*args, **clip), [-1.2, 4.0], rtol=1e-6)
  np.testing.assert_allclose(
      losses.token_ratio_loss(*args, **clip),
      [[-1.2, -1.2, 0.0], [2.0, 8.0, 0.0]], rtol=1e-6)


def test_surrogate_by_hand():
  # Below the range a fall is kept for A > 0 (it may recover), cut for A < 0.
  ratio = jnp.array([0.5, 0.5, 2.0, 2.0, 1.1])
  advs = jnp.array([1.0, -1.0, 1.0, -1.0, 3.0])
  got = losses.clipped_surrogate(ratio, advs, clip_low=0.2, clip_high=0.3)
  np.testing.assert_allclose(got, [-0.5, 0.8, -1.3, 2.0, -3.3], rtol=1e-6)
  slope = jax.grad(lambda r: losses.clipped_surrogate(
      r, advs, clip_low=0.2, clip_high=0.3).sum())(ratio)
  np.testing.assert_array_equal(slope, [-1.0, 0.0, 0.0, 1.0, -3.0])


def test_on_policy_both_ratios_have_the_score_function_gradient():
  logprobs, _, advs, mask = random_inputs(dtype=np.float32, poisoned=False)
  for ours, share in (
      (token_loss, np.ones(len(mask))),
      (sequence_loss, 1 / np.maximum(mask.sum(-1), 1))):
    got = jax.grad(lambda x: ours(x, logprobs, advs, mask).sum())(
        jnp.asarray(logprobs))
    np.testing.assert_allclose(
        got, np.where(mask, -(advs * share)[:, None], 0), rtol=1e-6)


def test_token_ratio_is_finite_for_any_gap():
  gaps = jnp.array([[-1e4, -21.0, 0.0, 21.0, 1e4]])
  got = losses.token_ratio(gaps, jnp.zeros((1, 5)), jnp.ones((1, 5), bool))
  np.testing.assert_allclose(
      got, np.exp([[-20.0, -20.0, 0.0, 20.0, 20.0]]), rtol=1e-5)


def test_k3_is_right_for_small_gaps_and_never_negative():
  x = np.array([[1e-3, -1e-3, 1e-2, 0.5, -8.0]], np.float32)
  mask = np.ones(x.shape, bool)
  got = losses.kl(jnp.zeros(x.shape), jnp.asarray(x), mask, estimator='k3')
  np.testing.assert_allclose(
      got, oracles.kl(np.zeros(x.shape), x, mask, 'k3'), rtol=1e-3)
  assert (np.array(got) >= 0).all()


@pytest.mark.parametrize('how', losses.AGGREGATIONS)
def test_aggregate_by_hand_and_over_splits(how):
  # Rows (1, 2), (6,) and an empty one; T = 3.
  x = jnp.array([[1.0, jnp.nan, 2.0], [6.0, 9.0, 9.0], [9.0, 9.0, jnp.inf]])
  mask = jnp.array([[True, False, True], [True, False, False], [False] * 3])
  whole = losses.aggregate(x, mask, how=how)
  assert (whole.total, whole.count) == {
      'token_mean': (9.0, 3.0), 'sequence_mean': (7.5, 2.0),
      'sequence_sum': (9.0, 2.0), 'sequence_sum_norm': (3.0, 2.0)}[how]
  parts = [losses.aggregate(x[i:i+1], mask[i:i+1], how=how) for i in range(3)]
  assert parts[0] + parts[1] + parts[2] == whole


def test_the_norm_may_be_a_constant():
  x, mask = jnp.ones((2, 3)), jnp.ones((2, 3), bool)
  mean = losses.aggregate(x, mask, how='sequence_sum_norm', length=12)
  assert mean.value == 0.25


def test_clip_fractions_by_side():
  logprobs, old, advs, mask = random_inputs(3, np.float32, gap=1.0)
  inputs = logprobs, old, mask
  rows = mask.any(-1)
  for ratio, oracle, where in (
      (losses.token_ratio(*inputs), oracles.token_ratio(*inputs), mask),
      (losses.sequence_ratio(*inputs), oracles.sequence_ratio(*inputs), rows)):
    got = losses.clip_fractions(ratio, advs, where, **CLIP)
    low, high = oracles.clip_fractions(oracle, advs, where, *LOW_HIGH)
    assert low > 0 and high > 0
    np.testing.assert_allclose(got['actor/clipfrac_low'].value, low, rtol=1e-6)
    np.testing.assert_allclose(
        got['actor/clipfrac_high'].value, high, rtol=1e-6)
    np.testing.assert_allclose(
        got['actor/pg_clipfrac'].value, low + high, rtol=1e-6)


def test_policy_drift_reads_old_against_new():
  logprobs, old, _, mask = random_inputs(dtype=np.float32)
  got = losses.policy_drift(*map(jnp.asarray, (logprobs, old, mask)))
  for name, estimator in (('actor/ppo_kl', 'k1'), ('actor/ppo_kl_k3', 'k3')):
    per_token = oracles.kl(old, logprobs, mask, estimator)
    total, count = oracles.aggregate(per_token, mask, 'token_mean')
    assert isinstance(got[name], Mean)
    np.testing.assert_allclose(
        got[name].value, total / count, rtol=1e-5, atol=1e-6)


def test_refuses_bad_input():
  x, mask, advs = jnp.zeros((2, 3)), jnp.ones((2, 3), bool), jnp.zeros(2)
  with pytest.raises(ValueError, match=r'old_logprobs must .*\(2, 3\).*\(2,\)'):
    losses.token_ratio(x, advs, mask)
  with pytest.raises(ValueError, match=r'must have shape \(2,\) \(one a seq'):
    losses.sequence_ratio_loss(x, x, x, mask)
  with pytest.raises(ValueError, match=r'\(2, 3\).*, or \(2,\).*have \(2, 1\)'):
    losses.token_ratio_loss(x, x, advs[:, None], mask)
  with pytest.raises(ValueError, match="k1, abs, k2, k3, but is 'k4'"):
    losses.kl(x, x, mask, estimator='k4')
  with pytest.raises(ValueError, match="how must be .*token_mean.*'mean'"):
    losses.aggregate(x, mask, how='mean')
