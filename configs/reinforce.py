# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""REINFORCE: log pi times the plain reward, as in ZeroSearch.

  python -m searchrl.main --config=configs/reinforce.py

There is no ratio, so that a batch allows only one optimizer step. There is no
baseline, so that a wrong answer has no gradient.

Hardware: a core of an AMD EPYC (family 25, model 17). Time: 127 CPU seconds.
Result: exact match of greedy answers, 1 to 4 hops, .94 .00 .00 .00 before and
.96 .85 .74 .59 after, with 1 search before and 1 2 3 4 after (means of five
seeds, 200 questions of each hop count, names of known parts; BENCHMARKS.md). At
the size of Qwen2.5: not yet measured.

Source: Williams 1992; ZeroSearch, arXiv:2505.04588. Differs: the engine is a
real one, not simulated, and on the laptop the reward is exact match.
"""

from configs import arguments
from configs import common


def get_config(text: str = ''):
  config = common.get_config(text)
  common.one_sample_a_question(config)
  config.algorithm.update(
      name='searchrl.rl.algorithms:reinforce',
      kl_coef=1e-3,  # per nat, to the model that the run started from
  )
  config.learner.minibatches = 1
  arguments.apply_setting(config, text, 'zerosearch')
  return config
