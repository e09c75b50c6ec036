# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Compares the arms of configs/atlas.py, over seeds.

  python benchmarks/atlas/arms.py collect runs/atlas runs/atlas_seed1 \
      --out=benchmarks/atlas/third_protocol.jsonl
  python benchmarks/atlas/arms.py show benchmarks/atlas/third_protocol.jsonl \
      --figure=benchmarks/atlas/third_protocol.png

`collect` reads the runs of directories of configs/atlas.py into one small
file: the kinds of the test questions in its first line, and then one line per
run. In a line, `before` and `after` have one digit per question: 1 if the
greedy answer is right; the searches have theirs. `show` prints and draws what
such a file holds. Intervals of a run are Wilson's, over questions; differences
are paired by question (bootstrap).
"""

import argparse
import json
import pathlib

import numpy as np
from table import bare
from table import kinds_of
from table import scores_of

from searchrl.evaluation import compare
from searchrl.evaluation import evaluator
from searchrl.evaluation import figures

MAIN = 'grpo'
KINDS = ('1 hop', '2 hops, not shown', '2 hops, shown', '3 hops')
COURSE = {'reward': 'critic/score/mean', 'searches': 'search/calls_per_traj',
          'valid': 'format/valid_rate', 'tokens': 'response_length/mean'}
DRAWN = ('dspo', 'unmasked', 'no_search', 'fee')  # beside the main arm
SMOOTHED = 3  # steps of the mean that is drawn


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  commands = parser.add_subparsers(dest='command', required=True)
  collecting = commands.add_parser('collect')
  collecting.add_argument('folders', nargs='+', type=pathlib.Path)
  collecting.add_argument('--out', type=pathlib.Path, required=True)
  showing = commands.add_parser('show')
  showing.add_argument('file', type=pathlib.Path)
  showing.add_argument('--figure', type=pathlib.Path)
  options = parser.parse_args()
  if options.command == 'collect':
    lines = collect(options.folders)
    options.out.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    return
  kinds, *runs = map(json.loads, options.file.read_text().splitlines())
  if not _main_runs(runs):
    parser.error(f'{options.file} must hold a run of the arm {MAIN}, with which '
                 'the others are compared. Collect its directory, too.')
  for rows in (exact_match(runs, kinds), against_main(runs)):
    print(figures.table(rows, list(rows[0])) + '\n')
  if options.figure:
    draw(runs, kinds, options.figure)


def collect(folders) -> list:
  """Returns the kinds of the questions, and what each run of an arm records."""
  kinds = kinds_of(folders[0] / 'data' / 'test.jsonl')
  ids = sorted(kinds)
  runs = []
  for folder in folders:
    for file in sorted(folder.glob('*/metrics.jsonl')):
      run = file.parent
      config = json.loads((run / 'config.json').read_text())
      if (run / 'evaluation' / 'before').exists():
        runs.append({'arm': run.name, 'seed': config['seed'],
                     **course(file), **answers(run / 'evaluation', ids)})
  return [[kinds[uid] for uid in ids], *runs]


def course(file: pathlib.Path) -> dict[str, list[float]]:
  """Returns what a run's steps measured, a list for each name of COURSE."""
  lines = [json.loads(line) for line in file.read_text().splitlines()]
  steps = [line for line in lines if COURSE['reward'] in line]
  return {name: [round(step[key], 4) for step in steps]
          for name, key in COURSE.items()}


def answers(evaluation: pathlib.Path, ids) -> dict[str, str]:
  """Returns a digit per question: is the answer right, and its searches."""
  digits = {}
  for when in ('before', 'after'):
    if (evaluation / when / 'records').exists():
      scores = {bare(score.uid): score.values
                for score in scores_of(evaluation / when)}
      for name, key in ((when, 'em'), (f'{when}_searches', 'searches')):
        digits[name] = ''.join(str(int(scores[uid][key])) for uid in ids)
  return digits


def numbers(digits: str) -> np.ndarray:
  return np.array([int(digit) for digit in digits], float)


def exact_match(runs, kinds) -> list[dict[str, str]]:
  """Returns a row for each run that has ended: exact match by kind."""
  tuned = _main_runs(runs)[0]
  rows = [_row('tuned', tuned['before'], tuned['before_searches'], kinds)]
  return rows + [
      _row(f"{run['arm']}, seed {run['seed']}", run['after'],
           run['after_searches'], kinds) for run in runs if 'after' in run]


