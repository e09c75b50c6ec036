# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""DAPO: GRPO on mixed groups, with a higher upper clip and a length penalty.

  python -m searchrl.main --config=configs/dapo.py

Rounds of questions are sampled as in dspo.py, until 12 groups are mixed or 3
rounds are over. The run ends after as many trajectories as grpo.py samples.

Hardware: a core of an Intel Xeon (family 6, model 167). Time: 103 CPU seconds.
Result: exact match of greedy answers, 1 to 4 hops, .94 .00 .00 .00 before and
.94 .84 .69 .53 after, with 1 search before and 1 2 3 4 after (means of five
seeds, 200 questions of each hop count, names of known parts; BENCHMARKS.md). At
the size of Qwen2.5: not yet measured.

Source: Yu et al. 2025, arXiv:2503.14476, with its clip range. Differs: the
lengths are the laptop's, where four-hop answers take about 110 policy tokens.
"""

from configs import arguments
from configs import common
from searchrl.experiment.rules import field


def get_config(text: str = ''):
  config = common.get_config(text)
  config.algorithm.update(
      name='searchrl.rl.algorithms:dapo',
      clip_low=0.2,
      clip_high=0.28,
      # Policy tokens at which the penalty reaches 1.
      max_length=field(192, above=0),
      # Tokens before max_length over which the penalty grows.
      buffer=field(48, above=0),
  )
  config.rollout.max_rounds = 3
  if arguments.parse(text).is_laptop:
    config.train.max_rollouts = 1728  # trajectories; 24 steps of grpo.py
    config.evaluate.every = 2
  if arguments.apply_setting(config, text, 'dspo'):
    length = common.most_tokens(config)
    config.algorithm.update(max_length=length, buffer=length // 5)
  return config
