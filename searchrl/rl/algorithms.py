# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Recipes: hyper-parameters in, an Algorithm out: what to keep, A, and loss.

An algorithm is three pure functions and a few facts. A config names one as
`module:function`, and `make` builds it; one of your own needs no registration:

  algorithm = make('my.module:recipe', clip_high=0.3)
  advs = algorithm.advantages(batch)
  terms, metrics = algorithm.loss(policy, batch, advs)
  loss = total(terms)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
import dataclasses
import difflib
import importlib
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from searchrl.rl import advantages, losses
from searchrl.rl.masked import Mean
from searchrl.trajectory import Batch, Question

Terms = dict[str, tuple[float, Mean]]  # name: coefficient, and what it scales
Metrics = dict[str, Mean]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PolicyOutput:
  """What the network being trained says of a batch's tokens."""

  logprobs: Float[Array, 'B T']  # nats, at the sampling temperature
  entropy: Float[Array, 'B T']  # nats, of the distribution that token t is from
  values: Float[Array, 'B T'] | None = None  # of the critic


def question_uid(question: Question) -> str:
  """The usual baseline: all samples of one question."""
  return question.uid


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """Three pure functions, and what they ask of their surroundings.

  The counts of a loss's Means depend on masks alone, so that a learner knows
  the global denominators before it runs the first micro-batch.
  """

  # outcome rewards [N], question ids [N] -> which rows to train on; numpy.
  keep: Callable[[np.ndarray, np.ndarray], np.ndarray]
  # The whole global batch -> any array whose first axis is B; under jit.
  advantages: Callable[[Batch], Float[Array, 'B ...']]
  # Policy, (micro-)batch, its advantages -> terms and metrics; under jit.
  loss: Callable[[PolicyOutput, Batch, Array], tuple[Terms, Metrics]]
  # Rows of equal groups share a baseline.
  group_of: Callable[[Question], Hashable] = question_uid
  needs: frozenset[str] = frozenset()  # of 'ref_logprobs', 'values'
  min_group_size: int = 1  # samples a question, below which nothing is learned


def grpo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    kl_estimator: str = 'k3',
    entropy_coef: float = 0.0,
    normalize_std: bool = True,
    aggregation: str = 'token_mean',
) -> Algorithm:
  """A token ratio, clipped, on advantages relative to the question's group.

  Args:
    clip_low: how far a token's ratio may fall below 1.
    clip_high: how far it may rise above 1.
    kl_coef: weight of the KL to the reference, per nat; the paper's is 0.04.
    kl_estimator: one of `losses.KL_ESTIMATORS`.
    entropy_coef: weight of the entropy bonus, per nat.
    normalize_std: divide advantages by the group's standard deviation.
    aggregation: one of `losses.AGGREGATIONS`; the paper's is 'sequence_mean'.

  Returns:
    An Algorithm; it needs `ref_logprobs` if `kl_coef` is not 0.

  Raises:
    ValueError: an option is out of its range.

  Source: Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, eq. 3; with the
    token mean, and without KL, of DAPO, arXiv:2503.14476.
  """
  clip = _clip_range(clip_low, clip_high)

  def policy_loss(logprobs, old, advs, mask):
    per_token = losses.token_ratio_loss(logprobs, old, advs, mask, **clip)
    ratio = losses.token_ratio(logprobs, old, mask)
    return (losses.aggregate(per_token, mask, how=aggregation),
            losses.clip_fractions(ratio, advs, mask, **clip))

  return Algorithm(
      keep=keep_all,
      advantages=_by_group(normalize_std),
      loss=_objective(
          policy_loss, kl_coef, kl_estimator, entropy_coef, aggregation),
      needs=_needs(kl_coef),
      min_group_size=2)


def gspo(
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    kl_coef: float = 0.0,
    kl_estimator: str = 'k3',
    entropy_coef: float = 0.0,
    normalize_std: bool = True,
) -> Algorithm:
  """One ratio a sequence, clipped, on advantages relative to its group.

  Args:
    clip_low: how far a sequence's ratio may fall below 1.
    clip_high: how far it may rise above 1.
    kl_coef: weight of the KL to the reference, per nat.
    kl_estimator: one of `losses.KL_ESTIMATORS`.
    entropy_coef: weight of the entropy bonus, per nat.
    normalize_std: divide advantages by the group's standard deviation.

  Returns:
    An Algorithm; every row weighs the same, in the KL and the entropy too. It
    needs `ref_logprobs` if `kl_coef` is not 0.

  Raises:
    ValueError: an option is out of its range.

  Source: Zheng et al. 2025, Group Sequence Policy Optimization,
    arXiv:2507.18071, eq. 5; clip ranges of its section 5.1.
  """
  clip = _clip_range(clip_low, clip_high)

  def policy_loss(logprobs, old, advs, mask):
    rows = mask.any(-1)
    per_row = losses.sequence_ratio_loss(logprobs, old, advs, mask, **clip)
    ratio = losses.sequence_ratio(logprobs, old, mask)
    return (Mean.of(per_row, rows),
            losses.clip_fractions(ratio, advs, rows, **clip))

  return Algorithm(
      keep=keep_all,
      advantages=_by_group(normalize_std),
      loss=_objective(
          policy_loss, kl_coef, kl_estimator, entropy_coef, 'sequence_mean'),
      needs=_needs(kl_coef),
      min_group_size=2)


