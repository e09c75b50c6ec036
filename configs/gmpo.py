# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""GMPO: the geometric mean of a row's clipped token ratios.

  python -m searchrl.main --config=configs/gmpo.py

Hardware: a core of an AMD EPYC (family 25, model 17) or, one seed, an Intel
Xeon (family 6, model 167). Time: 151 CPU seconds. Result: exact match of greedy
answers, 1 to 4 hops, .94 .00 .00 .00 before and .96 .86 .74 .59 after, with 1
search before and 1 2 3 4 after (means of five seeds, 200 questions of each hop
count, names of known parts; BENCHMARKS.md). At the size of Qwen2.5: not yet
measured.

Source: Zhao et al. 2025, arXiv:2507.20673, with its clip range. Differs:
learning rate, group size and steps are the laptop's.
"""

from configs import arguments
from configs import common


def get_config(text: str = ''):
  config = common.get_config(text)
  config.algorithm.update(
      name='searchrl.rl.algorithms:gmpo',
      clip_low=0.4,  # log ratio in nats: a ratio of 0.67
      clip_high=0.4,  # log ratio in nats: a ratio of 1.49
      kl_coef=0.0,  # per nat, to the model that the run started from
  )
  arguments.apply_setting(config, text, 'search_r1')
  return config
