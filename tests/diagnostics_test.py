# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""diagnostics: each number against its definition, and against one by hand.

Whatever is not trained on is poisoned with NaN and infinities throughout.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from searchrl.rl import advantages
from searchrl.rl import diagnostics
from searchrl.rl import losses
from searchrl.rl.masked import Mean
from searchrl.trajectory import Batch

pytestmark = pytest.mark.usefixtures('no_silent_broadcasting')
CLIP = dict(clip_low=0.2, clip_high=0.3)


def random_inputs(seed=0, dtype=np.float32, gap=1.0):
  """logprobs, old_logprobs, advantages [B], mask; rows drift, tokens too."""
  rng = np.random.default_rng(seed)
  mask = oracles.ragged_mask(rng, 15, 8)
  old = -rng.exponential(size=mask.shape)
  drift = rng.normal(size=(len(mask), 1))
  logprobs = old + gap * (rng.normal(size=mask.shape) + drift) / 2**0.5
  advs = rng.normal(size=len(mask))
  logprobs, old = (oracles.poison(rng, x, mask) for x in (logprobs, old))
  advs = oracles.poison(rng, advs, mask.any(-1))
  return *(x.astype(dtype) for x in (logprobs, old, advs)), mask


def random_batch(seed=0):
  """Scored; rows out of the loss, of an earlier policy, and empty ones."""
  rng = np.random.default_rng(seed)
  mask = oracles.ragged_mask(rng, 9, 8)
  in_loss = mask.any(-1) & (rng.random(9) < 0.8)
  on_policy = mask.any(-1) & (rng.random(9) < 0.7)

  def noise(where):
    x = -rng.exponential(size=mask.shape)
    return oracles.poison(rng, x, where).astype(np.float32)

  trained = mask & in_loss[:, None]
  return Batch(
      tokens=np.zeros(mask.shape, np.int32), loss_mask=mask,
      behavior_logprobs=noise(mask), rewards=np.ones(9, np.float32),
      outcome_rewards=np.ones(9, np.float32), question_ids=np.arange(9),
      group_ids=np.arange(9), in_baseline=in_loss, in_loss=in_loss,
      on_policy=on_policy, old_logprobs=noise(mask),
      ref_logprobs=noise(trained), values=noise(trained))


def mean_of(values, mask):
  total, count = oracles.aggregate(values, mask, 'token_mean')
  return total / count


@pytest.mark.parametrize('dual_clip', [None, 1.5])
@pytest.mark.parametrize('level', ['token', 'token_advantage', 'sequence'])
@pytest.mark.parametrize('transform', [jax.jit, lambda f: f])
def test_clip_fractions_agree_with_loops(level, dual_clip, transform):
  logprobs, old, advs, mask = random_inputs()
  ratio, oracle, where = {
      'token': (losses.token_ratio, oracles.token_ratio, mask),
      'sequence': (
          losses.sequence_ratio, oracles.sequence_ratio, mask.any(-1)),
  }[level.removesuffix('_advantage')]
  if level == 'token_advantage':
    advs = old + 0.7  # of either sign; poisoned where `old` is

  def fractions(logprobs):
    return diagnostics.clip_fractions(
        ratio(logprobs, old, mask), advs, where, **CLIP, dual_clip=dual_clip)

  got = transform(fractions)(jnp.asarray(logprobs))
  low, high, dual = oracles.clip_fractions(
      oracle(logprobs, old, mask), advs, where, *CLIP.values(),
      dual_clip or np.inf)
  assert low > 0 and high > 0
  expected = {'actor/clipfrac_low': low, 'actor/clipfrac_high': high,
              'actor/pg_clipfrac': low + high}
  if dual_clip is not None:
    assert dual > 0
    expected['actor/pg_clipfrac_lower'] = dual
  assert set(got) == set(expected)
  for name, fraction in expected.items():
    assert got[name].count == where.sum()
    np.testing.assert_allclose(got[name].value, fraction, rtol=1e-6)


def test_clip_fractions_by_hand():
  # Of four ratios that count, one fell with A < 0, one rose with A > 0, the
  # third rose with A < 0, above 3, and the fourth is in range. A fifth is not
  # in the mask.
  got = diagnostics.clip_fractions(
      jnp.array([0.5, 2.0, 4.0, 1.1, 9.0]), jnp.array([-1, 1, -1, 1, jnp.nan]),
      jnp.array([True, True, True, True, False]), **CLIP, dual_clip=3.0)
  assert {name: float(mean.value) for name, mean in got.items()} == {
      'actor/pg_clipfrac': 0.5, 'actor/clipfrac_low': 0.25,
      'actor/clipfrac_high': 0.25, 'actor/pg_clipfrac_lower': 0.25}


def test_policy_drift_reads_old_against_new():
  logprobs, old, _, mask = random_inputs(gap=0.4)
  got = diagnostics.policy_drift(*map(jnp.asarray, (logprobs, old, mask)))
  for name, estimator in (('actor/ppo_kl', 'k1'), ('actor/ppo_kl_k3', 'k3')):
    assert isinstance(got[name], Mean)
    per_token = oracles.kl(old, logprobs, mask, estimator)
    np.testing.assert_allclose(
        got[name].value, mean_of(per_token, mask), rtol=1e-5, atol=1e-6)


