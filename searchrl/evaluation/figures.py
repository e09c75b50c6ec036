# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Figures and text tables of reports: curves of metrics, aligned columns."""

from collections.abc import Mapping, Sequence
import os
import pathlib
from typing import Any

import numpy as np

_COLUMNS = 3  # panels side by side
_COLOR = '#1f5fa8'
_SHADES = ('#8fb7e3', '#4f8fd0', '#1f5fa8', '#0b2f5c')  # for several lines
Line = tuple[Sequence[float], Sequence[float]]  # steps, values
Series = Line | Mapping[str, Line]  # a line, or several lines by name
_STYLE: dict[Any, Any] = {
    'axes.edgecolor': '#9aa0a6', 'axes.labelcolor': '#3c4043',
    'axes.grid': True, 'axes.axisbelow': True, 'axes.xmargin': 0.02,
    'axes.titlesize': 10, 'axes.titlepad': 8, 'axes.labelsize': 8.5,
    'axes.spines.top': False, 'axes.spines.right': False,
    'grid.color': '#e8eaed', 'grid.linewidth': 0.7, 'text.color': '#202124',
    'lines.solid_capstyle': 'round', 'svg.hashsalt': 'searchrl',
    'xtick.color': '#5f6368', 'xtick.labelsize': 8, 'xtick.major.size': 0,
    'ytick.color': '#5f6368', 'ytick.labelsize': 8, 'ytick.major.size': 0,
}


def curve(
    path: str | os.PathLike[str],
    series: Mapping[str, Series],
    *,
    title: str,
    units: Mapping[str, str],
    window: int = 10,
) -> tuple[pathlib.Path, pathlib.Path]:
  """Draws a panel for each series: faint values and a bold running mean.

  Args:
    path: Path without suffix; `path`.png and `path`.svg are written.
    series: {name: (steps, values)}, in order, with a panel for each; NaN is a
      gap. A panel {name: {line: (steps, values)}} has up to four lines, without
      running means.
    title: Title of the figure.
    units: {name: unit}, the label of the panel's vertical axis.
    window: Number of training steps of the running mean.

  Returns:
    The paths of the PNG and of the SVG.
  """
  import matplotlib  # slow to import, and only reports need it
  from matplotlib.figure import Figure
  from matplotlib.layout_engine import ConstrainedLayoutEngine
  columns = min(_COLUMNS, len(series))
  rows = -(-len(series) // columns)
  files = pathlib.Path(f'{path}.png'), pathlib.Path(f'{path}.svg')
  files[0].parent.mkdir(parents=True, exist_ok=True)
  with matplotlib.rc_context(_STYLE):
    figure = Figure(figsize=(3.9 * columns, 0.5 + 2.5 * rows),
                    layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    figure.suptitle(title, x=0.012, ha='left', size=13, weight='bold')
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True).flat
    for i, (name, lines) in enumerate(series.items()):
      if isinstance(lines, Mapping):
        _plot_lines(panels[i], lines)
      else:
        _plot(panels[i], *lines, window)
      finish(panels[i], name, units.get(name, ''))
      if i + columns >= len(series):  # no panel is below this one
        panels[i].set_xlabel('training step')
        panels[i].tick_params(labelbottom=True)
    for panel in panels[len(series):]:
      panel.set_visible(False)
    figure.savefig(files[0], dpi=160)
    figure.set_layout_engine('none')  # the layout is done
    figure.savefig(files[1], metadata={'Date': None})  # reproducible file
  return files


def running_mean(values: Sequence[float], window: int = 10) -> np.ndarray:
  """Returns for each value the mean of the last `window` values up to it.

  The means at the start are over fewer values. NaN values are left out. If
  there are no other values, the mean is NaN.
  """
  array = np.asarray(values, np.float64)
  recent = (array[max(i - window, 0):i] for i in range(1, len(array) + 1))
  present = (x[~np.isnan(x)] for x in recent)
  return np.array([x.mean() if x.size else np.nan for x in present])


def plain(text: str) -> str:
  """Returns the text with spaces for control characters, for the terminal."""
  return ''.join(c if c.isprintable() or c == '\n' else ' ' for c in text)


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()
         ) -> str:
  """Returns an aligned text table: a header, a rule, and a line per row.

  Numbers are aligned to the right.

  Args:
    rows: Rows {column: value}, which may lack columns.
    columns: Keys of the rows, and the header; (): all keys of the rows.
  """
  columns = columns or [*dict.fromkeys(key for row in rows for key in row)]
  cells = [[cell(row.get(column)) for column in columns] for row in rows]
  widths = [max(map(len, column)) for column in zip(columns, *cells)]
  right = [any(isinstance(row.get(column), (int, float)) for row in rows)
           for column in columns]

  def line(words):
    return '  '.join(
        word.rjust(width) if is_right else word.ljust(width)
        for word, width, is_right in zip(words, widths, right)).rstrip()

  rule = '  '.join('-' * width for width in widths)
  return '\n'.join([line(columns), rule, *map(line, cells)])


