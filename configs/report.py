# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Shows one or several runs in one HTML page, which needs no network.

  python -m searchrl.main --config=configs/report.py:runs/dspo,runs/grpo

It writes runs/report/report.html. The page has curves with their spread over
seeds, the time of a step, alerts, tables, and a browser of trajectories. The
browser shows each token's log-prob, ratio and advantage. A directory of runs,
as --seeds makes it, stands for all of them. docs/report.md shows the page.

Hardware: 2 CPU cores (AMD EPYC, family 25). Time: 10 seconds for four runs of
the laptop. Result: a page of 1 to 3 MB.
"""

import ml_collections

from searchrl.experiment.rules import field


def get_config(text: str = '') -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  config.job = 'searchrl.jobs.report:run'
  config.report = dict(
      # Runs, evaluations, or directories of them. A text may join several by
      # commas.
      runs=tuple((text or 'runs/dspo').split(',')),
      # Most trajectories on the page, spread evenly over the steps.
      trajectories=field(2000, at_least=0, zero='none'),
      title='',  # title of the page; '': the runs' names
  )
  return config
