# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""PPO: a ratio per token, and a critic as baseline.

  python -m searchrl.main --config=configs/ppo.py

There is one sample per question, so that a step has 72 questions. The critic
has the policy's backbone, a head that returns 0 at first, and its own
optimizer. The KL to the model that the run started from is subtracted from the
rewards.

Hardware: a core of an AMD EPYC (family 25, model 17). Time: 231 CPU seconds.
Result: exact match of greedy answers, 1 to 4 hops, .94 .00 .00 .00 before and
.96 .87 .78 .64 after, with 1 search before and 1 2 3 4 after (means of five
seeds, 200 questions of each hop count, names of known parts; BENCHMARKS.md). At
the size of Qwen2.5: not yet measured.

Source: Schulman et al. 2017, arXiv:1707.06347; as Search-R1 uses it,
arXiv:2503.09516: discount and lambda 1, value clip 0.5, kl_coef 1e-3, a
critic's learning rate of 1e-5 beside a policy's of 1e-6. Differs: learning
rates here are the laptop's, found by us.
"""

from configs import arguments
from configs import common


def get_config(text: str = ''):
  config = common.get_config(text)
  common.one_sample_a_question(config)
  config.algorithm.update(
      name='searchrl.rl.algorithms:ppo',
      clip_low=0.2,
      clip_high=0.2,
      value_clip=0.5,  # largest change of a value, in units of the reward
      discount=1.0,  # discount per policy token
      gae_lambda=1.0,
      whiten=True,
      kl_coef=1e-3,  # per nat, in the reward
      entropy_coef=0.0,
  )
  if not arguments.apply_setting(config, text, 'search_r1'):
    config.critic.optimizer.learning_rate = 1e-3  # the paper has 1e-5
    config.critic.warmup_updates = 2  # updates of the critic only, at first
  return config
