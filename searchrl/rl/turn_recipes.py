# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Recipes whose advantages belong to turns: MT-GRPO and GiGPO.

They are public in `algorithms`, which explains the options that recipes share.
"""

from __future__ import annotations

from searchrl.rl import option_checks
from searchrl.rl import turn_advantages
from searchrl.rl.algorithm import Algorithm, scored
from searchrl.rl.objective import (
    Regularizer, clipped_token_ratio, policy_gradient, regularized)


@regularized(kl_coef=0.01, kl_estimator='k3', entropy_coef=0.0,
             aggregation='token_mean', length=None)
def mt_grpo(
    regularizer: Regularizer,
    *,
    turn_coef: float = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    normalize_std: bool = True,
) -> Algorithm:
  """Makes MT-GRPO: GRPO plus an advantage from each turn's own reward.

  A turn is what the policy writes until the environment answers. The reward of
  a row's k-th turn is compared with the k-th turns of the other rows of its
  group. `turn_coef` is the weight of that advantage. If no turn has a reward,
  the algorithm is GRPO with the token mean.

  Source: Zeng et al. 2025, Reinforcing Multi-Turn Reasoning in LLM Agents,
    arXiv:2505.11821; KL, coefficient and token mean as in its code.
  """
  option_checks.at_least_0(turn_coef=turn_coef)

  def by_turn(batch):
    return turn_advantages.mt_grpo(
        batch.rewards, scored(batch, 'turn_rewards'), batch.turn_ids,
        batch.group_ids, batch.in_baseline, turn_coef=turn_coef,
        normalize_std=normalize_std)

  return policy_gradient(
      by_turn, clipped_token_ratio(regularizer, clip_low, clip_high, dual_clip),
      regularizer, min_group_size=2, reads_turns=True)


@regularized(kl_coef=0.01, kl_estimator='k3', entropy_coef=0.0,
             aggregation='token_mean', length=None)
def gigpo(
    regularizer: Regularizer,
    *,
    step_coef: float = 1.0,
    discount: float = 0.95,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    normalize_std: bool = True,
) -> Algorithm:
  """Makes GiGPO: GRPO plus an advantage over turns that began in equal states.

  `step_coef` is the weight omega of that advantage. `discount` is gamma: a
  reward that comes k turns later is multiplied by gamma^k. Two turns began in
  equal states if their rows are in one group and the policy had read the same
  prompt and the same observations before them. What the policy wrote may
  differ. Turns may have rewards of their own, which are added to the returns.

  Source: Feng et al. 2025, GiGPO, arXiv:2505.10978, eq. 8 and 9.
  """
  option_checks.at_least_0(step_coef=step_coef)
  option_checks.fractions(discount=discount)

  def by_state(batch):
    return turn_advantages.gigpo(
        batch.rewards, scored(batch, 'turn_rewards'), batch.turn_ids,
        batch.state_ids, batch.group_ids, batch.in_baseline,
        step_coef=step_coef, discount=discount, normalize_std=normalize_std)

  return policy_gradient(
      by_state,
      clipped_token_ratio(regularizer, clip_low, clip_high, dual_clip),
      regularizer, min_group_size=2, reads_turns=True)
