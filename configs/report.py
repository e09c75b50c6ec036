# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""One or several runs as one HTML page, which needs no network.

  python -m searchrl.main --config=configs/report.py \
      --config.report.runs="('runs/dspo',)"

Writes runs/report/report.html: curves with their spread over seeds, the time of
a step, alarms, tables, and a browser of trajectories, each token with its
log-prob, ratio and advantage. A folder of runs, as --seeds makes it, is all of
them. docs/report.md shows it.

Hardware: 2 CPU cores (AMD EPYC, family 25). Time: 10 seconds for four runs of
the laptop. Result: a page of 1 to 3 MB.
"""

import ml_collections


def get_config(size: str = 'laptop') -> ml_collections.ConfigDict:
  if size != 'laptop':
    raise ValueError(f"size must be 'laptop', but is {size!r}.")
  config = ml_collections.ConfigDict()
  config.job = 'searchrl.jobs.report:run'
  config.report = dict(
      runs=('runs/dspo',),  # folders of runs or evaluations, or folders of those
      trajectories=2000,  # on the page at most, evenly over steps; 0: none
      title='',  # of the page; '': the runs' names
  )
  return config
