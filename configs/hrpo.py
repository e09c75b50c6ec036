# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""HRPO: rows of equally many hops share a baseline.

  python -m searchrl.main --config=configs/hrpo.py

There is one sample a question, which is the point, and no ratio, so that a
batch is good for one optimizer step.

Hardware: 2 CPU cores. Time: not yet measured with today's tiny base model.
Result: not yet measured with it. With tiny_base_1, in worlds without common
knowledge, exact match of sampled answers of 1 to 4 hops, .31 .10 .04 .01
before, and .88 .75 .64 .46 after. At the size of Qwen2.5: not yet measured.

Source: Dr. Zero, arXiv:2601.07055, eq. 2 and 3. Differs: here the policy
answers questions; Dr. Zero trains the one that writes them.
"""

from configs import common
from configs import settings


def get_config(size: str = 'laptop'):
  config = common.get_config(size)
  common.one_sample_a_question(config)
  config.algorithm.update(
      name='searchrl.rl.algorithms:hrpo',
      kl_coef=0.0,  # per nat, to the model that the run started from
  )
  config.learner.minibatches = 1
  settings.apply(config, size, 'drzero_proposer')
  return config
