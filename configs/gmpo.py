# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""GMPO: the geometric mean of a row's clipped token ratios.

  python -m searchrl.main --config=configs/gmpo.py

Hardware: 2 CPU cores. Time: not yet measured with today's tiny base model.
Result: not yet measured with it. With tiny_base_1, in worlds without common
knowledge, exact match of sampled answers of 1 to 4 hops, .31 .10 .04 .01
before, and .88 .78 .66 .44 after. At the size of Qwen2.5: not yet measured.

Source: Zhao et al. 2025, arXiv:2507.20673, with its clip range. Differs:
learning rate, group size and steps are the laptop's.
"""

from configs import common
from configs import settings


def get_config(size: str = 'laptop'):
  config = common.get_config(size)
  config.algorithm.update(
      name='searchrl.rl.algorithms:gmpo',
      clip_low=0.4,  # nats: a ratio of 0.67
      clip_high=0.4,  # nats: a ratio of 1.49
      kl_coef=0.0,  # per nat, to the model that the run started from
  )
  settings.apply(config, size, 'search_r1')
  return config
