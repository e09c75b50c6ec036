# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Records in, the tables and figures of README.md out."""

from collections.abc import Callable, Mapping, Sequence
import pathlib

import experiments  # beside this file
import matplotlib
import numpy as np
import paired
from searchrl.evaluation import figures

matplotlib.use('Agg')
from matplotlib import pyplot  # pylint: disable=g-import-not-at-top

BUDGET = experiments.STEPS * experiments.TRAJECTORIES  # of a default run
LEVEL = 0.6  # of greedy exact match, which a run is timed to
_LAST = 5  # steps
_HOPS = (1, 2, 3)  # that a measure is the mean of

Record = Mapping
Measure = Callable[[Record], float | None]
Curve = tuple[np.ndarray, np.ndarray]  # steps of 72 trajectories, heights


def cells(evaluation: str, name: str, decoding: str = 'greedy', *,
          hops: Sequence[int] = _HOPS, column: int = 1) -> Measure:
  """The mean over hop counts of exact match, or, with column 2, of searches."""
  def measure(record):
    keys = [f'{evaluation}/{name}/{decoding}/{h}' for h in hops]
    rows = [record['rows'][key] for key in keys if key in record['rows']]
    if len(rows) < len(keys):
      return None
    return float(np.mean([row[column] for row in rows]))
  return measure


def last(metric: str) -> Measure:
  """The mean of a metric of training over the last steps."""
  def measure(record):
    curve = record['curves'].get(metric)
    return float(np.mean(curve[-_LAST:])) if curve else None
  return measure


def greedy_curve(record: Record) -> Curve:
  """Steps of 72 trajectories, and greedy exact match of 1 to 3 hops there."""
  at = np.array([point[0] for point in record['greedy']], np.float64)
  heights = np.array([np.mean(point[1:]) for point in record['greedy']])
  return at / experiments.TRAJECTORIES, heights


def area(record: Record) -> float | None:
  """The mean of greedy exact match from the first trajectory to the last.

  Of recipes that filter, a step has more trajectories: so no run is credited
  for what it sampled beyond as many steps of 72 as its arm was given.
  """
  if len(record['greedy']) < 2:
    return None
  at, heights = greedy_curve(record)
  filtered = record['arm'].partition(' ')[0] in experiments.FILTERED
  end = experiments.STEPS if filtered else at[-1]
  return paired.area(at, heights, end)


def steps_to(record: Record) -> float | None:
  """Steps of 72 trajectories until greedy exact match reaches LEVEL."""
  return paired.reaches(*greedy_curve(record), LEVEL)


def through(engine: str) -> Measure:
  """Greedy exact match as judged through an engine; its own, too."""
  other, own = cells(f'through_{engine}', 'known'), MEASURES['greedy']
  return lambda record: other(record) if (
      f'through_{engine}' in record['commands']) else own(record)


def examined(column: str, name: str = 'iteration_1') -> Measure:
  """A column of how a proposer fared, of all hops, tried by the first solver.
  """
  def measure(record):
    reports = record.get('selfplay', {}).get('reports', {})
    rows = reports.get(f'examined/{name}', {}).get('rows', ())
    return next((row.get(column) for row in rows if row['hops'] == 'all'), None)
  return measure


def of_questions(value: Callable[[Mapping], float]) -> Measure:
  """Returns a measure of the solvers' question files: the iterations' mean."""
  def measure(record):
    reports = [report for name, report in record.get('selfplay', {}).get(
        'reports', {}).items() if name.endswith('/proposals')]
    return float(np.mean([value(report) for report in reports])) if (
        reports) else None
  return measure


def rollouts_of_proposers(record: Record) -> float | None:
  """Returns the number of proposers' rollouts, with the solver's attempts."""
  spent = record.get('selfplay', {}).get('spent', {})
  if not spent:
    return None
  return float(sum(phase['rollouts'] + phase['attempts']
                   for name, phase in spent.items()
                   if name.endswith('/proposer')))


