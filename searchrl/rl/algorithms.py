# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Recipes: hyper-parameters in, an Algorithm out; defaults are the papers'.

  algorithm = algorithms.dspo(clip_high=0.05)
  advs = algorithm.advantages(batch)
  terms, metrics = algorithm.loss(policy, batch, advs)
  loss = algorithms.total(terms)

A config names a recipe as `module:function`; one of your own needs no
registration. Options that recipes share:

  clip_low, clip_high: how far a ratio may fall below 1, and rise above it.
  dual_clip: bounds the loss where A < 0; see `losses.clipped_surrogate`.
  kl_coef: of the KL to the reference, per nat. In the loss, unless the recipe
    says that it is in the reward. Above 0 it needs `ref_logprobs`.
  kl_estimator: one of `losses.KL_ESTIMATORS`.
  entropy_coef: of the entropy bonus, per nat.
  normalize_std: divide advantages by the group's standard deviation.
  aggregation: one of `losses.AGGREGATIONS`, of all terms but the value loss.
  length: the constant of aggregation 'sequence_sum_norm', in tokens.

Every recipe raises a ValueError for an option that is out of its range.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from searchrl.rl import advantages, checks, diagnostics, losses, masked
from searchrl.rl.advantages import Estimate
# What recipes are made of is public here too: yours are made of the same.
from searchrl.rl.contract import (
    Algorithm, Metrics, PolicyOutput, Terms, denominator_logprobs, keep_all,
    keep_mixed, question_hops, scored, total, trained_tokens)
from searchrl.rl.masked import Mean
from searchrl.rl.objective import (
    by_group, clipped_token_ratio, corrected, objective, reference_kl,
    score_function)


def ppo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    value_clip: float | None = 0.5,
    discount: float = 1.0,
    gae_lambda: float = 1.0,
    whiten: bool = True,
    kl_coef: float = 1e-3,
    kl_estimator: str = 'k1',
    entropy_coef: float = 0.0,
    aggregation: str = 'token_mean',
    length: int | None = None,
) -> Algorithm:
  """A token ratio, clipped, on advantages over a critic; the KL in the reward.

  Args:
    value_clip: how far the critic may move an update; None: as far as it likes.
    discount: what a reward one policy token later is worth.
    gae_lambda: 1 takes the rewards' word for it, 0 the critic's.
    whiten: the advantages, over all policy tokens of the batch.

  Source: Schulman et al. 2017, arXiv:1707.06347; hyper-parameters as Search-R1
    (arXiv:2503.09516) uses it.
  """
  checks.fractions(discount=discount, gae_lambda=gae_lambda)
  checks.at_least_0(kl_coef=kl_coef, value_clip=value_clip or 0)
  policy_objective = objective(
      clipped_token_ratio(clip_low, clip_high, dual_clip, aggregation, length),
      kl_estimator=kl_estimator, entropy_coef=entropy_coef,
      aggregation=aggregation, length=length)

  def estimate(batch):
    mask = trained_tokens(batch)
    rewards = advantages.token_rewards(
        batch.rewards, mask, reference_kl(batch, kl_coef, kl_estimator))
    advs, returns = advantages.gae(
        rewards, scored(batch, 'values'), mask, discount=discount,
        gae_lambda=gae_lambda)
    return Estimate(
        advantages.whiten(advs, mask) if whiten else advs, returns)

  def loss(policy, batch, estimate):
    mask = trained_tokens(batch)
    terms, metrics = policy_objective(policy, batch, estimate.advantages)
    fit = policy.values, scored(batch, 'values'), estimate.returns, mask
    mean = Mean.of(losses.value_loss(*fit, value_clip=value_clip), mask)
    return terms | {'value': (1.0, mean)}, metrics | {
        'critic/vf_loss': mean,
        **diagnostics.value_fit(*fit, value_clip=value_clip)}

  return Algorithm(
      estimate, loss, needs=_needs(kl_coef, in_reward=True) | {'values'})


