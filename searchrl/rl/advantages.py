# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rewards in, advantages out: baselines by group, by critic, or by batch.

A row: `group_relative`, `leave_one_out`, `hop_group_relative`. With JAX arrays
they give JAX arrays, also under jit; with numpy arrays alone the same code
computes on the host, in float64. A row out of its group's baseline, a failed
search for one, has advantage 0 whatever its reward holds.

A token: `token_rewards`, then `gae` or `reinforce_plus_plus`, and `whiten`. All
of them read a row as if its retrieved tokens were not there: rewards, values
and discounts cross an observation as if it had taken no time.
"""

from __future__ import annotations

import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from searchrl.rl import masked

MIN_SPREAD = 1e-6  # a group whose rewards differ by no more has no spread

_SEGMENT = {  # what numpy's ufunc.at is called in JAX
    np.add: jax.ops.segment_sum,
    np.minimum: jax.ops.segment_min,
    np.maximum: jax.ops.segment_max,
}


def group_relative(
    rewards: Float[Array, 'B'],
    group_ids: Int[Array, 'B'],
    in_baseline: Bool[Array, 'B'] | None = None,
    *,
    normalize_std: bool = True,
    num_groups: int | None = None,
    ddof: int = 1,
) -> Float[Array, 'B']:
  """How much better a row did than its group, in standard deviations.

    A_i = (r_i - mean_g r) / (std_g r + 1e-6)

  A group of one, or one whose rewards differ by 1e-6 at most, gives exactly
  0: rounding of a constant reward never becomes an advantage.

  Args:
    rewards: r of each row; what is trained on.
    group_ids: rows of one id share a baseline; in [0, num_groups).
    in_baseline: False for a row that neither counts nor gets an advantage.
      Default: all count.
    normalize_std: divide by the spread; without it A = r - mean (Dr. GRPO,
      arXiv:2503.20783).
    num_groups: how many ids there may be; static. Default: B.
    ddof: 1 divides the variance by the group's size less one (sample
      variance), 0 by its size.

  Returns:
    One advantage a row, unitless (without `normalize_std` in that of r).

  Raises:
    ValueError: shapes differ, or an id is out of range (seen outside jit).

  Source: Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, section 4.1.2.
  """
  group = _groups(rewards, group_ids, in_baseline, num_groups)
  advantages = group.gap - group.mean
  if normalize_std:
    variance = group.squares / group.xp.maximum(group.count - ddof, 1)
    advantages = advantages / (group.xp.sqrt(variance) + 1e-6)
  mixed = group.member & (group.spread > MIN_SPREAD)
  return group.xp.where(mixed, advantages, 0)


def leave_one_out(
    rewards: Float[Array, 'B'],
    group_ids: Int[Array, 'B'],
    in_baseline: Bool[Array, 'B'] | None = None,
    *,
    num_groups: int | None = None,
) -> Float[Array, 'B']:
  """How much better a row did than the others of its group.

    A_i = r_i - mean_{j in g, j != i} r_j = (r_i - mean_g r) n / (n - 1)

  A group of one gives 0.

  Args:
    rewards: r of each row; what is trained on.
    group_ids: rows of one id share a baseline; in [0, num_groups).
    in_baseline: as in `group_relative`.
    num_groups: how many ids there may be; static. Default: B.

  Returns:
    One advantage a row, in the unit of the rewards.

  Raises:
    ValueError: shapes differ, or an id is out of range (seen outside jit).

  Source: Ahmadian et al. 2024, Back to Basics, arXiv:2402.14740, RLOO.
  """
  group = _groups(rewards, group_ids, in_baseline, num_groups)
  scale = group.count / group.xp.maximum(group.count - 1, 1)
  return group.xp.where(group.member, (group.gap - group.mean) * scale, 0)


def hop_group_relative(
    rewards: Float[Array, 'B'],
    group_ids: Int[Array, 'B'],
    in_baseline: Bool[Array, 'B'] | None = None,
    *,
    delta: float = 1e-6,
    num_groups: int | None = None,
) -> Float[Array, 'B']:
  """How much better a row did than all rows of equally many hops.

    A_i = (r_i - mean_h r) / sqrt(var_h r + delta)

  The variance is the population's (ddof=0). A hop count met once gives 0.

  Args:
    rewards: r of each row; what is trained on.
    group_ids: the hop class of each row; in [0, num_groups).
    in_baseline: as in `group_relative`.
    delta: added to the variance, so that a constant class is finite. The
      paper gives no value; this one is ours.
    num_groups: how many ids there may be; static. Default: B.

  Returns:
    One advantage a row, unitless.

  Raises:
    ValueError: shapes differ, or an id is out of range (seen outside jit).

  Source: Dr. Zero, arXiv:2601.07055, eq. 3.
  """
  group = _groups(rewards, group_ids, in_baseline, num_groups)
  std = group.xp.sqrt(group.squares / group.xp.maximum(group.count, 1) + delta)
  return group.xp.where(group.member, (group.gap - group.mean) / std, 0)


class Estimate(NamedTuple):
  """What a critic's values make of a batch's rewards."""

  advantages: Float[Array, 'B T']
  returns: Float[Array, 'B T']  # what the critic should have said


def token_rewards(
    rewards: Float[Array, 'B'],
    loss_mask: Bool[Array, 'B T'],
    penalty: Float[Array, 'B T'] | None = None,
) -> Float[Array, 'B T']:
  """Each token's own reward: the outcome on the last one, less a penalty.

    r_t = r [t is the row's last policy token] - penalty_t

  An outcome written on the last token of all would fall on an observation
  where a budget ended the row, and be lost.

  Args:
    rewards: r of each row; what is trained on.
    loss_mask: True where the policy sampled the token.
    penalty: of each token, such as kl_coef times its KL; constant. Default: 0.

  Returns:
    One reward a token; 0 outside the mask.

  Raises:
    ValueError: the shapes do not fit.

  Source: Ouyang et al. 2022, InstructGPT, arXiv:2203.02155, eq. 2, read token
    by token, as Search-R1 (arXiv:2503.09516) does.
  """
  _check_one_a_row(rewards, loss_mask)
  length = loss_mask.shape[1]
  last = length - 1 - jnp.argmax(loss_mask[:, ::-1], axis=1)
  ends = loss_mask & (jnp.arange(length)[None, :] == last[:, None])
  per_token = jnp.where(ends, rewards[:, None], 0)
  if penalty is not None:
    masked.check_shapes(loss_mask=loss_mask, penalty=penalty)
    per_token -= jnp.where(loss_mask, penalty, 0)
  return jax.lax.stop_gradient(per_token)


def gae(
    token_rewards: Float[Array, 'B T'],
    values: Float[Array, 'B T'],
    loss_mask: Bool[Array, 'B T'],
    *,
    discount: float = 1.0,
    gae_lambda: float = 1.0,
) -> Estimate:
  """Generalised advantage estimates on each row without its observations.

    delta_t = r_t + discount V_{t+1} - V_t
    A_t = delta_t + discount gae_lambda A_{t+1}        R_t = A_t + V_t

  t counts policy tokens alone: after a token comes the row's next one that the
  policy sampled, however much was retrieved in between; after the last, V = 0.

  Args:
    token_rewards: r_t, from `token_rewards`.
    values: V_t, the critic's guess before token t of what is still to come.
    loss_mask: True where the policy sampled the token.
    discount: what a reward one policy token later is worth; gamma.
    gae_lambda: 1 takes the rewards' word for it, 0 the critic's.

  Returns:
    Advantages and returns, in the unit of the rewards; 0 outside the mask.
    `whiten` the advantages, not the returns.

  Raises:
    ValueError: the shapes differ.

  Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16. Search-R1's code runs
    over retrieved tokens too; here they are deleted first.
  """
  masked.check_shapes(
      token_rewards=token_rewards, values=values, loss_mask=loss_mask)
  rewards, values = jax.lax.stop_gradient((
      jnp.where(loss_mask, token_rewards, 0), jnp.where(loss_mask, values, 0)))

  def earlier(later, column):  # R, not A: sums of V - V' would lose digits
    next_value, next_return = later
    reward, value, here = column
    mixed = (1 - gae_lambda) * next_value + gae_lambda * next_return
    later = (jnp.where(here, value, next_value),
             jnp.where(here, reward + discount * mixed, next_return))
    return later, jnp.where(here, later[1], 0)

  nothing = jnp.zeros(len(values), jnp.result_type(rewards, values, float))
  columns = jax.tree.map(jnp.transpose, (rewards, values, loss_mask))
  _, result = jax.lax.scan(earlier, (nothing, nothing), columns, reverse=True)
  return Estimate(result.T - values, result.T)


def reinforce_plus_plus(
    token_rewards: Float[Array, 'B T'],
    loss_mask: Bool[Array, 'B T'],
    *,
    discount: float = 1.0,
) -> Float[Array, 'B T']:
  """What is still to come after each token, against the whole batch.

    A = whiten(G),  G_t = r_t + discount G_{t+1}

  t counts policy tokens alone: a return crosses an observation, and is not
  reset by it.

  Args:
    token_rewards: r_t, from `token_rewards`; the KL is in them.
    loss_mask: True where the policy sampled the token.
    discount: what a reward one policy token later is worth; gamma.

  Returns:
    One advantage a token, unitless; 0 outside the mask.

  Raises:
    ValueError: the shapes differ.

  Source: Hu et al. 2025, REINFORCE++, arXiv:2501.03262.
  """
  returns, _ = gae(
      token_rewards, jnp.zeros_like(token_rewards), loss_mask,
      discount=discount, gae_lambda=1.0)
  return whiten(returns, loss_mask)


def reinforce_plus_plus_baseline(
    rewards: Float[Array, 'B'],
    group_ids: Int[Array, 'B'],
    loss_mask: Bool[Array, 'B T'],
    in_baseline: Bool[Array, 'B'] | None = None,
    *,
    num_groups: int | None = None,
) -> Float[Array, 'B T']:
  """REINFORCE++ with the group's mean as a first baseline.

    A_it = whiten(r_i - mean_g r)

  Args:
    rewards: r of each row; what is trained on.
    group_ids: rows of one id share a baseline; in [0, num_groups).
    loss_mask: True where the policy sampled the token.
    in_baseline: as in `group_relative`.
    num_groups: how many ids there may be; static. Default: B.

  Returns:
    One advantage a token, unitless; 0 outside the mask.

  Raises:
    ValueError: shapes do not fit, or an id is out of range (outside jit).

  Source: Hu et al. 2025, REINFORCE++, arXiv:2501.03262, "w/ baseline".
  """
  _check_one_a_row(rewards, loss_mask)
  centred = group_relative(
      rewards, group_ids, in_baseline, normalize_std=False,
      num_groups=num_groups)
  return whiten(
      jnp.broadcast_to(jnp.asarray(centred)[:, None], loss_mask.shape),
      loss_mask)


def whiten(
    x: Float[Array, '*N'], where: Bool[Array, '*N']) -> Float[Array, '*N']:
  """(x - mean) / sqrt(var + 1e-8) over the entries where `where` holds.

  The variance is the sample's (ddof=1). Equal entries give exactly 0. Give it
  the whole global batch: its moments are no sums that micro-batches could add.

  Args:
    x: what to whiten; constant.
    where: True where an entry counts.

  Returns:
    The whitened entries; 0 where `where` is False.

  Raises:
    ValueError: the shapes differ.

  Source: the whitening of advantages in PPO as Search-R1 uses it
    (arXiv:2503.09516), without its retrieved tokens.
  """
  masked.check_shapes(x=x, where=where)
  x = jax.lax.stop_gradient(jnp.where(where, x, 0))
  low = jnp.min(jnp.where(where, x, jnp.inf), initial=jnp.inf)
  centred = jnp.where(where, x - low, 0)  # exact if close, 0 if equal
  count = jnp.sum(where, dtype=x.dtype)
  for _ in range(2):  # the second time for what rounding left of the mean
    mean = jnp.sum(centred) / jnp.maximum(count, 1)
    centred = jnp.where(where, centred - mean, 0)
  variance = jnp.sum(centred ** 2) / jnp.maximum(count - 1, 1)
  return centred / jnp.sqrt(variance + 1e-8)


def group_spread(
    rewards: Float[Array, 'B'],
    group_ids: Int[Array, 'B'],
    in_baseline: Bool[Array, 'B'] | None = None,
    *,
    num_groups: int | None = None,
) -> Float[Array, 'B']:
  """The largest less the smallest reward of each row's group.

  Args:
    rewards: one a row.
    group_ids: rows of one id form a group; in [0, num_groups).
    in_baseline: False for a row that does not count; it too is told the
      spread of its group. Default: all count.
    num_groups: how many ids there may be; static. Default: B.

  Returns:
    One spread a row, in the unit of the rewards.

  Raises:
    ValueError: shapes differ, or an id is out of range (seen outside jit).
  """
  return _groups(rewards, group_ids, in_baseline, num_groups).spread


class _Groups(NamedTuple):
  """What each row knows of its group; arrays [B], computed with `xp`."""

  xp: types.ModuleType  # jax.numpy or numpy
  member: Array  # counts in its group's baseline
  gap: Array  # reward above the group's smallest; 0 for a row that is out
  count: Array  # members of the group
  mean: Array  # of the members' gaps
  squares: Array  # sum of the members' squared distances from the mean
  spread: Array  # the members' largest gap


def _groups(rewards, group_ids, in_baseline, num_groups) -> _Groups:
  """Tells each row of its group.

  Gaps are averaged instead of rewards, for the gap between two close rewards
  is exact in floating point, and between equal ones exactly 0.
  """
  if in_baseline is None:
    in_baseline = np.ones(np.shape(rewards), bool)
  inputs = (rewards, group_ids, in_baseline)
  xp = jnp if any(isinstance(x, jax.Array) for x in inputs) else np
  rewards, ids, member = map(xp.asarray, inputs)
  masked.check_shapes(rewards=rewards, group_ids=ids, in_baseline=member)
  num_groups = len(rewards) if num_groups is None else num_groups
  _check_range(ids, num_groups)

  def over_group(ufunc, x):
    if xp is jnp:
      return _SEGMENT[ufunc](x, ids, num_groups)[ids]
    result = np.full(num_groups, np.inf if ufunc is np.minimum else 0.0)
    ufunc.at(result, ids, x)
    return result[ids]

  dtype = jnp.promote_types(rewards.dtype, jnp.float32) if xp is jnp else float
  rewards = xp.where(member, rewards, 0).astype(dtype)
  low = over_group(np.minimum, xp.where(member, rewards, np.inf))
  gap = xp.where(member, rewards - low, 0)
  count = over_group(np.add, member.astype(dtype))
  mean = over_group(np.add, gap) / xp.maximum(count, 1)
  rest = over_group(np.add, xp.where(member, gap - mean, 0))  # of rounding
  mean = mean + rest / xp.maximum(count, 1)
  squares = over_group(np.add, xp.where(member, gap - mean, 0) ** 2)
  spread = over_group(np.maximum, gap)
  return _Groups(xp, member, gap, count, mean, squares, spread)


def _check_one_a_row(rewards, loss_mask):
  if rewards.shape != loss_mask.shape[:1]:
    raise ValueError(
        f'rewards must be one a row, {loss_mask.shape[:1]}, but have shape '
        f'{rewards.shape}. Reduce them first.')


def _check_range(group_ids, num_groups):
  """Refuses ids that no group has; inside jit they cannot be looked at."""
  if isinstance(group_ids, jax.core.Tracer):
    return
  ids = np.asarray(group_ids)
  for row in np.flatnonzero((ids < 0) | (ids >= num_groups))[:1]:
    raise ValueError(
        f'group_ids must lie in [0, {num_groups}), but row {row} holds '
        f'{ids[row]}. Renumber them with '
        'np.unique(ids, return_inverse=True)[1], or raise num_groups.')
