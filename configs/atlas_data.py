# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Writes the atlas: real facts as a corpus and questions of 1 to 3 hops.

  python -m searchrl.main --config=configs/atlas_data.py --workdir=runs/atlas_data

The files have the form of any user's data (docs/data.md):

  --config.data.train=runs/atlas_data/train.jsonl \
  --config.data.evaluate=runs/atlas_data/test.jsonl \
  --config.search.corpus=runs/atlas_data/corpus.jsonl

docs/atlas.md shows passages and questions of each kind. It needs the packages
of `pip install 'searchrl[atlas]'`. The same command again changes nothing.

Hardware: 1 CPU core, no accelerator. Time: about 20 CPU seconds.
Result: 34,765 passages and 10,800 questions; BM25 has the right passage among
its first two for 99 % of the queries.
"""

import ml_collections

from searchrl.experiment.rules import field


def get_config():
  config = ml_collections.ConfigDict()
  config.job = 'searchrl.jobs.atlas_data:run'
  config.allow_changes = False  # set by --allow_changes
  config.seed = 0  # seed of the draws, the wording and the split
  # Cities below 100,000 inhabitants; all larger ones are in the corpus.
  config.cities = field(12_000, at_least=0)
  # Entities of each kind, for a small atlas; 0: all. Those that they lead to,
  # such as a city's country and its capital, are added.
  config.per_kind = field(0, at_least=0)
  config.train_per_hop = field(3000, at_least=1)  # questions of 1, 2, 3 hops
  config.test_per_hop = field(600, at_least=1)
  # Share of the entities that only test questions begin with.
  config.test_share = field(0.25, above=0, below=1)
  return config
