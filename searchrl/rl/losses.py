# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Policy, value and KL losses per token or row, and their aggregation.

The same surrogate serves PPO and GRPO, which clip a ratio for each token, and
GSPO and DSPO, which clip a ratio for each sequence. All functions share these
conventions:

  logprobs      Log-probs log pi of each token, in nats; differentiated.
  old_logprobs  Log-probs log pi_old before the update, in nats; constant.
  advantages    Advantages A, one per sequence or one per token; unitless and
                constant.
  loss_mask     True where the policy sampled the token. Other entries, such as
                retrieved passages, may be anything, including NaN.
  count_mask    Mask of the tokens that denominators count, a subset of
                `loss_mask`. Each row with tokens in `loss_mask` must have at
                least one token in it. The default is `loss_mask`.

A policy loss has the unit of A. A result per token is 0 outside the mask, and a
result per row is 0 for a row without tokens in it. Shapes that do not match and
options out of range raise a ValueError.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from searchrl.rl import masked, option_checks
from searchrl.rl.masked import Mean
# The ratios are also public here, for losses of your own.
from searchrl.rl.ratios import (  # noqa: F401
    log_ratio, masked_weights, sequence_ratio, token_ratio, truncated_weights)

AGGREGATIONS = (
    'token_mean', 'sequence_mean', 'sequence_sum', 'sequence_sum_norm')
KL_ESTIMATORS = ('k1', 'abs', 'k2', 'k3')
_TANGENT = 20.0  # log ratio in nats above which k3 is a straight line


