# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Reports runs on one HTML page: curves, tables, alerts and trajectories."""

import pathlib
import sys

from searchrl.evaluation.report import page
from searchrl.evaluation.report import reading
from searchrl.experiment import config_checks
from searchrl.experiment import policy
from searchrl.runtime import atomic_files
from searchrl.runtime import processes
from searchrl.runtime import progress
from searchrl.runtime import run_store

FILE = 'report.html'


def run(config, workdir: str) -> None:
  """Writes `workdir`/report.html, and prints that path.

  Args:
    config: Config of the job; see configs/report.py.
    workdir: Directory of reports.

  Raises:
    ValueError, FileNotFoundError: A directory holds no run.
  """
  config_checks.check(config)
  options = config.report
  if not options.runs:
    raise ValueError(
        'report.runs must name the folders of runs, but is empty. Add for '
        'instance --config.report.runs="(\'runs/dspo\',)".')
  folders = [folder for text in options.runs for folder in text.split(',')]
  with progress.phase('Reading the runs'):
    runs = reading.runs([*map(run_store.local, folders)])
  file = pathlib.Path(workdir) / FILE
  if processes.is_first():
    with progress.phase('Writing the page'):
      atomic_files.write(file, page.render(
          runs, lambda run: policy.tokenizer_of(run.folder),
          most=options.trajectories, title=options.title or ', '.join(
              pathlib.Path(folder).resolve().name for folder in folders)))
  processes.say(str(file), file=sys.stdout)

