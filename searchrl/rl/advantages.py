# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Advantages: rewards relative to a group, to a critic or to the batch.

`group_relative`, `leave_one_out` and `hop_group_relative` return one advantage
per row. If any input is a JAX array, they use JAX and work under jit. If all
inputs are numpy arrays, they compute on the host in float64. They share these
arguments:

  rewards      Reward r of each row.
  group_ids    Group of each row, in [0, num_groups). Rows with the same id
               share a baseline.
  in_baseline  False for a row that is outside the baseline and gets the
               advantage 0, such as a row whose search failed. The reward of
               such a row may be NaN. By default, all rows count.
  num_groups   Number of possible ids, static. The default is B.

`token_rewards`, `gae`, `reinforce_plus_plus` and `whiten` return one value per
token. They skip the tokens outside `loss_mask`, which the policy did not
sample: the policy's last token before an observation and its first token after
it count as neighbours. The results have no gradient, and are 0 outside the
mask.

Shapes that do not match raise a ValueError. Outside jit, an id out of range
raises a ValueError, and so does a reward that counts but is NaN or infinite.
Nothing can be raised under jit. There, a row that counts gets NaN if its id is
out of range, and the group of a reward that is not finite gets no valid
advantages. `trajectory.collate` prevents the first, `rollouts.scoring` the
second.
"""

import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from searchrl.rl import masked

HostOrDevice = Array | np.ndarray
MIN_SPREAD = 1e-6  # rewards of a group that differ by no more count as equal

_SEGMENT = {  # JAX equivalents of numpy's ufunc.at
    np.add: jax.ops.segment_sum,
    np.minimum: jax.ops.segment_min,
    np.maximum: jax.ops.segment_max,
}


def group_relative(
    rewards: Float[HostOrDevice, 'B'],
    group_ids: Int[HostOrDevice, 'B'],
    in_baseline: Bool[HostOrDevice, 'B'] | None = None,
    *,
    normalize_std: bool = True,
    num_groups: int | None = None,
    ddof: int = 1,
) -> Float[HostOrDevice, 'B']:
  """Returns rewards relative to their group, in standard deviations, [B].

    A_i = (r_i - mean_g r) / (std_g r + 1e-6)

  Here g are the rows of row i's group whose `in_baseline` is True. The other
  rows get 0. A group of one such row gives exactly 0, and so does a group whose
  rewards differ by at most 1e-6. The rounding of a constant reward never
  becomes an advantage. The ids are below `num_groups`, which is B by default.

  Without `normalize_std`, A = r - mean (Dr. GRPO, arXiv:2503.20783). The
  variance is that of a sample with `ddof` 1, and of a population with 0: in a
  group of n rows, the sum of squared distances is divided by n - `ddof`.

  Source: Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, section 4.1.2.
  """
  group = _groups(rewards, group_ids, in_baseline, num_groups)
  advantages = group.gap - group.mean
  if normalize_std:
    variance = group.squares / group.xp.maximum(group.size - ddof, 1)
    advantages = advantages / (group.xp.sqrt(variance) + 1e-6)
  return group.advantages(advantages, group.spread > MIN_SPREAD)


def leave_one_out(
    rewards: Float[HostOrDevice, 'B'],
    group_ids: Int[HostOrDevice, 'B'],
    in_baseline: Bool[HostOrDevice, 'B'] | None = None,
    *,
    num_groups: int | None = None,
) -> Float[HostOrDevice, 'B']:
  """Returns rewards relative to the mean of the group's other rows, [B].

    A_i = r_i - mean_{j in g, j != i} r_j = (r_i - mean_g r) n / (n - 1)

  Here g are the n rows of row i's group whose `in_baseline` is True. The other
  rows get 0. A group of one such row gives 0.

  Source: Ahmadian et al. 2024, Back to Basics, arXiv:2402.14740, RLOO.
  """
  group = _groups(rewards, group_ids, in_baseline, num_groups)
  scale = group.size / group.xp.maximum(group.size - 1, 1)
  return group.advantages((group.gap - group.mean) * scale)


def hop_group_relative(
    rewards: Float[HostOrDevice, 'B'],
    group_ids: Int[HostOrDevice, 'B'],
    in_baseline: Bool[HostOrDevice, 'B'] | None = None,
    *,
    delta: float = 1e-6,
    num_groups: int | None = None,
) -> Float[HostOrDevice, 'B']:
  """Returns rewards relative to all rows with the same hop count, [B].

    A_i = (r_i - mean_h r) / sqrt(var_h r + delta)

  `group_ids` has the hop count of each row, below `num_groups`, which is B by
  default. h is the set of rows that have the hop count of row i and whose
  `in_baseline` is True. A row whose `in_baseline` is False gets 0, and so does
  a row that is alone in h. The variance is the population's (ddof=0). `delta`
  keeps the result finite if all rewards are equal. The paper gives no value,
  and this default is ours.

  Source: Dr. Zero, arXiv:2601.07055, eq. 3.
  """
  group = _groups(rewards, group_ids, in_baseline, num_groups)
  std = group.xp.sqrt(group.squares / group.xp.maximum(group.size, 1) + delta)
  is_spread = std > 0  # always, unless delta is 0
  return group.advantages(
      (group.gap - group.mean) / group.xp.where(is_spread, std, 1), is_spread)


class Estimate(NamedTuple):
  """Advantages relative to a critic, and the critic's targets."""

  advantages: Float[Array, 'B T']
  returns: Float[Array, 'B T']  # targets of the critic's values


