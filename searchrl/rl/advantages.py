# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rewards in, advantages out: baselines by the group that a row belongs to.

JAX arrays in, JAX arrays out, also under jit; with numpy arrays alone the same
code computes on the host, in float64. A row out of its group's baseline, a
failed search for one, has advantage 0 whatever its reward holds.
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
  squares = over_group(np.add, xp.where(member, gap - mean, 0) ** 2)
  spread = over_group(np.maximum, gap)
  return _Groups(xp, member, gap, count, mean, squares, spread)


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
