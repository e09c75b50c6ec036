# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Importance ratios of two policies, to clip or to weight advantages.

A surrogate clips the ratio of the new policy to the old one, by token or by
sequence. The ratio of the learner to the sampler corrects for the differences
between the two. All functions share these conventions:

  logprobs      Log-probs of each token, in nats; differentiated.
  old_logprobs  Log-probs of each token, in nats; constant.
  loss_mask     True where the policy sampled the token. Other entries may be
                anything, and have ratio 1.

Shapes that differ and options out of range raise a ValueError. To keep ratios
finite, their logs are clipped to [-20, 20] nats. The results are in float32, or
in float64 if an input is, because bfloat16 rounds a ratio of 1 + 4e-4 to 1.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from searchrl.rl import option_checks
from searchrl.rl import masked


def log_ratio(
    logprobs: Float[Array, 'B T'],
    old_logprobs: Float[Array, 'B T'],
    loss_mask: Bool[Array, 'B T'],
) -> Float[Array, 'B T']:
  """Returns the log of each token's importance ratio, in nats, [B, T].

    d_t = logprobs_t - old_logprobs_t

  It is 0 outside the mask. Only `logprobs` has a gradient.
  """
  masked.check_shapes(
      logprobs=logprobs, old_logprobs=old_logprobs, loss_mask=loss_mask)
  new, old = (masked.at_least_float32(jnp.where(loss_mask, x, 0))
              for x in (logprobs, old_logprobs))
  return new - jax.lax.stop_gradient(old)


def token_ratio(
    logprobs: Float[Array, 'B T'],
    old_logprobs: Float[Array, 'B T'],
    loss_mask: Bool[Array, 'B T'],
) -> Float[Array, 'B T']:
  """Returns the importance ratio of each token, [B, T], and 1 outside the mask.

    rho_t = exp(clip(d_t, -20, 20)),  d_t = logprobs_t - old_logprobs_t

  Source: Schulman et al. 2017, Proximal Policy Optimization,
    arXiv:1707.06347, section 3.
  """
  gaps = log_ratio(logprobs, old_logprobs, loss_mask)
  return jnp.exp(jnp.clip(gaps, -20, 20))


def sequence_ratio(
    logprobs: Float[Array, 'B T'],
    old_logprobs: Float[Array, 'B T'],
    loss_mask: Bool[Array, 'B T'],
    *,
    count_mask: Bool[Array, 'B T'] | None = None,
) -> Float[Array, 'B']:
  """Returns the geometric mean of each row's token ratios, [B].

    s = exp(sum_t m_t d_t / sum_t m_t),  d_t = logprobs_t - old_logprobs_t

  Retrieved tokens change neither s nor the length in its exponent. A row
  without sampled tokens has s = 1 and no gradient. With a mask `count_mask`, c,
  the length is sum_t c_t.

  Source: Zheng et al. 2025, Group Sequence Policy Optimization,
    arXiv:2507.18071, eq. 7.
  """
  gaps = log_ratio(logprobs, old_logprobs, loss_mask)
  mean = masked.row_mean(gaps, loss_mask, count_mask)
  return jnp.exp(jnp.clip(mean, -20, 20))


def truncated_weights(
    old_logprobs: Float[Array, 'B T'],
    behavior_logprobs: Float[Array, 'B T'],
    loss_mask: Bool[Array, 'B T'],
    *,
    high: float = 2.0,
    level: str = 'token',
) -> Float[Array, 'B T']:
  """Returns truncated importance weights (TIS) of the learner to the sampler.

    min(w, high),  w = pi_old / pi_behavior

  The learner and the sampler are two implementations of one policy and differ a
  little. With these weights on the advantages a loss is unbiased again, except
  for the truncation.

  Args:
    old_logprobs: Log-probs o of the learner before its first update, [B, T].
    behavior_logprobs: Log-probs b of the sampler when it drew the token,
      [B, T].
    loss_mask: True where the policy sampled the token, [B, T].
    high: Largest weight.
    level: Unit of a weight: 'token', with w_t = exp(o_t - b_t), or 'sequence',
      where every token of a row has w = exp(sum_t (o_t - b_t)).

  Returns:
    One weight per token, [B, T], constant. It is 1 outside the mask.

  Source: Yao et al. 2025, Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training, https://fengyao.notion.site/off-policy-rl.
  """
  option_checks.require(high > 0, f'high must be above 0, but is {high}.')
  weights = _mismatch_weights(old_logprobs, behavior_logprobs, loss_mask, level)
  return jnp.where(loss_mask, jnp.minimum(weights, high), 1)


def masked_weights(
    old_logprobs: Float[Array, 'B T'],
    behavior_logprobs: Float[Array, 'B T'],
    loss_mask: Bool[Array, 'B T'],
    *,
    low: float = 0.5,
    high: float = 5.0,
    level: str = 'token',
) -> Float[Array, 'B T']:
  """Returns IcePop weights: pi_old / pi_behavior if in [low, high], else 0.

  A token or row whose weight is outside the interval is not trained on, but
  still counts in every denominator.

  Args:
    old_logprobs: Log-probs of the learner before its first update, [B, T].
    behavior_logprobs: Log-probs of the sampler when it drew the token, [B, T].
    loss_mask: True where the policy sampled the token, [B, T].
    low: Smallest weight that is kept.
    high: Largest weight that is kept.
    level: Unit of a weight: 'token', or 'sequence', where all tokens of a row
      have the product of their weights.

  Returns:
    One weight per token, [B, T], constant. It is 1 outside the mask.

  Source: Ling Team 2025, Every Step Evolves, arXiv:2510.18855, IcePop.
  """
  option_checks.interval(low, high)
  weights = _mismatch_weights(old_logprobs, behavior_logprobs, loss_mask, level)
  inside = (weights >= low) & (weights <= high)
  return jnp.where(inside | ~loss_mask, weights, 0)


def _mismatch_weights(old_logprobs, behavior_logprobs, loss_mask, level):
  """Returns pi_old / pi_behavior of each token, or of the token's whole row.

  The weights are not differentiated.
  """
  option_checks.choice('level', level, ('token', 'sequence'))
  if level == 'token':
    weights = token_ratio(old_logprobs, behavior_logprobs, loss_mask)
  else:
    gaps = log_ratio(old_logprobs, behavior_logprobs, loss_mask)
    whole = jnp.sum(gaps, axis=-1, keepdims=True)
    weights = jnp.where(loss_mask, jnp.exp(jnp.clip(whole, -20, 20)), 1)
  return jax.lax.stop_gradient(weights)
