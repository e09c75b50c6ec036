# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The building blocks of an algorithm: advantages, policy losses, objectives.

A policy loss maps log-probs [B T], old log-probs [B T], advantages [B] or [B T]
and a mask [B T] to a Mean and metrics. A policy loss with a fifth argument,
`count_mask`, can also be trained on observations. It sums over the mask and
divides by the number of the policy's tokens, which `count_mask` marks.
`objective` adds the KL and the entropy of a `Regularizer` and returns
`Algorithm.loss`.

Two functions change a finished algorithm. `with_observations` adds observations
to the tokens that are trained on. `corrected` weights the advantages by the
ratio of learner to sampler.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
import inspect
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from searchrl.rl import advantages, option_checks, diagnostics, losses, masked
from searchrl.rl.advantages import Estimate
from searchrl.rl.algorithm import (
    Algorithm, Metrics, denominator_logprobs, observed_tokens, scored,
    trained_tokens)
from searchrl.rl.masked import Mean
from searchrl.trajectory import Batch

PolicyLoss = Callable[..., tuple[Mean, Metrics]]


@dataclasses.dataclass(frozen=True)
class Regularizer:
  """The KL and entropy terms of a loss, and the aggregation over tokens.

  Raises:
    ValueError: A field is out of its range, or `length` is missing.
  """

  kl_coef: float = 0.0  # coefficient of the KL to the reference, per nat
  kl_estimator: str = 'k3'  # one of losses.KL_ESTIMATORS
  entropy_coef: float = 0.0  # coefficient of the entropy bonus, per nat
  aggregation: str = 'token_mean'  # one of losses.AGGREGATIONS
  length: int | None = None  # tokens; constant of 'sequence_sum_norm'

  def __post_init__(self):
    option_checks.choice(
        'kl_estimator', self.kl_estimator, losses.KL_ESTIMATORS)
    option_checks.choice('aggregation', self.aggregation, losses.AGGREGATIONS)
    option_checks.at_least_0(
        kl_coef=self.kl_coef, entropy_coef=self.entropy_coef)
    if self.aggregation == 'sequence_sum_norm' and not self.length:
      raise ValueError(
          "length must be given for aggregation 'sequence_sum_norm', but is "
          f'{self.length}. Give one constant for all batches, such as the most '
          'tokens that a policy may write: micro-batches differ in T.')
    option_checks.require(
        self.length is None or self.length >= 1,
        f'length must be a number of tokens, but is {self.length}.')

  def aggregate(
      self, per_token: Float[Array, 'B T'], mask: Bool[Array, 'B T'],
      count_mask: Bool[Array, 'B T'] | None = None) -> Mean:
    """Reduces one value per token to a Mean, in the way of `aggregation`.

    Args:
      per_token: Values, [B, T].
      mask: True for the tokens whose values are summed.
      count_mask: True for the tokens that the divisor counts. Default: `mask`.
    """
    return losses.aggregate(
        per_token, mask, how=self.aggregation, length=self.length,
        count_mask=count_mask)

  @property
  def is_empty(self) -> bool:
    """True if it adds no term to the policy loss.

    A row whose advantages are 0 then has no gradient.
    """
    return not self.kl_coef and not self.entropy_coef

  def without_kl(self) -> Regularizer:
    """Returns a copy without the KL, for when the KL is in the reward."""
    return dataclasses.replace(self, kl_coef=0.0)

  def needs(self, kl_in_reward: bool) -> frozenset[str]:
    """Returns the names of the batch fields that the KL reads.

    They are `ref_logprobs`, and `old_logprobs` if the KL is in the reward. If
    kl_coef is 0, there are none.
    """
    if not self.kl_coef:
      return frozenset()
    return frozenset(
        ('ref_logprobs', 'old_logprobs') if kl_in_reward else ('ref_logprobs',))


