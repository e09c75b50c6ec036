# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""HRPO: rows of equally many hops share a baseline.

  python -m searchrl.main --config=configs/hrpo.py

One sample a question, which is the point; here on solving questions, where Dr.
Zero uses it to write them. There is no ratio, so that a batch is good for one
optimiser step.

Source: Dr. Zero, arXiv:2601.07055, eq. 2 and 3.
"""

from configs import common


def get_config(size: str = 'laptop'):
  config = common.get_config(size)
  common.one_sample_a_question(config, size)
  config.algorithm = dict(
      name='searchrl.rl.algorithms:hrpo',
      kl_coef=0.0,  # per nat, to the model that the run started from
  )
  common.minibatches(config, size, 1)
  return config
