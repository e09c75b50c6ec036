# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Floats in; a JSONL file, TensorBoard, a progress line, curves and tables out.

`metrics.jsonl` is the source of truth: append-only, one JSON object a write,
on disk when `write` returns; all else is derived from it. One process writes.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import datetime
import json
import math
import os
import pathlib
import sys
import time
from typing import Any

import numpy as np

FILE = 'metrics.jsonl'


class Writer:
  """Appends one line a call to `workdir`/metrics.jsonl, and mirrors it.

  Args:
    workdir: made if it is missing; opening it again appends.
    tensorboard: also write `workdir`/tensorboard, if tensorboardX is there.
    step_field: what lines call the step.
  """

  def __init__(self, workdir: str | os.PathLike[str], *,
               tensorboard: bool = True,
               step_field: str = 'training/global_step'):
    workdir = pathlib.Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    self.path = workdir / FILE
    self._step_field = step_field
    self._events_dir = workdir / 'tensorboard' if tensorboard else None
    self._events = None  # opened by the first write: `truncate` may come first
    self._purge_from = None
    self._file = self.path.open('a')
    # A kill inside `write` may leave half a line; the next would glue to it.
    os.truncate(self.path, self.path.read_bytes().rfind(b'\n') + 1)

  def write(self, step: int, values: Mapping[str, Any]) -> None:
    """One line {step_field: step, **values}, flushed and synced to disk.

    Args:
      step: of the run, from 0 or 1.
      values: scalars, on the host or a device; written as floats, and as null
        where JSON has no number (NaN, infinities), which `read` makes NaN.

    Raises:
      ValueError: if a value is no scalar, or bears the name of the step.
    """
    if self._step_field in values:
      raise ValueError(f'values must leave {self._step_field} to `step`, but '
                       'hold it. Rename it.')
    floats = {name: _scalar(name, value) for name, value in values.items()}
    line = {self._step_field: int(step)} | {
        name: x if math.isfinite(x) else None for name, x in floats.items()}
    self._file.write(json.dumps(line) + '\n')
    self._file.flush()
    os.fsync(self._file.fileno())
    events = self._open_events()
    if events is not None:
      for name, value in floats.items():
        events.add_scalar(name, value, int(step))
      events.flush()

  def holds(self, step: int, prefix: str) -> bool:
    """Whether a line of that step has a value whose name begins so."""
    return any(line[self._step_field] == step and
               any(name.startswith(prefix) for name in line)
               for line in read(self.path))

  def truncate(self, step: int) -> None:
    """Drops the lines after `step`, the restored one: they will come again.

    A run that starts anew in an old `workdir` passes -1.
    """
    kept = [line for line in self.path.read_text().splitlines(keepends=True)
            if json.loads(line)[self._step_field] <= step]
    self.close()
    temporary = self.path.with_name(FILE + '.tmp')
    with temporary.open('w') as file:
      file.writelines(kept)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, self.path)
    self._file = self.path.open('a')
    self._purge_from = step + 1

  def close(self) -> None:
    self._file.close()
    if self._events is not None:
      self._events.close()
    self._events = None

  def _open_events(self):
    if self._events is None and self._events_dir is not None:
      with contextlib.suppress(ImportError):  # it is optional
        import tensorboardX
        older = len(list(self._events_dir.glob('*')))  # names count seconds
        self._events = tensorboardX.SummaryWriter(
            str(self._events_dir), purge_step=self._purge_from,
            filename_suffix=f'.{older}')
    return self._events


def read(path: str | os.PathLike[str]) -> list[dict[str, float]]:
  """The lines of a metrics.jsonl, in order; null is NaN.

  A last line without its end, torn by a kill, is left out.
  """
  lines = pathlib.Path(path).read_text().split('\n')[:-1]
  return [{name: math.nan if x is None else x
           for name, x in json.loads(line).items()} for line in lines]


def running_mean(values: Sequence[float], window: int = 10) -> np.ndarray:
  """The mean of each value and the up to `window - 1` before it; skips NaN."""
  values = np.asarray(values, np.float64)
  recent = (values[max(i - window, 0):i] for i in range(1, len(values) + 1))
  known = (x[~np.isnan(x)] for x in recent)
  return np.array([x.mean() if x.size else np.nan for x in known])