def regularized(**defaults) -> Callable:
  """Returns a decorator that adds `Regularizer` fields to a recipe's options.

    @regularized(kl_coef=0.04, aggregation='sequence_mean')
    def mine(regularizer, *, clip_high=0.2): ...

    mine(clip_high=0.3, kl_coef=0.1)

  A recipe is a function that makes an `Algorithm`. Its first argument is a
  Regularizer. The decorated function makes it from the options in `defaults`.

  Args:
    **defaults: Fields that become options of the recipe, with their defaults.
      inspect.signature lists them, and an unknown option raises a TypeError.
  """
  shared = [
      inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY,
                        default=defaults[field.name], annotation=field.type)
      for field in dataclasses.fields(Regularizer) if field.name in defaults]

  def flat(recipe):
    _, *parameters = inspect.signature(recipe).parameters.values()

    @functools.wraps(recipe)
    def build(**options):
      fields = {name: options.pop(name, default)
                for name, default in defaults.items()}
      return recipe(Regularizer(**fields), **options)

    named = sorted(parameters + shared, key=lambda parameter: (
        parameter.kind == parameter.VAR_KEYWORD))
    build.__signature__ = inspect.Signature(
        named, return_annotation=Algorithm)
    return build

  return flat


def by_group(normalize_std: bool = True) -> Callable:
  """Returns GRPO's function from a batch to one advantage per row, [B].

  An advantage is the row's reward minus the mean reward of its group. With
  `normalize_std`, it is divided by the group's standard deviation.
  """
  return lambda batch: advantages.group_relative(
      batch.rewards, batch.group_ids, batch.in_baseline,
      normalize_std=normalize_std)


def reference_kl(batch: Batch, regularizer: Regularizer
                ) -> Float[Array, 'B T'] | None:
  """Returns kl_coef times each token's KL to the reference policy, [B, T].

  It is an estimate of KL(pi_old || pi_ref) from the log-probs of the sampled
  token, in nats, by the regularizer's estimator; see `losses.kl`. It is 0 at
  tokens that are not trained on. The result is None if kl_coef is 0.
  """
  if not regularizer.kl_coef:
    return None
  return regularizer.kl_coef * losses.kl(
      scored(batch, 'old_logprobs'), scored(batch, 'ref_logprobs'),
      trained_tokens(batch), estimator=regularizer.kl_estimator)


def clipped_token_ratio(
    regularizer: Regularizer, clip_low: float, clip_high: float,
    dual_clip: float | None = None) -> PolicyLoss:
  """Returns PPO's policy loss, with one clipped ratio per token.

  The result is a function as described at the top of this file. The
  regularizer's aggregation reduces the tokens' losses to a Mean. The clips are
  distances below and above a ratio of 1; `dual_clip` bounds the loss of tokens
  with a negative advantage.
  """
  option_checks.clip(clip_low, clip_high, dual_clip)
  clip = dict(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)

  def policy_loss(logprobs, old, advs, mask, count_mask=None):
    count_mask = mask if count_mask is None else count_mask
    per_token = losses.token_ratio_loss(logprobs, old, advs, mask, **clip)
    ratio = losses.token_ratio(logprobs, old, mask)
    return (regularizer.aggregate(per_token, mask, count_mask),
            diagnostics.clip_fractions(ratio, advs, count_mask, **clip))

  return policy_loss


def clipped_sequence_ratio(
    clip_low: float, clip_high: float, dual_clip: float | None = None
) -> PolicyLoss:
  """Returns GSPO's policy loss: one clipped ratio per row, mean over rows.

  The ratio of a row is the geometric mean of its tokens' ratios. The result is
  a function as described at the top of this file.
  """
  option_checks.clip(clip_low, clip_high, dual_clip)
  clip = dict(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)

  def policy_loss(logprobs, old, advs, mask, count_mask=None):
    rows = mask.any(-1)
    per_row = losses.sequence_ratio_loss(
        logprobs, old, advs, mask, count_mask=count_mask, **clip)
    ratio = losses.sequence_ratio(logprobs, old, mask, count_mask=count_mask)
    return (Mean.of(per_row, rows),
            diagnostics.clip_fractions(ratio, advs, rows, **clip))

  return policy_loss


def clipped_geometric_mean(clip_low: float, clip_high: float) -> PolicyLoss:
  """Returns GMPO's policy loss: the geometric mean of a row's clipped ratios.

  The loss is averaged over rows. The clips are in nats: `clip_low` and
  `clip_high` are the distances that a log ratio may fall below 0 and rise above
  0. The result is a function as described at the top of this file.
  """
  option_checks.log_clip(clip_low, clip_high)
  as_ratios = dict(clip_low=-math.expm1(-clip_low),
                   clip_high=math.expm1(clip_high))

  def policy_loss(logprobs, old, advs, mask, count_mask=None):
    count_mask = mask if count_mask is None else count_mask
    per_row = losses.geometric_mean_loss(
        logprobs, old, advs, mask, clip_low=clip_low, clip_high=clip_high,
        count_mask=count_mask)
    ratio = losses.token_ratio(logprobs, old, mask)
    return (Mean.of(per_row, mask.any(-1)),
            diagnostics.clip_fractions(ratio, advs, count_mask, **as_ratios))

  return policy_loss