def token_rewards(
    rewards: Float[Array, 'B'],
    loss_mask: Bool[Array, 'B T'],
    penalty: Float[Array, 'B T'] | None = None,
) -> Float[Array, 'B T']:
  """Returns the reward of each token, [B, T].

    r_t = r [t is the row's last policy token] - penalty_t

  The row's reward goes to its last policy token. The row's very last token may
  belong to an observation, where the reward would be lost. A row without policy
  tokens has only zeros.

  Args:
    rewards: Reward r of each row, [B].
    loss_mask: True where the policy sampled the token, [B, T].
    penalty: Penalty of each token, such as kl_coef times its KL, [B, T]. The
      default is 0.

  Source: Ouyang et al. 2022, InstructGPT, arXiv:2203.02155, eq. 2, applied by
    token, as in Search-R1 (arXiv:2503.09516).
  """
  _check_one_a_row(rewards, loss_mask)
  masked.check_shapes(loss_mask=loss_mask)
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
  """Returns generalised advantage estimates (GAE) and the critic's targets.

    delta_t = r_t + discount V_{t+1} - V_t
    A_t = delta_t + discount gae_lambda A_{t+1}        R_t = A_t + V_t

  Here t + 1 is the next token of the row that the policy sampled: retrieved
  tokens between the two are skipped. After the last one V = 0. Apply `whiten`
  to the advantages A, not to the returns R.

  Args:
    token_rewards: Rewards r_t, from `token_rewards`, [B, T].
    values: Values V_t, [B, T]: the critic's estimates, made before token t, of
      the rewards to come.
    loss_mask: True where the policy sampled the token, [B, T].
    discount: Discount gamma: a reward that comes k policy tokens later is
      multiplied by gamma^k.
    gae_lambda: Weight lambda in [0, 1]: 1 uses the rewards only, and 0 relies
      on the critic.

  Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16. Search-R1's code also
    runs over retrieved tokens; here they are removed first.
  """
  masked.check_shapes(
      token_rewards=token_rewards, values=values, loss_mask=loss_mask)
  # Sums of many small rewards need float32.
  dtype = jnp.result_type(token_rewards, values, jnp.float32)
  rewards, values = (jax.lax.stop_gradient(jnp.where(loss_mask, x, 0).astype(
      dtype)) for x in (token_rewards, values))
  gamma, weight, rest = (
      jnp.asarray(x, dtype) for x in (discount, gae_lambda, 1 - gae_lambda))

  # The scan sums returns R and not A, because sums of V - V' would lose digits.
  def earlier(later, column):
    next_value, next_return = later
    reward, value, here = column
    mixed = rest * next_value + weight * next_return
    later = (jnp.where(here, value, next_value),
             jnp.where(here, reward + gamma * mixed, next_return))
    return later, jnp.where(here, later[1], 0)

  # Zeros that vary over the devices of a shard_map as the columns do.
  nothing = jnp.where(loss_mask.any(1), jnp.zeros((), dtype), 0)
  columns = jax.tree.map(jnp.transpose, (rewards, values, loss_mask))
  _, result = jax.lax.scan(earlier, (nothing, nothing), columns, reverse=True)
  return Estimate(result.T - values, result.T)


