# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Summary of a finished run: tables and curves, from the run's folder."""

from collections.abc import Callable, Mapping, Sequence
import json
import math
import pathlib
import re
from typing import NamedTuple

from searchrl.evaluation import figures
from searchrl.evaluation import evaluator
from searchrl.runtime import atomic_files
from searchrl.runtime import metrics

FILE = 'summary.txt'  # marks a finished run
EXACT_MATCH = 'greedy exact match'
_SHOWN = {'critic/score/mean': 'reward', 'search/calls_per_traj': 'searches',
          'data/frac_group_mixed': 'mixed groups',
          'response_length/mean': 'response length',
          'actor/entropy': 'entropy', 'actor/grad_norm': 'gradient norm'}
_UNITS = {'reward': 'mean outcome', 'searches': 'per question',
          EXACT_MATCH: 'share', 'mixed groups': 'share',
          'response length': 'tokens', 'entropy': 'nats', 'gradient norm': ''}


class _Cell(NamedTuple):
  """Scores of the questions of a hop count, or of a whole set."""

  em: float
  searches: float  # mean number per question
  n: int


_Cells = dict[tuple[str, str, str], dict[int | str, _Cell]]  # by case, by hops


def finish(folder: pathlib.Path, title: str) -> None:
  """Draws the curves, prints the table, and marks the run as finished."""
  series = curves(metrics.read(folder / metrics.FILE))
  steps = len(series['reward'][0])
  figures.curve(folder / 'curve', series, title=title, units=_UNITS,
                window=max(3, steps // 6))
  text = table(folder)
  atomic_files.write(folder / FILE, text + '\n')  # last, since it marks the end
  print(text)


def curves(lines: Sequence[Mapping[str, float]]) -> dict[str, figures.Series]:
  """Returns a run's panels, with greedy exact match if it was evaluated."""
  trained = [line for line in lines if 'critic/score/mean' in line]
  steps = [line['training/global_step'] for line in trained]
  series = {name: (steps, [line.get(key, math.nan) for line in trained])
            for key, name in _SHOWN.items()}
  found = _greedy(lines)
  if any(len(x) > 2 for x, _ in found.values()):  # more than before and after
    del series['response length']
    series = dict(list(series.items())[:2]) | {EXACT_MATCH: found} | series
  return series


def _greedy(lines: Sequence[Mapping[str, float]]
           ) -> dict[str, tuple[list[float], list[float]]]:
  """Returns greedy exact match of the first set by hops, or of the sets."""
  pattern = re.compile(r'val/(.+)/em/greedy')
  names = [match[1] for match in map(pattern.fullmatch, dict.fromkeys(
      key for line in lines for key in line)) if match]
  names = [name for name in names if not name.endswith('_noise')
           and '_noise_' not in name]
  hops = [name for name in names if re.search(r'_\d+hop$', name)]
  first = hops[0].rpartition('_')[0] + '_' if hops else ''
  chosen = [name for name in hops if name.startswith(first)] or names
  return {name.removeprefix(first).replace('hop', '-hop')
          if first else name: tuple(zip(*(
      (line['training/global_step'], line[f'val/{name}/em/greedy'])
      for line in lines if f'val/{name}/em/greedy' in line)))
          for name in chosen[:4]}


def table(folder: pathlib.Path) -> str:
  """Returns a run's tables, before and after training, and its file paths."""
  before, after = (_cells(folder / 'evaluation' / name / 'table.json')
                   for name in ('before', 'after'))
  text = ('\n\n'.join([
      _by_hops('Exact match', before, after, lambda cell: f'{cell.em:.2f}'),
      _by_hops('Searches a question, where answers are greedy',
               *({case: row for case, row in cells.items()
                  if 'greedy' in case} for cells in (before, after)),
               lambda cell: f'{cell.searches:.1f}'),
      _legend(after)]) if after else
          'No evaluation set: give --config.data.evaluate.')
  return (f'{text}\n\ncurve    {folder / "curve.png"}\n'
          f'model    {folder / "model"} (Hugging Face format)\n'
          f'metrics  {folder / metrics.FILE}')


def _by_hops(title: str, before: _Cells, after: _Cells,
             show: Callable[[_Cell], str]) -> str:
  """Returns a table of cases (rows) by hop counts (columns), with totals."""
  hops = sorted({hops for row in after.values() for hops in row},
                key=lambda hops: (hops == evaluator.ALL, hops))
  name = {h: evaluator.ALL if h == evaluator.ALL else f'{h}-hop' for h in hops}
  rows = []
  for case, cells in after.items():
    row = dict(zip(('set', 'engine', 'decoding'), case))
    for hop, cell in cells.items():
      old = before.get(case, {}).get(hop)
      row[name[hop]] = (f'{show(old)} -> ' if old else '') + show(cell)
    whole = cells.get(evaluator.ALL)
    row['n'] = whole.n if whole else sum(cell.n for cell in cells.values())
    rows.append(row)
  how = ', before -> after' if before else ''
  return f'{title}{how}\n\n' + figures.table(
      rows, ('set', 'engine', 'decoding', *name.values(), 'n'))


def _legend(cells: _Cells) -> str:
  """Returns notes for the tables: terms, and widths of the intervals."""
  counts = sorted({cell.n for row in cells.values() for cell in row.values()})
  if len(counts) > 4:
    counts = [counts[0], counts[len(counts) // 2], counts[-1]]
  halves = []
  for n in counts:
    low, high = evaluator.wilson(n / 2, n)
    halves.append(f'{(high - low) / 2:.2f} of {n}')
  return ('noise: random passages; n: questions of a row. Half of a 95% '
          'interval is at most\n' + ', '.join(halves)
          + f' question{"s" * (counts[-1] > 1)}.')


def _cells(file: pathlib.Path) -> _Cells:
  """Returns the cells of an evaluation; {} without one.

  Runs of versions without rows of whole sets have none of those cells.
  """
  cells = {}
  for row in json.loads(file.read_text()) if file.exists() else ():
    case = cells.setdefault((row['set'], row['engine'], row['decoding']), {})
    case[row['hops']] = _Cell(row['em'], row['searches'], row['n'])
  return cells