MEASURES: dict[str, Measure] = {
    'greedy': cells('full', 'known'),
    'greedy, 1 hop': cells('full', 'known', hops=(1,)),
    'greedy, 2 hops': cells('full', 'known', hops=(2,)),
    'greedy, 3 hops': cells('full', 'known', hops=(3,)),
    'greedy, 4 hops': cells('full', 'known', hops=(4,)),
    'sampled': cells('full', 'known', 'sampled'),
    'searches': cells('full', 'known', column=2),
    'unseen': cells('unseen', 'unseen'),
    'famous': cells('full', 'famous'),
    'outdated': cells('full', 'outdated'),
    'area': area,
    'steps to .6': steps_to,
    'reward': last('critic/score/mean'),
    'valid turns': last('format/valid_rate'),
    'random passages': cells('through_noise', 'known'),
    'leak': last('search/leak_rate'),
    'last hop answered': last('search/answer_rate_last_hop'),
}
MEASURES |= {f'through_{engine}': through(engine)
             for engine in experiments.ENGINES}
MEASURES |= {
    'difficulty': examined('difficulty'), 'truth': examined('true'),
    'needed': examined('needed'), 'truth of questions': of_questions(
        lambda report: report['true']),
    'questions of 2 hops': of_questions(
        lambda report: report['needed'].get('2', 0) / report['kept']),
    "proposer's rollouts": rollouts_of_proposers}
_ALWAYS = ('greedy', 'greedy, 4 hops', 'searches', 'sampled', 'famous',
           'outdated', 'unseen', 'area', 'steps to .6', 'reward')


def by_seed(found: experiments.Records, arm: str, measure: str
           ) -> dict[int, float]:
  """{seed: value} of an arm's records that have the measure."""
  values = {seed: MEASURES[measure](record)
            for (name, seed), record in found.items() if name == arm}
  return {seed: value for seed, value in values.items() if value is not None}


# Tables -----------------------------------------------------------------------

def text(chosen: Mapping[str, experiments.Experiment],
         found: experiments.Records) -> str:
  """Each experiment: what was asked, its arms, and their differences."""
  return '\n'.join(
      f'## {name}\n\nHypothesis: {experiment.hypothesis}\n'
      f'Decided by: {experiment.measures[0]}, a difference of at least '
      f'{experiment.smallest:g}.\n\n{arms(experiment, found)}\n\n'
      f'{differences(experiment, found)}\n'
      for name, experiment in chosen.items())


def arms(experiment: experiments.Experiment, found: experiments.Records) -> str:
  """A row an arm: means over seeds, with their standard deviations."""
  measures = list(dict.fromkeys((*_ALWAYS, *experiment.measures)))
  lines = [f'| arm | seeds | {" | ".join(measures)} | CPU s a run |',
           '|---' * (len(measures) + 3) + '|']
  for arm in experiments.distinct([experiment]):
    costs = [sum(record['cpu_secs'].values())
             for (name, _), record in found.items() if name == arm.name]
    if costs:
      values = ' | '.join(mean_and_spread(
          [*by_seed(found, arm.name, measure).values()], len(costs))
                          for measure in measures)
      lines.append(f'| {arm.name} | {len(costs)} | {values} '
                   f'| {np.mean(costs):.0f} |')
  return '\n'.join(lines)


def mean_and_spread(values: Sequence[float], seeds: int) -> str:
  """A cell; of how many seeds, where only some have a value."""
  if not values:
    return ''
  spread = f' ± {np.std(values, ddof=1):.3f}' if len(values) > 1 else ''
  some = f' ({len(values)} of {seeds})' if len(values) < seeds else ''
  return f'{np.mean(values):.3f}{spread}{some}'


def differences(experiment: experiments.Experiment,
                found: experiments.Records) -> str:
  """A row a pair of arms, a column a measure: mean, 95 % interval, verdict."""
  lines = [f'| first minus second | {" | ".join(experiment.measures)} |',
           '|---' * (len(experiment.measures) + 1) + '|']
  for a, b in experiment.pairs:
    row = [verdict(paired.difference(
        by_seed(found, a, measure), by_seed(found, b, measure),
        smallest=smallest(measure, experiment.smallest)))
           for measure in experiment.measures]
    if any(row):
      lines.append(f'| {a} - {b} | {" | ".join(row)} |')
  return '\n'.join([*lines, '', 'Means over paired seeds, with 95 % t '
                    'intervals; bold: the interval excludes 0, and the '
                    'difference is large enough to count.'])