def _main_runs(runs) -> list:
  return [run for run in runs if run['arm'] == MAIN]


def _row(name: str, right: str, searches: str, kinds) -> dict[str, str]:
  right, searches = numbers(right), numbers(searches)
  low, high = evaluator.wilson(right.sum(), len(right))
  of_kind = {kind: np.array(kinds) == kind for kind in KINDS}
  return {'': name, 'all': f'{right.mean():.3f} ({low:.3f} to {high:.3f})',
          **{kind: f'{right[picked].mean():.2f}'
             for kind, picked in of_kind.items()},
          'searches of 1 hop': f'{searches[of_kind["1 hop"]].mean():.2f}',
          'of 3 hops': f'{searches[of_kind["3 hops"]].mean():.2f}'}


def against_main(runs) -> list[dict[str, str]]:
  """Returns a row per run: its difference from before, and from the main arm.

  The main arm's run is that of the same seed.
  """
  mains = {run['seed']: run for run in _main_runs(runs)}
  rows = []
  for run in runs:
    if 'after' in run:
      after = numbers(run['after'])
      rows.append({
          '': f"{run['arm']}, seed {run['seed']}",
          'after - before': _difference(after, numbers(run['before'])),
          f'{MAIN} - arm': '' if run['arm'] == MAIN else _difference(
              numbers(mains[run['seed']]['after']), after)})
  return rows


def _difference(right: np.ndarray, others: np.ndarray) -> str:
  differences = right - others
  low, high = compare.bootstrap(differences)
  return f'{differences.mean():+.3f} ({low:+.3f} to {high:+.3f})'


def draw(runs, kinds, file: pathlib.Path) -> None:
  """Draws exact match by hops, and reward and searches over the steps."""
  import matplotlib
  matplotlib.use('Agg')
  from matplotlib import pyplot
  figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.4))
  bars(axes[0], runs, kinds)
  for name, axis in zip(('reward', 'searches'), axes[1:]):
    for arm in (MAIN, *DRAWN):
      lines = [smooth(run[name]) for run in runs if run['arm'] == arm]
      drawn, = axis.plot(range(1, 1 + len(lines[0])), np.mean(lines, axis=0),
                         label=arm + f' (mean of {len(lines)})' * (arm == MAIN))
      if len(lines) > 1:
        axis.fill_between(range(1, 1 + len(lines[0])), np.min(lines, axis=0),
                          np.max(lines, axis=0), alpha=0.2, lw=0,
                          color=drawn.get_color())
    axis.axvline(10.5, color='gray', lw=0.8, ls=':')
    axis.set(xlabel='step (from 11 on, questions of 1 hop join)',
             title=f'{name} per training question')
  axes[1].legend(fontsize=8)
  figure.tight_layout()
  figure.savefig(file, dpi=110)


def bars(axis, runs, kinds) -> None:
  """Draws exact match by the number of hops: tuned, and after each arm."""
  hops = np.array([int(kind[0]) for kind in kinds])
  groups = {'tuned': [_main_runs(runs)[0]['before']]} | {
      arm: [run['after'] for run in runs if run['arm'] == arm]
      for arm in (MAIN, *DRAWN)}
  width = 0.8 / len(groups)
  for place, (name, ends) in enumerate(groups.items()):
    color = 'lightgray' if name == 'tuned' else f'C{place - 1}'
    heights = [[numbers(end)[hops == n].mean() for n in (1, 2, 3)]
               for end in ends]
    x = np.arange(3) + (place - len(groups) / 2 + 0.5) * width
    axis.bar(x, np.mean(heights, axis=0), width, color=color, label=name)
    if len(heights) > 1:
      for height in heights:
        axis.plot(x, height, '.', color='black', ms=3)
  axis.set(xticks=range(3), xticklabels=['1 hop', '2 hops', '3 hops'],
           title='exact match of 300 test questions')
  axis.legend(fontsize=8)


def smooth(values) -> np.ndarray:
  """Returns the mean of up to SMOOTHED values that end at each place."""
  return np.array([np.mean(values[max(0, n - SMOOTHED + 1):n + 1])
                   for n in range(len(values))])


if __name__ == '__main__':
  main()
