# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""RLOO: log pi of the whole row, against the others of its group.

  python -m searchrl.main --config=configs/rloo.py

There is no ratio, so that a batch is good for one optimizer step.

Hardware: 2 CPU cores. Time: not yet measured with today's tiny base model.
Result: not yet measured with it. With tiny_base_1, in worlds without common
knowledge, exact match of sampled answers of 1 to 4 hops, .31 .10 .04 .01
before, and .86 .72 .64 .38 after. At the size of Qwen2.5: not yet measured.

Source: Ahmadian et al. 2024, arXiv:2402.14740. Differs: the KL is off; the
paper tunes its coefficient by task.
"""

from configs import common
from configs import settings


def get_config(size: str = 'laptop'):
  config = common.get_config(size)
  config.algorithm.update(
      name='searchrl.rl.algorithms:rloo',
      kl_coef=0.0,  # per nat, in the reward
  )
  config.learner.minibatches = 1
  settings.apply(config, size, 'search_r1')
  return config
