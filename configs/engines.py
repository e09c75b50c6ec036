# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""The engine matrix: trains with each engine and evaluates with all of them.

  python -m searchrl.main --config=configs/engines.py
  python -m searchrl.main --config=configs/engines.py --seeds=0,1,2
  python -m searchrl.main --config=configs/engines.py:qwen2.5-7b
  python -m searchrl.main --config=configs/engines.py:recipe=ppo

Each engine has a run in runs/engines/NAME, which is evaluated with every engine
at its end. One table shows runs by engine. The engines are random passages,
BM25, an approximate index (HNSW, with low recall on the laptop) and exact
search. The recipe is GRPO on the laptop and PPO with a model, unless recipe=ppo
or recipe=grpo names it, which then begins the names of the runs: ppo_exact.

Hardware: not yet measured. Time: not yet measured. Result: not yet measured;
benchmarks/study/learning.py has the same comparison over five seeds
(BENCHMARKS.md).

Source: Study (Jin et al. 2025, arXiv:2505.15117) 6.1, whose PPO of 7B reaches
.241, .352, .379 and .430, each evaluated with the engine that it was trained
with. A model has the setting `study_outcome`, and its HNSW has 64 links and 16
candidates per search. Differs: the laptop trains with GRPO, and every run is
evaluated with every engine.
"""

from configs import arguments
from configs import common
from configs import grpo
from configs import ppo


def get_config(text: str = ''):
  args = arguments.parse(text, recipe=('grpo', 'ppo'))
  named = args.others['recipe']
  recipe = ppo if named == 'ppo' or args.model and not named else grpo
  if not args.model:
    config = recipe.get_config(args.size)
    vectors, bm25 = dict(encoder='tiny_e5'), {}
    graph = dict(links=8, construction=20, visited=2)
  else:  # a model searches the indexes of configs/build_index.py
    config = recipe.get_config(f'{args.setting or "study_outcome"}/{args.model}')
    vectors, bm25 = dict(index='runs/e5'), dict(index='runs/bm25')
    graph = dict(visited=16)
  engines = dict(
      noise=dict(engine='noise', options={}),
      bm25=dict(engine='bm25', options=bm25),
      hnsw=dict(engine='dense', options=vectors | graph | dict(
          backend='hnsw', min_recall=0.0)),
      exact=dict(engine='dense', options=vectors | dict(backend='exact')),
  )
  config.evaluate.update(initial=False, every=0, noise=False,
                         decodings=('greedy',), engines=engines)
  runs = {name: dict(search=engine) for name, engine in engines.items()}
  return common.as_sweep(config, runs, recipe=named, across='engine')
