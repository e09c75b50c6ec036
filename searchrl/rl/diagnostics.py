# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Training metrics of a batch, under verl's names where it has them.

`clip_fractions`, `policy_drift` and `value_fit` return Means, because they are
computed with the loss of each micro-batch. Their arrays follow the conventions
of `losses`. `describe` and `mismatch` read a whole batch of numpy arrays on the
host.
"""

from typing import Any

from jaxtyping import Array, Bool, Float
import numpy as np

from searchrl.rl import losses
from searchrl.rl import masked
from searchrl.rl.advantages import Estimate
from searchrl.rl.algorithm import scored, trained_tokens
from searchrl.rl.masked import Mean
from searchrl.trajectory import Batch


def clip_fractions(
    ratio: Float[Array, '*N'],
    advantages: Float[Array, 'B'] | Float[Array, '*N'],
    where: Bool[Array, '*N'],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> dict[str, Mean]:
  """Returns the fractions of importance ratios that PPO's loss clips.

    actor/clipfrac_low        A < 0 and rho < 1 - clip_low
    actor/clipfrac_high       A > 0 and rho > 1 + clip_high
    actor/pg_clipfrac         either of these
    actor/pg_clipfrac_lower   A < 0 and rho > dual_clip, if there is one

  Here rho is a ratio and A its advantage. A ratio belongs to a token, [B, T],
  or to a sequence, [B]. Only ratios inside the mask `where` count. The clips
  are those of `losses.clipped_surrogate`.
  """
  masked.check_shapes(ratio=ratio, where=where)
  advantages = losses.spread_over(where, advantages)
  low = (advantages < 0) & (ratio < 1 - clip_low)
  high = (advantages > 0) & (ratio > 1 + clip_high)
  fractions = {
      'actor/pg_clipfrac': Mean.of(low | high, where),
      'actor/clipfrac_low': Mean.of(low, where),
      'actor/clipfrac_high': Mean.of(high, where),
  }
  if dual_clip is not None:
    dual = (advantages < 0) & (ratio > dual_clip)
    fractions['actor/pg_clipfrac_lower'] = Mean.of(dual, where)
  return fractions


def policy_drift(
    logprobs: Float[Array, 'B T'],
    old_logprobs: Float[Array, 'B T'],
    loss_mask: Bool[Array, 'B T'],
) -> dict[str, Mean]:
  """Returns two estimates of KL(pi_old || pi), averaged over tokens, in nats.

  They say how far the policy pi has moved from pi_old, the policy before the
  update. The estimators are k1 (verl's `ppo_kl`) and k3 of `losses.kl`.
  """
  masked.check_shapes(
      logprobs=logprobs, old_logprobs=old_logprobs, loss_mask=loss_mask)
  k1, k3 = (
      losses.kl(old_logprobs, logprobs, loss_mask, estimator=estimator)
      for estimator in ('k1', 'k3'))
  return {
      'actor/ppo_kl': Mean.of(k1, loss_mask),
      'actor/ppo_kl_k3': Mean.of(k3, loss_mask),
  }


def value_fit(
    values: Float[Array, 'B T'],
    old_values: Float[Array, 'B T'],
    returns: Float[Array, 'B T'],
    loss_mask: Bool[Array, 'B T'],
    *,
    value_clip: float | None,
) -> dict[str, Mean]:
  """Returns the mean of the critic's values, and the share of clipped tokens.

  A token is clipped if the error of its clipped value is larger than the error
  of its plain value. A clipped value is at most `value_clip` from the old one.

  Args:
    values: Value of each token, [B, T].
    old_values: Values before the update, [B, T].
    returns: Targets of the values, [B, T].
    loss_mask: True where the policy sampled the token, [B, T].
    value_clip: Largest change of a value, in the unit of the rewards. None:
      values are not clipped, and the fraction is 0.
  """
  plain, worse = (
      losses.value_loss(
          values, old_values, returns, loss_mask, value_clip=clip)
      for clip in (None, value_clip))
  return {
      'critic/vpred_mean': Mean.of(values, loss_mask),
      'critic/vf_clipfrac': Mean.of(worse > plain, loss_mask),
  }


def describe(batch: Batch, estimate: Any, trained: Bool[np.ndarray, 'B']
            ) -> dict[str, float]:
  """Returns statistics of a batch and of its advantages.

  They are the mean, largest and smallest advantage of the tokens in the loss,
  the number of rows without such tokens, and the share of the other rows that
  is trained on. With a critic, there are also the same statistics of returns
  and values, and the share of the returns' variance that the values explain.
  With a reference policy, there is also the KL to it. If no token is in the
  loss, the result is {'train/empty_rows': B}.

  Args:
    batch: Scored batch of numpy arrays.
    estimate: Result of `Algorithm.advantages` as numpy arrays: one advantage
      per row, one per token, or an `Estimate`.
    trained: True for the rows that the update's gradient was computed from,
      [B].
  """
  where = np.asarray(trained_tokens(batch))
  result = {'train/empty_rows': float((~where.any(-1)).sum())}
  if not where.any():
    return result
  result['train/frac_rows_trained'] = float(trained[where.any(-1)].mean())
  advs = getattr(estimate, 'advantages', estimate)
  advs = advs[:, None] if advs.ndim == 1 else advs
  result |= _spread(
      'critic/advantages', np.broadcast_to(advs, where.shape)[where])
  if isinstance(estimate, Estimate):
    returns, values = (np.asarray(x)[where] for x in (
        estimate.returns, batch.values))
    result |= _spread('critic/returns', returns)
    result |= _spread('critic/values', values)
    spread = returns.var()
    result['critic/vf_explained_var'] = float(
        1 - (returns - values).var() / spread if spread > 0 else 0)
  if batch.ref_logprobs is not None:
    gap = scored(batch, 'old_logprobs')[where] - batch.ref_logprobs[where]
    result['actor/reference_kl'] = float(gap.mean())
  return result


def mismatch(batch: Batch, trained: Bool[np.ndarray, 'B']
            ) -> dict[str, float]:
  """Returns metrics of the difference between sampler and learner.

  They compare the log-probs that the two computed for the same tokens. If both
  run the same model, these are near 0: the absolute differences of log-probs
  (in nats) and of probabilities, and KL(sampler || learner) by the estimators
  k1 and k3. These are near 1: the tokens' importance weights
  pi_old / pi_behavior, and the effective sample size of the weights as a share
  of the tokens. Only on-policy rows for which `trained`, [B], is True are read,
  and they need `old_logprobs`. Without such tokens the dict is empty.
  """
  where = batch.loss_mask & (batch.on_policy & trained)[:, None]
  if not where.any():
    return {}
  sampler = batch.behavior_logprobs[where].astype(np.float64)
  learner = scored(batch, 'old_logprobs')[where].astype(np.float64)
  gap, probs = learner - sampler, np.exp(learner) - np.exp(sampler)
  weights = np.exp(np.clip(gap, -20, 20))
  return {
      'training/rollout_logprobs_diff_mean': np.abs(gap).mean(),
      'training/rollout_logprobs_diff_max': np.abs(gap).max(),
      'training/rollout_probs_diff_mean': np.abs(probs).mean(),
      'training/rollout_probs_diff_max': np.abs(probs).max(),
      'training/rollout_probs_diff_std': np.abs(probs).std(),
      'rollout_corr/kl': -gap.mean(),
      'rollout_corr/k3_kl': (np.expm1(gap) - gap).mean(),
      'rollout_corr/rollout_is_mean': weights.mean(),
      'rollout_corr/rollout_is_max': weights.max(),
      'rollout_corr/rollout_is_min': weights.min(),
      'rollout_corr/rollout_is_eff_sample_size':
          weights.mean() ** 2 / (weights ** 2).mean(),
  }


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
  """Returns the mean, max and min of values, as `name`/mean and so on."""
  return {f'{name}/mean': float(values.mean()),
          f'{name}/max': float(values.max()),
          f'{name}/min': float(values.min())}