def score_function(regularizer: Regularizer) -> PolicyLoss:
  """Returns REINFORCE's policy loss: minus advantage times log-prob.

  It has no importance ratio. The regularizer's aggregation reduces the tokens'
  losses to a Mean. The result is a function as described at the top of this
  file.
  """
  def policy_loss(logprobs, old, advs, mask, count_mask=None):
    del old  # there is no ratio
    per_token = losses.score_function_loss(logprobs, advs, mask)
    return regularizer.aggregate(per_token, mask, count_mask), {}

  return policy_loss


def objective(
    policy_loss: PolicyLoss, regularizer: Regularizer = Regularizer()
) -> Callable:
  """Returns `Algorithm.loss`: a policy loss plus the regularizer's terms.

  A term whose coefficient is 0 is left out, and the batch does not need the
  scored field of that term. If the policy loss has an argument `count_mask`,
  the returned function has an argument `observed`, [B T]. This is a mask of
  further tokens that all terms sum over; see `with_observations`.
  """
  def loss(policy, batch, advs, observed=None):
    mask, old = trained_tokens(batch), denominator_logprobs(batch)
    summed, options = mask, {}
    if observed is not None:
      summed, options = mask | observed, {'count_mask': mask}
    mean, policy_metrics = policy_loss(
        policy.logprobs, old, advs, summed, **options)
    terms = {'policy': (1.0, mean)}
    metrics = {
        'actor/pg_loss': mean,
        'actor/entropy': Mean.of(policy.entropy, mask),
        **diagnostics.policy_drift(policy.logprobs, old, mask),
        **policy_metrics,
    }
    if regularizer.kl_coef:
      kl = losses.kl(policy.logprobs, scored(batch, 'ref_logprobs'), summed,
                     estimator=regularizer.kl_estimator)
      mean = regularizer.aggregate(kl, summed, **options)
      terms['kl'] = (regularizer.kl_coef, mean)
      metrics['actor/kl_loss'] = mean
    if regularizer.entropy_coef:
      mean = regularizer.aggregate(policy.entropy, summed, **options)
      terms['entropy'] = (-regularizer.entropy_coef, mean)
    return terms, metrics

  if _takes(policy_loss, 'count_mask'):
    return loss
  return lambda policy, batch, advs: loss(policy, batch, advs)


def policy_gradient(
    advantages_of: Callable, policy_loss: PolicyLoss, regularizer: Regularizer,
    *, kl_in_reward: bool = False, **fields) -> Algorithm:
  """Returns an algorithm that trains the policy alone, without a critic.

  Args:
    advantages_of: Function from a batch to its advantages, [B] or [B T].
    policy_loss: Loss of the sampled tokens. It must have no gradient where the
      advantages are 0.
    regularizer: KL and entropy that `objective` adds to the loss.
    kl_in_reward: True if `advantages_of` takes the KL from the reward, so that
      it is not in the loss.
    **fields: Other fields of the `Algorithm`.
  """
  in_loss = regularizer.without_kl() if kl_in_reward else regularizer
  return Algorithm(
      advantages_of, objective(policy_loss, in_loss),
      needs=regularizer.needs(kl_in_reward), skips_zero=in_loss.is_empty,
      skips_unsampled=True, **fields)


