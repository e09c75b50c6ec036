# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Curves of runs as inline SVG, in colours of the page's style sheet."""

import collections
from collections.abc import Callable, Mapping, Sequence
import io
import math
import re
from typing import Any, NamedTuple

import numpy as np

from searchrl.data import datasets
from searchrl.evaluation import figures
from searchrl.evaluation.report import reading
from searchrl.runtime import alerts

PANELS = {  # title and unit by metric
    'critic/score/mean': ('outcome', 'mean of a step'),
    'critic/rewards/mean': ('reward', 'mean of a step'),
    'reward/agrees_with_em/mean': ('the judge agrees with exact match',
                                   'share of the answers'),
    'search/calls_per_traj': ('searches', 'a question'),
    'response_length/mean': ('response length', 'tokens'),
    'actor/entropy': ('entropy', 'nats a token'),
    'actor/pg_clipfrac': ('clipped', 'share of the loss'),
    'actor/grad_norm': ('gradient norm', ''),
    'data/frac_group_mixed': ('groups with different outcomes', 'share'),
    'training/rollout_probs_diff_mean': ('sampler against learner',
                                         'mean difference of probability'),
    'sft/loss': ('loss of tuning', 'nats a token'),
    'sft/val_loss': ('validation loss of tuning', 'nats a token'),
}
PHASES = {  # descriptions of a step's phases, in their order
    'gen': 'rollouts', 'old_log_prob': 'log-probs', 'ref': 'reference',
    'values': 'values', 'adv': 'advantages', 'update_actor': 'update'}
# Placeholders in Matplotlib's output; the page has a variable for each.
_INK = {'--ink': '#010203', '--muted': '#010204', '--grid': '#010205'}
_LINES = tuple(f'#0102{n:02x}' for n in range(16, 24))
_SIZE = (3.9, 2.35)  # width and height of a panel, in inches
_STYLE: dict[Any, Any] = {
    'svg.fonttype': 'none', 'text.parse_math': False,
    'font.family': 'sans-serif', 'font.size': 9,
    'axes.edgecolor': _INK['--muted'], 'axes.labelcolor': _INK['--muted'],
    'axes.facecolor': 'none', 'figure.facecolor': 'none',
    'axes.grid': True, 'axes.axisbelow': True, 'axes.xmargin': 0.02,
    'axes.spines.top': False, 'axes.spines.right': False,
    'axes.spines.left': False, 'axes.titlesize': 10, 'axes.labelsize': 8,
    'grid.color': _INK['--grid'], 'grid.linewidth': 0.8,
    'text.color': _INK['--ink'], 'lines.solid_capstyle': 'round',
    'xtick.color': _INK['--muted'], 'xtick.labelsize': 8,
    'ytick.color': _INK['--muted'], 'ytick.labelsize': 8,
    'xtick.major.size': 0, 'ytick.major.size': 0}
_MOST_SETS = 5  # sets of questions whose exact match is drawn
_FEW = 30  # steps of a curve up to which each has a point
Curve = tuple[np.ndarray, np.ndarray, np.ndarray]  # steps, means, deviations


class Panel(NamedTuple):
  """The plot of one metric."""

  svg: str
  # {'name': ..., 'points': [[x, y, step, mean, deviation], ...]} of each line.
  # The place (x, y) is in fractions of width and height, from the upper left.
  points: list[dict[str, Any]]


def groups(runs: Sequence[reading.Run]) -> dict[str, list[reading.Run]]:
  """Returns groups of trained runs that differ only in seeds, by name."""
  by_family = collections.defaultdict(list)
  for run in runs:
    if run.steps or run.updates:
      by_family[run.family if run.config else run.name].append(run)
  return {(same[0].name if len(same) == 1 else
           f'{same[0].name} and {len(same) - 1} more seeds'): same
          for same in by_family.values()}


def curves(runs: Sequence[reading.Run]) -> dict[str, Panel]:
  """Returns the panels with values from at least one run, by title.

  A panel with the same numbers as an earlier panel is left out, such as the
  reward if it equals the outcome.
  """
  by_name = groups(runs)
  panels: dict[str, Panel] = {}
  drawn_lines: list[dict[str, Curve]] = []
  for name, title, unit in _panels(runs):
    lines = {group: curve for group, same in by_name.items()
             if (curve := _curve(same, name)) is not None}
    if lines and not any(_is_same(lines, drawn) for drawn in drawn_lines):
      drawn_lines.append(lines)
      panels[title] = _drawn(lines, list(by_name), title, unit)
  return panels


def times(run: reading.Run) -> str:
  """Returns a stacked plot of the seconds of a run's steps, by phase."""
  steps = [line[alerts.STEP] for line in run.steps]
  values = {label: [line.get(f'timing_s/{name}', 0.0) for line in run.steps]
            for name, label in PHASES.items()}
  values['the rest'] = [max(line.get('timing_s/step', 0.0) - sum(
      value[n] for value in values.values()), 0.0)
                        for n, line in enumerate(run.steps)]
  values = {label: value for label, value in values.items() if any(value)}

  def draw(axes):
    axes.stackplot(steps, list(values.values()), labels=list(values),
                   colors=_LINES, linewidth=0)
    axes.legend(fontsize=8, frameon=False, loc='upper left',
                bbox_to_anchor=(1.0, 1.05))

  return _svg(draw, f'{run.name}: time', 'seconds a step', (6.4, 2.35))[0]