def grpo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kl_coef: float = 0.04,
    kl_estimator: str = 'k3',
    entropy_coef: float = 0.0,
    normalize_std: bool = True,
    aggregation: str = 'sequence_mean',
    length: int | None = None,
) -> Algorithm:
  """A token ratio, clipped, on advantages relative to the question's group.

  Source: Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, eq. 3. Search-R1
    uses kl_coef 1e-3 and the token mean.
  """
  return Algorithm(
      by_group(normalize_std),
      objective(
          clipped_token_ratio(
              clip_low, clip_high, dual_clip, aggregation, length),
          kl_coef=kl_coef, kl_estimator=kl_estimator,
          entropy_coef=entropy_coef, aggregation=aggregation, length=length),
      needs=_needs(kl_coef), min_group_size=2)


def dr_grpo(
    *,
    length: int,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
) -> Algorithm:
  """GRPO without its two biases: no division by spread, nor by own length.

  Args:
    length: what every row's sum is divided by: the most tokens that a policy
      may write, whatever it did write.

  Source: Liu et al. 2025, Understanding R1-Zero-Like Training,
    arXiv:2503.20783, section 3.2.
  """
  return grpo(
      clip_low=clip_low, clip_high=clip_high, kl_coef=kl_coef,
      entropy_coef=entropy_coef, normalize_std=False,
      aggregation='sequence_sum_norm', length=length)


def dapo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    max_length: int = 20_480,
    buffer: int = 4_096,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
) -> Algorithm:
  """GRPO on mixed groups: the clip higher above, long rows penalised.

  Args:
    max_length: policy tokens at which a row loses a whole 1 of its reward.
    buffer: tokens before that over which the penalty grows; see
      `losses.overlong_penalty`. What was retrieved does not count.

  Source: Yu et al. 2025, DAPO, arXiv:2503.14476.
  """
  checks.overlong(max_length, buffer)

  def relative(batch):
    penalty = losses.overlong_penalty(
        trained_tokens(batch).sum(-1), max_length=max_length, buffer=buffer)
    return by_group()(dataclasses.replace(
        batch, rewards=batch.rewards + penalty))

  plain = grpo(
      clip_low=clip_low, clip_high=clip_high, kl_coef=kl_coef,
      entropy_coef=entropy_coef, aggregation='token_mean')
  return dataclasses.replace(plain, advantages=relative, keep=keep_mixed)


def gspo(
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = 'k3',
    entropy_coef: float = 0.0,
    normalize_std: bool = True,
    aggregation: str = 'sequence_mean',
) -> Algorithm:
  """One ratio a sequence, clipped, on advantages relative to its group.

  Every row weighs the same, in the KL and the entropy too.

  Source: Zheng et al. 2025, Group Sequence Policy Optimization,
    arXiv:2507.18071, eq. 5; clip ranges of its section 5.1.
  """
  _check_sequence_level('gspo', aggregation)
  checks.clip(clip_low, clip_high, dual_clip)
  clip = dict(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)

  def policy_loss(logprobs, old, advs, mask):
    rows = mask.any(-1)
    per_row = losses.sequence_ratio_loss(logprobs, old, advs, mask, **clip)
    ratio = losses.sequence_ratio(logprobs, old, mask)
    return (Mean.of(per_row, rows),
            diagnostics.clip_fractions(ratio, advs, rows, **clip))

  return Algorithm(
      by_group(normalize_std),
      objective(policy_loss, kl_coef=kl_coef, kl_estimator=kl_estimator,
                entropy_coef=entropy_coef, aggregation=aggregation),
      needs=_needs(kl_coef), level='sequence', min_group_size=2)


