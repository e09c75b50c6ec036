# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Computes the cost of a run's searches, by a paid engine or your own model.

  python -m searchrl.main --config=configs/search_cost.py \
      --config.cost.run=runs/zerosearch

Queries, hours and tokens are those that the run has counted. The prices are
those behind ZeroSearch's Table 8: $586.7 for 64,000 queries, and $17.7 for 12
hours of an A100. For your own prices set --config.cost.thousand_queries and
--config.cost.device_hour.

Result: the paper's counts give its table; for a run here, see BENCHMARKS.md.

Source: Sun et al. 2025, ZeroSearch, arXiv:2505.04588, appendix D.
"""

import ml_collections

from searchrl.experiment.rules import field


def get_config() -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  config.job = 'searchrl.papers.zerosearch.search_cost:run'
  config.cost = dict(
      run='',  # directory of a training run
      # price of 1,000 paid queries, in any currency
      thousand_queries=field(9.17, at_least=0),
      # price of a device for an hour, in the same currency
      device_hour=field(1.475, at_least=0),
      # numbers of devices of your own model, a row each
      devices=field((1, 2, 4), at_least=1),
  )
  return config