def reinforce_plus_plus(
    token_rewards: Float[Array, 'B T'],
    loss_mask: Bool[Array, 'B T'],
    *,
    discount: float = 1.0,
) -> Float[Array, 'B T']:
  """Returns each token's return, standardized over the batch, [B, T].

    A = whiten(G),  G_t = r_t + discount G_{t+1}

  The return G_t is the discounted sum of the rewards from token t on. `whiten`
  subtracts the mean of all policy tokens and divides by their standard
  deviation. The index t counts policy tokens only: an observation does not
  reset the return. The rewards r_t come from `token_rewards` and include the KL
  penalty.

  Source: Hu et al. 2025, REINFORCE++, arXiv:2501.03262.
  """
  returns, _ = gae(
      token_rewards, jnp.zeros_like(token_rewards), loss_mask,
      discount=discount, gae_lambda=1.0)
  return whiten(returns, loss_mask)


def reinforce_plus_plus_baseline(
    rewards: Float[HostOrDevice, 'B'],
    group_ids: Int[HostOrDevice, 'B'],
    loss_mask: Bool[Array, 'B T'],
    in_baseline: Bool[HostOrDevice, 'B'] | None = None,
    *,
    num_groups: int | None = None,
) -> Float[Array, 'B T']:
  """Returns rewards minus the group's mean, standardized over tokens, [B, T].

    A_it = whiten(r_i - mean_g r)

  Every policy token t of row i gets the row's difference. `whiten` then
  subtracts the mean over all policy tokens of the batch, and divides by their
  standard deviation.

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
  """Returns (x - mean) / sqrt(var + 1e-8) inside the mask `where`, 0 outside.

  Mean and variance are over the entries inside, and the variance is that of a
  sample (ddof=1). Equal entries give exactly 0. The input must be the global
  batch, because the mean and the variance of a micro-batch differ from those of
  the batch.

  Source: the whitening of advantages in Search-R1's PPO (arXiv:2503.09516),
    where retrieved tokens are in the mean and the variance; here they are not.
  """
  masked.check_shapes(x=x, where=where)
  x = masked.at_least_float32(
      jax.lax.stop_gradient(jnp.where(where, x, 0)))
  low = jnp.min(jnp.where(where, x, jnp.inf), initial=jnp.inf)
  centred = jnp.where(where, x - low, 0)  # exact if close; 0 if equal
  count = jnp.sum(where, dtype=x.dtype)
  for _ in range(2):  # the second pass removes the rounding of the first
    mean = jnp.sum(centred) / jnp.maximum(count, 1)
    centred = jnp.where(where, centred - mean, 0)
  variance = jnp.sum(centred ** 2) / jnp.maximum(count - 1, 1)
  return centred / jnp.sqrt(variance + 1e-8)


def group_spread(
    rewards: Float[HostOrDevice, 'B'],
    group_ids: Int[HostOrDevice, 'B'],
    in_baseline: Bool[HostOrDevice, 'B'] | None = None,
    *,
    num_groups: int | None = None,
) -> Float[HostOrDevice, 'B']:
  """Returns the largest minus the smallest reward of each row's group, [B].

  A row outside the baseline does not count, but gets its group's spread.
  """
  return _groups(rewards, group_ids, in_baseline, num_groups).spread


class _Groups(NamedTuple):
  """Statistics of each row's group, as arrays [B] computed with `xp`."""

  xp: types.ModuleType  # jax.numpy or numpy
  member: Array  # True if the row counts in its group's baseline
  gap: Array  # reward minus the group's smallest; 0 for a row not counted
  size: Array  # number of members of the group
  mean: Array  # mean of the members' gaps
  squares: Array  # sum of the members' squared distances from the mean
  spread: Array  # largest gap of the members
  exists: Array  # True if the group's id is in range; False only under jit

  def advantages(self, values, where=True):
    """Returns the values of members for which `where` is True, 0 for others.

    A member has NaN if its group does not exist.
    """
    values = self.xp.where(self.member & where, values, 0)
    return self.xp.where(self.exists | ~self.member, values, np.nan)


