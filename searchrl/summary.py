# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A run's folder in; its table, its curve and the mark that it is done out."""

import json
import math
import pathlib

from searchrl import metrics

FILE = 'summary.txt'  # of a finished run


def finish(folder: pathlib.Path, title: str) -> None:
  """Draws the curve, prints before against after, and marks the run done."""
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
  metrics.curve(
      folder / 'curve',
      {name: (steps, [line.get(key, math.nan) for line in lines])
       for key, name in shown.items()},
      title=title, units=units)
  text = table(folder)
  (folder / FILE).write_text(text + '\n')
  print(text)


def table(folder: pathlib.Path) -> str:
  """The table of a run: exact match before and after, and where things are."""
  rows = []
  try:
    before, after = (json.loads(
        (folder / 'evaluation' / name / 'table.json').read_text())
                     for name in ('before', 'after'))
  except FileNotFoundError:
    before, after = [], []
  for old, new in zip(before, after, strict=True):
    rows.append({'set': new['set'], 'engine': new['engine'],
                 'decoding': new['decoding'], 'hops': new['hops'],
                 'n': new['n'], 'em before': old['em'], 'em after': new['em'],
                 '95% interval': new['95% interval'],
                 'searches before': old['searches'],
                 'searches after': new['searches']})
  text = metrics.table(rows, tuple(rows[0])) if rows else (
      'No evaluation set: give --config.data.evaluate.')
  return (f'{text}\n\ncurve    {folder / "curve.png"}\n'
          f'model    {folder / "model"} (Hugging Face format)\n'
          f'metrics  {folder / metrics.FILE}')
