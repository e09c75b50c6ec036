# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Dr. GRPO: GRPO without division by the spread or by a row's own length.

  python -m searchrl.main --config=configs/dr_grpo.py

Hardware: a core of an AMD EPYC (family 25, model 17) or, one seed, an Intel
Xeon (family 6, model 167). Time: 145 CPU seconds. Result: exact match of greedy
answers, 1 to 4 hops, .94 .00 .00 .00 before and .95 .86 .75 .55 after, with 1
search before and 1 2 3 4 after (means of five seeds, 200 questions of each hop
count, names of known parts; BENCHMARKS.md). At the size of Qwen2.5: not yet
measured.

Source: Liu et al. 2025, arXiv:2503.20783. Differs: learning rate, group size
and steps are the laptop's; `length` is the most tokens that a policy may write.
"""

from configs import arguments
from configs import common
from searchrl.experiment.rules import field


def get_config(text: str = ''):
  config = common.get_config(text)
  config.algorithm.update(
      name='searchrl.rl.algorithms:dr_grpo',
      # Tokens: 6 turns of 48, the most a policy may write.
      length=field(288, above=0),
      clip_low=0.2,
      clip_high=0.2,
      kl_coef=0.0,  # per nat, to the model that the run started from
  )
  if arguments.apply_setting(config, text, 'search_r1'):
    config.algorithm.length = common.most_tokens(config)
  return config
