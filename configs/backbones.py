# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""The backbone sweep: one recipe, started from each of several models.

  python -m searchrl.main --config=configs/backbones.py
  python -m searchrl.main --config=configs/backbones.py --seeds=0,1,2
  python -m searchrl.main --config=configs/backbones.py:qwen2.5-7b
  python -m searchrl.main --config=configs/backbones.py:ppo/qwen2.5-7b

Each model has a run in runs/backbones/NAME, evaluated before and after, and all
are compared in one table. On the laptop the models are ours: tiny_base searches
once, tiny_raw seldom keeps the format, and tiny_instruct has learned every
skill. With a model, the sweep has all models with as many parameters: base,
instruct and, if there is one, distilled from R1. The recipe is GRPO, unless
recipe=ppo or recipe=grpo names it, which then begins the names of the runs:
ppo_tiny_base.

Hardware: not yet measured. Time: not yet measured. Result: not yet measured.

Source: Study (Jin et al. 2025, arXiv:2505.15117) 5.1: GRPO reaches .420 from
Qwen2.5-7B and .100 from DeepSeek-R1-Distill-Qwen-7B. A model has the setting
`study_models`.
"""

from configs import arguments
from configs import common
from configs import grpo
from configs import ppo
from searchrl.papers.known_models import MODELS


def get_config(text: str = ''):
  args = arguments.parse(text, recipe=('grpo', 'ppo'))
  recipe = ppo if args.others['recipe'] == 'ppo' else grpo
  setting = args.setting or 'study_models'
  config = recipe.get_config(
      f'{setting}/{args.model}' if args.model else args.size)
  config.evaluate.update(noise=False, decodings=('greedy',))
  if args.size:
    config.search.engine, config.search.options = 'bm25', {}
    runs = {name: dict(model=dict(path=name))
            for name in ('tiny_raw', 'tiny_base', 'tiny_instruct')}
  else:
    runs = {name.replace('.', '_'): _of(recipe.get_config(f'{setting}/{name}'))
            for name, model in MODELS.items()
            if model.billions == MODELS[args.model].billions}
  return common.as_sweep(config, runs, recipe=args.others['recipe'],
                         across='hops' if args.size else 'set')


def _of(config) -> dict:
  """Returns the config fields that depend on the model: path and dialogue."""
  return dict(model=dict(path=config.model.path), dialogue=config.dialogue)
