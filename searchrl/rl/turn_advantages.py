# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Advantages of turns: one value per token, equal for the tokens of a turn.

A turn is what the policy writes until the environment answers, such as a search
query. A row of a batch has several turns, and the answers between them.
The functions are pure and can be jitted. Their arguments are fields of `Batch`:

  rewards       Reward R of each row, [B]. It may be NaN outside the baseline.
  turn_rewards  Reward r_k of turn k at the turn's last token, [B, T]. NaN there
                means that the turn has no reward. Other entries are not read.
  turn_ids      Number k of the turn that a token belongs to, from 1; 0 if the
                policy did not sample the token, [B, T].
  group_ids, in_baseline  As in `advantages`, [B].

The results are constants, and 0 at tokens that the policy did not sample.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from searchrl.rl import advantages
from searchrl.rl import masked


def turn_ends(turn_ids: Int[Array, 'B T']) -> Bool[Array, 'B T']:
  """Returns True for the last sampled token of each turn, [B, T]."""
  following = jnp.pad(turn_ids[:, 1:], ((0, 0), (0, 1)))
  return (turn_ids > 0) & (turn_ids != following)


def rewards_at_ends(
    turn_rewards: Float[Array, 'B T'], turn_ids: Int[Array, 'B T']
) -> Float[Array, 'B T']:
  """Returns each turn's reward at the turn's last token, [B, T].

  All other entries are 0. A turn without a reward (NaN) also has 0.
  """
  masked.check_shapes(turn_rewards=turn_rewards, turn_ids=turn_ids)
  is_rewarded = turn_ends(turn_ids) & ~jnp.isnan(turn_rewards)
  return jax.lax.stop_gradient(jnp.where(is_rewarded, turn_rewards, 0))


def mt_grpo(
    rewards: Float[Array, 'B'],
    turn_rewards: Float[Array, 'B T'],
    turn_ids: Int[Array, 'B T'],
    group_ids: Int[Array, 'B'],
    in_baseline: Bool[Array, 'B'],
    *,
    turn_coef: float = 1.0,
    normalize_std: bool = True,
) -> Float[Array, 'B T']:
  """Returns the row's outcome advantage plus the turn's advantage, [B, T].

    A_ik = A^O_i + turn_coef A^T_ik
    A^O_i = (R_i - mean_g R) / (std_g R + 1e-6)
    A^T_ik = (r_ik - mean_gk r) / (std_gk r + 1e-6)

  The group gk has the k-th turns of the rows of group g, without the turns
  that have no reward. A turn without a reward has A^T = 0. A^T is also 0 if
  the group gk has one turn only, or rewards that differ by at most 1e-6.
  Without `normalize_std`, nothing is divided by a standard deviation.

  Source: Zeng et al. 2025, arXiv:2505.11821, MT-GRPO. Its published code
    multiplies A^T by the coefficient. The paper has two turns, of which the
    first has a reward; the groups of later turns are ours.
  """
  is_rewarded = (turn_ends(turn_ids) & ~jnp.isnan(turn_rewards)
                 & in_baseline[:, None])
  length = turn_ids.shape[1]
  of_outcome = advantages.group_relative(
      jnp.asarray(rewards), group_ids, in_baseline,
      normalize_std=normalize_std)
  of_turns = _relative(
      rewards_at_ends(turn_rewards, turn_ids), is_rewarded,
      group_ids[:, None] * length + jnp.maximum(turn_ids - 1, 0),
      normalize_std)
  return jax.lax.stop_gradient(jnp.where(
      turn_ids > 0,
      of_outcome[:, None] + turn_coef * _over_turns(of_turns, turn_ids), 0))


def gigpo(
    rewards: Float[Array, 'B'],
    turn_rewards: Float[Array, 'B T'],
    turn_ids: Int[Array, 'B T'],
    state_ids: Int[Array, 'B T'],
    group_ids: Int[Array, 'B'],
    in_baseline: Bool[Array, 'B'],
    *,
    step_coef: float = 1.0,
    discount: float = 0.95,
    normalize_std: bool = True,
) -> Float[Array, 'B T']:
  """Returns the row's episode advantage plus the turn's advantage, [B, T].

    A_ik = A^E_i + step_coef A^S_ik
    A^E_i = (R_i + sum_k r_ik - mean_g) / (std_g + 1e-6)
    A^S_ik = (G_ik - mean_s G) / (std_s G + 1e-6)
    G_ik = r_ik + discount G_i,k+1, and R_i is added to the last turn's r

  The index i counts rows and k turns. G is the discounted sum of rewards from a
  turn on. The group g has the rows with the same id in `group_ids`, and the
  group s has all turns that began in the same state. A state in which only one
  turn began gives A^S = 0.

  Args:
    rewards: Reward R of each row, [B].
    turn_rewards: Reward r_k of turn k at its last token, [B, T]. A turn without
      a reward (NaN) counts as 0.
    turn_ids: Number of each token's turn, from 1; 0 if not sampled, [B, T].
    state_ids: Number of the state in which the token's turn began, in
      [0, B * T), [B, T].
    group_ids: Group of each row, [B].
    in_baseline: False for a row that does not count, [B].
    step_coef: Coefficient omega of the turns' advantages A^S.
    discount: Discount gamma: a reward k turns later is multiplied by gamma^k.
    normalize_std: Flag that divides by the standard deviations.

  Source: Feng et al. 2025, GiGPO, arXiv:2505.10978, eq. 3 and 5 to 8.
  """
  masked.check_shapes(turn_ids=turn_ids, state_ids=state_ids)
  ends = turn_ends(turn_ids)
  per_turn = rewards_at_ends(turn_rewards, turn_ids)
  total = jnp.where(in_baseline, rewards, 0)
  of_episodes = advantages.group_relative(
      total + per_turn.sum(1), group_ids, in_baseline,
      normalize_std=normalize_std)
  # The index of the returns counts turns, each at its last token.
  returns = advantages.gae(
      advantages.token_rewards(total, ends, -per_turn),
      jnp.zeros_like(per_turn), ends, discount=discount).returns
  of_steps = _relative(
      returns, ends & in_baseline[:, None], state_ids, normalize_std)
  return jax.lax.stop_gradient(jnp.where(
      turn_ids > 0,
      of_episodes[:, None] + step_coef * _over_turns(of_steps, turn_ids), 0))


def _relative(values, members, group_ids, normalize_std) -> Float[Array, 'B T']:
  """Returns each member's value relative to the members of its group, [B, T].

  It is the value minus the group's mean, divided by the standard deviation if
  `normalize_std`. Entries that are not `members` are 0.
  """
  relative = advantages.group_relative(
      jnp.where(members, values, 0).reshape(-1), group_ids.reshape(-1),
      members.reshape(-1), normalize_std=normalize_std)
  return jnp.asarray(relative).reshape(values.shape)


def _over_turns(values, turn_ids) -> Float[Array, 'B T']:
  """Copies the value at a turn's last token to all tokens of the turn, [B, T].

  Tokens outside turns get an arbitrary value.
  """
  length = turn_ids.shape[1]
  columns = jnp.where(turn_ends(turn_ids), jnp.arange(length)[None], length - 1)
  ends = jax.lax.cummin(columns, axis=1, reverse=True)
  return jnp.take_along_axis(values, ends, axis=1)
