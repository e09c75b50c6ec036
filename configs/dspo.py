# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""DSPO: GSPO's sequence ratio on groups with mixed outcomes; the default run.

  python -m searchrl.main --config=configs/dspo.py

A step plays rounds of questions until 12 groups have mixed outcomes, or 3
rounds are over; what is left over opens the next step. The run ends after as
many trajectories as grpo.py samples.

Source: DSPO, arXiv:2510.09255. The paper gives no learning rate, clip range,
group size or round limit: all are ours.
"""

from configs import common


def get_config(size: str = 'laptop'):
  config = common.get_config(size)
  config.algorithm = dict(
      name='searchrl.rl.algorithms:dspo',
      clip_low=0.05,  # GSPO's: 3e-4
      clip_high=0.05,  # GSPO's: 4e-4
      kl_coef=0.0,  # per nat, to the model that the run started from
      entropy_coef=0.0,
  )
  config.rollout.max_rounds = 3
  config.train.max_rollouts = 2160  # trajectories; 30 steps of grpo.py
  if size == 'smoke':
    config.train.max_rollouts = 0
  return config
