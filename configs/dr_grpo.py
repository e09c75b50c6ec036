# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Dr. GRPO: GRPO without division by spread or by own length.

  python -m searchrl.main --config=configs/dr_grpo.py

Source: Liu et al. 2025, arXiv:2503.20783.
"""

from configs import common


def get_config(size: str = 'laptop'):
  config = common.get_config(size)
  config.algorithm = dict(
      name='searchrl.rl.algorithms:dr_grpo',
      length=288,  # tokens: 6 turns of 48, the most a policy may write
      clip_low=0.2,
      clip_high=0.2,
      kl_coef=0.0,  # per nat, to the model that the run started from
  )
  if size in common.MODELS:
    config.algorithm.length = 2500  # 5 turns of 500
  return config
