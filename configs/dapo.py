# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""DAPO: GRPO on mixed groups, with more room above, and no long rows.

  python -m searchrl.main --config=configs/dapo.py

Rounds of questions are sampled as in dspo.py, until 12 groups are mixed or 3
rounds are over, and the run ends after as many trajectories as grpo.py samples.

Hardware: 2 CPU cores. Time: not yet measured with today's tiny base model.
Result: not yet measured with it. With tiny_base_1, in worlds without common
knowledge, exact match of sampled answers of 1 to 4 hops, .31 .10 .04 .01
before, and .89 .75 .68 .43 after. At the size of Qwen2.5: not yet measured.

Source: Yu et al. 2025, arXiv:2503.14476, with its clip range. Differs: the
lengths are the laptop's, where four-hop answers take about 110 policy tokens.
"""

from configs import common
from configs import settings


def get_config(size: str = 'laptop'):
  config = common.get_config(size)
  config.algorithm.update(
      name='searchrl.rl.algorithms:dapo',
      clip_low=0.2,
      clip_high=0.28,
      max_length=192,  # policy tokens at which a whole 1 is lost
      buffer=48,  # tokens before that over which the penalty grows
  )
  config.rollout.max_rounds = 3
  if settings.is_laptop(size):
    config.train.max_rollouts = 1728  # trajectories; 24 steps of grpo.py
    config.evaluate.every = 2
  if settings.apply(config, size, 'dspo'):
    most = common.most_tokens(config)
    config.algorithm.update(max_length=most, buffer=most // 5)
  return config