def test_policy_drift_by_hand():
  # The policy halves its probabilities: k1 = ln 2, k3 = 1/2 - 1 + ln 2.
  got = diagnostics.policy_drift(
      jnp.log(jnp.array([[0.25, 0.0]])), jnp.log(jnp.array([[0.5, 0.0]])),
      jnp.array([[True, False]]))
  np.testing.assert_allclose(got['actor/ppo_kl'].value, np.log(2), rtol=1e-6)
  np.testing.assert_allclose(
      got['actor/ppo_kl_k3'].value, np.log(2) - 0.5, rtol=1e-6)


@pytest.mark.parametrize('value_clip', [None, 0.3])
@pytest.mark.parametrize('transform', [jax.jit, lambda f: f])
def test_value_fit_agrees_with_loops(value_clip, transform):
  values, old, _, mask = random_inputs()
  inputs = values, old, old / 2, mask
  got = transform(lambda *args: diagnostics.value_fit(
      *args, value_clip=value_clip))(*inputs)
  plain, worse = (
      oracles.value_loss(*inputs, clip) for clip in (None, value_clip))
  share = mean_of(worse > plain, mask)
  assert (share > 0) == (value_clip is not None)
  np.testing.assert_allclose(
      got['critic/vf_clipfrac'].value, share, rtol=1e-6)
  np.testing.assert_allclose(
      got['critic/vpred_mean'].value, mean_of(values, mask),
      rtol=1e-5, atol=1e-6)


def test_value_fit_by_hand():
  # Both moved from 0 to 2, further than 1/2. R = 3: the clipped error is the
  # larger one; R = 0: the smaller one.
  got = diagnostics.value_fit(
      jnp.array([[2.0, 2.0, 9.0]]), jnp.zeros((1, 3)),
      jnp.array([[3.0, 0.0, 0.0]]), jnp.array([[True, True, False]]),
      value_clip=0.5)
  assert got['critic/vf_clipfrac'].value == 0.5
  assert got['critic/vpred_mean'].value == 2


