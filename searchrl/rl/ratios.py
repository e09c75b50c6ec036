# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Log-probs of two policies in, their ratios out: to clip, or to weigh with.

New over old, a token or a sequence, is what a surrogate clips; the learner's
over the sampler's corrects for what the two disagree on.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from searchrl.rl import checks
from searchrl.rl import masked


def log_ratio(
    logprobs: Float[Array, 'B T'],
    old_logprobs: Float[Array, 'B T'],
    loss_mask: Bool[Array, 'B T'],
) -> Float[Array, 'B T']:
  """d = log pi - log pi_old of each token, in nats; 0 outside the mask.

  Args:
    logprobs: log pi of each token, in nats; the only differentiated input.
    old_logprobs: log pi_old of each token, in nats.
    loss_mask: True where the policy sampled the token.

  Returns:
    d, in nats.

  Raises:
    ValueError: the shapes differ.
  """
  masked.check_shapes(
      logprobs=logprobs, old_logprobs=old_logprobs, loss_mask=loss_mask)
  old = jax.lax.stop_gradient(jnp.where(loss_mask, old_logprobs, 0))
  return jnp.where(loss_mask, logprobs, 0) - old


def token_ratio(
    logprobs: Float[Array, 'B T'],
    old_logprobs: Float[Array, 'B T'],
    loss_mask: Bool[Array, 'B T'],
) -> Float[Array, 'B T']:
  """rho_t = exp(clip(d_t, -20, 20)); 1 outside the mask.

  Args:
    logprobs: log pi of each token, in nats; the only differentiated input.
    old_logprobs: log pi_old of each token, in nats.
    loss_mask: True where the policy sampled the token.

  Returns:
    One ratio a token, unitless.

  Raises:
    ValueError: the shapes differ.

  Source: Schulman et al. 2017, Proximal Policy Optimization,
    arXiv:1707.06347, section 3. The guard at 20 nats only keeps it finite.
  """
  gaps = log_ratio(logprobs, old_logprobs, loss_mask)
  return jnp.exp(jnp.clip(gaps, -20, 20))


def sequence_ratio(
    logprobs: Float[Array, 'B T'],
    old_logprobs: Float[Array, 'B T'],
    loss_mask: Bool[Array, 'B T'],
) -> Float[Array, 'B']:
  """s = exp(sum_t m_t d_t / sum_t m_t): the geometric mean of token ratios.

  Retrieved tokens neither move s nor count in the length that divides it. A
  row without sampled tokens has s = 1 and no gradient.

  Args:
    logprobs: log pi of each token, in nats; the only differentiated input.
    old_logprobs: log pi_old of each token, in nats.
    loss_mask: True where the policy sampled the token.

  Returns:
    One ratio a row, unitless.

  Raises:
    ValueError: the shapes differ.

  Source: Zheng et al. 2025, Group Sequence Policy Optimization,
    arXiv:2507.18071, eq. 7. The guard at 20 nats only keeps it finite.
  """
  gaps = log_ratio(logprobs, old_logprobs, loss_mask)
  return jnp.exp(jnp.clip(masked.row_mean(gaps, loss_mask), -20, 20))


def truncated_weights(
    old_logprobs: Float[Array, 'B T'],
    behavior_logprobs: Float[Array, 'B T'],
    loss_mask: Bool[Array, 'B T'],
    *,
    high: float = 2.0,
    level: str = 'token',
) -> Float[Array, 'B T']:
  """TIS: min(w, high), w = pi_old / pi_behavior, of learner over sampler.

  Two implementations of one policy disagree a little; these weights, on the
  advantages, make a loss unbiased again, but for the truncation.

  Args:
    old_logprobs: of the learner, in nats, before its first update.
    behavior_logprobs: of the sampler, in nats, as it drew the token.
    loss_mask: True where the policy sampled the token.
    high: the largest weight.
    level: 'token', w_t = exp(o_t - b_t); or 'sequence', where every token of a
      row has w = exp(sum_t o_t - b_t).

  Returns:
    One weight a token, unitless, constant; 1 outside the mask.

  Raises:
    ValueError: the shapes differ, or the level is unknown.

  Source: Yao et al. 2025, Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training, https://fengyao.notion.site/off-policy-rl.
  """
  weights = _mismatch_weights(old_logprobs, behavior_logprobs, loss_mask, level)
  return jnp.minimum(weights, high)


def masked_weights(
    old_logprobs: Float[Array, 'B T'],
    behavior_logprobs: Float[Array, 'B T'],
    loss_mask: Bool[Array, 'B T'],
    *,
    low: float = 0.5,
    high: float = 5.0,
    level: str = 'token',
) -> Float[Array, 'B T']:
  """IcePop: w where low <= w <= high, else 0; w = pi_old / pi_behavior.

  A token, or a row, on which sampler and learner disagree beyond the interval
  is not trained on, but stays in every denominator.

  Args:
    old_logprobs: of the learner, in nats, before its first update.
    behavior_logprobs: of the sampler, in nats, as it drew the token.
    loss_mask: True where the policy sampled the token.
    low: the smallest weight that is kept.
    high: the largest.
    level: as in `truncated_weights`.

  Returns:
    One weight a token, unitless, constant; 1 outside the mask.

  Raises:
    ValueError: the shapes differ, the level is unknown, or the interval empty.

  Source: Ling Team 2025, Every Step Evolves, arXiv:2510.18855, IcePop.
  """
  checks.interval(low, high)
  weights = _mismatch_weights(old_logprobs, behavior_logprobs, loss_mask, level)
  kept = (weights >= low) & (weights <= high)
  return jnp.where(kept | ~loss_mask, weights, 0)


def _mismatch_weights(old_logprobs, behavior_logprobs, loss_mask, level):
  """pi_old / pi_behavior of each token, or of each token's row; constant.

  The log of either is kept within 20 nats, so that it is finite.
  """
  checks.choice('level', level, ('token', 'sequence'))
  if level == 'token':
    weights = token_ratio(old_logprobs, behavior_logprobs, loss_mask)
  else:
    gaps = log_ratio(old_logprobs, behavior_logprobs, loss_mask)
    whole = jnp.sum(gaps, axis=-1, keepdims=True)
    weights = jnp.where(loss_mask, jnp.exp(jnp.clip(whole, -20, 20)), 1)
  return jax.lax.stop_gradient(weights)