def narrow_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str],
                 keys: Sequence[str], *, stay: Sequence[str] = (),
                 width: int = 80) -> str:
  """Returns rows as tables of at most `width` characters, where possible.

  If a column has the same value in all rows, its value is written once, above
  the tables. A column without any value is left out. Columns that do not fit
  beside the keys go into further tables, which repeat the keys.

  Args:
    rows: Rows {column: value}, which may lack columns.
    columns: Keys of the rows, and the header.
    keys: Columns that identify a row. Each table repeats them.
    stay: Columns that stay in a table even if all their values are equal.
      Columns of floats always do.
    width: Maximum number of characters per line.
  """
  texts = {name: [cell(row.get(name)) for row in rows] for name in columns}
  filled = [name for name in columns if any(texts[name])]
  alike = [name for name in filled
           if len(rows) > 1 and len({*texts[name]}) == 1 and name not in stay
           and not isinstance(rows[0][name], float)]
  head = [name for name in filled if name in keys and name not in alike]
  above = ', '.join(f'{name} {texts[name][0]}' for name in alike)
  tables, block = [], head
  for name in filled:
    if name in (*alike, *head):
      continue
    wider = table(rows, [*block, name])
    if block != head and len(wider.split('\n')[1]) > width:
      tables.append(table(rows, block))
      block = head
    block = [*block, name]
  tables.append(table(rows, block))
  return '\n\n'.join([*[f'In all rows: {above}'] * bool(above), *tables])


def _plot(axes, x, y, window: int) -> None:
  """Draws one series. The newest mean is written at the upper right."""
  spacing = np.median(np.diff(x)) if len(x) > 1 else 1  # evaluations are rare
  mean = running_mean(y, max(round(window / spacing), 1))
  axes.plot(x, y, color=_COLOR, alpha=0.3, linewidth=0.9,
            marker='o' if len(x) < 30 else None, markersize=4)
  axes.plot(x, mean, color=_COLOR, linewidth=2)
  if len(x):
    newest = f'{mean[-1]:,.0f}' if abs(mean[-1]) >= 1000 else f'{mean[-1]:.3g}'
    axes.set_title(newest, loc='right', color=_COLOR)


def _plot_lines(axes, lines: Mapping[str, Line]) -> None:
  """Draws several lines in increasingly dark shades, with a legend."""
  shades = _SHADES[-len(lines):]
  for (label, (x, y)), color in zip(lines.items(), shades, strict=True):
    axes.plot(x, y, color=color, linewidth=1.8, marker='o', markersize=3,
              label=label)
  axes.legend(fontsize=7.5, frameon=False, ncols=2, borderaxespad=0.2,
              handlelength=1.2, columnspacing=1.0)


def finish(axes, title: str, unit: str) -> None:
  """Sets the title and the ticks of a panel whose horizontal axis is steps."""
  axes.set_title(title, loc='left', weight='bold')
  axes.set_ylabel(unit)
  axes.locator_params('x', integer=True, nbins=6)
  axes.locator_params('y', nbins=5)


def cell(value: Any) -> str:
  """Returns a value as a text for a table: None -> '', 0.5 -> '0.500'."""
  if value is None:
    return ''
  return f'{value:.3f}' if isinstance(value, float) else str(value)