def with_observations(algorithm: Algorithm) -> Algorithm:
  """Returns an algorithm that also trains on observations, for comparison.

  The terms of `objective` then also sum over `observed_tokens`, as if the
  policy had written these tokens. The denominators still count the policy's
  tokens only, so that these keep their weights. An observation has the
  advantage of the last policy token before it, which is the end of the turn
  that requested it. Everything else reads the policy's tokens only: the
  advantages, the critic, a KL in the reward, the filter and the metrics, except
  the metrics of the terms and of a row's ratio. If `corrected` is needed, apply
  it to the result of this function, and not before.

  Raises:
    ValueError: The loss does not take `observed`.

  Source: the runs without masking of Search-R1, arXiv:2503.09516, section 5.4,
    and of ZeroSearch, arXiv:2505.04588, appendix C. Search-R1's published code
    also counts observations in the denominators of these runs.
  """
  if not _takes(algorithm.loss, 'observed'):
    raise ValueError(
        "algorithm.mask_observations must be True for an algorithm whose loss "
        'takes no `observed` tokens, but is False. Make the loss with '
        '`algorithms.objective`, of a policy loss with the argument '
        '`count_mask`, as docs/cispo.py does.')

  def loss(policy, batch, advs):
    return algorithm.loss(policy, batch, advs, observed=observed_tokens(batch))

  return dataclasses.replace(
      algorithm, advantages=_changed(algorithm, _held), loss=loss,
      skips_unsampled=False)


def corrected(
    algorithm: Algorithm,
    *,
    method: str = 'truncate',
    level: str = 'token',
    low: float = 0.5,
    high: float = 2.0,
) -> Algorithm:
  """Returns the algorithm with advantages weighted by pi_old / pi_behavior.

  pi_old is the policy as the learner computes it, and pi_behavior as the
  sampler computed it. Every policy loss here is proportional to |A| on either
  side of 0, so that weighting the advantages weights the loss. Rows of an
  earlier policy keep weight 1, because their ratio already divides by the
  sampler's log-probs. Observations also keep weight 1, unless the weight
  belongs to the whole row.

  Args:
    algorithm: Any algorithm, including one of your own.
    method: 'truncate' for `losses.truncated_weights` (TIS), or
      'mask' for `losses.masked_weights` (IcePop).
    level: Unit that has one weight: 'token' or 'sequence'.
    low: Smallest weight that 'mask' keeps. 'truncate' does not use it.
    high: Largest weight. 'truncate' lowers larger weights to it, and 'mask'
      sets them to 0.

  Raises:
    ValueError: A name is unknown, 0 <= low < high is not true, or `level` is
      'token' for an algorithm with one ratio per sequence.
  """
  option_checks.choice('method', method, ('truncate', 'mask'))
  option_checks.choice('level', level, ('token', 'sequence'))
  option_checks.interval(low, high)
  if algorithm.level == 'sequence' and level == 'token':
    raise ValueError(
        "level must be 'sequence' for an algorithm whose ratio belongs to a "
        "sequence, but is 'token'. A sequence has one advantage.")

  def weigh(advs, batch):
    mask = trained_tokens(batch)
    inputs = scored(batch, 'old_logprobs'), batch.behavior_logprobs, mask
    if method == 'truncate':
      weights = losses.truncated_weights(*inputs, high=high, level=level)
    else:
      weights = losses.masked_weights(*inputs, low=low, high=high, level=level)
    weights = jnp.where(batch.on_policy[:, None], weights, 1)
    if level == 'sequence':
      row_weights = masked.row_mean(weights, mask)
      if advs.ndim == 1:
        return advs * row_weights
      weights = jnp.where(mask, weights, row_weights[:, None])
    return losses.spread_over(mask | observed_tokens(batch), advs) * weights

  return dataclasses.replace(
      algorithm, advantages=_changed(algorithm, weigh),
      needs=algorithm.needs | {'old_logprobs'})


def _changed(algorithm: Algorithm, change: Callable) -> Callable:
  """Returns `Algorithm.advantages` with `change` applied to the result.

  `change` maps (advantages, batch) to advantages. The returns of an `Estimate`
  stay as they are.
  """
  def advantages_of(batch):
    result = algorithm.advantages(batch)
    if isinstance(result, Estimate):
      return result._replace(advantages=change(result.advantages, batch))
    return change(result, batch)

  return advantages_of


def _held(advs, batch):
  """Gives each observation the advantage of the last policy token before it.

  Advantages per row, [B], are returned unchanged.
  """
  if advs.ndim == 1:
    return advs
  columns = jnp.arange(advs.shape[1])[None]
  last = jax.lax.cummax(jnp.where(trained_tokens(batch), columns, 0), axis=1)
  held = jnp.take_along_axis(advs, last, axis=1)
  return jnp.where(observed_tokens(batch), held, advs)


def _takes(function: Callable, argument: str) -> bool:
  """Returns whether a function has an argument of this name."""
  return argument in inspect.signature(function).parameters
