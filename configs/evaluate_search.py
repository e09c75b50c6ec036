# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Measures how often an engine finds answers when asked questions unchanged.

  python -m searchrl.main --config=configs/evaluate_search.py \
      --config.search.engine=dense

It reports the Empirical Study's recall (a gold answer is a substring of a
passage), and the same by whole words. To use your own questions and passages,
set data.evaluate and search.corpus.

Hardware: 2 CPU cores (AMD EPYC, family 25). Time: 3 seconds, start included.
Result: the first passage holds the answer of .98 of 200 one-hop questions about
names of known parts; with bm25 of .94, with tiny_e5 of 1.00 (BENCHMARKS.md).
"""

from configs import arguments
from configs import common
from searchrl.experiment.rules import field, seed
import ml_collections


def get_config(text: str = '') -> ml_collections.ConfigDict:
  base = common.as_evaluated(common.get_config(text))
  config = ml_collections.ConfigDict()
  config.job = 'searchrl.jobs.evaluate_search:run'
  config.seed = seed(0)  # seed of the noise engine
  config.search = base.search
  config.data = dict(evaluate='')  # jsonl of questions; '' generates worlds
  config.evaluate = dict(worlds=base.evaluate.worlds)
  config.world = base.world  # options: common knowledge, hard worlds
  config.retrieval = dict(top_ks=field(  # numbers of passages read
      (1, 3, 10), lambda ks: ks and min(ks) >= 1,
      'whole numbers of at least 1'))
  if arguments.parse(text).is_laptop:
    config.evaluate.worlds.update(questions_per_hop=200, common_per_hop=50)
  return config
