# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Policy losses and weights in, a whole objective out: recipes are made of it.

`objective` adds to a policy loss what keeps the policy from drifting;
`corrected` wraps a finished algorithm.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from searchrl.rl import advantages, checks, diagnostics, losses, masked
from searchrl.rl.advantages import Estimate
from searchrl.rl.contract import (
    Algorithm, denominator_logprobs, scored, trained_tokens)
from searchrl.rl.masked import Mean
from searchrl.trajectory import Batch


def by_group(normalize_std: bool = True) -> Callable:
  """Advantages of GRPO and its descendants: batch -> [B]."""
  return lambda batch: advantages.group_relative(
      batch.rewards, batch.group_ids, batch.in_baseline,
      normalize_std=normalize_std)


def reference_kl(
    batch: Batch, kl_coef: float, estimator: str
) -> Float[Array, 'B T'] | None:
  """kl_coef KL(pi_old || pi_ref) of each token [B, T]; None if kl_coef is 0."""
  checks.choice('kl_estimator', estimator, losses.KL_ESTIMATORS)
  if not kl_coef:
    return None
  return kl_coef * losses.kl(
      scored(batch, 'old_logprobs'), scored(batch, 'ref_logprobs'),
      trained_tokens(batch), estimator=estimator)


def clipped_token_ratio(
    clip_low: float, clip_high: float, dual_clip: float | None = None,
    aggregation: str = 'token_mean', length: int | None = None) -> Callable:
  """PPO's policy loss, for `objective`."""
  checks.clip(clip_low, clip_high, dual_clip)
  clip = dict(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)

  def policy_loss(logprobs, old, advs, mask):
    per_token = losses.token_ratio_loss(logprobs, old, advs, mask, **clip)
    ratio = losses.token_ratio(logprobs, old, mask)
    return (losses.aggregate(per_token, mask, how=aggregation, length=length),
            diagnostics.clip_fractions(ratio, advs, mask, **clip))

  return policy_loss


def score_function(
    aggregation: str = 'token_mean', length: int | None = None) -> Callable:
  """REINFORCE's policy loss, for `objective`."""
  def policy_loss(logprobs, old, advs, mask):
    del old  # there is no ratio
    per_token = losses.score_function_loss(logprobs, advs, mask)
    return losses.aggregate(
        per_token, mask, how=aggregation, length=length), {}

  return policy_loss


def objective(
    policy_loss: Callable,
    *,
    kl_coef: float = 0.0,
    kl_estimator: str = 'k3',
    entropy_coef: float = 0.0,
    aggregation: str = 'token_mean',
    length: int | None = None,
) -> Callable:
  """Algorithm.loss: a policy loss, plus what keeps the policy from drifting.

  Args:
    policy_loss: log-probs [B, T], old ones [B, T], advantages [B] or [B, T],
      mask [B, T] -> a Mean, and metrics.
    kl_coef: of the KL to the reference. A term whose coefficient is 0 is left
      out, and asks for nothing.
    kl_estimator: one of `losses.KL_ESTIMATORS`.
    entropy_coef: of the entropy bonus.
    aggregation: of KL and entropy.
    length: the constant of 'sequence_sum_norm', in tokens.

  Raises:
    ValueError: an unknown name, or no length where one is needed.
  """
  checks.choice('kl_estimator', kl_estimator, losses.KL_ESTIMATORS)
  checks.choice('aggregation', aggregation, losses.AGGREGATIONS)
  checks.at_least_0(kl_coef=kl_coef, entropy_coef=entropy_coef)
  if aggregation == 'sequence_sum_norm' and not length:
    raise ValueError(
        "length must be given for aggregation 'sequence_sum_norm', but is "
        f'{length}. Give one constant for all batches, such as the most tokens '
        'that a policy may write: micro-batches differ in T.')
  reduce = dict(how=aggregation, length=length)

  def loss(policy, batch, advs):
    mask, old = trained_tokens(batch), denominator_logprobs(batch)
    mean, policy_metrics = policy_loss(policy.logprobs, old, advs, mask)
    terms = {'policy': (1.0, mean)}
    metrics = {
        'actor/pg_loss': mean,
        'actor/entropy': Mean.of(policy.entropy, mask),
        **diagnostics.policy_drift(policy.logprobs, old, mask),
        **policy_metrics,
    }
    if kl_coef:
      kl = losses.kl(policy.logprobs, scored(batch, 'ref_logprobs'), mask,
                     estimator=kl_estimator)
      mean = losses.aggregate(kl, mask, **reduce)
      terms['kl'] = (kl_coef, mean)
      metrics['actor/kl_loss'] = mean
    if entropy_coef:
      mean = losses.aggregate(policy.entropy, mask, **reduce)
      terms['entropy'] = (-entropy_coef, mean)
    return terms, metrics

  return loss


def corrected(
    algorithm: Algorithm,
    *,
    how: str = 'truncate',
    level: str = 'token',
    low: float = 0.5,
    high: float = 2.0,
) -> Algorithm:
  """The algorithm, its advantages weighted by learner over sampler.

  Every policy loss here is proportional to |A| on either side of 0, so that
  weighting advantages weights losses. Rows of an earlier policy keep weight 1:
  their ratio divides by what the sampler said already.

  Args:
    algorithm: any, of yours too.
    how: 'truncate' for `losses.truncated_weights` (TIS), 'mask' for
      `losses.masked_weights` (IcePop).
    level: 'token', or 'sequence': one weight a row.
    low: the smallest weight that 'mask' keeps.
    high: the largest weight.

  Raises:
    ValueError: an unknown name; an empty interval; or weights by token for a
      ratio by sequence.

  Source: see the two functions of `losses`.
  """
  checks.choice('how', how, ('truncate', 'mask'))
  checks.choice('level', level, ('token', 'sequence'))
  checks.interval(low, high)
  if algorithm.level == 'sequence' and level == 'token':
    raise ValueError(
        "level must be 'sequence' for an algorithm whose ratio belongs to a "
        "sequence, but is 'token'. A sequence has one advantage.")

  def weigh(advs, batch):
    mask = trained_tokens(batch)
    inputs = scored(batch, 'old_logprobs'), batch.behavior_logprobs, mask
    if how == 'truncate':
      weights = losses.truncated_weights(*inputs, high=high, level=level)
    else:
      weights = losses.masked_weights(*inputs, low=low, high=high, level=level)
    weights = jnp.where(batch.on_policy[:, None], weights, 1)
    if level == 'sequence' and advs.ndim == 1:
      return advs * masked.row_mean(weights, mask)
    return losses.spread_over(mask, advs) * weights

  def weighted(batch):
    result = algorithm.advantages(batch)
    if isinstance(result, Estimate):
      return result._replace(advantages=weigh(result.advantages, batch))
    return weigh(result, batch)

  return dataclasses.replace(
      algorithm, advantages=weighted, needs=algorithm.needs | {'old_logprobs'})