def dspo(
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    kl_coef: float = 0.0,
    kl_estimator: str = 'k3',
    entropy_coef: float = 0.0,
    normalize_std: bool = True,
) -> Algorithm:
  """GSPO on the groups whose outcomes are mixed.

  Args:
    clip_low: how far a sequence's ratio may fall below 1. The paper gives no
      range; these are GSPO's.
    clip_high: how far it may rise above 1.
    kl_coef: weight of the KL to the reference, per nat.
    kl_estimator: one of `losses.KL_ESTIMATORS`.
    entropy_coef: weight of the entropy bonus, per nat.
    normalize_std: divide advantages by the group's standard deviation.

  Returns:
    An Algorithm; it needs `ref_logprobs` if `kl_coef` is not 0.

  Raises:
    ValueError: an option is out of its range.

  Source: DSPO, arXiv:2510.09255.
  """
  algorithm = gspo(
      clip_low=clip_low, clip_high=clip_high, kl_coef=kl_coef,
      kl_estimator=kl_estimator, entropy_coef=entropy_coef,
      normalize_std=normalize_std)
  return dataclasses.replace(algorithm, keep=keep_mixed)


def keep_all(
    outcome_rewards: Float[np.ndarray, 'N'],
    question_ids: Int[np.ndarray, 'N'],
) -> Bool[np.ndarray, 'N']:
  """Every row is trained on."""
  del question_ids
  return np.ones(len(outcome_rewards), bool)


def keep_mixed(
    outcome_rewards: Float[np.ndarray, 'N'],
    question_ids: Int[np.ndarray, 'N'],
) -> Bool[np.ndarray, 'N']:
  """A question's rows are trained on if their outcomes are mixed.

    max r - min r > 1e-6 over the rows of the question

  Args:
    outcome_rewards: what the filter reads; NaN where none could be computed,
      which neither mixes a group nor takes its row out of one.
    question_ids: rows of one question; any integers.

  Returns:
    True for the rows to keep: all rows of a question, or none.

  Raises:
    ValueError: the shapes differ.

  Source: Yu et al. 2025, DAPO, arXiv:2503.14476, eq. 11; DSPO,
    arXiv:2510.09255.
  """
  outcome_rewards = np.asarray(outcome_rewards)
  ids = np.unique(question_ids, return_inverse=True)[1]
  spread = advantages.group_spread(
      outcome_rewards, ids, ~np.isnan(outcome_rewards))
  return spread > advantages.MIN_SPREAD


def trained_tokens(batch: Batch) -> Bool[Array, 'B T']:
  """True where the policy sampled the token, in rows that are in the loss."""
  return batch.loss_mask & batch.in_loss[:, None]


def denominator_logprobs(batch: Batch) -> Float[Array, 'B T']:
  """log pi_old, in nats: what the importance ratio divides by.

  Rows that the present policy sampled take the learner's own `old_logprobs`;
  rows carried over from an earlier policy keep the `behavior_logprobs` they
  were sampled with, so that they are off-policy honestly, never at ratio 1.

  Raises:
    ValueError: the batch has no `old_logprobs`.
  """
  old = _scored('old_logprobs', batch.old_logprobs)
  return jnp.where(batch.on_policy[:, None], old, batch.behavior_logprobs)


def total(
    terms: Terms, counts: Mapping[str, Array] | None = None
) -> Float[Array, '']:
  """loss = sum over terms of coefficient * total / count.

  Args:
    terms: what `Algorithm.loss` gave for a batch, or for a micro-batch of it.
    counts: each term's count over the global batch. The totals of its
      micro-batches then add up to the loss of the whole. Default: their own.

  Returns:
    The loss to differentiate; a term that counts nothing adds 0.
  """
  if counts is None:
    counts = {name: mean.count for name, (_, mean) in terms.items()}
  return sum(
      coefficient * Mean(mean.total, counts[name]).value
      for name, (coefficient, mean) in terms.items())


