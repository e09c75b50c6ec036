# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""GSPO: one ratio for the whole sequence, and the group's baseline.

  python -m searchrl.main --config=configs/gspo.py

Hardware: 2 CPU cores. Time: not yet measured with today's tiny base model.
Result: not yet measured with it. With tiny_base_1, in worlds without common
knowledge, exact match of sampled answers of 1 to 4 hops, .31 .10 .04 .01
before, and .87 .78 .63 .45 after. At the size of Qwen2.5: not yet measured.

Source: Zheng et al. 2025, arXiv:2507.18071. Differs: its clip range, 3e-4 and
4e-4, belongs to long answers of large models at small learning rates; here a
turn has tens of tokens and the learning rate is 500 times larger, so the range
is ours.
"""

from configs import common
from configs import settings


def get_config(size: str = 'laptop'):
  config = common.get_config(size)
  config.algorithm.update(
      name='searchrl.rl.algorithms:gspo',
      clip_low=0.05,  # the paper's: 3e-4
      clip_high=0.05,  # the paper's: 4e-4
      kl_coef=0.0,  # per nat, to the model that the run started from
      entropy_coef=0.0,
  )
  if settings.apply(config, size, 'dspo'):
    config.algorithm.update(clip_low=3e-4, clip_high=4e-4)
  return config
