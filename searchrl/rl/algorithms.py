# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""RL algorithms: a recipe takes hyper-parameters and returns an `Algorithm`.

  algorithm = algorithms.dspo(clip_high=0.05)
  advs = algorithm.advantages(batch)
  terms, metrics = algorithm.loss(policy, batch, advs)
  loss = algorithms.total(terms)

The defaults are those of the papers. A config names a recipe as
`module:function`, and a recipe of your own needs no registration. All options
are keyword arguments. A recipe raises a ValueError when it is called if an
option is out of its range. Recipes share these options:

  clip_low, clip_high: Distances that a ratio may fall below 1 and rise above 1.
  dual_clip: Bound of the loss where A < 0; see `losses.clipped_surrogate`.
  discount: Discount gamma: a reward that comes k policy tokens later is
    multiplied by gamma^k.
  normalize_std: Flag that divides advantages by the group's standard deviation.
  kl_coef, kl_estimator, entropy_coef, aggregation, length: Fields of
    `Regularizer`. `inspect.signature` of a recipe lists the fields that it
    takes, with their defaults. The KL needs `ref_logprobs`. It is in the loss,
    unless the recipe puts it in the reward. The aggregation applies to all
    terms except the value loss.

Every recipe trains on the policy's own tokens only. For comparison,
`with_observations(algorithm)` also trains on the observations. A config has
this with `algorithm.mask_observations=False`.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from searchrl.rl import (
    advantages, diagnostics, losses, masked, option_checks, turn_advantages)
from searchrl.rl.advantages import Estimate
# The building blocks are also public here, for recipes of your own.
from searchrl.rl.algorithm import (  # noqa: F401
    Algorithm, Metrics, PolicyOutput, Terms, denominator_logprobs, keep_all,
    keep_mixed, observed_tokens, question_hops, scored, total, trained_tokens)
from searchrl.rl.masked import Mean
from searchrl.rl.objective import (  # noqa: F401
    Regularizer, by_group, clipped_geometric_mean, clipped_sequence_ratio,
    clipped_token_ratio, corrected, objective, policy_gradient, reference_kl,
    regularized, score_function, with_observations)
from searchrl.rl.turn_recipes import gigpo, mt_grpo  # noqa: F401


@regularized(kl_coef=1e-3, kl_estimator='k1', entropy_coef=0.0,
             aggregation='token_mean', length=None)
def ppo(
    regularizer: Regularizer,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    value_clip: float | None = 0.5,
    discount: float = 1.0,
    gae_lambda: float = 1.0,
    whiten: bool = True,
    turn_rewards: bool = False,
) -> Algorithm:
  """Makes PPO: clipped token ratios, a critic, and the KL in the reward.

  `value_clip` is the distance that a value may move in an update, in the unit
  of the rewards; None means any distance. `gae_lambda` is in [0, 1]: 1 uses the
  rewards only, and 0 relies on the critic. With `whiten`, advantages are
  shifted and scaled to mean 0 and variance 1 over all policy tokens of the
  batch. With `turn_rewards`, a turn's own reward is added at its last token.

  Source: Schulman et al. 2017, arXiv:1707.06347; hyper-parameters as in
    Search-R1 (arXiv:2503.09516). Rewards of turns as in MT-PPO (Zeng et al.
    2025, arXiv:2505.11821).
  """
  option_checks.fractions(discount=discount, gae_lambda=gae_lambda)
  option_checks.at_least_0(value_clip=value_clip or 0)
  policy_objective = objective(
      clipped_token_ratio(regularizer, clip_low, clip_high, dual_clip),
      regularizer.without_kl())

  def estimate(batch):
    mask = trained_tokens(batch)
    rewards = advantages.token_rewards(
        batch.rewards, mask, reference_kl(batch, regularizer))
    if turn_rewards:
      rewards += jnp.where(mask, turn_advantages.rewards_at_ends(
          scored(batch, 'turn_rewards'), batch.turn_ids), 0)
    advs, returns = advantages.gae(
        rewards, scored(batch, 'values'), mask, discount=discount,
        gae_lambda=gae_lambda)
    return Estimate(
        advantages.whiten(advs, mask) if whiten else advs, returns)

  def loss(policy, batch, estimate, observed=None):
    mask = trained_tokens(batch)
    terms, metrics = policy_objective(
        policy, batch, estimate.advantages, observed)
    fit = policy.values, scored(batch, 'values'), estimate.returns, mask
    mean = Mean.of(losses.value_loss(*fit, value_clip=value_clip), mask)
    return terms | {'value': (1.0, mean)}, metrics | {
        'critic/vf_loss': mean,
        **diagnostics.value_fit(*fit, value_clip=value_clip)}

  return Algorithm(
      estimate, loss, reads_turns=turn_rewards, skips_unsampled=True,
      needs=regularizer.needs(kl_in_reward=True) | {'values'})