def dspo(
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = 'k3',
    entropy_coef: float = 0.0,
    normalize_std: bool = True,
    aggregation: str = 'sequence_mean',
) -> Algorithm:
  """GSPO on the groups whose outcomes are mixed.

  Source: DSPO, arXiv:2510.09255. It gives no clip range: these are GSPO's.
  """
  _check_sequence_level('dspo', aggregation)
  return dataclasses.replace(
      gspo(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip,
           kl_coef=kl_coef, kl_estimator=kl_estimator,
           entropy_coef=entropy_coef, normalize_std=normalize_std),
      keep=keep_mixed)


def gmpo(
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    kl_coef: float = 0.0,
    kl_estimator: str = 'k3',
    entropy_coef: float = 0.0,
    normalize_std: bool = True,
    aggregation: str = 'sequence_mean',
) -> Algorithm:
  """The geometric mean of a row's token ratios, each clipped before.

  Args:
    clip_low: how far a token's LOG ratio may fall, in nats.
    clip_high: how far it may rise, in nats.

  Source: Zhao et al. 2025, Geometric-Mean Policy Optimization,
    arXiv:2507.20673, eq. 4; clip range of its section 4.
  """
  _check_sequence_level('gmpo', aggregation)
  checks.log_clip(clip_low, clip_high)
  as_ratios = dict(clip_low=-math.expm1(-clip_low),
                   clip_high=math.expm1(clip_high))

  def policy_loss(logprobs, old, advs, mask):
    per_row = losses.geometric_mean_loss(
        logprobs, old, advs, mask, clip_low=clip_low, clip_high=clip_high)
    ratio = losses.token_ratio(logprobs, old, mask)
    return (Mean.of(per_row, mask.any(-1)),
            diagnostics.clip_fractions(ratio, advs, mask, **as_ratios))

  return Algorithm(
      by_group(normalize_std),
      objective(policy_loss, kl_coef=kl_coef, kl_estimator=kl_estimator,
                entropy_coef=entropy_coef, aggregation=aggregation),
      needs=_needs(kl_coef), level='sequence', min_group_size=2)


def rloo(
    *,
    kl_coef: float = 0.0,
    kl_estimator: str = 'k1',
    entropy_coef: float = 0.0,
    aggregation: str = 'sequence_sum',
    length: int | None = None,
) -> Algorithm:
  """log pi of the whole row, against the others of its group; no ratio.

  The KL is in the reward, summed over the row. The paper tunes its coefficient
  by task; 0 is ours.

  Source: Ahmadian et al. 2024, Back to Basics, arXiv:2402.14740, section 2.2.
  """
  _check_whole_rows('rloo', aggregation)
  checks.at_least_0(kl_coef=kl_coef)

  def left_out(batch):
    mask = trained_tokens(batch)
    penalty = reference_kl(batch, kl_coef, kl_estimator)
    rewards = batch.rewards
    if penalty is not None:
      rewards = rewards - masked.row_sum(penalty, mask)
    return advantages.leave_one_out(
        rewards, batch.group_ids, batch.in_baseline)

  return Algorithm(
      left_out,
      objective(score_function(aggregation, length), kl_estimator=kl_estimator,
                entropy_coef=entropy_coef, aggregation=aggregation,
                length=length),
      needs=_needs(kl_coef, in_reward=True), min_group_size=2, one_update=True)


def reinforce(
    *,
    kl_coef: float = 1e-3,
    kl_estimator: str = 'k3',
    entropy_coef: float = 0.0,
    aggregation: str = 'token_mean',
    length: int | None = None,
) -> Algorithm:
  """log pi times the bare reward: no baseline, no ratio, no clip.

  Source: Williams 1992; as ZeroSearch (arXiv:2505.04588) uses it, the sign of
    its KL put right.
  """
  return Algorithm(
      lambda batch: jnp.where(batch.in_baseline, batch.rewards, 0),
      objective(score_function(aggregation, length), kl_coef=kl_coef,
                kl_estimator=kl_estimator, entropy_coef=entropy_coef,
                aggregation=aggregation, length=length),
      needs=_needs(kl_coef), one_update=True)