def clipped_surrogate(
    ratio: Float[Array, '*N'],
    advantages: Float[Array, '*N'],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Float[Array, '*N']:
  """Returns PPO's clipped surrogate loss, one per ratio.

    L = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)

  Args:
    ratio: Ratio rho of each token or of each sequence; differentiated.
    advantages: Advantages A, in the shape of `ratio`; constant.
    clip_low: Distance below 1. A ratio below 1 - clip_low has no gradient if
      A < 0.
    clip_high: Distance above 1. A ratio above 1 + clip_high has no gradient if
      A > 0.
    dual_clip: Bound of the loss where A < 0: L <= -dual_clip A. A ratio above
      `dual_clip` then has no gradient. It must be above 1, and 3 is usual.
      None: no bound, as in PPO's paper.

  Source: Schulman et al. 2017, Proximal Policy Optimization,
    arXiv:1707.06347, eq. 7. Two ranges: DAPO, arXiv:2503.14476, eq. 10. Dual
    clip: Ye et al. 2020, arXiv:1912.09729, eq. 5.
  """
  option_checks.clip(clip_low, clip_high, dual_clip)
  masked.check_shapes(ratio=ratio, advantages=advantages)
  advantages = jax.lax.stop_gradient(advantages)
  clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
  gain = jnp.minimum(ratio * advantages, clipped * advantages)
  if dual_clip is not None:
    floor = jnp.where(advantages < 0, dual_clip * advantages, -jnp.inf)
    gain = jnp.maximum(gain, floor)
  return -gain


def token_ratio_loss(
    logprobs: Float[Array, 'B T'],
    old_logprobs: Float[Array, 'B T'],
    advantages: Float[Array, 'B'] | Float[Array, 'B T'],
    loss_mask: Bool[Array, 'B T'],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Float[Array, 'B T']:
  """Returns the clipped surrogate with one importance ratio per token, [B, T].

    rho_it = exp( clip( log pi(y_it) - log pi_old(y_it), -20, 20 ) )
    L_it = -min( rho_it A, clip(rho_it, 1 - clip_low, 1 + clip_high) A )

  The options are those of `clipped_surrogate`. DAPO's clip_high is larger than
  its clip_low. Reduce the result with `aggregate`.

  Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; as summed in Shao et
    al. 2024, DeepSeekMath, arXiv:2402.03300, eq. 3.
  """
  ratio = token_ratio(logprobs, old_logprobs, loss_mask)
  return clipped_surrogate(
      ratio, spread_over(loss_mask, advantages),
      clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def sequence_ratio_loss(
    logprobs: Float[Array, 'B T'],
    old_logprobs: Float[Array, 'B T'],
    advantages: Float[Array, 'B'],
    loss_mask: Bool[Array, 'B T'],
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
    count_mask: Bool[Array, 'B T'] | None = None,
) -> Float[Array, 'B']:
  """Returns the clipped surrogate with one importance ratio per sequence, [B].

    s_i = exp( sum_t m_it (log pi(y_it) - log pi_old(y_it)) / sum_t m_it )
    L_i = -min( s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i )

  Retrieved passages are outside the mask m and change neither s_i nor the
  length in its exponent. A row without sampled tokens has L_i = 0 and no
  gradient; leave it out of the mean with `loss_mask.any(-1)`. With a
  `count_mask`, the divisor in the exponent is the number of its tokens. The
  paper's clip ranges are hundreds of times smaller than PPO's 0.2, because s is
  a geometric mean over tokens.

  Source: Zheng et al. 2025, Group Sequence Policy Optimization,
    arXiv:2507.18071, eq. 5. DSPO (arXiv:2510.09255) has the same loss.
  """
  ratio = sequence_ratio(
      logprobs, old_logprobs, loss_mask, count_mask=count_mask)
  return clipped_surrogate(
      ratio, spread_over(loss_mask.any(-1), advantages),
      clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def geometric_mean_loss(
    logprobs: Float[Array, 'B T'],
    old_logprobs: Float[Array, 'B T'],
    advantages: Float[Array, 'B'],
    loss_mask: Bool[Array, 'B T'],
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    count_mask: Bool[Array, 'B T'] | None = None,
) -> Float[Array, 'B']:
  """Returns GMPO's loss: the geometric mean of clipped token ratios, [B].

    A > 0: d_it' = min(d_it, clip_high)      A < 0: d_it' = max(d_it, -clip_low)
    L_i = -A_i exp( sum_t m_it d_it' / sum_t m_it ),  d = log pi - log pi_old

  The clips are in nats. A token's ratio counts as at most exp(clip_high) if
  A > 0, and as at least exp(-clip_low) if A < 0. A row without sampled tokens
  has L_i = 0.

  Source: Zhao et al. 2025, Geometric-Mean Policy Optimization,
    arXiv:2507.20673, eq. 4.
  """
  option_checks.log_clip(clip_low, clip_high)
  advantages = spread_over(loss_mask.any(-1), advantages)
  gaps = log_ratio(logprobs, old_logprobs, loss_mask)
  clipped = jnp.where(advantages[:, None] > 0, jnp.minimum(gaps, clip_high),
                      jnp.maximum(gaps, -clip_low))
  mean = masked.row_mean(clipped, loss_mask, count_mask)
  # The clip keeps the ratio finite, so that it times A = 0 is 0.
  return -advantages * jnp.exp(jnp.clip(mean, -20, 20))


def score_function_loss(
    logprobs: Float[Array, 'B T'],
    advantages: Float[Array, 'B'] | Float[Array, 'B T'],
    loss_mask: Bool[Array, 'B T'],
) -> Float[Array, 'B T']:
  """Returns L_it = -A log pi(y_it), without ratio and clip, [B, T].

  The loss is valid only for the policy that sampled the tokens, before its
  first update.

  Source: Williams 1992, REINFORCE; Dr. Zero's HRPO, arXiv:2601.07055, eq. 2.
  """
  masked.check_shapes(logprobs=logprobs, loss_mask=loss_mask)
  return -spread_over(loss_mask, advantages) * jnp.where(
      loss_mask, logprobs, 0)


def value_loss(
    values: Float[Array, 'B T'],
    old_values: Float[Array, 'B T'],
    returns: Float[Array, 'B T'],
    loss_mask: Bool[Array, 'B T'],
    *,
    value_clip: float | None = 0.5,
) -> Float[Array, 'B T']:
  """Returns PPO's clipped value loss of each token, [B, T].

    V' = clip(V, V_old - value_clip, V_old + value_clip)
    L = max((V - R)^2, (V' - R)^2) / 2

  Its unit is the square of the rewards' unit.

  Args:
    values: Value V of each token, [B, T]; differentiated.
    old_values: Values before the update, [B, T]; constant.
    returns: Targets R of V, from `advantages.gae`, [B, T]; constant.
    loss_mask: True where the policy sampled the token, [B, T].
    value_clip: Distance from V_old, in the unit of the rewards. A value that is
      farther away has no gradient if the clipped value's error is larger. The
      default is Search-R1's. None gives a plain squared error.

  Source: the value function of PPO's reference implementation (Dhariwal et al.
    2017, OpenAI Baselines), as Search-R1 (arXiv:2503.09516) uses it.
  """
  if value_clip is not None and not value_clip >= 0:
    raise ValueError(
        f'value_clip must be 0 or more, but is {value_clip}. Give a distance '
        'from V_old, or None for a plain squared error.')
  masked.check_shapes(values=values, old_values=old_values, returns=returns,
                      loss_mask=loss_mask)
  values = jnp.where(loss_mask, values, 0)
  old_values, returns = jax.lax.stop_gradient((
      jnp.where(loss_mask, old_values, 0), jnp.where(loss_mask, returns, 0)))
  error = jnp.square(values - returns)
  if value_clip is not None:
    clipped = jnp.clip(
        values, old_values - value_clip, old_values + value_clip)
    error = jnp.maximum(error, jnp.square(clipped - returns))
  return error / 2


def entropy(
    logits: Float[Array, 'B T V'], loss_mask: Bool[Array, 'B T']
) -> Float[Array, 'B T']:
  """Returns the entropy of each token's distribution, in nats, [B, T].

    -sum_v p_v log p_v,  p = softmax(logits)

  The logits must be divided by the sampling temperature already. They may be
  -inf for tokens that cannot be drawn.
  """
  masked.check_shapes(loss_mask=loss_mask, **{'logits[..., 0]': logits[..., 0]})
  logprobs = jax.nn.log_softmax(jnp.where(loss_mask[..., None], logits, 0))
  probs = jnp.exp(logprobs)
  each = probs * jnp.where(probs > 0, logprobs, 0)  # 0 log 0 = 0
  return jnp.where(loss_mask, -jnp.sum(each, -1), 0)


def kl(
    logprobs: Float[Array, 'B T'],
    ref_logprobs: Float[Array, 'B T'],
    loss_mask: Bool[Array, 'B T'],
    *,
    estimator: str = 'k3',
) -> Float[Array, 'B T']:
  """Returns an estimate of KL(pi || pi_ref) at each token, in nats, [B, T].

  With x = ref_logprobs - logprobs, the estimators are

    k1 = -x      abs = |x|      k2 = x^2 / 2      k3 = exp(x) - 1 - x

  `loss_mask` is True where the policy sampled the token. Elsewhere the estimate
  is 0. `ref_logprobs` is constant. Over tokens that pi sampled, the mean of k1
  or of k3 estimates the KL without bias, and the gradient of the mean of k2
  estimates the gradient of the KL without bias. k3 is never negative. It uses
  expm1, which is accurate for small x.
  Above x = 20, k3 continues as its tangent at 20, because exp overflows float32
  at 89 nats and one such token would make the whole update NaN. Nothing else is
  clamped. Where x = 0, abs has gradient 0.

  Source: Schulman 2020, Approximating KL Divergence,
    http://joschu.net/blog/kl-approx.html.
  """
  option_checks.choice('estimator', estimator, KL_ESTIMATORS)
  masked.check_shapes(
      logprobs=logprobs, ref_logprobs=ref_logprobs, loss_mask=loss_mask)
  x = -log_ratio(logprobs, ref_logprobs, loss_mask)
  if estimator == 'k1':
    return -x
  if estimator == 'abs':
    return x * jnp.sign(x)  # not jnp.abs, whose gradient at 0 is 1
  if estimator == 'k2':
    return jnp.square(x) / 2
  near, slope = jnp.minimum(x, _TANGENT), math.expm1(_TANGENT)
  return jnp.where(x > _TANGENT, slope - _TANGENT + slope * (x - _TANGENT),
                   jnp.expm1(near) - near)


def overlong_penalty(
    lengths: Int[Array, 'B'], *, max_length: int, buffer: int
) -> Float[Array, 'B']:
  """Returns the penalty on long rows, from 0 down to -1, [B].

    clip((max_length - buffer - length) / buffer, -1, 0)

  Add it to the rows' rewards.

  Args:
    lengths: Length of each row in tokens, [B]. With `loss_mask.sum(-1)`,
      retrieved tokens do not count.
    max_length: Length at which the penalty reaches -1, in tokens.
    buffer: Number of tokens before `max_length` over which the penalty grows,
      in (0, max_length].

  Source: Yu et al. 2025, DAPO, arXiv:2503.14476, eq. 13.
  """
  option_checks.overlong(max_length, buffer)
  # Unsigned lengths would wrap where they are subtracted.
  lengths = jnp.asarray(lengths, jnp.result_type(lengths, jnp.int32))
  return jnp.clip((max_length - buffer - lengths) / buffer, -1, 0)


def aggregate(
    per_token: Float[Array, 'B T'],
    loss_mask: Bool[Array, 'B T'],
    *,
    how: str,
    length: int | None = None,
    count_mask: Bool[Array, 'B T'] | None = None,
) -> Mean:
  """Reduces one value per token to a Mean, which is a total and a count.

    token_mean         sum of all tokens        / tokens
    sequence_mean      sum of the rows' means   / rows
    sequence_sum       sum of the rows' sums    / rows
    sequence_sum_norm  sum of the rows' sums    / rows / length

  Rows without policy tokens are left out. The count depends on the masks only.
  Means can be added, so the Means of the micro-batches add up to the Mean of
  the whole batch.

  Args:
    per_token: Value of each token, [B, T].
    loss_mask: True where the policy sampled the token, [B, T].
    how: Name of the aggregation, one of `AGGREGATIONS`.
    length: Constant of `sequence_sum_norm`, in tokens. The default is T; it
      must be given if micro-batches differ in T.
    count_mask: True for the tokens that the denominators of `token_mean` and
      of each row's mean count, [B, T]. The default is `loss_mask`.

  Source: token_mean: DAPO, arXiv:2503.14476, eq. 12; sequence_mean: GRPO,
    arXiv:2402.03300, eq. 3; sequence_sum_norm: Dr. GRPO, arXiv:2503.20783.
  """
  option_checks.choice('how', how, AGGREGATIONS)
  option_checks.require(
      length is None or length >= 1, f'length must be at least 1, but is '
      f'{length}. Give the most tokens that a policy may write, or None.')
  if how == 'token_mean':
    return Mean.of(per_token, loss_mask, count_mask)
  if how == 'sequence_mean':
    per_row = masked.row_mean(per_token, loss_mask, count_mask)
  else:
    per_row = masked.row_sum(per_token, loss_mask)
  if how == 'sequence_sum_norm':
    per_row = per_row / (per_token.shape[1] if length is None else length)
  return Mean.of(per_row, loss_mask.any(-1))


def spread_over(
    where: Bool[Array, '*N'],
    advantages: Float[Array, 'B'] | Float[Array, '*N'],
) -> Float[Array, '*N']:
  """Returns advantages in the shape of a mask, without a gradient.

  The mask `where` is [B T] for tokens and [B] for sequences. If there is one
  advantage per sequence, each of its tokens gets it. Entries outside the mask
  are 0.

  Raises:
    ValueError: The advantages fit neither the mask nor its first axis, such as
      one advantage per token for a mask of sequences.
  """
  legal = {where.shape: 'one for each ratio',
           where.shape[:1]: 'one per sequence'}
  if advantages.shape not in legal:
    shapes = ', or '.join(f'{shape} ({what})' for shape, what in legal.items())
    raise ValueError(
        f'advantages must have shape {shapes}, but have {advantages.shape}. '
        'Reduce or align them first.')
  if advantages.ndim < where.ndim:
    advantages = advantages[:, None]
  return jax.lax.stop_gradient(jnp.where(where, advantages, 0))
