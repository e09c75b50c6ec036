# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The building blocks of an algorithm: advantages, policy losses, objectives.

A policy loss maps log-probs [B T], old log-probs [B T], advantages [B] or
[B T] and a mask [B T] to a Mean and metrics. One with a fifth argument,
`counted`, can be trained on observations: it sums over the mask, and divides by
the number of the policy's tokens, which are `counted`. `objective` adds the KL
and the entropy of a `Regularizer` and gives `Algorithm.loss`.

Finished algorithms are changed by `trained_on`, which adds observations to the
tokens they are trained on, and `corrected`, which weights their advantages by
learner over sampler.
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
  """The terms that keep a policy from drifting, and how tokens are averaged.

  Raises:
    ValueError: a field is out of its range, or `length` is missing.
  """

  kl_coef: float = 0.0  # of the KL to the reference policy, per nat
  kl_estimator: str = 'k3'  # one of losses.KL_ESTIMATORS
  entropy_coef: float = 0.0  # of the entropy bonus, per nat
  aggregation: str = 'token_mean'  # one of losses.AGGREGATIONS
  length: int | None = None  # the constant of 'sequence_sum_norm', in tokens

  def __post_init__(self):
    option_checks.choice('kl_estimator', self.kl_estimator, losses.KL_ESTIMATORS)
    option_checks.choice('aggregation', self.aggregation, losses.AGGREGATIONS)
    option_checks.at_least_0(kl_coef=self.kl_coef, entropy_coef=self.entropy_coef)
    if self.aggregation == 'sequence_sum_norm' and not self.length:
      raise ValueError(
          "length must be given for aggregation 'sequence_sum_norm', but is "
          f'{self.length}. Give one constant for all batches, such as the most '
          'tokens that a policy may write: micro-batches differ in T.')

  def aggregate(
      self, per_token: Float[Array, 'B T'], mask: Bool[Array, 'B T'],
      counted: Bool[Array, 'B T'] | None = None) -> Mean:
    """The mean of one value per token, by this aggregation."""
    return losses.aggregate(
        per_token, mask, how=self.aggregation, length=self.length,
        counted=counted)

  def without_kl(self) -> Regularizer:
    """For an objective whose KL is in the reward."""
    return dataclasses.replace(self, kl_coef=0.0)


def regularized(**defaults) -> Callable:
  """Gives a recipe the fields of its `Regularizer` as flat options.

    @regularized(kl_coef=0.04, aggregation='sequence_mean')
    def mine(regularizer, *, clip_high=0.2): ...

    mine(clip_high=0.3, kl_coef=0.1)

  Args:
    **defaults: the fields that are options of the recipe, with their defaults.
      inspect.signature lists them, and an unknown option is a TypeError.
  """
  shared = [
      inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY,
                        default=defaults[field.name], annotation=field.type)
      for field in dataclasses.fields(Regularizer) if field.name in defaults]

  def flat(recipe):
    _, *own = inspect.signature(recipe).parameters.values()

    @functools.wraps(recipe)
    def build(**options):
      fields = {name: options.pop(name, default)
                for name, default in defaults.items()}
      return recipe(Regularizer(**fields), **options)

    build.__signature__ = inspect.Signature(
        own + shared, return_annotation=Algorithm)
    return build

  return flat


def by_group(normalize_std: bool = True) -> Callable:
  """The advantages of GRPO and its descendants: batch -> [B]."""
  return lambda batch: advantages.group_relative(
      batch.rewards, batch.group_ids, batch.in_baseline,
      normalize_std=normalize_std)


def reference_kl(batch: Batch, regularizer: Regularizer
                ) -> Float[Array, 'B T'] | None:
  """kl_coef KL(pi_old || pi_ref) of each token, or None if kl_coef is 0."""
  if not regularizer.kl_coef:
    return None
  return regularizer.kl_coef * losses.kl(
      scored(batch, 'old_logprobs'), scored(batch, 'ref_logprobs'),
      trained_tokens(batch), estimator=regularizer.kl_estimator)