def make(name: str, **options: Any) -> Algorithm:
  """Builds the algorithm that a config names.

  Args:
    name: `module:function`, such as 'searchrl.rl.algorithms:dspo'. The
      function takes keyword options and returns an Algorithm.
    **options: its hyper-parameters.

  Returns:
    The Algorithm.

  Raises:
    ValueError: the name is malformed, leads nowhere or to something else, or
      an option is unknown.
  """
  factory = _resolve(name)
  parameters = inspect.signature(factory).parameters.values()
  legal = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
  unknown = sorted(set(options) - set(legal))
  if unknown and len(legal) == len(parameters):
    raise ValueError(
        f'options of {name} must be among {", ".join(legal) or "none"}, but '
        f'{unknown[0]!r} was given. Remove it or correct its spelling.')
  algorithm = factory(**options)
  if not isinstance(algorithm, Algorithm):
    raise ValueError(
        f'name must lead to a function that returns an Algorithm, but {name} '
        f'returned {type(algorithm).__name__}.')
  return algorithm


def _resolve(name):
  """The function that `module:function` names."""
  module_name, _, function = name.partition(':')
  if not (module_name and function.isidentifier()):
    raise ValueError(
        f'name must read module:function, but is {name!r}. Write for instance '
        "'searchrl.rl.algorithms:dspo'.")
  try:
    module = importlib.import_module(module_name)
  except ModuleNotFoundError as error:
    if not f'{module_name}.'.startswith(f'{error.name}.'):
      raise  # the module is there; something that it imports is not
    raise ValueError(
        f'name must begin with a module that can be imported, but {name!r} '
        f'begins with {module_name}, and there is no {error.name}. Correct '
        'it, or put its folder on PYTHONPATH.') from error
  factory = getattr(module, function, None)
  if not callable(factory):
    near = difflib.get_close_matches(function, dir(module))
    hint = f'did you mean {near[0]}?' if near else 'check its spelling.'
    raise ValueError(
        f'name must end with a function of {module_name}, but that has no '
        f'function {function!r}; {hint}')
  return factory


def _by_group(normalize_std):
  """The baseline of GRPO and its descendants."""
  return lambda batch: advantages.group_relative(
      batch.rewards, batch.group_ids, batch.in_baseline,
      normalize_std=normalize_std)


def _needs(kl_coef):
  return frozenset({'ref_logprobs'} if kl_coef else ())


def _objective(policy_loss, kl_coef, kl_estimator, entropy_coef, aggregation):
  """Algorithm.loss: a policy loss, plus what keeps the policy from drifting.

  Args:
    policy_loss: logprobs, old log-probs, advantages, mask -> Mean, metrics.
    kl_coef: of the KL to the reference. A term whose coefficient is 0 is left
      out, and asks for nothing.
    kl_estimator: one of `losses.KL_ESTIMATORS`.
    entropy_coef: of the entropy bonus.
    aggregation: of KL and entropy.
  """
  losses.check_choice('kl_estimator', kl_estimator, losses.KL_ESTIMATORS)
  losses.check_choice('aggregation', aggregation, losses.AGGREGATIONS)

  def loss(policy, batch, advs):
    mask, old = trained_tokens(batch), denominator_logprobs(batch)
    mean, clip_metrics = policy_loss(policy.logprobs, old, advs, mask)
    terms = {'policy': (1.0, mean)}
    metrics = {
        'actor/pg_loss': mean,
        'actor/entropy': Mean.of(policy.entropy, mask),
        **losses.policy_drift(policy.logprobs, old, mask),
        **clip_metrics,
    }
    if kl_coef:
      ref = _scored('ref_logprobs', batch.ref_logprobs)
      kl = losses.kl(policy.logprobs, ref, mask, estimator=kl_estimator)
      mean = losses.aggregate(kl, mask, how=aggregation)
      terms['kl'] = (kl_coef, mean)
      metrics['actor/kl_loss'] = mean
    if entropy_coef:
      mean = losses.aggregate(policy.entropy, mask, how=aggregation)
      terms['entropy'] = (-entropy_coef, mean)
    return terms, metrics

  return loss


def _clip_range(clip_low, clip_high):
  """Both as keywords of a loss, if they leave the ratio 1 inside."""
  if not (0 <= clip_low < 1 and clip_high >= 0):
    raise ValueError(
        'clip_low must lie in [0, 1) and clip_high be 0 or more, but they are '
        f'{clip_low} and {clip_high}. Give distances below and above 1.')
  return dict(clip_low=clip_low, clip_high=clip_high)


def _scored(field, array):
  """Refuses a batch that still lacks what the loss reads."""
  if array is None:
    raise ValueError(
        f'batch.{field} must be scored before the loss, but is None. Fill it '
        'with learner.score, or with dataclasses.replace.')
  return array
