# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Summary of a finished run: tables and curves, from the run's folder."""

import collections
from collections.abc import Callable, Mapping, Sequence
import math
import pathlib
import re
import sys
from typing import Any

from searchrl.evaluation import figures
from searchrl.evaluation import evaluator
from searchrl.runtime import alerts
from searchrl.runtime import atomic_files
from searchrl.runtime import metrics
from searchrl.runtime import processes

FILE = 'summary.txt'  # marks a finished run
EXACT_MATCH = 'greedy exact match'
_REWARD = 'critic/score/mean'  # in the metrics of every training step
_SHOWN = {_REWARD: 'reward', 'search/calls_per_traj': 'searches',
          'data/frac_group_mixed': 'mixed groups',
          'response_length/mean': 'response length',
          'actor/entropy': 'entropy', 'actor/grad_norm': 'gradient norm'}
_UNITS = {'reward': 'mean outcome', 'searches': 'per question',
          EXACT_MATCH: 'share', 'mixed groups': 'share',
          'response length': 'tokens', 'entropy': 'nats', 'gradient norm': ''}


_Cell = Mapping[str, Any]  # row of an evaluation's table
_Cells = dict[tuple[str, str, str], dict[int | str, _Cell]]  # by case, by hops


def finish(folder: pathlib.Path, title: str) -> None:
  """Draws the curves, prints the table, and marks the run as finished."""
  lines = metrics.read(folder / metrics.FILE)
  steps = sum(_REWARD in line for line in lines)
  figures.curve(folder / 'curve', curves(lines), title=title, units=_UNITS,
                window=max(3, steps // 6))
  text = table(folder)
  atomic_files.write(folder / FILE, text + '\n')  # last, since it marks the end
  processes.say(text, sys.stdout)


def curves(lines: Sequence[Mapping[str, float]]) -> dict[str, figures.Series]:
  """Returns the series of a run's figure, by title: values at training steps.

  `lines` are the lines of metrics.jsonl. If greedy exact match was evaluated
  during training, too, it is included in place of the response length.
  """
  trained = [line for line in lines if _REWARD in line]
  steps = [line[alerts.STEP] for line in trained]
  series: dict[str, figures.Series] = {
      name: (steps, [line.get(key, math.nan) for line in trained])
      for key, name in _SHOWN.items()}
  exact = _greedy(lines)
  if any(len(x) > 2 for x, _ in exact.values()):  # more than before and after
    del series['response length']
    series = dict(list(series.items())[:2]) | {EXACT_MATCH: exact} | series
  return series


def _greedy(lines: Sequence[Mapping[str, float]]) -> dict[str, figures.Line]:
  """Returns the curves of greedy exact match over training steps, by label.

  There is a curve for each hop count of the first evaluation set with several
  hop counts. If no set has several, there is a curve for each set. There are at
  most four curves.
  """
  pattern = re.compile(r'val/(.+)/em/greedy')
  names = [match[1] for match in map(pattern.fullmatch, dict.fromkeys(
      key for line in lines for key in line))
           if match and not re.search(r'_noise(_|$)', match[1])]
  hops = [name for name in names if re.search(r'_\d+hop$', name)]
  first = hops[0].rpartition('_')[0] + '_' if hops else ''
  chosen = [name for name in hops if name.startswith(first)] or names
  result: dict[str, figures.Line] = {}
  for name in chosen[:4]:
    label = name.removeprefix(first).replace('hop', '-hop') if first else name
    key = f'val/{name}/em/greedy'
    points = [(line[alerts.STEP], line[key]) for line in lines if key in line]
    result[label] = tuple(x for x, _ in points), tuple(y for _, y in points)
  return result


def table(folder: pathlib.Path) -> str:
  """Returns the text of a run's summary: tables of scores, and paths of files.

  The scores are from before and after training.
  """
  text = scores(folder / 'evaluation', 'after') or (
      'No evaluation set: give --config.data.evaluate.')
  return (f'{text}\n\ncurve    {folder / "curve.png"}\n'
          f'model    {folder / "model"} (Hugging Face format)\n'
          f'metrics  {folder / metrics.FILE}')


def scores(folder: pathlib.Path, name: str) -> str:
  """Returns the text tables of an evaluation: scores and searches by hop count.

  The evaluation after training is shown beside the one before training.

  Args:
    folder: Directory of the run's evaluations.
    name: Directory of the evaluation in it, such as 'after'.

  Returns:
    The tables; '' if there is no such evaluation.
  """
  after = _cells(folder / name)
  # Evaluations during training are of fewer questions.
  before = _cells(folder / 'before') if name == 'after' else {}

  def greedy(cells):
    return {case: row for case, row in cells.items() if 'greedy' in case}

  if not after:
    return ''
  title = evaluator.score_name(next(iter(next(iter(after.values())).values())))
  return '\n\n'.join([
      _by_hops(
          title[0].upper() + title[1:], before, after,
          lambda cell: f'{evaluator.main_score(cell):.2f}'.removeprefix('0')),
      _by_hops('Searches per question, where answers are greedy',
               greedy(before), greedy(after),
               lambda cell: f'{cell["searches"]:.1f}'),
      _legend(after)])


def _by_hops(title: str, before: _Cells, after: _Cells,
             show: Callable[[_Cell], str]) -> str:
  """Returns a text table with a row per case and a column per hop count.

  A case is a set with an engine and a way of decoding. `show` makes the text of
  a cell. Where `before` has the same cell, it is shown first: "old→new".
  """
  hops = sorted({hops for row in after.values() for hops in row},
                key=lambda hops: (hops == evaluator.ALL, hops))
  names = {h: evaluator.ALL if h == evaluator.ALL else f'{h}-hop' for h in hops}
  rows = []
  for case, cells in after.items():
    row: dict[str, Any] = dict(zip(('set', 'engine', 'decoding'), case))
    for hop, cell in cells.items():
      old = before.get(case, {}).get(hop)
      row[names[hop]] = (f'{show(old)}→' if old else '') + show(cell)
    whole = cells.get(evaluator.ALL)
    row['n'] = whole['n'] if whole else sum(
        cell['n'] for cell in cells.values())
    rows.append(row)
  keys, shown = ('set', 'engine', 'decoding'), (*names.values(), 'n')
  return title + ', before→after' * bool(before) + '\n\n' + (
      figures.narrow_table(rows, (*keys, *shown), keys, stay=shown))


def _legend(cells: _Cells) -> str:
  """Returns notes for the tables: the terms, and widths of the intervals."""
  counts = sorted({cell['n'] for row in cells.values()
                   for cell in row.values()})
  if len(counts) > 4:
    counts = [counts[0], counts[len(counts) // 2], counts[-1]]
  halves = []
  for n in counts:
    low, high = evaluator.wilson(n / 2, n)
    halves.append(f'{(high - low) / 2:.2f} of {n}')
  noise = any(engine == 'noise' for _, engine, _ in cells)
  return ('noise: random passages; ' * noise + 'n: questions of a row. Half of '
          'a 95% interval is at most\n' + ', '.join(halves)
          + f' question{"s" * (counts[-1] > 1)}.')


def _cells(folder: pathlib.Path) -> _Cells:
  """Returns the rows of an evaluation's table, by case and hop count.

  The result is {} if there is no table.
  """
  cells: _Cells = collections.defaultdict(dict)
  for row in evaluator.read_table(folder) or ():
    cells[row['set'], row['engine'], row['decoding']][row['hops']] = row
  return cells