@regularized(kl_coef=0.04, kl_estimator='k3', entropy_coef=0.0,
             aggregation='sequence_mean', length=None)
def grpo(
    regularizer: Regularizer,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    normalize_std: bool = True,
) -> Algorithm:
  """Makes GRPO: clipped token ratios, advantages relative to the group.

  A group is the rows that were sampled together for one question. The advantage
  of a row is its reward minus the group's mean, divided by the group's standard
  deviation if `normalize_std`.

  Source: Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, eq. 3. Search-R1
    uses other options of the regularizer: kl_coef=1e-3, and 'token_mean' as
    the aggregation.
  """
  return policy_gradient(
      by_group(normalize_std),
      clipped_token_ratio(regularizer, clip_low, clip_high, dual_clip),
      regularizer, min_group_size=2)


def dr_grpo(
    *,
    length: int,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
) -> Algorithm:
  """Makes Dr. GRPO: GRPO without division by deviations and row lengths.

  Advantages are not divided by the group's standard deviation. The sum of a
  row's token losses is divided by the constant `length`, the maximum number of
  tokens that the policy may write in a row.

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
  """Makes DAPO: GRPO with a filter, a higher upper clip and a length penalty.

  The filter drops questions whose rows all have the same outcome reward. The
  penalty on a row's reward falls from 0 to -1 over the last `buffer` of
  `max_length` policy tokens. Retrieved tokens do not count. A row that
  `rollout.mask_truncated` leaves out of the loss has no penalty.

  Source: Yu et al. 2025, DAPO, arXiv:2503.14476.
  """
  option_checks.overlong(max_length, buffer)

  def penalised(batch):
    penalty = losses.overlong_penalty(
        trained_tokens(batch).sum(-1), max_length=max_length, buffer=buffer)
    return by_group()(dataclasses.replace(
        batch, rewards=batch.rewards + penalty))

  plain = grpo(
      clip_low=clip_low, clip_high=clip_high, kl_coef=kl_coef,
      entropy_coef=entropy_coef, aggregation='token_mean')
  return dataclasses.replace(plain, advantages=penalised, keep=keep_mixed)


@regularized(kl_coef=0.0, kl_estimator='k3', entropy_coef=0.0,
             aggregation='sequence_mean')
def gspo(
    regularizer: Regularizer,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
    normalize_std: bool = True,
) -> Algorithm:
  """Makes GSPO: clipped sequence ratios, advantages relative to the group.

  The ratio of a row is the geometric mean of its tokens' ratios. A group is the
  rows that were sampled together for one question. Every row has the same
  weight, also in the KL and the entropy, so `aggregation` must stay
  'sequence_mean'.

  Source: Zheng et al. 2025, Group Sequence Policy Optimization,
    arXiv:2507.18071, eq. 5; clip ranges from its section 5.1.
  """
  return _sequence_level(
      'gspo', clipped_sequence_ratio(clip_low, clip_high, dual_clip),
      regularizer, normalize_std)


@regularized(kl_coef=0.0, kl_estimator='k3', entropy_coef=0.0,
             aggregation='sequence_mean')
def dspo(
    regularizer: Regularizer,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
    normalize_std: bool = True,
) -> Algorithm:
  """Makes DSPO: GSPO without the questions whose rows all score alike.

  A question is dropped if all its rows have the same outcome reward.

  Source: DSPO, arXiv:2510.09255. It gives no clip range; these are GSPO's.
  """
  return _sequence_level(
      'dspo', clipped_sequence_ratio(clip_low, clip_high, dual_clip),
      regularizer, normalize_std, keep_mixed)


@regularized(kl_coef=0.0, kl_estimator='k3', entropy_coef=0.0,
             aggregation='sequence_mean')
def gmpo(
    regularizer: Regularizer,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    normalize_std: bool = True,
) -> Algorithm:
  """Makes GMPO: the geometric mean of a row's clipped token ratios.

  `clip_low` and `clip_high` are the distances that a token's log ratio may fall
  below 0 and rise above 0, in nats.

  Source: Zhao et al. 2025, Geometric-Mean Policy Optimization,
    arXiv:2507.20673, eq. 4; clip range from its section 4.
  """
  return _sequence_level(
      'gmpo', clipped_geometric_mean(clip_low, clip_high), regularizer,
      normalize_std)


@regularized(kl_coef=0.0, kl_estimator='k1', entropy_coef=0.0,
             aggregation='sequence_sum', length=None)
def rloo(regularizer: Regularizer) -> Algorithm:
  """Makes RLOO: REINFORCE on whole rows with leave-one-out advantages.

  The loss is minus the log-prob of the whole row times its advantage, which is
  the row's reward minus the mean reward of the group's other rows. There is no
  ratio. The KL is in the reward, summed over the row, unless
  `rollout.mask_truncated` leaves the row out of the loss. The paper tunes the
  KL's coefficient for each task; the default 0 is ours.

  Source: Ahmadian et al. 2024, Back to Basics, arXiv:2402.14740, section 2.2.
  """
  _check_whole_rows('rloo', regularizer.aggregation)

  def left_out(batch):
    mask = trained_tokens(batch)
    penalty = reference_kl(batch, regularizer)
    rewards = batch.rewards
    if penalty is not None:
      rewards = rewards - masked.row_sum(penalty, mask)
    return advantages.leave_one_out(
        rewards, batch.group_ids, batch.in_baseline)

  return policy_gradient(
      left_out, score_function(regularizer), regularizer, kl_in_reward=True,
      min_group_size=2, one_update=True)


@regularized(kl_coef=1e-3, kl_estimator='k3', entropy_coef=0.0,
             aggregation='token_mean', length=None)
def reinforce(regularizer: Regularizer) -> Algorithm:
  """Makes REINFORCE: each token's loss is minus its log-prob times the reward.

  There is no baseline, no ratio and no clip. The KL is in the loss.

  Source: Williams 1992; as in ZeroSearch (arXiv:2505.04588), with the sign of
  its KL corrected.
  """
  return policy_gradient(
      lambda batch: jnp.where(batch.in_baseline, batch.rewards, 0),
      score_function(regularizer), regularizer, one_update=True)


@regularized(kl_coef=1e-3, entropy_coef=0.0, aggregation='token_mean',
             length=None)
def reinforce_plus_plus(
    regularizer: Regularizer,
    *,
    group_baseline: bool = False,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    discount: float = 1.0,
    kl_estimator: str | None = None,
) -> Algorithm:
  """Makes REINFORCE++: PPO without a critic, on returns whitened per batch.

  With `group_baseline`, the group's mean is first subtracted ("w/ baseline"),
  `discount` is not used, and the KL is in the loss. Otherwise the KL is in the
  reward. The default estimator of the KL is k2 in the loss and k1 in the
  reward. The default kl_coef was chosen by us, and is not the paper's.

  Source: Hu et al. 2025, REINFORCE++, arXiv:2501.03262.
  """
  option_checks.fractions(discount=discount)
  regularizer = dataclasses.replace(
      regularizer,
      kl_estimator=kl_estimator or ('k2' if group_baseline else 'k1'))

  def whitened(batch):
    mask = trained_tokens(batch)
    if group_baseline:
      return advantages.reinforce_plus_plus_baseline(
          batch.rewards, batch.group_ids, mask, batch.in_baseline)
    rewards = advantages.token_rewards(
        batch.rewards, mask, reference_kl(batch, regularizer))
    return advantages.reinforce_plus_plus(rewards, mask, discount=discount)

  return policy_gradient(
      whitened, clipped_token_ratio(regularizer, clip_low, clip_high),
      regularizer, kl_in_reward=not group_baseline,
      min_group_size=2 if group_baseline else 1)


@regularized(kl_coef=0.0, kl_estimator='k3', entropy_coef=0.0,
             aggregation='sequence_sum', length=None)
def hrpo(regularizer: Regularizer, *, delta: float = 1e-6) -> Algorithm:
  """Makes HRPO, hop-grouped relative policy optimisation.

  The hop count of a question is the number of facts that its answer needs. The
  loss is minus the log-prob of the whole row times its advantage, which is
  relative to all rows of equal hop count. These rows share a baseline, so that
  a question may have a single sample. `delta` is added to the variance of their
  rewards. The source gives no value, and the default is ours. (The HRPO of
  arXiv:2505.18454 is a different method, which changes the model.)

  Source: Dr. Zero, arXiv:2601.07055, eq. 2 and 3; strictly on-policy.
  """
  _check_whole_rows('hrpo', regularizer.aggregation)
  option_checks.at_least_0(delta=delta)
  return policy_gradient(
      lambda batch: advantages.hop_group_relative(
          batch.rewards, batch.group_ids, batch.in_baseline, delta=delta),
      score_function(regularizer), regularizer, group_of=question_hops,
      one_update=True)


@regularized(aggregation='token_mean', length=None)
def sft(regularizer: Regularizer) -> Algorithm:
  """Makes supervised fine-tuning: -log pi of each token times its row's reward.

  The reward is usually 1. There is no baseline, no ratio and no clip. A row of
  reward 0 counts in the denominator, but nothing is learned from it. If the
  batch has `weights`, one for each token, they are divided by their mean over
  the batch, so that the token mean is sum_t w_t (-log pi(y_t)) / sum_t w_t.
  """
  def weighted(batch):
    rewards = jnp.where(batch.in_loss, batch.rewards, 0)
    if batch.weights is None:
      return rewards
    mask = trained_tokens(batch)
    mean = masked.mean(batch.weights, mask)
    weights = jnp.where(mask, batch.weights, 0) / jnp.where(mean > 0, mean, 1)
    return rewards[:, None] * weights

  return policy_gradient(
      weighted, score_function(regularizer), regularizer, one_update=True)


def _sequence_level(
    recipe, policy_loss, regularizer, normalize_std, keep=keep_all):
  """Makes an algorithm with one ratio and one loss per row.

  Raises:
    ValueError: The aggregation is not 'sequence_mean'.
  """
  if regularizer.aggregation != 'sequence_mean':
    raise ValueError(
        f"aggregation must be 'sequence_mean' for {recipe}, whose loss belongs "
        f'to a whole row, but is {regularizer.aggregation!r}. For token-level '
        'aggregation choose a recipe with token ratios: grpo, dapo or ppo.')
  return policy_gradient(
      by_group(normalize_std), policy_loss, regularizer, keep=keep,
      level='sequence', min_group_size=2)


def _check_whole_rows(recipe, aggregation):
  """Raises a ValueError unless the aggregation sums the losses of a row.

  The log-prob of a whole row is the sum of its tokens' log-probs.
  """
  if aggregation not in ('sequence_sum', 'sequence_sum_norm'):
    raise ValueError(
        "aggregation must be 'sequence_sum' or 'sequence_sum_norm' for "
        f'{recipe}, whose action is the whole row, but is {aggregation!r}. For '
        'means over tokens choose reinforce or reinforce_plus_plus.')