def clipped_token_ratio(
    regularizer: Regularizer, clip_low: float, clip_high: float,
    dual_clip: float | None = None) -> PolicyLoss:
  """PPO's policy loss: one clipped ratio per token."""
  option_checks.clip(clip_low, clip_high, dual_clip)
  clip = dict(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)

  def policy_loss(logprobs, old, advs, mask, counted=None):
    counted = mask if counted is None else counted
    per_token = losses.token_ratio_loss(logprobs, old, advs, mask, **clip)
    ratio = losses.token_ratio(logprobs, old, mask)
    return (regularizer.aggregate(per_token, mask, counted),
            diagnostics.clip_fractions(ratio, advs, counted, **clip))

  return policy_loss


def clipped_sequence_ratio(
    clip_low: float, clip_high: float, dual_clip: float | None = None
) -> PolicyLoss:
  """GSPO's policy loss: one clipped ratio per row; the mean over rows."""
  option_checks.clip(clip_low, clip_high, dual_clip)
  clip = dict(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)

  def policy_loss(logprobs, old, advs, mask, counted=None):
    rows = mask.any(-1)
    per_row = losses.sequence_ratio_loss(
        logprobs, old, advs, mask, counted=counted, **clip)
    ratio = losses.sequence_ratio(logprobs, old, mask, counted=counted)
    return (Mean.of(per_row, rows),
            diagnostics.clip_fractions(ratio, advs, rows, **clip))

  return policy_loss


def clipped_geometric_mean(clip_low: float, clip_high: float) -> PolicyLoss:
  """GMPO's policy loss: log ratios clipped by token; the mean over rows."""
  option_checks.log_clip(clip_low, clip_high)
  as_ratios = dict(clip_low=-math.expm1(-clip_low),
                   clip_high=math.expm1(clip_high))

  def policy_loss(logprobs, old, advs, mask, counted=None):
    counted = mask if counted is None else counted
    per_row = losses.geometric_mean_loss(
        logprobs, old, advs, mask, clip_low=clip_low, clip_high=clip_high,
        counted=counted)
    ratio = losses.token_ratio(logprobs, old, mask)
    return (Mean.of(per_row, mask.any(-1)),
            diagnostics.clip_fractions(ratio, advs, counted, **as_ratios))

  return policy_loss


def score_function(regularizer: Regularizer) -> PolicyLoss:
  """REINFORCE's policy loss: -A log pi, without a ratio."""
  def policy_loss(logprobs, old, advs, mask, counted=None):
    del old  # there is no ratio
    per_token = losses.score_function_loss(logprobs, advs, mask)
    return regularizer.aggregate(per_token, mask, counted), {}

  return policy_loss


def objective(
    policy_loss: PolicyLoss, regularizer: Regularizer = Regularizer()
) -> Callable:
  """`Algorithm.loss`: a policy loss, plus the terms of the regularizer.

  A term whose coefficient is 0 is left out, and needs no scored field. With a
  policy loss that takes `counted`, `Algorithm.loss` takes `observed`, [B T],
  further tokens that all terms sum over; see `trained_on`.
  """
  def loss(policy, batch, advs, observed=None):
    mask, old = trained_tokens(batch), denominator_logprobs(batch)
    summed, counted = mask, {}
    if observed is not None:
      summed, counted = mask | observed, {'counted': mask}
    mean, policy_metrics = policy_loss(
        policy.logprobs, old, advs, summed, **counted)
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
      mean = regularizer.aggregate(kl, summed, **counted)
      terms['kl'] = (regularizer.kl_coef, mean)
      metrics['actor/kl_loss'] = mean
    if regularizer.entropy_coef:
      mean = regularizer.aggregate(policy.entropy, summed, **counted)
      terms['entropy'] = (-regularizer.entropy_coef, mean)
    return terms, metrics

  if _takes(policy_loss, 'counted'):
    return loss
  return lambda policy, batch, advs: loss(policy, batch, advs)


