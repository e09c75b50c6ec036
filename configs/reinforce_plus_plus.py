# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""REINFORCE++: PPO without a critic, on returns whitened over the batch.

  python -m searchrl.main --config=configs/reinforce_plus_plus.py

There is one sample per question. With group_baseline=True and a group_size
above 1 it is the paper's "REINFORCE++ w/ baseline".

Hardware: a core of an AMD EPYC (family 25, model 17). Time: 161 CPU seconds.
Result: exact match of greedy answers, 1 to 4 hops, .94 .00 .00 .00 before and
.95 .88 .80 .63 after, with 1 search before and 1 2 3 4 after (means of five
seeds, 200 questions of each hop count, names of known parts; BENCHMARKS.md). At
the size of Qwen2.5: not yet measured.

Source: Hu et al. 2025, arXiv:2501.03262. Differs: retrieved tokens are removed
from a row before its returns are summed; learning rate and steps are ours.
"""

from configs import arguments
from configs import common


def get_config(text: str = ''):
  config = common.get_config(text)
  common.one_sample_a_question(config)
  config.algorithm.update(
      name='searchrl.rl.algorithms:reinforce_plus_plus',
      group_baseline=False,
      clip_low=0.2,
      clip_high=0.2,
      discount=1.0,  # discount per policy token
      kl_coef=1e-3,  # per nat, in the reward
  )
  arguments.apply_setting(config, text, 'zerosearch')
  return config
