# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""`Algorithm`: a dynamic filter, advantages and a loss, as pure functions.

Also what these functions share: which tokens are trained on, and which
log-probs an importance ratio divides by.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from searchrl.rl import advantages
from searchrl.rl.masked import Mean
from searchrl.trajectory import Batch, Question

Terms = dict[str, tuple[float, Mean]]  # name: (coefficient, mean)
Metrics = dict[str, Mean]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PolicyOutput:
  """The outputs of the networks being trained, for each token of a batch."""

  logprobs: Float[Array, 'B T']  # nats, at the sampling temperature
  entropy: Float[Array, 'B T']  # nats, of the distribution that t is drawn from
  values: Float[Array, 'B T'] | None = None  # of the critic


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
    outcome_rewards: r; NaN if it could not be computed: such a row is ignored
      by the rule, and kept or dropped with its question.
    question_ids: equal for the rows of one question; any integers.

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


def question_hops(question: Question) -> int:
  """HRPO's group: all questions of one hop count share a baseline."""
  return question.hops


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """Pure functions, and what they require of the trainer.

  The counts of a loss's Means depend on masks alone, so that the learner has
  the global denominators before it runs the first micro-batch.
  """

  # The global batch -> a pytree of arrays whose first axis is B; under jit.
  advantages: Callable[[Batch], Any]
  # Policy outputs, (micro-)batch, its advantages -> terms, metrics; under jit.
  loss: Callable[[PolicyOutput, Batch, Any], tuple[Terms, Metrics]]
  # Outcome rewards [N], question ids [N] -> which rows to train on; numpy.
  keep: Callable[[np.ndarray, np.ndarray], np.ndarray] = keep_all
  # Questions of equal groups share a baseline; None: the samples of a question
  # that were asked for together do, and no others.
  group_of: Callable[[Question], Hashable] | None = None
  # Of 'ref_logprobs' and 'values'; 'old_logprobs' if `advantages` reads them.
  needs: frozenset[str] = frozenset()
  level: Literal['token', 'sequence'] = 'token'  # what one ratio belongs to
  min_group_size: int = 1  # samples per question; with fewer nothing is learned
  one_update: bool = False  # no ratio: one optimiser step per batch


def total(
    terms: Terms, counts: Mapping[str, Array] | None = None
) -> Float[Array, '']:
  """loss = sum over terms of coefficient * total / count.

  Args:
    terms: from `Algorithm.loss`, of a batch or of a micro-batch.
    counts: each term's count over the global batch, so that the losses of its
      micro-batches add up to that of the whole. Default: the terms' own.

  Returns:
    The loss to differentiate; a term whose count is 0 adds 0.
  """
  if counts is None:
    counts = {name: mean.count for name, (_, mean) in terms.items()}
  return sum(
      coefficient * Mean(mean.total, counts[name]).value
      for name, (coefficient, mean) in terms.items())


def trained_tokens(batch: Batch) -> Bool[Array, 'B T']:
  """True for tokens that the policy sampled, in rows that are in the loss."""
  return batch.loss_mask & batch.in_loss[:, None]


def observed_tokens(batch: Batch) -> Bool[Array, 'B T']:
  """True for tokens that the environment inserted into rows in the loss.

  They lie between a row's first sampled token and its last: the prompt is not
  among them, and what follows the last action is not in a batch.
  """
  mask = trained_tokens(batch)
  begun = jnp.cumsum(mask, axis=1) > 0
  goes_on = jnp.cumsum(mask[:, ::-1], axis=1)[:, ::-1] > 0
  return begun & goes_on & ~mask


def denominator_logprobs(batch: Batch) -> Float[Array, 'B T']:
  """log pi_old, in nats: what the importance ratio divides by.

  For rows sampled by the present policy these are the learner's own
  `old_logprobs`. Rows carried over from an earlier policy keep their
  `behavior_logprobs`: they are off-policy, and must not start at ratio 1.
  Tokens that nobody sampled have no others than the learner's.

  Raises:
    ValueError: the batch has no `old_logprobs`.
  """
  old = scored(batch, 'old_logprobs')
  own = batch.on_policy[:, None] | ~batch.loss_mask
  return jnp.where(own, old, batch.behavior_logprobs)


def scored(batch: Batch, field: str) -> Float[Array, 'B T']:
  """A field of the batch that `learner.score` fills.

  Raises:
    ValueError: it is None.
  """
  array = getattr(batch, field)
  if array is None:
    raise ValueError(
        f'batch.{field} must be scored before the loss, but is None. Fill it '
        'with learner.score, or with dataclasses.replace.')
  return array
