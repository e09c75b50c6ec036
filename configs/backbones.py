# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""The backbone sweep: one recipe, started from each of several models.

  python -m searchrl.main --config=configs/backbones.py
  python -m searchrl.main --config=configs/backbones.py --seeds=0,1,2
  python -m searchrl.main --config=configs/backbones.py:qwen2.5-7b

Each model has a run in runs/backbones/NAME, evaluated before and after, and all
are compared in one table. On the laptop the models are ours: tiny_base searches
once, tiny_raw seldom keeps the format, and tiny_instruct has learned every
skill. At a model's size the sweep has all models with as many parameters: base,
instruct and, if there is one, distilled from R1.

Hardware: not yet measured. Time: not yet measured. Result: not yet measured.

Source: Study (Jin et al. 2025, arXiv:2505.15117) 5.1: GRPO reaches .420 from
Qwen2.5-7B and .100 from DeepSeek-R1-Distill-Qwen-7B.
"""

from configs import grpo
from searchrl.papers import paper_models
from configs import settings


def get_config(size: str = 'laptop'):
  config = grpo.get_config(size)
  config.evaluate.update(noise=False, decodings=('greedy',))
  if settings.is_laptop(size) or size == 'smoke':
    config.search.engine, config.search.options = 'bm25', {}
    runs = {name: dict(model=dict(path=name))
            for name in ('tiny_raw', 'tiny_base', 'tiny_instruct')}
  else:
    setting, name = settings.parse(size, 'search_r1')
    scale = paper_models.MODELS[name].billions
    runs = {other.replace('.', '_'): _of(f'{setting}/{other}')
            for other, model in paper_models.MODELS.items()
            if model.billions == scale}
  config.sweep = dict(
      job=config.job, order=tuple(runs), runs=runs,
      across='hops' if settings.is_laptop(size) or size == 'smoke' else 'set')
  config.job = 'searchrl.jobs.sweep:run'
  return config


def _of(size: str) -> dict:
  """Returns the config fields that depend on the model: path and dialogue."""
  own = grpo.get_config(size)
  return dict(model=dict(path=own.model.path), dialogue=own.dialogue)
