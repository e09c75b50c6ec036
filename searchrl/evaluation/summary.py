# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Summary of a finished run: a table and curves, from the run's folder."""

import json
import math
import pathlib

from searchrl.evaluation import figures
from searchrl.evaluation import suite
from searchrl.runtime import metrics

FILE = 'summary.txt'  # of a finished run


def finish(folder: pathlib.Path, title: str) -> None:
  """Draws the curves, prints the table, and marks the run as finished."""
  lines = [line for line in metrics.read(folder / metrics.FILE)
           if 'critic/score/mean' in line]
  steps = [line['training/global_step'] for line in lines]
  shown = {'critic/score/mean': 'reward', 'search/calls_per_traj': 'searches',
           'data/frac_group_mixed': 'mixed groups',
           'response_length/mean': 'response length',
           'actor/entropy': 'entropy', 'actor/grad_norm': 'gradient norm'}
  units = {'reward': 'mean outcome', 'searches': 'per question',
           'mixed groups': 'share', 'response length': 'tokens',
           'entropy': 'nats', 'gradient norm': ''}
  figures.curve(
      folder / 'curve',
      {name: (steps, [line.get(key, math.nan) for line in lines])
       for key, name in shown.items()},
      title=title, units=units, window=max(3, len(steps) // 6))
  text = table(folder)
  (folder / FILE).write_text(text + '\n')
  print(text)


def table(folder: pathlib.Path) -> str:
  """The table of a run: exact match before and after; paths of its files."""
  before, after = (_cells(folder / 'evaluation' / name / 'table.json')
                   for name in ('before', 'after'))
  rows = []
  for case, by_hops in after.items():
    row = dict(zip(('set', 'engine', 'decoding'), case))
    for hops, (em, _, _) in by_hops.items():
      old = before.get(case, {}).get(hops)
      name = 'EM' if hops == suite.ALL else f'EM {hops}-hop'
      row[name] = (f'{old[0]:.2f} -> ' if old else '') + f'{em:.2f}'
    counts = {hops: cell[2] for hops, cell in by_hops.items()}
    row['n'] = counts.get(suite.ALL) or sum(counts.values())
    row['searches'] = ' '.join(
        f'{x:.1f}' for hops, (_, x, _) in by_hops.items()
        if hops != suite.ALL or len(by_hops) == 1)
    rows.append(row)
  columns = sorted(
      dict.fromkeys(name for row in rows for name in row),
      key=lambda name: ('EM' in name) + 2 * (name in ('n', 'searches')))
  text = (f'{figures.table(rows, columns)}\n'
          'EM: exact match, before -> after; n: questions; searches: a '
          'question, by hops' if rows else
          'No evaluation set: give --config.data.evaluate.')
  return (f'{text}\n\ncurve    {folder / "curve.png"}\n'
          f'model    {folder / "model"} (Hugging Face format)\n'
          f'metrics  {folder / metrics.FILE}')


def _cells(file: pathlib.Path) -> dict:
  """{(set, engine, decoding): {hops, or `ALL`: (exact match, searches, n)}}.

  Runs before there were rows of whole sets have none.
  """
  cells = {}
  for row in json.loads(file.read_text()) if file.exists() else ():
    case = cells.setdefault((row['set'], row['engine'], row['decoding']), {})
    case[row['hops']] = (row['em'], row['searches'], row['n'])
  return cells
