# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Summary of self-play: tables, curves and alarms, from the run's directory."""

from collections.abc import Mapping, Sequence
import pathlib
from typing import Any

from searchrl.evaluation import evaluator
from searchrl.evaluation import figures
from searchrl.papers.dr_zero import proposers
from searchrl.runtime import atomic_files
from searchrl.runtime import metrics

FILE = 'summary.txt'
_ROLES = ('proposer', 'solver')
_CURVES = {'critic/rewards/mean': 'reward', 'actor/entropy': 'entropy',
           'response_length/mean': 'response length'}
_UNITS = {'entropy': 'nats', 'response length': 'tokens'}
_PHASE_COLUMNS = ('iteration', 'role', 'steps', 'rollouts', 'attempts',
                  'reward', 'entropy', 'length')


def finish(folder: pathlib.Path, iterations: int, title: str) -> str:
  """Draws the curves of self-play, writes its summary, and returns the summary.

  Args:
    folder: Directory of the self-play.
    iterations: Number of iterations.
    title: Text in the title of the curves.
  """
  numbers = range(1, iterations + 1)
  lines = {(number, role): _steps(folder / f'iteration_{number}' / role)
           for number in numbers for role in _ROLES}
  panels = curves(lines)
  if panels:  # something was trained
    figures.curve(folder / 'curve', panels, title=f'Self-play, {title}',
                  units=_UNITS)
  examined = {
      name: atomic_files.read_json(
          folder / 'examined' / name / 'report.json') or {}
      for name in ('before', *(f'iteration_{n}' for n in numbers))}
  text = '\n\n'.join([
      _examined(examined), _proposals(folder, iterations), _phases(lines),
      _solvers(folder, iterations), _alarms(examined),
      f'curve  {folder / "curve.png"}\n' * bool(panels)
      + f'model  {folder / f"iteration_{iterations}" / "solver" / "model"} '
      '(Hugging Face format)'])
  atomic_files.write(folder / FILE, text + '\n')
  return text


def _steps(run: pathlib.Path) -> list[Mapping[str, float]]:
  """Returns the metrics of a run, one mapping per training step."""
  return [line for line in metrics.read(run / metrics.FILE)
          if 'critic/score/mean' in line]


def curves(lines: Mapping[tuple[int, str], Sequence[Mapping[str, float]]]
          ) -> dict[str, figures.Series]:
  """Returns the panels of the curves, such as 'solver: reward'.

  A panel is for one role and one metric. It has a line for each of the last
  four iterations.

  Args:
    lines: Metrics of the training steps by (iteration, role).
  """
  panels: dict[str, figures.Series] = {}
  for role in _ROLES:
    for key, name in _CURVES.items():
      curves_of = {f'iteration {number}': (
          [line['training/global_step'] for line in steps],
          [line[key] for line in steps])
               for (number, of), steps in lines.items()
               if of == role and steps and key in steps[0]}
      if curves_of:  # empty if the role was not trained
        panels[f'{role}: {name}'] = dict(list(curves_of.items())[-4:])
  return panels


def _phases(lines: Mapping[tuple[int, str], Sequence[Mapping[str, float]]]
           ) -> str:
  """Returns the table of trainings: their cost, first step and last step."""
  rows: list[dict[str, Any]] = []
  for (number, role), steps in lines.items():
    rows.append({'iteration': number, 'role': role, 'steps': len(steps)})
    if not steps:
      continue
    rows[-1] |= {
        'rollouts': int(steps[-1]['training/rollouts']),
        'attempts': int(sum(line.get('reward/attempts/sum', 0)
                            for line in steps))} | {
        label: f'{steps[0][key]:.2f} -> {steps[-1][key]:.2f}'
        for key, label in (('critic/rewards/mean', 'reward'),
                           ('actor/entropy', 'entropy'),
                           ('response_length/mean', 'length'))
        if key in steps[0]}
  return ('Training, first step -> last; attempts are the solver\'s, for the '
          "proposer's reward\n\n" + figures.table(rows, _PHASE_COLUMNS))


def _examined(reports: Mapping[str, Any]) -> str:
  """Returns the tables of all proposers' results against the first solver."""
  rows, rates = [], []
  for name, report in reports.items():
    rows += [{'proposer': name} | row for row in report.get('rows', ())]
    if report:
      rates.append({'proposer': name} | {
          str(right): n for right, n in enumerate(report['pass_rates'])}
                   | report['diversity'])
  columns = ('proposer', *proposers.COLUMNS)
  text = ('Proposals, tried by the first solver\n\n'
          + figures.table(rows, columns))
  return text + '\n\nOf these, by attempts that are right\n\n' + (
      figures.table(rates))


def _proposals(folder: pathlib.Path, iterations: int) -> str:
  """Returns a table of what became of each iteration's seeds.

  They were kept as questions for the solver, or dropped for some reason.
  """
  rows = []
  for number in range(1, iterations + 1):
    report = atomic_files.read_json(
        folder / f'iteration_{number}' / 'proposals' / 'report.json') or {}
    if report:
      rows.append({'iteration': number, 'seeds': report['seeds'],
                   'kept': report['kept'], **report['dropped'],
                   **report['diversity']} | {
                       k: report[k] for k in ('true',) if k in report} | {
                           f'needs {hops}': n for hops, n in report.get(
                               'needed', {}).items()})
  return "The solver's questions\n\n" + figures.table(rows)


def _solvers(folder: pathlib.Path, iterations: int) -> str:
  """Returns the table of the solver's exact match, by iteration."""
  rows: list[dict[str, Any]] = []
  for name, path in (
      ('before', folder / 'iteration_1' / 'solver' / 'evaluation' / 'before'),
      *((f'iteration_{n}',
         folder / f'iteration_{n}' / 'solver' / 'evaluation' / 'after')
        for n in range(1, iterations + 1))):
    by_case: dict[tuple, dict[str, Any]] = {}
    for row in evaluator.read_table(path) or ():
      facts = {key: row[key] for key in ('set', 'engine', 'decoding')}
      case = by_case.setdefault(tuple(facts.values()), {'solver': name} | facts)
      hops = row['hops']
      case[hops if hops == evaluator.ALL else f'{hops}-hop'] = row['em']
    rows += by_case.values()
  if not rows:
    return ('No evaluation set: give --config.data.evaluate, and '
            '--config.search.corpus.')
  hops = sorted({key for row in rows for key in row if key.endswith('hop')})
  return 'Exact match of the solver\n\n' + figures.table(
      rows, ('solver', 'set', 'engine', 'decoding', *hops, evaluator.ALL))


def _alarms(reports: Mapping[str, Any]) -> str:
  alarms = [f'{name}: {alarm}' for name, report in reports.items()
            for alarm in report.get('alarms', ())]
  return '\n'.join(['Alarms', '', *(alarms or ['none'])])