def trained_on(algorithm: Algorithm, tokens: str) -> Algorithm:
  """The algorithm, trained on the policy's tokens, or also on what it read.

  With 'all', for comparison, the terms of `objective` sum over
  `observed_tokens`, too, as if the policy had written them. Denominators still
  count the policy's tokens alone, which thus keep their weights. An observation
  has the advantage of the last policy token before it, which fetched it. All
  else is the policy's as before: advantages, the critic, a KL in the reward,
  the filter, and metrics but for those of the terms and of a row's ratio.

  Args:
    algorithm: not `corrected` yet; any whose loss takes `observed`.
    tokens: 'policy', which changes nothing, or 'all'.

  Raises:
    ValueError: another name, or a loss that does not take `observed`.

  Source: the runs without masking of Search-R1, arXiv:2503.09516, section 5.4,
    and of ZeroSearch, arXiv:2505.04588, appendix C. Search-R1's published code
    counts observations in the denominators of these runs, too.
  """
  option_checks.choice('algorithm.trained_on', tokens, ('policy', 'all'))
  if tokens == 'policy':
    return algorithm
  if not _takes(algorithm.loss, 'observed'):
    raise ValueError(
        "algorithm.trained_on must be 'policy' for an algorithm whose loss "
        "takes no `observed` tokens, but is 'all'. Make the loss with "
        '`algorithms.objective`, of a policy loss with the argument `counted`, '
        'as docs/cispo.py does.')

  def loss(policy, batch, advs):
    return algorithm.loss(policy, batch, advs, observed=observed_tokens(batch))

  return dataclasses.replace(
      algorithm, advantages=_changed(algorithm, _held), loss=loss)


def corrected(
    algorithm: Algorithm,
    *,
    how: str = 'truncate',
    level: str = 'token',
    low: float = 0.5,
    high: float = 2.0,
) -> Algorithm:
  """The algorithm with its advantages weighted by pi_old / pi_behavior.

  Every policy loss here is proportional to |A| on either side of 0, so that
  weighting the advantages weights the loss. Rows of an earlier policy keep
  weight 1: their ratio divides by the sampler's log-probs already. So do
  observations, unless the weight is that of the whole row.

  Args:
    algorithm: any, your own too.
    how: 'truncate' for `losses.truncated_weights` (TIS), 'mask' for
      `losses.masked_weights` (IcePop).
    level: 'token', or 'sequence': one weight per row.
    low: the smallest weight that 'mask' keeps.
    high: the largest weight.

  Raises:
    ValueError: an unknown name; an empty interval; or weights by token for a
      ratio by sequence.
  """
  option_checks.choice('how', how, ('truncate', 'mask'))
  option_checks.choice('level', level, ('token', 'sequence'))
  option_checks.interval(low, high)
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
    if level == 'sequence':
      of_rows = masked.row_mean(weights, mask)
      if advs.ndim == 1:
        return advs * of_rows
      weights = jnp.where(mask, weights, of_rows[:, None])
    return losses.spread_over(mask | observed_tokens(batch), advs) * weights

  return dataclasses.replace(
      algorithm, advantages=_changed(algorithm, weigh),
      needs=algorithm.needs | {'old_logprobs'})


def _changed(algorithm: Algorithm, change: Callable) -> Callable:
  """`Algorithm.advantages`, the policy's changed by (advs, batch) -> advs."""
  def advantages_of(batch):
    result = algorithm.advantages(batch)
    if isinstance(result, Estimate):
      return result._replace(advantages=change(result.advantages, batch))
    return change(result, batch)

  return advantages_of


def _held(advs, batch):
  """An observation has the advantage of the last policy token before it."""
  if advs.ndim == 1:
    return advs
  columns = jnp.arange(advs.shape[1])[None]
  last = jax.lax.cummax(jnp.where(trained_tokens(batch), columns, 0), axis=1)
  held = jnp.take_along_axis(advs, last, axis=1)
  return jnp.where(observed_tokens(batch), held, advs)


def _takes(function: Callable, argument: str) -> bool:
  return argument in inspect.signature(function).parameters
