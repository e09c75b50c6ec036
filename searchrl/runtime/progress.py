# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Progress bar and phase timer: the progress of a run and its time by phase."""

from __future__ import annotations

import collections
from collections.abc import Iterator
import contextlib
import datetime
import sys
import time


class Timer:
  """A timer of phases; `with timer('rollout'): ...` adds seconds to one."""

  def __init__(self):
    self._secs = collections.defaultdict(float)

  @contextlib.contextmanager
  def __call__(self, phase: str) -> Iterator[None]:
    """Adds the seconds of the body to a phase."""
    start = time.perf_counter()
    try:
      yield
    finally:
      self._secs[phase] += time.perf_counter() - start

  def pop(self) -> dict[str, float]:
    """Returns {'timing_s/<phase>': seconds} since the last call, and resets."""
    secs, self._secs = self._secs, collections.defaultdict(float)
    return {f'timing_s/{phase}': s for phase, s in secs.items()}


class ProgressBar:
  """Progress on stderr: a bar on a terminal, otherwise one line per step.

  Args:
    total: Number of units, such as steps, in the run.
    initial: Number of units that were done before this process.
    enabled: Whether to print anything; False on all processes but the first.
    unit: Name of one unit.
  """

  FORMATS = {  # formats used by `update`; other fields: name and value
      'outcome': 'outcome {:.3f}',  # mean, in [0, 1]
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
    """Sets the number of units done, by default one more, and shows fields."""
    before = self._done
    self._done = min(self._total, self._done + 1 if done is None else done)
    shown = [self.FORMATS.get(name, name + ' {:.4g}').format(value)
             for name, value in fields.items()]
    if self._bar is not None:
      self._bar.set_postfix_str(', '.join(shown), refresh=False)
      self._bar.update(self._done - before)
    elif self._enabled:
      elapsed = time.monotonic() - self._start
      pace = elapsed / max(self._done - self._initial, 1)
      secs = round(pace * max(self._total - self._done, 0))
      print(f'{self._unit} {self._done}/{self._total}', *shown,
            f'ETA {datetime.timedelta(seconds=secs)}',
            sep='  ', file=sys.stderr, flush=True)

  def close(self) -> None:
    """Closes the bar, if there is one."""
    if self._bar is not None:
      self._bar.close()