def _groups(rewards, group_ids, in_baseline, num_groups) -> _Groups:
  """Returns for each row the statistics of its group.

  A row's gap is its reward minus the smallest reward of its group. Gaps are
  averaged instead of rewards: the gap between two close rewards is exact in
  floating point, and the gap between equal rewards is exactly 0.
  """
  if in_baseline is None:
    in_baseline = np.ones(np.shape(rewards), bool)
  inputs = (rewards, group_ids, in_baseline)
  xp = jnp if any(isinstance(x, jax.Array) for x in inputs) else np
  rewards, ids, member = map(xp.asarray, inputs)
  masked.check_shapes(rewards=rewards, group_ids=ids, in_baseline=member)
  num_groups = len(rewards) if num_groups is None else num_groups
  _check_range(ids, num_groups)
  _check_rewards(rewards, member)

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
  # The rounding error of the first mean.
  rest = over_group(np.add, xp.where(member, gap - mean, 0))
  mean = mean + rest / xp.maximum(count, 1)
  squares = over_group(np.add, xp.where(member, gap - mean, 0) ** 2)
  spread = over_group(np.maximum, gap)
  exists = (ids >= 0) & (ids < num_groups)
  return _Groups(xp, member, gap, count, mean, squares, spread, exists)


def _check_one_a_row(rewards, loss_mask):
  """Raises a ValueError unless there is one reward per row."""
  if rewards.shape != loss_mask.shape[:1]:
    raise ValueError(
        f'rewards must be one per row, {loss_mask.shape[:1]}, but have shape '
        f'{rewards.shape}. Reduce them first.')


def _check_rewards(rewards, member):
  """Raises a ValueError if the reward of a row in a baseline is not finite.

  It does nothing inside jit.
  """
  if any(isinstance(x, jax.core.Tracer) for x in (rewards, member)):
    return
  rewards = np.asarray(rewards)
  for row in np.flatnonzero(~np.isfinite(rewards) & np.asarray(member))[:1]:
    value = 'NaN' if np.isnan(rewards[row]) else rewards[row]
    raise ValueError(
        f'rewards must be finite numbers, but that of row {row} is {value}. '
        'Correct it, or take the row out by in_baseline.')


def _check_range(group_ids, num_groups):
  """Raises a ValueError on an id out of range; does nothing inside jit."""
  if isinstance(group_ids, jax.core.Tracer):
    return
  ids = np.asarray(group_ids)
  for row in np.flatnonzero((ids < 0) | (ids >= num_groups))[:1]:
    raise ValueError(
        f'group_ids must lie in [0, {num_groups}), but row {row} holds '
        f'{ids[row]}. Renumber them with '
        'np.unique(ids, return_inverse=True)[1], or raise num_groups.')
