# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""The full evaluation of a run: 200 questions of each hop count, greedily.

  python -m searchrl.main --config=configs/evaluate.py --config.evaluate.run=runs/dspo

Without `evaluate.run`, the model of `model.path` is evaluated; the shipped tiny
base model by default. Sampled answers, random passages and common knowledge
have 50 questions each. Writes runs/evaluate/table.json and records/.

Hardware: 2 CPU cores (AMD EPYC, family 25). Time: 121 CPU seconds.
Result: exact match of greedy answers, 1 to 4 hops, names of known parts, after
dspo.py: .93 .85 .78 .55 (seed 0); sampled, .82 .62 .50 .26.
"""

from configs import common
from configs import settings


def get_config(size: str = 'laptop'):
  config = common.as_evaluated(common.get_config(size))
  size = 'laptop' if settings.is_laptop(size) else size  # of any updates
  config.job = 'searchrl.jobs.evaluate:run'
  config.evaluate.update(
      run='',  # whose newest checkpoint is evaluated; '': the model itself
      step=0,  # another one draws other samples
      samples=1,  # a question, where sampled: for pass@k and the majority
  )
  if size in ('laptop', 'smoke'):  # else the setting's
    config.search.engine = ''  # that of the run, with its options; else bm25
  if size == 'laptop':
    config.evaluate.worlds.update(
        questions_per_hop=200, common_per_hop=50, few_per_hop=50)
  return config