def reinforce_plus_plus(
    *,
    group_baseline: bool = False,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    discount: float = 1.0,
    kl_coef: float = 1e-3,
    kl_estimator: str | None = None,
    entropy_coef: float = 0.0,
    aggregation: str = 'token_mean',
    length: int | None = None,
) -> Algorithm:
  """PPO without a critic: returns whitened over all tokens of the batch.

  Args:
    group_baseline: take the group's mean off first ("w/ baseline"). The KL is
      then in the loss, else in the reward. Its coefficient is ours.
    discount: what a reward one policy token later is worth.
    kl_estimator: default k2 in the loss, k1 in the reward.

  Source: Hu et al. 2025, REINFORCE++, arXiv:2501.03262.
  """
  checks.fractions(discount=discount)
  checks.at_least_0(kl_coef=kl_coef)
  in_loss = kl_coef if group_baseline else 0.0
  estimator = kl_estimator or ('k2' if group_baseline else 'k1')

  def whitened(batch):
    mask = trained_tokens(batch)
    if group_baseline:
      return advantages.reinforce_plus_plus_baseline(
          batch.rewards, batch.group_ids, mask, batch.in_baseline)
    rewards = advantages.token_rewards(
        batch.rewards, mask, reference_kl(batch, kl_coef, estimator))
    return advantages.reinforce_plus_plus(rewards, mask, discount=discount)

  return Algorithm(
      whitened,
      objective(
          clipped_token_ratio(clip_low, clip_high, None, aggregation, length),
          kl_coef=in_loss, kl_estimator=estimator, entropy_coef=entropy_coef,
          aggregation=aggregation, length=length),
      needs=_needs(kl_coef, in_reward=not group_baseline),
      min_group_size=2 if group_baseline else 1)


def hrpo(
    *,
    delta: float = 1e-6,
    kl_coef: float = 0.0,
    kl_estimator: str = 'k3',
    entropy_coef: float = 0.0,
    aggregation: str = 'sequence_sum',
    length: int | None = None,
) -> Algorithm:
  """log pi times how much better than all rows of equally many hops.

  Hop-grouped relative policy optimisation: one sample a question has a
  baseline, too. (arXiv:2505.18454 has another HRPO, that changes the model.)

  Args:
    delta: added to the variance of a hop count's rewards; the value is ours.

  Source: Dr. Zero, arXiv:2601.07055, eq. 2 and 3; strictly on-policy.
  """
  _check_whole_rows('hrpo', aggregation)
  checks.at_least_0(delta=delta)
  return Algorithm(
      lambda batch: advantages.hop_group_relative(
          batch.rewards, batch.group_ids, batch.in_baseline, delta=delta),
      objective(score_function(aggregation, length), kl_coef=kl_coef,
                kl_estimator=kl_estimator, entropy_coef=entropy_coef,
                aggregation=aggregation, length=length),
      group_of=question_hops, needs=_needs(kl_coef), one_update=True)


def _needs(kl_coef, in_reward=False):
  if not kl_coef:
    return frozenset()
  return frozenset({'ref_logprobs'} | ({'old_logprobs'} if in_reward else set()))


def _check_sequence_level(recipe, aggregation):
  """A row has one ratio and one loss: there is nothing to sum over tokens."""
  if aggregation != 'sequence_mean':
    raise ValueError(
        f"aggregation must be 'sequence_mean' for {recipe}, whose loss belongs "
        f'to a whole row, but is {aggregation!r}. For token-level aggregation '
        'choose a recipe with token ratios: grpo, dapo or ppo.')


def _check_whole_rows(recipe, aggregation):
  """log pi of a row is the sum over its tokens; a mean is something else."""
  if aggregation not in ('sequence_sum', 'sequence_sum_norm'):
    raise ValueError(
        "aggregation must be 'sequence_sum' or 'sequence_sum_norm' for "
        f'{recipe}, whose action is the whole row, but is {aggregation!r}. For '
        'means over tokens choose reinforce or reinforce_plus_plus.')
