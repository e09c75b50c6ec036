# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Runs the arms of configs/archive.py over seeds, and compares them.

  python benchmarks/archive/arms.py run runs/archive --seeds 0 1 2 3 4
  python benchmarks/archive/arms.py show runs/archive

`run` goes on where it was stopped. `show` prints the exact match of greedy
answers by kind of question, before and after RL, the calls of tools per
question, and the differences between arms. These are paired by seed and
question, with bootstrap intervals over questions.
"""

import argparse
import pathlib
import subprocess
import sys

from configs.archive import ARMS
import numpy as np

from searchrl.evaluation import compare
from searchrl.evaluation import figures
from searchrl.evaluation import shards
from searchrl.jobs.archive_data import SETS

# Pairs of arms, and the kinds of questions that they are compared on.
PAIRS = (('all', 'no_open', ('deep',)), ('all', 'no_open', ('near',)),
         ('all', 'no_calculate', ('sum', 'difference')),
         ('no_open', 'random', ('deep',)),
         ('no_calculate', 'random', ('sum', 'difference')),
         ('all', 'failing', ('near', 'deep', 'sum', 'difference')))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('command', choices=('run', 'show'))
  parser.add_argument('folder', type=pathlib.Path)
  parser.add_argument('--seeds', nargs='+', type=int, default=[0])
  parser.add_argument('--arms', nargs='+', default=[*ARMS], choices=[*ARMS])
  options = parser.parse_args()
  if options.command == 'run':
    for seed in options.seeds:
      for arm in options.arms:
        run(options.folder / f'seed{seed}', seed, arm)
    return
  runs = {(arm, seed.name): answers(seed / arm / 'evaluation')
          for seed in sorted(options.folder.glob('seed*')) for arm in ARMS
          if (seed / arm / 'evaluation' / 'after' / 'records').exists()}
  for rows in (by_kind(runs), differences(runs)):
    if rows:
      print(figures.table(rows, list(rows[0])) + '\n')


def run(folder: pathlib.Path, seed: int, arm: str) -> None:
  """Runs all phases of an arm; done ones are not run again."""
  subprocess.run(
      [sys.executable, '-m', 'searchrl.main', f'--workdir={folder}',
       f'--config=configs/archive.py:arm={arm}', f'--config.seed={seed}'],
      check=True)


def answers(folder: pathlib.Path) -> dict[str, dict[str, dict[str, float]]]:
  """Returns em and calls of tools of each question, before and after RL."""
  found: dict[str, dict[str, dict[str, float]]] = {}
  for when in ('before', 'after'):
    found[when] = {}
    for record in shards.read_all(folder / when / 'records'):
      turns = record['trajectory']['turns']
      kinds = [turn['action']['kind'] for turn in turns
               if turn['observation_tokens']]
      uid = record['trajectory']['question']['uid']
      found[when][uid] = {
          'em': float(record['em']), 'open': kinds.count('open'),
          'calculate': kinds.count('calculate')}
  return found


def kind_of(uid: str) -> str:
  """Returns the kind of a test question, test-KIND-NUMBER."""
  return uid.rsplit('/', 1)[-1].split('-')[1]


def by_kind(runs) -> list[dict[str, str]]:
  """Returns a row for each run, before and after RL."""
  rows = []
  for (arm, seed), found in runs.items():
    for when in ('before', 'after'):
      row = {'': f'{arm}, {seed}, {when}'}
      for kind in SETS:
        values = [v for uid, v in found[when].items() if kind_of(uid) == kind]
        row[kind] = f'{np.mean([v["em"] for v in values]):.2f}'
        if kind in ('deep', 'sum'):
          tool = 'open' if kind == 'deep' else 'calculate'
          row[f'{tool} per {kind}'] = (
              f'{np.mean([v[tool] for v in values]):.2f}')
      rows.append(row)
  return rows


def differences(runs) -> list[dict[str, str]]:
  """Returns a row for each pair of arms that have runs of the same seeds."""
  rows = []
  for one, other, kinds in PAIRS:
    values = [
        found['after'][uid]['em'] - runs[other, seed]['after'][uid]['em']
        for (arm, seed), found in runs.items() if arm == one
        and (other, seed) in runs
        for uid in found['after'] if kind_of(uid) in kinds]
    if values:
      low, high = compare.bootstrap(values)
      seeds = sum(arm == one and (other, seed) in runs for arm, seed in runs)
      rows.append({'': f'{one} - {other}', 'questions': ', '.join(kinds),
                   'seeds': str(seeds), 'difference': f'{np.mean(values):+.3f}',
                   '95 %': f'{low:+.3f} to {high:+.3f}'})
  return rows


if __name__ == '__main__':
  main()
