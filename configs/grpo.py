# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""GRPO: a ratio per token, and a baseline from the question's own group.

  python -m searchrl.main --config=configs/grpo.py
  python -m searchrl.main --config=configs/grpo.py:qwen2.5-7b

Hardware: a core of an Intel Xeon (family 6, model 167). Time: 129 CPU seconds.
Result: exact match of greedy answers, 1 to 4 hops, .94 .00 .00 .00 before and
.96 .86 .77 .54 after, with 1 search before and 1 2 3 3.9 after (means of five
seeds, 200 questions of each hop count, names of known parts; BENCHMARKS.md). At
the size of Qwen2.5: not yet measured.

Source: Shao et al. 2024, arXiv:2402.03300; as Search-R1 uses it,
arXiv:2503.09516. Differs: the token mean is Search-R1's; on the laptop there is
no KL, and learning rate, group size and steps were found by us.
"""

from configs import arguments
from configs import common
from searchrl.experiment.rules import tracked


def get_config(text: str = ''):
  config = common.get_config(text)
  config.algorithm.update(
      name='searchrl.rl.algorithms:grpo',
      clip_low=0.2,
      clip_high=0.2,
      aggregation='token_mean',  # Search-R1's; the paper has sequence_mean
      kl_coef=0.0,  # per nat; the paper has 0.04, Search-R1 1e-3
      entropy_coef=0.0,
  )
  if not arguments.apply_setting(config, text, 'search_r1'):
    # The shipped encoder makes the vectors when a run starts. It knows generated
    # worlds: with a corpus of your own, the engine is BM25 unless it is set.
    config.search.engine = tracked('dense')
    config.search.options = dict(encoder='tiny_e5', backend='scann')
  return config
