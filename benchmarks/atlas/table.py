# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""The tables of this folder's page, from a directory of configs/atlas.py.

  python benchmarks/atlas/table.py runs/atlas
  python benchmarks/atlas/table.py runs/atlas --arms grpo fee --figure atlas.png

It prints exact match of the 300 test questions before and after each arm's
training with 95 % intervals (Wilson), the difference paired by question
(bootstrap), searches per question by hops, and apart, the kinds of two hops
that demonstrations show and those that they do not. The figure has searches per
question by hops, the rate of valid conversations and the response length over
the steps.
"""

import argparse
import json
import pathlib

import numpy as np

from searchrl.evaluation import compare
from searchrl.evaluation import evaluator
from searchrl.evaluation import figures
from searchrl.rollouts import records


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('folder', type=pathlib.Path)
  parser.add_argument('--arms', nargs='+', default=['grpo'])
  parser.add_argument('--figure', type=pathlib.Path)
  options = parser.parse_args()
  kinds = kinds_of(options.folder / 'data' / 'test.jsonl')
  for arm in options.arms:
    print(f'\n{arm}\n')
    print(table(options.folder / arm / 'evaluation', kinds))
  methods = options.folder / 'methods' / 'methods'
  rows = [row(name.name, scores_of(name)) for name in sorted(methods.glob('*'))]
  if rows:
    print('\nwithout training\n\n' + figures.table(rows, list(rows[0])))
  if options.figure:
    draw(options.folder / options.arms[0], options.figure)


def kinds_of(file: pathlib.Path) -> dict[str, str]:
  """Kind of each test question: its hops, and whether its chain was shown."""
  kinds = {}
  for line in file.read_text().splitlines():
    question = json.loads(line)
    hops = question['metadata']['hops']
    shown = question['metadata']['relations'][0] == 'city'
    kinds[question['id']] = f'{hops} hop' + 's' * (hops > 1) + (
        (', shown' if shown else ', not shown') if hops == 2 else '')
  return kinds


def scores_of(folder: pathlib.Path) -> list:
  """Scores of all greedy answers in the records of an evaluation."""
  return [score for name, scores in evaluator.recorded(folder).items()
          if name.endswith('.greedy') for score in scores]


def row(name: str, scores) -> dict[str, str]:
  values = [score.values['em'] for score in scores]
  low, high = evaluator.wilson(sum(values), len(values))
  return {'': name, 'n': len(values), 'exact match': f'{np.mean(values):.3f}',
          '95 %': f'{low:.3f} to {high:.3f}'}


def table(folder: pathlib.Path, kinds: dict[str, str]) -> str:
  """Returns the table of an arm; a row for all, and for each kind."""
  before, after = (scores_of(folder / when) for when in ('before', 'after'))
  rows = []
  for kind in ('all', *sorted({*kinds.values()})):
    picked = [[score for score in scores
               if kind == 'all' or kinds[bare(score.uid)] == kind]
              for scores in (before, after)]
    gap = compare.difference(picked[1], picked[0])
    first, second = (row(kind, scores) for scores in picked)
    searches = [np.mean([score.values['searches'] for score in scores])
                for scores in picked]
    rows.append({
        'questions': kind, 'n': first['n'],
        'before': f"{first['exact match']} ({first['95 %']})",
        'after': f"{second['exact match']} ({second['95 %']})",
        'difference': f'{gap.mean:+.3f} ({gap.low:+.3f} to {gap.high:+.3f})',
        'searches': f'{searches[0]:.2f} -> {searches[1]:.2f}'})
  return figures.table(rows, list(rows[0]))


def bare(uid: str) -> str:
  """A question's id without the name of its set."""
  return uid.rpartition('/')[2].rpartition(':')[2]


def draw(run: pathlib.Path, file: pathlib.Path) -> None:
  """Draws the course of a training."""
  import matplotlib
  matplotlib.use('Agg')
  from matplotlib import pyplot
  steps = [records.read(path)
           for path in sorted((run / 'trajectories').iterdir())]
  lines = {json.loads(line)['training/global_step']: json.loads(line)
           for line in (run / 'metrics.jsonl').read_text().splitlines()
           if 'training/global_step' in line}
  figure, axes = pyplot.subplots(1, 4, figsize=(13, 3))
  for hops in (1, 2, 3):
    of_hops = [[t for t in step if t.question.hops == hops] for step in steps]
    for axis, value in ((axes[0], lambda t: t.reward),
                        (axes[1], lambda t: t.searches)):
      pairs = [(n, np.mean([value(t) for t in picked]))
               for n, picked in enumerate(of_hops, start=1) if picked]
      axis.plot(*zip(*pairs), label=f'{hops} hop' + 's' * (hops > 1))
  for axis, name in ((axes[2], 'format/valid_rate'),
                     (axes[3], 'response_length/mean')):
    pairs = [(n, line[name]) for n, line in lines.items() if name in line]
    axis.plot(*zip(*pairs), color='black')
  for axis, title in zip(axes, (
      'reward of training questions', 'searches per question',
      'rate of valid conversations', 'tokens after the prompt')):
    axis.set_title(title, fontsize=10)
    axis.set_xlabel('step')
    axis.grid(alpha=.3)
  axes[0].legend(fontsize=8)
  figure.tight_layout()
  figure.savefig(file, dpi=110)


if __name__ == '__main__':
  main()
