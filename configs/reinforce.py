# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""REINFORCE: log pi times the bare reward, as in ZeroSearch.

  python -m searchrl.main --config=configs/reinforce.py

There is no ratio, so that a batch is good for one optimizer step, and no
baseline: a wrong answer has no gradient.

Hardware: 2 CPU cores. Time: not yet measured with today's tiny base model.
Result: not yet measured with it. With tiny_base_1, in worlds without common
knowledge, exact match of sampled answers of 1 to 4 hops, .31 .10 .04 .01
before, and .89 .79 .73 .47 after. At the size of Qwen2.5: not yet measured.

Source: Williams 1992; ZeroSearch, arXiv:2505.04588. Differs: the engine is a
real one, not simulated, and on the laptop the reward is exact match.
"""

from configs import common
from configs import settings


def get_config(size: str = 'laptop'):
  config = common.get_config(size)
  common.one_sample_a_question(config)
  config.algorithm.update(
      name='searchrl.rl.algorithms:reinforce',
      kl_coef=1e-3,  # per nat, to the model that the run started from
  )
  config.learner.minibatches = 1
  settings.apply(config, size, 'zerosearch')
  return config
