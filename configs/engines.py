# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""The engine matrix: trains with each engine and evaluates with all of them.

  python -m searchrl.main --config=configs/engines.py
  python -m searchrl.main --config=configs/engines.py --seeds=0,1,2
  python -m searchrl.main --config=configs/engines.py:qwen2.5-7b

Each engine has a run in runs/engines/NAME, which is evaluated with every engine
at its end. One table shows runs by engine. The engines are random passages,
BM25, an approximate index (HNSW, with low recall on the laptop) and exact
search.

Hardware: not yet measured. Time: not yet measured. Result:
benchmarks/learning.py has the same comparison over five seeds (BENCHMARKS.md).

Source: Study (Jin et al. 2025, arXiv:2505.15117) 5.2, whose PPO of 7B reaches
.241, .352, .379 and .430, each evaluated with the engine that it was trained
with. Differs: the laptop trains with GRPO, and every run is evaluated with
every engine.
"""

from configs import arguments
from configs import grpo
from configs import ppo


def get_config(text: str = ''):
  is_tiny = not arguments.parse(text).model
  config = (grpo if is_tiny else ppo).get_config(text)
  encoder = dict(encoder='tiny_e5')
  hasty = dict(links=8, construction=20, visited=2, min_recall=0.0)
  engines = dict(
      noise=dict(engine='noise', options={}),
      bm25=dict(engine='bm25', options={}),
      hnsw=dict(engine='dense', options=encoder | hasty | dict(backend='hnsw')),
      exact=dict(engine='dense', options=encoder | dict(backend='exact')),
  )
  if not is_tiny:  # over the index of configs/build_index.py
    index = dict(config.search.options)
    engines['hnsw']['options'] = index | dict(backend='hnsw')
    engines['exact']['options'] = index | dict(backend='exact')
  config.evaluate.update(initial=False, every=0, noise=False,
                         decodings=('greedy',), engines=engines)
  config.sweep = dict(
      job=config.job,
      order=tuple(engines),
      runs={name: dict(search=of) for name, of in engines.items()},
      across='engine',  # name of the last table's columns
  )
  config.job = 'searchrl.jobs.sweep:run'
  return config
