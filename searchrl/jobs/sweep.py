# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a job with several seeds or settings, and makes one table."""

import copy
from collections.abc import Iterator, Mapping, Sequence
import functools
import pathlib
from typing import Any

import numpy as np

from searchrl.evaluation import figures
from searchrl.evaluation import evaluator
from searchrl.runtime import atomic_files
from searchrl.runtime import config_fields
from searchrl.runtime import plugins
from searchrl.runtime import processes

FILE = 'sweep.json'
_CASE = ('run', 'method', 'set', 'engine', 'decoding', 'hops')
_SCORES = ('em', 'f1', 'searches')


def run(config, workdir: str, seeds: Sequence[int] = ()) -> None:
  """Runs a job with each setting and seed; the same call resumes it.

  Args:
    config: Config of a job. Its `sweep`, if it has one, names the job and the
      changes of each run; see configs/engines.py.
    workdir: Directory for NAME/seed_N of each run, and for the table if the
      runs are evaluated.
    seeds: Seeds given by --seeds. (): the config's seed.

  Raises:
    ValueError: A seed is negative or given twice, or a setting changes a field
      that does not exist.
  """
  if len({*seeds}) < len(seeds) or min(seeds, default=0) < 0:
    raise ValueError('--seeds must be different numbers from 0 on, as in '
                     f'--seeds=0,1,2, but are {list(seeds)}.')
  folder = pathlib.Path(workdir)
  runs = [*_runs(config, folder, seeds)]  # checks all before the first begins
  done = []
  for name, changed, here in runs:
    job = plugins.resolve(changed.job, field='job',
                          ours='searchrl.jobs.train:run')
    processes.say(f'\n{here}')
    job(changed, str(here))
    done.append((name, processes.on_first(
        str(here), functools.partial(_table, here))))
  if None in [table for _, table in done]:
    processes.say(f'\nNo table: runs of {runs[0][1].job} are not evaluated. '
                  'Evaluate what they made by configs/evaluate.py.')
    return
  processes.on_first('sweep', lambda: _write(folder, done, config, seeds))


def _runs(config, folder: pathlib.Path, seeds: Sequence[int]
         ) -> Iterator[tuple[str, Any, pathlib.Path]]:
  """Yields (name, config, directory) for each setting and seed to run.

  Raises:
    ValueError: `sweep.order` is empty or names no setting, or a setting changes
      a field that does not exist.
  """
  swept = config.get('sweep')
  if swept and not swept.order:
    raise ValueError('sweep.order must name runs, of '
                     f'{", ".join(swept.runs)}, but is empty.')
  for name in swept.order if swept else ('',):
    if swept and name not in swept.runs:
      raise ValueError(
          f'sweep.order must name entries of sweep.runs, which are '
          f'{", ".join(swept.runs)}, but names {name!r}.')
    for seed in seeds or (None,):
      changed = copy.deepcopy(config)  # with the rules of its fields
      with changed.unlocked():
        if swept:
          changed.job = swept.job
          del changed.sweep
          config_fields.change(
              changed, swept.runs[name], f'sweep.runs.{name}')
        if seed is not None:
          changed.seed = seed
      here = folder / name if name else folder
      yield name, changed, here if seed is None else here / f'seed_{seed}'


def _table(folder: pathlib.Path) -> list[dict[str, Any]] | None:
  """Returns the rows of a run's evaluation, or None if there is none."""
  trained = evaluator.read_table(folder / 'evaluation' / 'after')
  return evaluator.read_table(folder) if trained is None else trained


def _write(folder: pathlib.Path, done: Sequence[tuple[str, list[dict]]],
           config, seeds: Sequence[int]) -> None:
  """Writes and prints a table of all runs, with scores averaged over seeds.

  With several seeds, it has standard deviations, too.
  """
  by_case: dict[tuple, list[dict[str, Any]]] = {}
  for name, rows in done:
    for row in ({'run': name} | row for row in rows if 'em' in row):
      by_case.setdefault(tuple(row.get(key, '') for key in _CASE), []).append(
          row)
  rows = [_row(*each, count=len(seeds or (0,))) for each in by_case.items()]
  atomic_files.write_json(folder / FILE, rows)
  print(f'Means over {len(seeds)} seeds, ± standard deviation\n'
        if len(seeds) > 1 else '', figures.table(rows), sep='\n')
  if across := config.get('sweep', {}).get('across', ''):
    print(_crossed(rows, across))


def _row(case: tuple, rows: Sequence[Mapping[str, Any]], count: int
        ) -> dict[str, Any]:
  row = {key: value for key, value in zip(_CASE, case) if value != ''}
  row |= {'seeds': len(rows)} if count > 1 else {}
  main = rows[0].get('score', 'em')
  row |= {'score': main} if main != 'em' else {}
  for name in dict.fromkeys((main, *_SCORES)):
    values = [of_seed[name] for of_seed in rows]
    row[name] = float(np.mean(values))
    if len(rows) > 1:
      row[f'{name} ±'] = float(np.std(values, ddof=1))
  return row


def _crossed(rows: Sequence[Mapping[str, Any]], across: str) -> str:
  """Returns a table of the score, with a row per run.

  It has a column per value of `across`, one of set, engine, decoding and hops.
  The set, the engine and the decoding are those of the first row, except for
  `across`. Scores are over all hops, unless `across` is 'hops'.
  """
  fixed = {key: rows[0][key] for key in ('set', 'engine', 'decoding')
           if key != across}
  if across != 'hops':
    fixed['hops'] = evaluator.ALL
  crossed: dict[str, dict[str, Any]] = {}
  for row in rows:
    if fixed.items() <= row.items():
      crossed.setdefault(row['run'], {'run': row['run']})[
          str(row[across])] = evaluator.main_score(row)
  lines = list(crossed.values())
  where = ', '.join(map(str, fixed.values()))
  name = evaluator.score_name(rows[0])
  title = f'{name[0].upper()}{name[1:]} ({where}): runs by {across}'
  return f'\n{title}\n\n' + figures.table(lines)
