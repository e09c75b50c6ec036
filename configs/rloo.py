# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""RLOO: log pi of the whole row, against the others of its group.

  python -m searchrl.main --config=configs/rloo.py

There is no ratio, so that a batch is good for one optimiser step.

Source: Ahmadian et al. 2024, arXiv:2402.14740.
"""

from configs import common


def get_config(size: str = 'laptop'):
  config = common.get_config(size)
  config.algorithm = dict(
      name='searchrl.rl.algorithms:rloo',
      kl_coef=0.0,  # per nat, in the reward
  )
  common.minibatches(config, size, 1)
  return config
