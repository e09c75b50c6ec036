# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""R1: GRPO without search; the policy answers from memory.

  python -m searchrl.main --config=configs/r1.py

This baseline shows what RL teaches without looking anything up. It has the
prompt for a direct answer and one turn, so that the search engine has no
effect.

Hardware: a core of an Intel Xeon (family 6, model 167). Time: 34 CPU seconds.
Result: exact match of greedy answers to fresh questions .00, to famous ones of
1 to 3 hops .95 .79 .68, from 1.00 .45 .16 (means of five seeds; BENCHMARKS.md).
At the size of Qwen2.5: not yet measured.

Source: R1 of Search-R1, arXiv:2503.09516, after DeepSeek-R1, arXiv:2501.12948.
"""

from configs import arguments
from configs import grpo


def get_config(text: str = ''):
  config = grpo.get_config(text)
  config.rollout.budgets.max_turns = 1
  if not arguments.parse(text).model:
    config.dialogue = 'searchrl.agent.dialogue:laptop_answer'
    config.search.engine, config.search.options = 'bm25', {}
  else:
    plain = config.dialogue.startswith('searchrl.agent.dialogue:')
    config.dialogue = f'searchrl.agent.{"dialogue" if plain else "chat"}:r1'
  return config
