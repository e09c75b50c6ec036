# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Runs the arms of configs/archive.py over seeds, and compares them.

  python benchmarks/archive/arms.py run runs/archive --parallel 2
  python benchmarks/archive/arms.py show runs/archive

`run` goes on where it was stopped. It tunes once, with seed 0. Then come an arm
with all seeds, which have archives, questions and RL of their own, and the next.
Each run computes with one thread, so that it gives the same bits alone and
beside others. `show` prints the exact match of greedy answers by kind of
question, before and after RL, the calls of tools per question, and the
differences between arms. These are paired by seed and question, with bootstrap
intervals over seeds and the questions of each.
"""

import argparse
import concurrent.futures
import os
import pathlib
import subprocess
import sys
import threading

from configs.archive import ARMS
import numpy as np

from searchrl.evaluation import figures
from searchrl.evaluation import shards
from searchrl.jobs.archive_data import SETS

# Pairs of arms, and the kinds of questions that they are compared on.
PAIRS = (('all', 'no_open', ('deep',)), ('all', 'no_open', ('near',)),
         ('all', 'no_calculate', ('sum', 'difference')),
         ('no_open', 'random', ('deep',)),
         ('no_calculate', 'random', ('sum', 'difference')),
         ('all', 'failing', ('deep',)),
         ('all', 'failing', ('sum', 'difference')))
THREADS = dict.fromkeys(
    ('NPROC', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS'), '1')
TUNED = 0  # seed of the tuned model, which is none of the study's
_RESAMPLES = 4000


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('command', choices=('run', 'show'))
  parser.add_argument('folder', type=pathlib.Path)
  parser.add_argument('--seeds', nargs='+', type=int, default=[1, 2, 3, 4, 5])
  parser.add_argument('--arms', nargs='+', default=[*ARMS], choices=[*ARMS])
  parser.add_argument('--parallel', type=int, default=1, help='runs at a time')
  options = parser.parse_args()
  if options.command == 'run':
    run_all(options)
    return
  runs = {(arm, seed.name): answers(seed / arm / 'evaluation')
          for arm in ARMS for seed in sorted(options.folder.glob('seed*'))
          if (seed / arm / 'evaluation' / 'after' / 'table.json').exists()}
  for rows in (by_kind(runs), differences(runs)):
    if rows:
      print(figures.table(rows, list(rows[0])) + '\n')


def run_all(options) -> None:
  """Tunes a model, and runs every arm of every seed from it."""
  tuned = options.folder / f'seed{TUNED}'
  run(tuned, TUNED, ('data', 'tune'))
  locks = {seed: threading.Lock() for seed in options.seeds}

  def one(seed, arm):
    with locks[seed]:
      run(options.folder / f'seed{seed}', seed, ('data', arm),
          f'--config.phases.{arm}.model.path={tuned}/tune/model')

  with concurrent.futures.ThreadPoolExecutor(options.parallel) as pool:
    for job in [pool.submit(one, seed, arm)
                for arm in options.arms for seed in options.seeds]:
      job.result()


def run(folder: pathlib.Path, seed: int, phases: tuple[str, ...], *flags: str
       ) -> None:
  """Runs phases, the last of which may be an arm; done ones are not run again.
  """
  arm = phases[-1] if phases[-1] in ARMS else 'all'
  subprocess.run(
      [sys.executable, '-m', 'searchrl.main', f'--workdir={folder}',
       f'--config=configs/archive.py:arm={arm}', f'--config.seed={seed}',
       f'--config.order={phases}', *flags],
      check=True, env=os.environ | THREADS)


def answers(folder: pathlib.Path) -> dict[str, dict[str, dict[str, float]]]:
  """Returns em and calls of tools of each question, before and after RL.

  Some arms have no evaluation before RL.
  """
  found: dict[str, dict[str, dict[str, float]]] = {}
  for when in ('before', 'after'):
    if not (folder / when).exists():
      continue
    found[when] = {}
    for record in shards.read_all(folder / when / 'records'):
      turns = record['trajectory']['turns']
      kinds = [turn['action']['kind'] for turn in turns
               if turn['observation_tokens']]
      uid = record['trajectory']['question']['uid']
      found[when][uid] = {
          'em': float(record['em']), 'open': kinds.count('open'),
          'calculate': kinds.count('calculate'),
          'failed': record['trajectory']['stop_reason'] == 'search_error'}
  return found


def kind_of(uid: str) -> str:
  """Returns the kind of a test question, test-KIND-NUMBER."""
  return uid.rsplit('/', 1)[-1].split('-')[1]


def by_kind(runs) -> list[dict[str, str]]:
  """Returns a row for each arm, before and after RL: mean, and each seed's."""
  rows = []
  for arm, when in ((arm, when) for arm in ARMS for when in ('before', 'after')):
    chosen = [found[when] for (name, _), found in runs.items()
              if name == arm and when in found]
    if not chosen:
      continue
    row = {'': f'{arm}, {when}', 'seeds': str(len(chosen))}
    for kind in SETS:
      row[kind] = _cell(chosen, kind, 'em')
    row['open per deep'] = _cell(chosen, 'deep', 'open')
    row['calculate per sum'] = _cell(chosen, 'sum', 'calculate')
    rows.append(row)
  return rows


def _cell(chosen, kind: str, field: str) -> str:
  """Returns the mean over seeds, and those of all seeds."""
  means = [np.mean([value[field] for uid, value in found.items()
                    if kind_of(uid) == kind]) for found in chosen]
  return f'{np.mean(means):.2f} ({" ".join(f"{mean:.2f}" for mean in means)})'


def differences(runs) -> list[dict[str, str]]:
  """Returns a row for each pair of arms that have runs of the same seeds.

  Questions whose trajectory was ended by a failing tool are left out.
  """
  rows = []
  for one, other, kinds in PAIRS:
    pairs = [(found['after'], runs[other, seed]['after'])
             for (arm, seed), found in runs.items()
             if arm == one and (other, seed) in runs]
    values = [[first[uid]['em'] - second[uid]['em'] for uid in first
               if kind_of(uid) in kinds and not second[uid]['failed']]
              for first, second in pairs]
    if values:
      low, high = interval(values)
      rows.append({'': f'{one} - {other}', 'questions': ', '.join(kinds),
                   'seeds': str(len(values)),
                   'difference': f'{np.mean(np.concatenate(values)):+.3f}',
                   '95 %': f'{low:+.3f} to {high:+.3f}',
                   'each': ' '.join(f'{np.mean(v):+.2f}' for v in values)})
  return rows


def interval(values) -> tuple[float, float]:
  """Returns the 95 % interval of a mean of means, by the percentile bootstrap.

  Args:
    values: Values of each seed. Seeds are resampled, and the values of each.
  """
  rng = np.random.default_rng(0)
  means = [np.mean([np.mean(rng.choice(values[i], len(values[i])))
                    for i in rng.integers(len(values), size=len(values))])
           for _ in range(_RESAMPLES)]
  low, high = np.quantile(means, [0.025, 0.975])
  return float(low), float(high)


if __name__ == '__main__':
  main()
