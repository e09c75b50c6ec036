# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""The full evaluation of a run: 200 questions of each hop count, every way.

  python -m searchrl.main --config=configs/evaluate.py --config.evaluate.run=runs/dspo

Without `evaluate.run`, the model of `model.path` is judged; the shipped tiny
base model by default. Writes runs/evaluate/table.json and records.jsonl.

Hardware: 2 CPU cores. Time: not yet measured by itself.
Result: the shipped base model's exact match, 1 to 4 hops, names of known parts:
.94 .86 .86 .68 greedy, .31 .10 .04 .01 sampled (seed 0; BENCHMARKS.md).
"""

from configs import common


def get_config(size: str = 'laptop'):
  config = common.get_config(size)
  config.job = 'searchrl.jobs.evaluate:run'
  config.search.engine = ''  # that of the run, with its options; else bm25
  if size == 'laptop':
    config.evaluate.worlds.questions_per_hop = 200
  return config