def smallest(measure: str, of_scores: float) -> float:
  """The smallest difference that counts: of steps, and of searches, its own."""
  return {'steps to .6': 3.0, 'searches': 0.2, 'needed': 0.2,
          "proposer's rollouts": 500}.get(measure, of_scores)


def verdict(found: paired.Difference | None) -> str:
  """A cell of a difference; bold if it is separable."""
  if found is None:
    return ''
  shown = f'{found.mean:+.3f}'
  if found.seeds > 1:
    shown += f' [{found.low:+.3f}, {found.high:+.3f}]'
  return f'**{shown}**' if found.separable else shown


# Figures ----------------------------------------------------------------------

_PANELS = {'reward in training': lambda record: _rewards(record),
           'greedy exact match, 1 to 3 hops': greedy_curve,
           'searches a question': lambda record: _searches(record)}


def _rewards(record: Record) -> Curve:
  return _of_training(record, 'critic/score/mean')


def _searches(record: Record) -> Curve:
  return _of_training(record, 'search/calls_per_traj')


def _of_training(record: Record, metric: str) -> Curve:
  """The running mean of a metric."""
  at = np.array(record['curves']['training/rollouts'], np.float64)
  means = figures.running_mean(record['curves'][metric], _LAST)
  return at / experiments.TRAJECTORIES, means


def draw(found: experiments.Records, folder: pathlib.Path) -> None:
  """Draws stress.png and through_engines.png, of what has records."""
  grids = {
      'stress': {rung: {recipe: experiments.at_rung(recipe, rung)
                        for recipe in experiments.STRESSED}
                 for rung in experiments.RUNGS},
      'through_engines': {f'{world or " plain"} world'.strip(): {
          engine: experiments.through(engine, world)
          for engine in experiments.ENGINES} for world in experiments.WORLDS}}
  grids['stress'][experiments.RUNGS[1]] |= {
      f'{recipe} matched': f'{recipe} stress_2 matched'
      for recipe in experiments.CLIPS}
  names = {arm for arm, _ in found}
  for name, columns in grids.items():
    if names & {arm for column in columns.values() for arm in column.values()}:
      rows = list(_PANELS)[:2] if name == 'stress' else list(_PANELS)
      grid(found, columns, rows, folder / f'{name}.png')


def grid(found: experiments.Records, columns: Mapping[str, Mapping[str, str]],
         rows: Sequence[str], file: pathlib.Path) -> None:
  """Panels: {column: {label: arm}} by rows of _PANELS; labels have colours."""
  figure, axes = pyplot.subplots(
      len(rows), len(columns), squeeze=False, sharex=True, sharey='row',
      figsize=(3.6 * len(columns), 2.8 * len(rows)), layout='constrained')
  labels = list(dict.fromkeys(
      label for column in columns.values() for label in column))
  for j, (title, arms_of) in enumerate(columns.items()):
    axes[0, j].set_title(title)
    axes[-1, j].set_xlabel('steps of 72 trajectories')
    for i, row in enumerate(rows):
      axes[i, 0].set_ylabel(row)
      for label, arm in arms_of.items():
        _band(axes[i, j], [record for (name, _), record in found.items()
                           if name == arm], _PANELS[row], label,
              f'C{labels.index(label)}')
  axes[0, 0].set_ylim(0, None)
  for axis in axes[0]:
    if axis.lines:
      axis.legend(fontsize=7)
  figure.savefig(file, dpi=150)
  pyplot.close(figure)


def _band(axis, records: Sequence[Record], curve: Callable, label: str,
          colour: str) -> None:
  """The mean of the seeds, and from the least to the most of them."""
  curves = [(x, y) for x, y in map(curve, records) if len(x)]
  if not curves:
    return
  start, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
  at = np.linspace(start, end, 61)
  heights = np.array([np.interp(at, x, y) for x, y in curves])
  axis.plot(at, heights.mean(0), color=colour, label=label,
            linestyle='--' if 'matched' in label else '-')
  axis.fill_between(at, heights.min(0), heights.max(0), color=colour, alpha=.15,
                    linewidth=0)
