# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""REINFORCE: log pi times the bare reward, as in ZeroSearch.

  python -m searchrl.main --config=configs/reinforce.py

There is no ratio, so that a batch is good for one optimiser step, and no
baseline: a wrong answer teaches nothing.

Source: Williams 1992; ZeroSearch, arXiv:2505.04588.
"""

from configs import common


def get_config(size: str = 'laptop'):
  config = common.get_config(size)
  common.one_sample_a_question(config, size)
  config.algorithm = dict(
      name='searchrl.rl.algorithms:reinforce',
      kl_coef=1e-3,  # per nat, to the model that the run started from
  )
  common.minibatches(config, size, 1)
  return config
