# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Runs in, one HTML page out: curves, tables, alarms and trajectories."""

import os
import pathlib
import sys

from searchrl.agent import tokenizer as tokenizers
from searchrl.evaluation.report import page
from searchrl.evaluation.report import reading
from searchrl.experiment import policy
from searchrl.models import weights
from searchrl.runtime import atomic
from searchrl.runtime import processes

FILE = 'report.html'


def run(config, workdir: str) -> None:
  """Writes `workdir`/report.html, and prints that path.

  Args:
    config: see configs/report.py.
    workdir: of reports.

  Raises:
    ValueError, FileNotFoundError: a folder holds no run.
  """
  options = config.report
  if not options.runs or options.trajectories < 0:
    raise ValueError(
        'report.runs must name folders, and report.trajectories be at least 0, '
        f'but they are {tuple(options.runs)} and {options.trajectories}. Add '
        '--config.report.runs="(\'runs/dspo\',)".')
  found = reading.runs(options.runs)
  file = pathlib.Path(workdir) / FILE
  file.parent.mkdir(parents=True, exist_ok=True)
  if processes.is_first():
    atomic.write(file, page.render(
        found, tokenizer_of, most=options.trajectories,
        title=options.title or ', '.join(options.runs)))
  processes.say(str(file), file=sys.stdout)


def tokenizer_of(run: reading.Run) -> tokenizers.Tokenizer | None:
  """That of a run's policy; None, and a line that says so, if it is not there."""
  for path in _models(run):
    try:
      return tokenizers.load(weights.locate(path))
    except (FileNotFoundError, ValueError, OSError) as error:
      processes.say(f'The tokens of {run.name} are not told apart, as its '
                    f'tokenizer cannot be loaded: {str(error).splitlines()[0]}')
      return None
  return None


def _models(run: reading.Run):
  """The model folder of a run, or of the run that an evaluation is of."""
  policy_run = run.config.get('evaluate', {}).get('run', '')
  folder = policy.parse_run(policy_run)[0] if policy_run else run.folder
  for name in ('model', policy.INIT):
    if (folder / name).is_dir():
      yield os.fspath(folder / name)
  config = (policy.recorded(folder) if policy_run and (
      folder / 'config.json').is_file() else run.config)
  yield str(config.get('model', {}).get('path') or policy.TINY_BASE)
