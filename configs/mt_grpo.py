# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""MT-GRPO: GRPO, and on top an advantage of each turn's own reward.

  python -m searchrl.main --config=configs/mt_grpo.py

A turn is rewarded if it reads a gold answer in a passage that no earlier turn
returned. Another reward of turns is --config.turn_reward=my_rewards:of_turns.

Hardware: a laptop's core. Result: not yet measured.

Source: Zeng et al. 2025, arXiv:2505.11821. Differs: as many turns as
rollout.budgets.max_turns allows, where the paper has two; the reward of turns
has one part; no KL on the laptop; learning rate, group size and steps are the laptop's.
"""

from configs import arguments
from configs import common


def get_config(text: str = ''):
  config = common.get_config(text)
  config.algorithm.update(
      name='searchrl.rl.algorithms:mt_grpo',
      turn_coef=1.0,  # weight of the turns' advantages
      clip_low=0.2,
      clip_high=0.2,
      kl_coef=0.01,  # per nat
  )
  config.turn_reward = 'searchrl.agent.turn_rewards:evidence'
  config.turn_reward_options = dict(new=1.0, duplicate=0.0, invalid=0.0)
  if not arguments.apply_setting(config, text, 'search_r1'):
    config.algorithm.kl_coef = 0.0  # as in grpo.py
  return config
