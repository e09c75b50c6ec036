# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Data scaling: RL on 1, 10, 100 and 1,000 questions, many times each.

  python -m searchrl.main --config=configs/data_scaling.py
  python -m searchrl.main --config=configs/data_scaling.py --seeds=0,1,2
  python -m searchrl.main --config=configs/data_scaling.py:qwen2.5-3b
  python -m searchrl.main --config=configs/data_scaling.py:ppo/qwen2.5-3b

Each number has a run in runs/data_scaling/NUMBER, all with the same number of
steps. One table shows runs by hops. A smaller set is part of a larger set of
the same seed. The recipe is GRPO, unless recipe=ppo or recipe=grpo names it,
which then begins the names of the runs: ppo_100.

Hardware: not yet measured. Time: not yet measured. Result: not yet measured.

Source: Study (Jin et al. 2025, arXiv:2505.15117) appendix E, whose GRPO of 3B
reaches .134, .258, .307, .377 and, with 10,000 questions, .379. It does not name
the reward; a model has the setting `study`, since .379 is near Table 1's .382
with a format reward, and not near its .312 without. Differs: a question that
occurs more than once in a step has its own samples each time.
"""

from configs import arguments
from configs import common
from configs import grpo
from configs import ppo


def get_config(text: str = ''):
  args = arguments.parse(text, recipe=('grpo', 'ppo'))
  is_tiny = not args.model
  recipe = ppo if args.others['recipe'] == 'ppo' else grpo
  config = recipe.get_config(
      args.size if is_tiny else f'{args.setting or "study"}/{args.model}')
  # A single question has one hop count, and is fresh or common knowledge.
  config.data.update(mix=(), common=0.0)
  config.evaluate.update(initial=False, noise=False, decodings=('greedy',))
  if is_tiny:
    config.search.engine, config.search.options = 'bm25', {}
  numbers = (1, 10, 100, 1000, *(() if is_tiny else (10_000,)))
  runs = {str(number): dict(data=dict(limit=number)) for number in numbers}
  return common.as_sweep(config, runs, recipe=args.others['recipe'],
                         across='hops' if is_tiny else 'set')
