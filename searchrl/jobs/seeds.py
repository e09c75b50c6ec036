# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""One config with several seeds: a run each, and one table with their spread."""

from collections.abc import Sequence
import json
import pathlib
import sys
from typing import Any

import numpy as np

from searchrl.evaluation import figures
from searchrl.evaluation import suite
from searchrl.runtime import plugins
from searchrl.runtime import processes

FILE = 'seeds.json'
_CASE = ('set', 'engine', 'decoding', 'hops')
_SCORES = ('em', 'f1', 'searches')


def run(config, workdir: str, seeds: Sequence[int]) -> None:
  """Does the config's job with each seed; the same call goes on.

  Args:
    config: of a job whose folder gets evaluation/after/, as recipes' do.
    workdir: gets a folder seed_N each, and the table.
    seeds: at least one, all different.

  Raises:
    ValueError: the seeds are none, or the job is not one that is evaluated.
  """
  if not seeds or len({*seeds}) < len(seeds) or min(seeds) < 0:
    raise ValueError('--seeds must be different numbers from 0 on, as in '
                     f'--seeds=0,1,2, but are {list(seeds)}.')
  job, folder = plugins.resolve(
      config.job, field='job', ours='searchrl.jobs.train:run'), (
          pathlib.Path(workdir))
  for seed in seeds:
    own = config.copy_and_resolve_references()
    with own.unlocked():
      own.seed = seed
    here = folder / f'seed_{seed}'
    processes.say(f'\nSeed {seed}: {here}')
    job(own, str(here))
    if not processes.on_first(str(here), _table(here).exists):
      if own.job == 'searchrl.jobs.train:run':
        return  # stopped, and said so
      raise ValueError(
          '--seeds is for runs that are evaluated at their end, but '
          f'{config.job} has left no {_table(here)}.')
  processes.on_first('seeds', lambda: _write(folder, seeds))


def _table(folder: pathlib.Path) -> pathlib.Path:
  return folder / 'evaluation' / 'after' / suite.TABLE


def _write(folder: pathlib.Path, seeds: Sequence[int]) -> None:
  """Writes and prints means and standard deviations over seeds."""
  by_case: dict[tuple, list[dict[str, Any]]] = {}
  for seed in seeds:
    for row in json.loads(_table(folder / f'seed_{seed}').read_text()):
      by_case.setdefault(tuple(row[name] for name in _CASE), []).append(row)
  rows = []
  for case, of in by_case.items():
    row = dict(zip(_CASE, case)) | {'seeds': len(of)}
    for name in _SCORES:
      values = [one[name] for one in of]
      row[name] = float(np.mean(values))
      if len(of) > 1:
        row[f'{name} ±'] = float(np.std(values, ddof=1))
    rows.append(row)
  (folder / FILE).write_text(json.dumps(rows, indent=1) + '\n')
  columns = list(dict.fromkeys(key for row in rows for key in row))
  print(f'Means over seeds {", ".join(map(str, seeds))}, ± standard deviation\n',
        figures.table(rows, columns), sep='\n', file=sys.stdout)
