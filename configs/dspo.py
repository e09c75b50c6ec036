# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""DSPO: GSPO's sequence ratio on groups with mixed outcomes; the default run.

  python -m searchrl.main --config=configs/dspo.py
  python -m searchrl.main --config=configs/dspo.py:qwen2.5-7b-instruct

A step samples rounds of questions until 12 groups have mixed outcomes, or 3
rounds are over. Groups beyond these are used first in the next step. The run
ends after as many trajectories as grpo.py samples.

Hardware: 2 CPU cores (AMD EPYC, family 25, model 17). Time: 88 seconds, 139
CPU seconds. Result: exact match of greedy answers, 1 to 4 hops, .94 .00 .00 .00
before and .95 .85 .74 .57 after, with 1 search before and 1 2 3 4 after (means
of five seeds, 200 questions of each hop count, names of known parts;
BENCHMARKS.md). At the size of Qwen2.5: not yet measured.

Source: DSPO, arXiv:2510.09255. The paper gives no learning rate, clip range,
group size or round limit: all are ours, with GSPO's clip range and four
mini-batches for Qwen2.5.
"""

from configs import arguments
from configs import common


def get_config(text: str = ''):
  config = common.get_config(text)
  config.algorithm.update(
      name='searchrl.rl.algorithms:dspo',
      clip_low=0.05,  # the GSPO paper, and with a model: 3e-4
      clip_high=0.05,  # the GSPO paper, and with a model: 4e-4
      kl_coef=0.0,  # per nat, to the model that the run started from
      entropy_coef=0.0,
  )
  config.rollout.max_rounds = 3
  args = arguments.parse(text)
  if args.is_laptop:
    config.train.max_rollouts = 1728  # trajectories; 24 steps of grpo.py
    config.evaluate.every = 2
  if args.size == 'laptop':  # as many updates as grpo.py, in fewer batches
    config.learner.minibatches = 3
  arguments.apply_setting(config, text, 'dspo')
  return config
