# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""GSPO: one ratio for the whole sequence, and the group's baseline.

  python -m searchrl.main --config=configs/gspo.py

Hardware: a core of an Intel Xeon (family 6, model 167). Time: 132 CPU seconds.
Result: exact match of greedy answers, 1 to 4 hops, .94 .00 .00 .00 before and
.96 .83 .72 .56 after, with 1 search before and 1 2 3 4 after (means of five
seeds, 200 questions of each hop count, names of known parts; BENCHMARKS.md). At
the size of Qwen2.5: not yet measured.

Source: Zheng et al. 2025, arXiv:2507.18071. Differs: its clip range, 3e-4 and
4e-4, is for long answers of large models at small learning rates. Here a turn
has tens of tokens and the learning rate is 500 times larger, so the range is
ours.
"""

from configs import arguments
from configs import common


def get_config(text: str = ''):
  config = common.get_config(text)
  config.algorithm.update(
      name='searchrl.rl.algorithms:gspo',
      clip_low=0.05,  # the paper has 3e-4
      clip_high=0.05,  # the paper has 4e-4
      kl_coef=0.0,  # per nat, to the model that the run started from
      entropy_coef=0.0,
  )
  arguments.apply_setting(config, text, 'dspo')
  return config
