# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The folder of a run of learning.py in, its part of a record out."""

from collections.abc import Sequence
import collections
import json
import pathlib
from typing import Any

import experiments  # beside this file
from searchrl.runtime import metrics

CURVES = ('critic/score/mean', 'search/calls_per_traj', 'actor/pg_clipfrac',
          'actor/entropy', 'actor/grad_norm', 'format/valid_rate',
          'training/rollouts', 'search/leak_rate',
          'search/answer_rate_last_hop', 'simulated/noisy_rate')
_COSTS = 'costs.jsonl'


def is_done(part: pathlib.Path) -> bool:
  """Returns whether a run of main, a training or an evaluation, has ended."""
  ends = 'summary.txt' if part.name == 'train' else 'table.json'
  return (part / ends).exists()


def add_cost(folder: pathlib.Path, part: str, *, cpu: float, wall: float
            ) -> None:
  """Notes the seconds of a process, also of one that was interrupted."""
  with (folder / _COSTS).open('a') as file:
    file.write(json.dumps(dict(part=part, cpu=cpu, wall=wall)) + '\n')


def of(folder: pathlib.Path) -> dict[str, Any]:
  """Returns the costs, curves and tables of a finished run.

  Returns:
    search: Digests of the searched files, and the recall of an index.
    cpu_secs and wall_secs: Seconds by part of the run.
    curves: Values of each step, for those metrics of CURVES that the run has.
    greedy: [[trajectories so far, exact match of 1 hop, of 2, of 3], ...].
    rows: {'evaluation/set/decoding/hops': [questions, exact match, searches]}.
    selfplay: The proposers' results and the costs, if it is a run of self-play.
  """
  train = folder / 'train'
  lines = (metrics.read(train / metrics.FILE)
           if (train / metrics.FILE).exists() else [])
  search = folder / 'train' / 'search.json'
  return {**_costs(folder),
          'search': json.loads(search.read_text()) if search.exists() else {},
          'curves': _curves(lines), 'greedy': _greedy(lines),
          'rows': {key: cell for table in sorted(folder.glob('*/table.json'))
                   for key, cell in _rows(table)}} | (
                       {'selfplay': _selfplay(train)}
                       if (train / 'examined').exists() else {})


def _selfplay(train: pathlib.Path) -> dict[str, Any]:
  """Reports of proposers; rollouts by phase, the solver's for rewards apart."""
  reports = {str(file.parent.relative_to(train)): json.loads(file.read_text())
             for file in sorted(train.glob('**/report.json'))}
  spent = {}
  for file in sorted(train.glob(f'iteration_*/*/{metrics.FILE}')):
    steps = [line for line in metrics.read(file) if 'timing_s/step' in line]
    spent[str(file.parent.relative_to(train))] = {
        'rollouts': int(steps[-1]['training/rollouts']) if steps else 0,
        'attempts': int(sum(line.get('reward/attempts/sum', 0)
                            for line in steps)),
        'curves': _curves(steps)}
  return {'reports': reports, 'spent': spent}


def _costs(folder: pathlib.Path) -> dict[str, dict[str, float]]:
  costs = {'cpu': collections.Counter(), 'wall': collections.Counter()}
  for line in (folder / _COSTS).read_text().splitlines():
    cost = json.loads(line)
    for kind, seconds in costs.items():
      seconds[cost['part']] += cost[kind]
  return {f'{kind}_secs': {part: round(value, 1) for part, value in of.items()}
          for kind, of in costs.items()}


def _curves(lines: Sequence[dict]) -> dict[str, list[float]]:
  steps = [line for line in lines if 'timing_s/step' in line]
  return {name: [round(step[name], 4) for step in steps] for name in CURVES
          if steps and name in steps[0]}


def _greedy(lines: Sequence[dict]) -> list[list[float]]:
  """The greedy evaluations of training, through its engine, noise or not."""
  rollouts, curve = 0, []
  for line in lines:  # a step's may be several
    rollouts = int(line.get('training/rollouts', rollouts))
    for data in ('known', 'known_noise'):
      names = [f'val/{data}_{hops}hop/em/greedy'
               for hops in experiments.CURVE_HOPS]
      if names[0] in line:
        curve.append([rollouts, *(round(line[name], 4) for name in names)])
  return curve


def _rows(table: pathlib.Path):
  for row in json.loads(table.read_text()):
    key = f'{table.parent.name}/{row["set"]}/{row["decoding"]}/{row["hops"]}'
    yield key, [row['n'], round(row['em'], 4), round(row['searches'], 4)]
