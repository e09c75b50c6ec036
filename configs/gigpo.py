# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""GiGPO: GRPO, and on top an advantage among turns that began alike.

  python -m searchrl.main --config=configs/gigpo.py

Samples of a question that have read the same so far are in the same state; at
first, all are. What they do there is compared by its discounted return. Rewards
of turns are not needed; --config.turn_reward names one.

Hardware: a laptop's core. Result: not yet measured.

Source: Feng et al. 2025, arXiv:2505.10978. Differs: a state is all that was
read so far, and not the last observation alone; no KL on the laptop; learning rate, group
size and steps are the laptop's.
"""

from configs import arguments
from configs import common


def get_config(text: str = ''):
  config = common.get_config(text)
  config.algorithm.update(
      name='searchrl.rl.algorithms:gigpo',
      step_coef=1.0,  # weight of the advantages among equal states
      discount=0.95,  # discount per turn
      clip_low=0.2,
      clip_high=0.2,
      kl_coef=0.01,  # per nat
  )
  if not arguments.apply_setting(config, text, 'search_r1'):
    config.algorithm.kl_coef = 0.0  # as in grpo.py
  return config