class Timer:
  """Seconds spent in named phases; `with timer('rollout'): ...` adds to one."""

  def __init__(self):
    self._secs = collections.defaultdict(float)

  @contextlib.contextmanager
  def __call__(self, phase: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
      yield
    finally:
      self._secs[phase] += time.perf_counter() - start

  def pop(self) -> dict[str, float]:
    """{'timing_s/<phase>': seconds} since the last call, which it forgets."""
    secs, self._secs = self._secs, collections.defaultdict(float)
    return {f'timing_s/{phase}': s for phase, s in secs.items()}


class Progress:
  """Where a run stands: a bar on a terminal, else one line a step, on stderr.

  Of the run's `total` units (steps, or what else its end is counted in),
  `initial` were done before this process. Pass `enabled=False` on all processes
  but the first.
  """

  FORMATS = {  # how `update` shows a field; others as name and value
      'reward': 'reward {:.3f}',  # mean outcome, in [0, 1]
      'mixed': 'mixed {:.0%}',  # share of groups with mixed outcomes
      'searches': 'searches/question {:.2f}',
      'tokens_per_sec': '{:,.0f} tokens/s',
  }

  def __init__(self, total: int, initial: int = 0, *, enabled: bool = True,
               unit: str = 'step'):
    self._unit = unit
    self._total, self._initial, self._done = total, initial, initial
    self._enabled = enabled
    self._start = time.monotonic()
    self._bar = None
    if enabled and sys.stderr.isatty():
      import tqdm  # only a terminal needs it
      self._bar = tqdm.tqdm(
          total=total, initial=initial, unit=f' {unit}s',
          dynamic_ncols=True)

  def update(self, done: int | None = None, **fields: float) -> None:
    """So many units are done, by default one more; `fields` say how it went."""
    before, self._done = self._done, self._done + 1 if done is None else done
    told = [self.FORMATS.get(name, name + ' {:.4g}').format(value)
            for name, value in fields.items()]
    if self._bar is not None:
      self._bar.set_postfix_str(', '.join(told), refresh=False)
      self._bar.update(self._done - before)
    elif self._enabled:
      elapsed = time.monotonic() - self._start
      pace = elapsed / max(self._done - self._initial, 1)
      secs = round(pace * max(self._total - self._done, 0))
      print(f'{self._unit} {self._done}/{self._total}', *told,
            f'ETA {datetime.timedelta(seconds=secs)}',
            sep='  ', file=sys.stderr, flush=True)

  def close(self) -> None:
    if self._bar is not None:
      self._bar.close()


def curve(
    path: str | os.PathLike[str],
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    title: str,
    units: Mapping[str, str] | None = None,
    xlabel: str = 'training step',
    window: int = 10,
    columns: int = 3,
) -> tuple[pathlib.Path, pathlib.Path]:
  """Draws small multiples, each value faintly and the running mean boldly.

  Args:
    path: without suffix; `path`.png and `path`.svg are written.
    series: {name: (steps, values)}, a panel each, in order; NaN is a gap.
    title: of the figure.
    units: {name: unit}, the label of the panel's vertical axis.
    xlabel: of the horizontal axes.
    window: training steps of the running mean.
    columns: panels side by side.

  Returns the paths of the PNG and of the SVG.
  """
  import matplotlib  # slow to import, and only reports need it
  from matplotlib.figure import Figure
  columns = min(columns, len(series))
  rows = -(-len(series) // columns)
  files = tuple(pathlib.Path(f'{path}.{kind}') for kind in ('png', 'svg'))
  files[0].parent.mkdir(parents=True, exist_ok=True)
  with matplotlib.rc_context(_STYLE):
    figure = Figure(figsize=(3.9 * columns, 0.5 + 2.5 * rows),
                    layout='constrained')
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    figure.suptitle(title, x=0.012, ha='left', size=13, weight='bold')
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True).flat
    for i, (name, (x, y)) in enumerate(series.items()):
      _panel(panels[i], x, y, name, (units or {}).get(name, ''), window)
      if i + columns >= len(series):  # nothing below it
        panels[i].set_xlabel(xlabel)
        panels[i].tick_params(labelbottom=True)
    for panel in panels[len(series):]:
      panel.set_visible(False)
    figure.savefig(files[0], dpi=160)
    figure.savefig(files[1], metadata={'Date': None})  # same run, same file
  return files


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
  """Aligned text: a header, a rule, a line a row; numbers to the right.

  `columns` are keys of the rows and words of the header; a row may lack some.
  """
  cells = [[_cell(row.get(column)) for column in columns] for row in rows]
  widths = [max(map(len, column)) for column in zip(columns, *cells)]
  right = [any(isinstance(row.get(column), (int, float)) for row in rows)
           for column in columns]

  def line(words):
    return '  '.join(
        word.rjust(width) if is_right else word.ljust(width)
        for word, width, is_right in zip(words, widths, right)).rstrip()

  rule = '  '.join('-' * width for width in widths)
  return '\n'.join([line(columns), rule, *map(line, cells)])


_COLOR = '#1f5fa8'
_STYLE = {
    'axes.edgecolor': '#9aa0a6', 'axes.labelcolor': '#3c4043',
    'axes.grid': True, 'axes.axisbelow': True, 'axes.xmargin': 0.02,
    'axes.titlesize': 10, 'axes.titlepad': 8, 'axes.labelsize': 8.5,
    'axes.spines.top': False, 'axes.spines.right': False,
    'grid.color': '#e8eaed', 'grid.linewidth': 0.7, 'text.color': '#202124',
    'lines.solid_capstyle': 'round', 'svg.hashsalt': 'searchrl',
    'xtick.color': '#5f6368', 'xtick.labelsize': 8, 'xtick.major.size': 0,
    'ytick.color': '#5f6368', 'ytick.labelsize': 8, 'ytick.major.size': 0,
}


def _panel(axes, x, y, name, unit, window) -> None:
  """One series; the newest mean stands at the upper right."""
  spacing = np.median(np.diff(x)) if len(x) > 1 else 1  # evaluations are rare
  mean = running_mean(y, max(round(window / spacing), 1))
  axes.plot(x, y, color=_COLOR, alpha=0.3, linewidth=0.9,
            marker='o' if len(x) < 30 else None, markersize=4)
  axes.plot(x, mean, color=_COLOR, linewidth=2)
  axes.set_title(name, loc='left', weight='bold')
  if len(x):
    shown = f'{mean[-1]:,.0f}' if abs(mean[-1]) >= 1000 else f'{mean[-1]:.3g}'
    axes.set_title(shown, loc='right', color=_COLOR)
  axes.set_ylabel(unit)
  axes.xaxis.get_major_locator().set_params(integer=True, nbins=6)
  axes.yaxis.get_major_locator().set_params(nbins=5)


def _scalar(name: str, value: Any) -> float:
  if np.size(value) != 1:
    raise ValueError(
        f'values must be scalars, but {name} has shape {np.shape(value)}. '
        'Reduce it before it is written.')
  return float(np.asarray(value).reshape(()))


def _cell(value: Any) -> str:
  if value is None:
    return ''
  return f'{value:.3f}' if isinstance(value, float) else str(value)
