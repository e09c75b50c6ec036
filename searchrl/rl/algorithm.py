# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""`Algorithm`: a dynamic filter, advantages and a loss, as pure functions.

The filter can drop questions from which nothing can be learned, such as those
whose samples all got the same reward. The module also has the helpers that
these functions share. They select the tokens that are trained on, and the
log-probs that an importance ratio divides by.
"""

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

Terms = dict[str, tuple[float, Mean]]  # loss terms by name: (coefficient, mean)
Metrics = dict[str, Mean]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PolicyOutput:
  """Outputs of the networks that are trained, for each token of a batch."""

  logprobs: Float[Array, 'B T']  # log-probs in nats, at sampling temperature
  entropy: Float[Array, 'B T']  # nats; of the distribution of token t
  values: Float[Array, 'B T'] | None = None  # values of the critic


def keep_all(
    outcome_rewards: Float[np.ndarray, 'N'],
    question_ids: Int[np.ndarray, 'N'],
) -> Bool[np.ndarray, 'N']:
  """Returns True for every row, [N]: the filter that drops nothing."""
  del question_ids
  return np.ones(len(outcome_rewards), bool)


def keep_mixed(
    outcome_rewards: Float[np.ndarray, 'N'],
    question_ids: Int[np.ndarray, 'N'],
) -> Bool[np.ndarray, 'N']:
  """Returns True for rows of questions whose rows differ in reward, [N].

    max r - min r > 1e-6 over the rows of the question

  A row is one sampled answer. The result is False for all rows of a question
  if their rewards are equal: their advantages in the group would be 0.

  Args:
    outcome_rewards: Outcome rewards r, [N]. A reward that could not be computed
      is NaN. The rule ignores such a row, which is kept or dropped with its
      question.
    question_ids: Integers that are equal for the rows of one question, [N].

  Raises:
    ValueError: The shapes differ.

  Source: Yu et al. 2025, DAPO, arXiv:2503.14476, eq. 11; DSPO,
    arXiv:2510.09255.
  """
  outcome_rewards = np.asarray(outcome_rewards)
  ids = np.unique(question_ids, return_inverse=True)[1]
  spread = advantages.group_spread(
      outcome_rewards, ids, ~np.isnan(outcome_rewards))
  return np.asarray(spread > advantages.MIN_SPREAD)


def question_hops(question: Question) -> int:
  """Returns a question's hop count: the number of facts that its answer needs.

  HRPO compares the reward of a row with all rows of the same hop count.
  """
  return question.hops


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """The pure functions of an RL algorithm, and its requirements on the trainer.

  A loss consists of Means, which have a total and a count. The counts must
  depend on masks only, so that the learner can compute the global denominators
  before it runs the first micro-batch.
  """

  # Maps the global batch to a pytree of arrays whose first axis is B; jitted.
  advantages: Callable[[Batch], Any]
  # Maps policy outputs, a batch or micro-batch and its advantages to loss terms
  # and metrics; jitted.
  loss: Callable[[PolicyOutput, Batch, Any], tuple[Terms, Metrics]]
  # Maps outcome rewards [N] and question ids [N] to a mask [N] of the rows to
  # train on, which is equal for all rows of a question; numpy.
  keep: Callable[[np.ndarray, np.ndarray], np.ndarray] = keep_all
  # Maps a question to its group; questions of equal groups share a baseline.
  # None: only samples of one question that were requested together share one.
  group_of: Callable[[Question], Hashable] | None = None
  # Fields of the batch to score first: any of 'ref_logprobs' and 'values', and
  # 'old_logprobs' if `advantages` reads them.
  needs: frozenset[str] = frozenset()
  level: Literal['token', 'sequence'] = 'token'  # unit that has one ratio
  min_group_size: int = 1  # fewest samples per question to learn from
  one_update: bool = False  # True without a ratio: one optimiser step per batch
  # True if a row whose advantages are all 0, or that is not in the loss, has no
  # gradient. The learner then leaves such rows out of the networks' passes.
  skips_zero: bool = False
  # True if advantages and loss read log-probs and entropies of sampled tokens
  # only. The learner then computes no logits for other tokens, and gives them
  # log-prob 0 and entropy 0.
  skips_unsampled: bool = False
  # True if `advantages` reads the turns of a batch: its fields `turn_ids`,
  # `turn_rewards` and `state_ids`, which are None otherwise.
  reads_turns: bool = False


def total(
    terms: Terms, counts: Mapping[str, Array] | None = None
) -> Float[Array, '']:
  """Returns the loss: the sum over terms of coefficient * total / count.

  A term whose count is 0 adds 0.

  Args:
    terms: Result of `Algorithm.loss` for a batch or a micro-batch.
    counts: Count of each term over the global batch. With it the losses of
      micro-batches add up to the loss of the whole batch. The default is the
      terms' own counts.
  """
  if counts is None:
    counts = {name: mean.count for name, (_, mean) in terms.items()}
  loss: Any = sum(coefficient * Mean(mean.total, counts[name]).value
                  for name, (coefficient, mean) in terms.items())
  return loss


def trained_tokens(batch: Batch) -> Bool[Array, 'B T']:
  """Returns True for the tokens that the loss is computed on, [B, T].

  The policy sampled these tokens, and their rows are marked by `batch.in_loss`.
  """
  return batch.loss_mask & batch.in_loss[:, None]


def observed_tokens(batch: Batch) -> Bool[Array, 'B T']:
  """Returns a mask of the tokens that the environment wrote, [B, T].

  These are for instance retrieved passages. The mask is True for the tokens
  that were not sampled, from a row's first to its last sampled token. So the
  prompt does not count, and rows that are not in the loss have no such tokens.
  """
  mask = trained_tokens(batch)
  after_first = jnp.cumsum(mask, axis=1) > 0
  before_last = jnp.cumsum(mask[:, ::-1], axis=1)[:, ::-1] > 0
  return after_first & before_last & ~mask


def denominator_logprobs(batch: Batch) -> Float[Array, 'B T']:
  """Returns log pi_old, the importance ratio's denominator, in nats, [B, T].

  For rows sampled by the present policy these are the learner's own
  `old_logprobs`. Rows carried over from an earlier policy keep their
  `behavior_logprobs`: they are off-policy, and must not start at ratio 1.
  Tokens that were not sampled have the learner's log-probs in every row.

  Raises:
    ValueError: The batch has no `old_logprobs`.
  """
  by_learner = batch.on_policy[:, None] | ~batch.loss_mask
  return jnp.where(
      by_learner, scored(batch, 'old_logprobs'), batch.behavior_logprobs)


def scored(batch: Batch, field: str) -> Float[Array, 'B T']:
  """Returns the array in a field of a batch, [B, T].

  The field is one that is None until it is computed: `old_logprobs`,
  `ref_logprobs`, `values` or `turn_rewards`.

  Raises:
    ValueError: The field is None.
  """
  array = getattr(batch, field)
  if array is None:
    raise ValueError(
        f'batch.{field} must be scored before the loss, but is None. Fill it '
        'with learner.score, with turn_fields.with_turns or with '
        'dataclasses.replace.')
  return array
