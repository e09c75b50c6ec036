# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""RLOO: log pi of the whole row, relative to the other rows of its group.

  python -m searchrl.main --config=configs/rloo.py

There is no ratio, so that a batch allows only one optimizer step.

Hardware: a core of an AMD EPYC (family 25, model 17). Time: 115 CPU seconds.
Result: exact match of greedy answers, 1 to 4 hops, .94 .00 .00 .00 before and
.96 .84 .70 .53 after, with 1 search before and 1 2 3 4 after (means of five
seeds, 200 questions of each hop count, names of known parts; BENCHMARKS.md). At
the size of Qwen2.5: not yet measured.

Source: Ahmadian et al. 2024, arXiv:2402.14740. Differs: the KL is off; the
paper tunes its coefficient for each task.
"""

from configs import arguments
from configs import common


def get_config(text: str = ''):
  config = common.get_config(text)
  config.algorithm.update(
      name='searchrl.rl.algorithms:rloo',
      kl_coef=0.0,  # per nat, in the reward
  )
  config.learner.minibatches = 1
  arguments.apply_setting(config, text, 'search_r1')
  return config