def _is_same(one: Mapping[str, Curve], other: Mapping[str, Curve]) -> bool:
  """Returns whether two panels have the same numbers."""
  return one.keys() == other.keys() and all(
      np.array_equal(x, y) for name in one
      for x, y in zip(one[name], other[name]))


def _panels(runs: Sequence[reading.Run]) -> list[tuple[str, str, str]]:
  """Returns (metric, title, unit) of each panel, in their order.

  Exact match comes after the outcome.
  """
  panels = [(name, *labels) for name, labels in PANELS.items()]
  return panels[:1] + [
      (name, f'exact match: {name.split("/")[1]}', 'greedy')
      for name in _validated(runs)[:_MOST_SETS]] + panels[1:]


def sets_left_out(runs: Sequence[reading.Run]) -> int:
  """Returns the number of sets whose exact match in training is not drawn."""
  return max(len(_validated(runs)) - _MOST_SETS, 0)


def _validated(runs: Sequence[reading.Run]) -> list[str]:
  """Returns the metrics of greedy exact match by set; the mean's is first."""
  names = {name: None for run in runs for line in run.lines for name in line}
  return sorted(
      (name for name in names if re.fullmatch(r'val/.+/em/greedy', name)
       and '_noise' not in name and not re.search(r'_\d+hop/', name)),
      key=lambda name: name != f'val/{datasets.MEAN}/em/greedy')


def _curve(runs: Sequence[reading.Run], name: str) -> Curve | None:
  """Returns the curve of a metric: its mean and deviation over runs, by step.

  The deviation is 0 at a step that only one run has. The result is None if no
  run has the metric.
  """
  by_step = collections.defaultdict(list)
  for run in runs:
    for line in run.lines:
      if math.isfinite(line.get(name, math.nan)):
        by_step[reading.step_of(line)].append(line[name])
  if not by_step:
    return None
  steps = sorted(by_step)
  values = [by_step[step] for step in steps]
  return (np.array(steps), np.array([np.mean(x) for x in values]),
          np.array([np.std(x, ddof=1) if len(x) > 1 else 0 for x in values]))


def _drawn(lines: Mapping[str, Curve], order: Sequence[str], title: str,
           unit: str) -> Panel:
  def draw(axes):
    for group, (steps, mean, spread) in lines.items():
      color = _LINES[order.index(group) % len(_LINES)]
      window = max(1, len(mean) // 12)
      if np.any(spread):
        axes.fill_between(steps, mean - spread, mean + spread, color=color,
                          alpha=0.18, linewidth=0)
      if window > 1:
        axes.plot(steps, mean, color=color, alpha=0.35, linewidth=1)
      axes.plot(steps, figures.running_mean(mean, window), color=color,
                linewidth=2)
      if len(steps) <= _FEW:
        axes.plot(steps, mean, 'o', color=color, markersize=3)

  svg, place = _svg(draw, title, unit, _SIZE)
  points = [{'name': group, 'points': [
      [*place(step, value), int(step), float(f'{value:.4g}'),
       float(f'{deviation:.2g}')]
      for step, value, deviation in zip(*curve)]}
            for group, curve in lines.items()]
  return Panel(svg, points)


def _svg(draw, title: str, unit: str, size: tuple[float, float]
        ) -> tuple[str, Callable[[float, float], tuple[float, float]]]:
  """Returns an SVG element whose colours are variables of the page.

  Also returns a function from a step and a value to their position in the
  element, as fractions of its width and height from the upper left.
  """
  import matplotlib  # slow to import, and only reports need it
  from matplotlib.figure import Figure
  with matplotlib.rc_context(_STYLE | {'svg.hashsalt': title}):
    figure = Figure(figsize=size, layout='constrained')
    axes = figure.subplots()
    draw(axes)
    figures.finish(axes, title, unit)
    axes.set_xlabel('step')
    axes.grid(axis='x', visible=False)
    file = io.StringIO()
    figure.savefig(file, format='svg', transparent=True,
                   metadata=dict.fromkeys(('Creator', 'Date', 'Format', 'Type')))
  text = file.getvalue()[file.getvalue().index('<svg'):]
  text = re.sub(r'font-family: [^;]*; ', '', text)  # the page's font
  text = re.sub(r'<[^>]*>', lambda tag: re.sub(  # finer than a pixel
      r'(\d\.\d\d)\d+', r'\1', tag[0]), text)
  for name, color in _INK.items():
    text = text.replace(color, f'var({name})')
  for n, color in enumerate(_LINES):
    text = text.replace(color, f'var(--line-{n})')

  def place(step, value):
    x, y = figure.transFigure.inverted().transform(
        axes.transData.transform((step, value)))
    return round(float(x), 4), round(1 - float(y), 4)

  return text, place


def legend(runs: Sequence[reading.Run]) -> list[tuple[str, str]]:
  """Returns the (colour, name) of each line, for the page."""
  return [(f'var(--line-{n % len(_LINES)})', name)
          for n, name in enumerate(groups(runs))]
