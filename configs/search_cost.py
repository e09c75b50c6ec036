# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""What the searches of a run cost: by a paid engine, or by a model of one's own.

  python -m searchrl.main --config=configs/search_cost.py \
      --config.cost.run=runs/zerosearch

Queries, hours and tokens are those that the run has counted. The prices are
those behind ZeroSearch's Table 8: $586.7 for 64,000 queries, and $17.7 for 12
hours of an A100. Yours: --config.cost.thousand_queries=... .device_hour=...

Result: the paper's counts give its table; of a run here, see BENCHMARKS.md.

Source: Sun et al. 2025, ZeroSearch, arXiv:2505.04588, appendix D.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  config.job = 'searchrl.jobs.search_cost:run'
  config.cost = dict(
      run='',  # the folder of a training run
      thousand_queries=9.17,  # to a paid engine, in any currency
      device_hour=1.475,  # in the same
      devices=(1, 2, 4),  # that a model of one's own takes: a row each
  )
  return config
