# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Log-probs, advantages and a mask in; unreduced losses, or Means, out.

Entry t of a row speaks of its token t. The mask is True where the policy
sampled the token: retrieved passages lie outside of it and may hold anything.
One surrogate serves two ratios: PPO and GRPO clip a ratio for each token, GSPO
and DSPO one for each sequence.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from searchrl.rl import masked
from searchrl.rl.masked import Mean

AGGREGATIONS = (
    'token_mean', 'sequence_mean', 'sequence_sum', 'sequence_sum_norm')
KL_ESTIMATORS = ('k1', 'abs', 'k2', 'k3')


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
    arXiv:2507.18071, eq. 7.
  """
  gaps = log_ratio(logprobs, old_logprobs, loss_mask)
  return jnp.exp(masked.row_mean(gaps, loss_mask))


def clipped_surrogate(
    ratio: Float[Array, '*N'],
    advantages: Float[Array, '*N'],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Array, '*N']:
  """L = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), unreduced.

  Args:
    ratio: rho of each token, or of each sequence; what is differentiated.
    advantages: A, in the shape of `ratio`; constant.
    clip_low: how far rho may fall below 1 and still be pushed down.
    clip_high: how far rho may rise above 1 and still be pushed up.

  Returns:
    One loss for each ratio, in the unit of `advantages`.

  Raises:
    ValueError: the shapes differ.

  Source: Schulman et al. 2017, Proximal Policy Optimization,
    arXiv:1707.06347, eq. 7. Two ranges: DAPO, arXiv:2503.14476, eq. 10.
  """
  masked.check_shapes(ratio=ratio, advantages=advantages)
  advantages = jax.lax.stop_gradient(advantages)
  clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
  return -jnp.minimum(ratio * advantages, clipped * advantages)


def token_ratio_loss(
    logprobs: Float[Array, 'B T'],
    old_logprobs: Float[Array, 'B T'],
    advantages: Float[Array, 'B'] | Float[Array, 'B T'],
    loss_mask: Bool[Array, 'B T'],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Float[Array, 'B T']:
  """Clipped surrogate whose importance ratio belongs to one token.

    rho_it = exp( clip( log pi(y_it) - log pi_old(y_it), -20, 20 ) )
    L_it = -min( rho_it A, clip(rho_it, 1 - clip_low, 1 + clip_high) A )

  Args:
    logprobs: log pi of each token, in nats; the only differentiated input.
    old_logprobs: log pi_old of each token, in nats, from before the update.
    advantages: A of each sequence, or of each token; unitless.
    loss_mask: True where the policy sampled the token.
    clip_low: how far rho may fall below 1.
    clip_high: how far rho may rise above 1; DAPO's is larger than clip_low.

  Returns:
    One loss a token, unreduced, in the unit of `advantages`; 0 outside the
    mask. Reduce it with `aggregate`.

  Raises:
    ValueError: the shapes do not fit.

  Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; as summed in Shao et
    al. 2024, DeepSeekMath, arXiv:2402.03300, eq. 3.
  """
  ratio = token_ratio(logprobs, old_logprobs, loss_mask)
  return clipped_surrogate(
      ratio, _advantages_where(loss_mask, advantages),
      clip_low=clip_low, clip_high=clip_high)


def sequence_ratio_loss(
    logprobs: Float[Array, 'B T'],
    old_logprobs: Float[Array, 'B T'],
    advantages: Float[Array, 'B'],
    loss_mask: Bool[Array, 'B T'],
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Float[Array, 'B']:
  """Clipped surrogate whose importance ratio belongs to the whole sequence.

    s_i = exp( sum_t m_it (log pi(y_it) - log pi_old(y_it)) / sum_t m_it )
    L_i = -min( s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i )

  Retrieved passages lie outside the mask m: they neither move s_i nor count in
  the length that divides it. A row without sampled tokens has L_i = 0 and no
  gradient; leave it out of the mean with `loss_mask.any(-1)`.

  Args:
    logprobs: log pi of each token, in nats; the only differentiated input.
    old_logprobs: log pi_old of each token, in nats, from before the update.
    advantages: A of each sequence, unitless; positive means "more of this".
    loss_mask: True where the policy sampled the token.
    clip_low: how far s may fall below 1. The paper's value, hundreds of times
      smaller than PPO's 0.2, for s is a geometric mean over tokens.
    clip_high: how far s may rise above 1.

  Returns:
    One loss per sequence, unreduced, in the unit of `advantages`.

  Raises:
    ValueError: the shapes do not fit; an advantage a token among them.

  Source: Zheng et al. 2025, Group Sequence Policy Optimization,
    arXiv:2507.18071, eq. 5. DSPO (arXiv:2510.09255) filters outcomes on top.
  """
  ratio = sequence_ratio(logprobs, old_logprobs, loss_mask)
  return clipped_surrogate(
      ratio, _advantages_where(loss_mask.any(-1), advantages),
      clip_low=clip_low, clip_high=clip_high)


def kl(
    logprobs: Float[Array, 'B T'],
    ref_logprobs: Float[Array, 'B T'],
    loss_mask: Bool[Array, 'B T'],
    *,
    estimator: str = 'k3',
) -> Float[Array, 'B T']:
  """What each token tells about KL(pi || pi_ref), in nats; x = ref - logp.

    k1 = -x      abs = |x|      k2 = x^2 / 2      k3 = exp(x) - 1 - x

  k1 and k3 are unbiased in value, k2 in gradient; k3 is never negative. All
  are unclamped, and k3 goes through expm1, so that it is right for small x.

  Args:
    logprobs: log pi of each token, in nats; the only differentiated input.
    ref_logprobs: log pi_ref of each token, in nats.
    loss_mask: True where the policy sampled the token.
    estimator: one of `KL_ESTIMATORS`.

  Returns:
    One estimate a token, in nats; 0 outside the mask.

  Raises:
    ValueError: the shapes differ, or the estimator is unknown.

  Source: Schulman 2020, Approximating KL Divergence,
    http://joschu.net/blog/kl-approx.html.
  """
  check_choice('estimator', estimator, KL_ESTIMATORS)
  masked.check_shapes(
      logprobs=logprobs, ref_logprobs=ref_logprobs, loss_mask=loss_mask)
  x = -log_ratio(logprobs, ref_logprobs, loss_mask)
  match estimator:
    case 'k1':
      return -x
    case 'abs':
      return jnp.abs(x)
    case 'k2':
      return jnp.square(x) / 2
    case 'k3':
      return jnp.expm1(x) - x


def aggregate(
    per_token: Float[Array, 'B T'],
    loss_mask: Bool[Array, 'B T'],
    *,
    how: str,
    length: int | None = None,
) -> Mean:
  """Reduces a loss a token to a Mean: a sum, and what it is divided by.

    token_mean         sum of all tokens        / tokens
    sequence_mean      sum of the rows' means   / rows
    sequence_sum       sum of the rows' sums    / rows
    sequence_sum_norm  sum of the rows' sums    / rows / length

  Rows without policy tokens are left out. The count depends on the mask alone
  and Means add up, so micro-batches give what the whole batch gives.

  Args:
    per_token: one value a token.
    loss_mask: True where the policy sampled the token.
    how: one of `AGGREGATIONS`.
    length: the constant of `sequence_sum_norm`, in tokens. Default: T; give
      it if micro-batches differ in T.

  Returns:
    A Mean in the unit of `per_token`.

  Raises:
    ValueError: the shapes differ, or the aggregation is unknown.

  Source: token_mean: DAPO, arXiv:2503.14476, eq. 12; sequence_mean: GRPO,
    arXiv:2402.03300, eq. 3; sequence_sum_norm: Dr. GRPO, arXiv:2503.20783.
  """
  check_choice('how', how, AGGREGATIONS)
  if how == 'token_mean':
    return Mean.of(per_token, loss_mask)
  if how == 'sequence_mean':
    per_row = masked.row_mean(per_token, loss_mask)
  else:
    per_row = masked.row_sum(per_token, loss_mask)
  if how == 'sequence_sum_norm':
    per_row = per_row / (per_token.shape[1] if length is None else length)
  return Mean.of(per_row, loss_mask.any(-1))


def clip_fractions(
    ratio: Float[Array, '*N'],
    advantages: Float[Array, 'B'] | Float[Array, '*N'],
    where: Bool[Array, '*N'],
    *,
    clip_low: float,
    clip_high: float,
) -> dict[str, Mean]:
  """How often the surrogate's clip was active, together and by side.

    low: A < 0 and rho < 1 - clip_low      high: A > 0 and rho > 1 + clip_high

  Args:
    ratio: rho of each token, or of each sequence.
    advantages: A, in the shape of `ratio`, or one a sequence.
    where: True where a ratio counts.
    clip_low: as in `clipped_surrogate`.
    clip_high: as in `clipped_surrogate`.

  Returns:
    Fractions in [0, 1] of the tokens, or of the sequences, that count.

  Raises:
    ValueError: the shapes do not fit.
  """
  masked.check_shapes(ratio=ratio, where=where)
  advantages = _advantages_where(where, advantages)
  low = (advantages < 0) & (ratio < 1 - clip_low)
  high = (advantages > 0) & (ratio > 1 + clip_high)
  return {
      'actor/pg_clipfrac': Mean.of(low | high, where),
      'actor/clipfrac_low': Mean.of(low, where),
      'actor/clipfrac_high': Mean.of(high, where),
  }


def policy_drift(
    logprobs: Float[Array, 'B T'],
    old_logprobs: Float[Array, 'B T'],
    loss_mask: Bool[Array, 'B T'],
) -> dict[str, Mean]:
  """How far the policy has moved since it sampled: KL(pi_old || pi), in nats.

  Args:
    logprobs: log pi of each token, in nats.
    old_logprobs: log pi_old of each token, in nats.
    loss_mask: True where the policy sampled the token.

  Returns:
    Token means of the estimators k1 (verl's `ppo_kl`) and k3.

  Raises:
    ValueError: the shapes differ.
  """
  k1, k3 = (
      kl(old_logprobs, logprobs, loss_mask, estimator=estimator)
      for estimator in ('k1', 'k3'))
  return {
      'actor/ppo_kl': Mean.of(k1, loss_mask),
      'actor/ppo_kl_k3': Mean.of(k3, loss_mask),
  }


def check_choice(field: str, found: str, choices: tuple[str, ...]) -> None:
  """Refuses a name that is not one of `choices`.

  Raises:
    ValueError: naming the field and the choices.
  """
  if found not in choices:
    raise ValueError(
        f'{field} must be one of {", ".join(choices)}, but is {found!r}.')


def _advantages_where(where, advantages):
  """A for every entry of `where`, constant; 0 where it is False."""
  legal = {where.shape: 'one for each ratio', where.shape[:1]: 'one a sequence'}
  if advantages.shape not in legal:
    shapes = ', or '.join(f'{shape} ({what})' for shape, what in legal.items())
    raise ValueError(
        f'advantages must have shape {shapes}, but have {advantages.shape}. '
        'Reduce or align them first.')
  if advantages.ndim < where.ndim:
    advantages = advantages[:, None]
  return jax.lax.stop_gradient(jnp.where(where, advantages, 0))