@pytest.mark.filterwarnings('error')  # what is poisoned is never computed with
@pytest.mark.parametrize('kind', ['row', 'token', 'critic'])
def test_describe_agrees_with_loops(kind):
  for seed in range(3):
    batch = random_batch(seed)
    where = batch.loss_mask & batch.in_loss[:, None]
    rng = np.random.default_rng(seed)
    advs, returns = (
        oracles.poison(rng, x, where).astype(np.float32)
        for x in rng.normal(size=(2, *where.shape)))
    if kind == 'row':
      advs = oracles.poison(rng, rng.normal(size=9), where.any(-1))
    estimate = advantages.Estimate(advs, returns) if kind == 'critic' else advs
    trained = rng.random(9) < 0.5
    got = diagnostics.describe(batch, estimate, trained)

    expected = {
        'train/empty_rows': sum(not any(row) for row in where),
        'train/frac_rows_trained': sum(
            trained[i] for i, row in enumerate(where) if any(row)) / sum(
                any(row) for row in where)}
    parts = {'critic/advantages': advs}
    if kind == 'critic':
      parts |= {'critic/returns': returns, 'critic/values': batch.values}
      expected['critic/vf_explained_var'] = oracles.explained_variance(
          batch.values, returns, where)
    for name, array in parts.items():
      entries = [float(array[i] if array.ndim == 1 else array[i, t])
                 for i, t in np.argwhere(where)]
      expected |= {f'{name}/mean': sum(entries) / len(entries),
                   f'{name}/max': max(entries), f'{name}/min': min(entries)}
    expected['actor/reference_kl'] = mean_of(
        oracles.kl(batch.old_logprobs, batch.ref_logprobs, where, 'k1'), where)
    assert set(got) == set(expected)
    for name, value in expected.items():
      assert isinstance(got[name], float)
      np.testing.assert_allclose(
          got[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def two_rows(**fields):
  """Two policy tokens around a retrieved one; the second row is empty."""
  mask = np.array([[True, False, True], [False] * 3])
  rows, some = np.array([True, False]), np.array([1.0, 0.0])
  return Batch(**dict(
      tokens=np.zeros(mask.shape, np.int32), loss_mask=mask,
      behavior_logprobs=np.zeros(mask.shape), rewards=some,
      outcome_rewards=some, question_ids=np.arange(2), group_ids=np.arange(2),
      in_baseline=rows, in_loss=rows, on_policy=rows,
      old_logprobs=np.zeros(mask.shape)) | fields)


def test_describe_by_hand():
  # Returns 1 and 3 vary by 1; the values err by 0 and by 1, which varies by
  # 1/4. The policy is twice as sure as the reference of one token in two.
  nan = np.nan
  batch = two_rows(
      ref_logprobs=np.log([[0.5, nan, 1.0], [nan] * 3]),
      values=np.array([[1.0, nan, 2.0], [nan] * 3]))
  got = diagnostics.describe(batch, advantages.Estimate(
      np.array([[-2.0, nan, 4.0], [nan] * 3]),
      np.array([[1.0, nan, 3.0], [nan] * 3])), np.array([True, False]))
  assert got == pytest.approx({
      'train/empty_rows': 1, 'train/frac_rows_trained': 1,
      'critic/advantages/mean': 1, 'critic/advantages/max': 4,
      'critic/advantages/min': -2, 'critic/returns/mean': 2,
      'critic/returns/max': 3, 'critic/returns/min': 1,
      'critic/values/mean': 1.5, 'critic/values/max': 2,
      'critic/values/min': 1, 'critic/vf_explained_var': 0.75,
      'actor/reference_kl': np.log(2) / 2})


def test_describe_of_returns_that_do_not_vary():
  batch = two_rows(values=np.array([[1.0, 0.0, 2.0], [0.0] * 3]))
  got = diagnostics.describe(
      batch, advantages.Estimate(np.ones((2, 3)), np.ones((2, 3))),
      np.ones(2, bool))
  assert got['critic/vf_explained_var'] == 0


def test_describe_of_a_batch_without_trained_tokens():
  batch = dataclasses.replace(random_batch(), in_loss=np.zeros(9, bool))
  assert diagnostics.describe(batch, np.zeros(9), np.ones(9, bool)) == {
      'train/empty_rows': 9}


@pytest.mark.filterwarnings('error')
def test_mismatch_agrees_with_loops():
  for seed in range(3):
    batch = random_batch(seed)
    trained = np.arange(9) % 4 > 0
    got = diagnostics.mismatch(dataclasses.replace(
        batch, old_logprobs=np.where(
            trained[:, None], batch.old_logprobs, np.nan)), trained)
    expected = oracles.mismatch(
        batch.old_logprobs, batch.behavior_logprobs,
        batch.loss_mask & (batch.on_policy & trained)[:, None])
    assert set(got) == set(expected)
    for name, value in expected.items():
      np.testing.assert_allclose(got[name], value, rtol=1e-9, err_msg=name)


def test_mismatch_by_hand():
  # The learner gives 1/2 and 1/2 where the sampler gave 1 and 1/4: weights
  # 1/2 and 2, so that (1 + 4)^2 / (2 (1 + 16)) of the tokens count.
  nan = np.nan
  got = diagnostics.mismatch(two_rows(
      old_logprobs=np.log([[0.5, nan, 0.5], [nan] * 3]),
      behavior_logprobs=np.log([[1.0, nan, 0.25], [nan] * 3])),
      np.ones(2, bool))
  assert got == pytest.approx({
      'training/rollout_logprobs_diff_mean': np.log(2),
      'training/rollout_logprobs_diff_max': np.log(2),
      'training/rollout_probs_diff_mean': 0.375,  # of 1/2 and 1/4
      'training/rollout_probs_diff_max': 0.5,
      'training/rollout_probs_diff_std': 0.125,
      'rollout_corr/kl': 0,
      'rollout_corr/k3_kl': 0.25,  # of (1/2 - 1 + ln 2) and (2 - 1 - ln 2)
      'rollout_corr/rollout_is_mean': 1.25,
      'rollout_corr/rollout_is_max': 2,
      'rollout_corr/rollout_is_min': 0.5,
      'rollout_corr/rollout_is_eff_sample_size': 25 / 34}, abs=1e-12)


def test_one_model_has_no_mismatch():
  batch = random_batch()
  batch = dataclasses.replace(batch, behavior_logprobs=batch.old_logprobs)
  got = diagnostics.mismatch(batch, np.ones(9, bool))
  for name, value in got.items():
    assert value == (1 if '_is_' in name else 0), name


def test_mismatch_of_a_batch_without_on_policy_tokens():
  nothing = np.zeros(9, bool)
  batch = dataclasses.replace(random_batch(), on_policy=nothing)
  assert diagnostics.mismatch(batch, np.ones(9, bool)) == {}


def test_refuses_bad_input():
  x, mask = jnp.zeros((2, 3)), jnp.ones((2, 3), bool)
  with pytest.raises(ValueError, match=r'where must have .*\(2, 3\).*\(2,\)'):
    diagnostics.clip_fractions(x, x, mask[:, 0], **CLIP)
  with pytest.raises(ValueError, match=r'advantages must have .*\(2, 1\)'):
    diagnostics.clip_fractions(x, x[:, :1], mask, **CLIP)
  with pytest.raises(ValueError, match=r'old_logprobs must have .*\(2, 3\)'):
    diagnostics.policy_drift(x, x[:1], mask)
  with pytest.raises(ValueError, match=r'returns must have .*\(2, 3\).*\(2,\)'):
    diagnostics.value_fit(x, x, jnp.zeros(2), mask, value_clip=0.5)
