# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""GMPO: the geometric mean of a row's clipped token ratios.

  python -m searchrl.main --config=configs/gmpo.py

Source: Zhao et al. 2025, arXiv:2507.20673, with its clip range.
"""

from configs import common


def get_config(size: str = 'laptop'):
  config = common.get_config(size)
  config.algorithm = dict(
      name='searchrl.rl.algorithms:gmpo',
      clip_low=0.4,  # nats: a ratio of 0.67
      clip_high=0.4,  # nats: a ratio of 1.49
      kl_coef=0.0,  # per nat, to the model that the run started from
  )
  return config
