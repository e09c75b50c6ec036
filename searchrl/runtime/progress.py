# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Progress on stderr: lines for long phases, one bar at a time, and timers.

A phase is a part of the work with a name. `with phase('Loading the weights'):
...` prints nothing if its body is quick. Otherwise it shows the name of the
phase and the seconds. A phase with a known amount of work has a bar. The work
of a training run is a `ProgressBar`. On a terminal, one line is redrawn; it
shows the innermost phase. In a file, a phase has a line at its start, one every
half minute, and one at its end.

Only the first process prints. This module imports no other module of ours.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import dataclasses
import datetime
import os
import sys
import threading
import time
from typing import Any, TextIO, TypeVar

T = TypeVar('T')

# Age at which a phase is announced.
WAIT_SECS = float(os.environ.get('SEARCHRL_ANNOUNCE_SECS') or 1.0)
EVERY_SECS = 30.0  # time between lines of one phase in a file
_STEP_SECS = 5.0  # smallest time between lines of a run's steps in a file
_LINES = 200  # largest number of lines of a run's steps in a file
_LONG_SECS = 5.0  # age from which the end of a phase is announced
_TICK_SECS = 0.25  # time between two looks at the phases
_BAR = 4, 20  # smallest and largest number of cells of a bar
_COLUMNS = 79  # width of a line, if that of the terminal is not known


@dataclasses.dataclass(eq=False)
class Phase:
  """A phase that is running. Only the display changes it."""

  what: str  # text that begins its lines
  began: float  # on the display's clock
  total: int = 0  # number of units; 0: not known
  unit: str = ''  # name of one unit
  initial: int = 0  # units that were done before
  done: int = 0  # units that are done, with those before
  # Texts beside the bar, about the last unit.
  fields: list[str] = dataclasses.field(default_factory=list)
  is_quiet: bool = False  # it is named only beside the bar that it is part of
  is_run: bool = False  # it has a line per unit, and is drawn from the start
  is_said: bool = False  # it has been announced
  last_line: float = -1e9  # time of its last line in a file

  def secs(self, now: float) -> float:
    """Returns the seconds since the phase began."""
    return now - self.began

  def bar(self, now: float, columns: int, beside: list[str]) -> str:
    """Returns a line with a bar that is at most `columns` wide."""
    import tqdm  # only a terminal needs it
    shape = f'{self.what} {{n_fmt}}/{{total_fmt}} |{{bar:{{cells}}}}| '
    meter = lambda cells: tqdm.tqdm.format_meter(
        self.done, self.total, self.secs(now), initial=self.initial,
        bar_format=shape.replace('{cells}', str(cells)) +
        '{elapsed}<{remaining}')
    text, least = meter(_BAR[0]), _BAR[0]
    line = _joined(text, (*beside, *self.fields), columns)
    more = min(columns - len(line), _BAR[1] - least)
    if more > 0:
      line = meter(least + more) + line.removeprefix(text)
    return line[:columns]

  def step(self, now: float) -> str:
    """Returns the line about a step of a run, for a file."""
    end = f'  ETA {self.left(now)}'
    return _joined(f'{self.what} {self.done}/{self.total}', self.fields,
                   _COLUMNS - len(end)) + end

  def status(self, now: float, beside: list[str]) -> str:
    """Returns the line about a phase that is still running, for a file."""
    if not self.total:
      return f'{self.what}: {_duration(self.secs(now))} so far'
    if self.is_run:
      return f'{self.what} {self.done}/{self.total}: ' + ', '.join(beside)
    left = f', {self.left(now)} left' if self.done > self.initial else ''
    return (f'{self.what}: {self.done:,} of {self.total:,} {_plural(self.unit)}'
            f', {_duration(self.secs(now))}{left}')

  def left(self, now: float) -> datetime.timedelta:
    """Returns the time that the phase still needs, at its speed so far."""
    return datetime.timedelta(
        seconds=round(self._pace(now) * max(self.total - self.done, 0)))

  def all(self, now: float) -> float:
    """Returns the seconds that the whole phase takes at its speed so far."""
    return self._pace(now) * self.total

  def _pace(self, now: float) -> float:
    return self.secs(now) / max(self.done - self.initial, 1)

  def end(self, now: float) -> str:
    """Returns the line for the end of the phase."""
    count = f'{self.done:,} {_plural(self.unit)}, ' if self.total else ''
    return f'{self.what}: {count}{_duration(self.secs(now))}'


def _plural(unit: str) -> str:
  return unit + ('es' if unit.endswith('ch') else 's')


class Display:
  """All running phases of a process, and the line that shows the innermost.

  Args:
    stream: Function that returns the file that is written to.
    clock: Function that returns seconds that never decrease.
    speaks: Function that returns whether this process prints.
  """

  def __init__(self, stream: Callable[[], TextIO],
               clock: Callable[[], float] = time.monotonic,
               speaks: Callable[[], bool] = lambda: True):
    self._stream, self._clock, self.speaks = stream, clock, speaks
    self._phases: list[Phase] = []  # from the outermost on
    self._drawn = ''  # line on the terminal that the next one replaces
    self._lock = threading.RLock()

  def begin(self, what: str, **facts: Any) -> Phase:
    """Adds an innermost phase. `facts` are fields of `Phase`."""
    now = self._clock()
    phase = Phase(what, now, **facts)
    phase.done = phase.initial
    with self._lock:
      self._phases.append(phase)
    return phase

  def end(self, phase: Phase, *, failed: bool = False) -> None:
    """Removes a phase, and prints its duration if it was long."""
    now = self._clock()
    with self._lock:
      outside = self._phases[:self._phases.index(phase)]
      self._phases.remove(phase)
      if outside and not outside[-1].is_run and not phase.is_quiet:
        outside[-1].began += phase.secs(now)  # its pace is that of its own work
      last = ''
      if phase.is_run and self._is_terminal():
        last = phase.bar(now, self._columns(), [])
      elif phase.is_said and not phase.is_run and (
          phase.secs(now) >= _LONG_SECS):
        last = phase.end(now)
      if last and not failed:
        self._line(last)
      else:
        self._clear()

  def advance(self, phase: Phase, done: int, fields: list[str] | None = None
             ) -> None:
    """Sets how many units of a phase are finished, and the texts at its bar."""
    now = self._clock()
    with self._lock:
      phase.done = min(done, phase.total)
      if fields is not None:
        phase.fields = fields
      if not phase.is_run:
        return
      if self._is_terminal():
        self._draw(now)
      elif (now - phase.last_line >= max(_STEP_SECS, phase.all(now) / _LINES)
            or phase.done == phase.total):
        phase.last_line = now
        self._line(phase.step(now))

  def tick(self) -> bool:
    """Shows the innermost long phase. Returns whether there is a phase."""
    now = self._clock()
    with self._lock:
      if self._is_terminal():
        self._draw(now)
      elif phase := self._innermost(now):
        beside = self._beside(phase, now)
        if not phase.is_said and not phase.is_run:
          self._line(f'{phase.what} ...')
          phase.is_said, phase.last_line = True, now
        elif now - phase.last_line >= EVERY_SECS and (
            beside or not phase.is_run):
          self._line(phase.status(now, beside))
          phase.last_line = now
      return bool(self._phases)

  @contextlib.contextmanager
  def hidden(self) -> Iterator[None]:
    """Removes the progress line while the body prints its own lines."""
    with self._lock:
      self._clear()
      yield

  def _innermost(self, now: float) -> Phase | None:
    """Returns the phase to show: the innermost one that is not short."""
    return next((phase for phase in reversed(self._phases)
                 if not phase.is_quiet and (
                     phase.is_run or phase.secs(now) >= WAIT_SECS)), None)

  def _beside(self, shown: Phase, now: float) -> list[str]:
    """Returns a list with the name and age of the running part of a step.

    It is empty if the part has not run for long.
    """
    inner = self._phases[self._phases.index(shown) + 1:]
    return [f'{phase.what} {_duration(phase.secs(now))}'
            for phase in inner[-1:]
            if phase.is_quiet and phase.secs(now) >= 2 * WAIT_SECS]

  def _draw(self, now: float) -> None:
    """Draws the line of the innermost phase on the terminal."""
    phase = self._innermost(now)
    if phase is None:
      self._clear()
      return
    phase.is_said = True
    columns = self._columns()
    text = (phase.bar(now, columns, self._beside(phase, now)) if phase.total
            else f'{phase.what} ... {_duration(phase.secs(now))}'[:columns])
    if text != self._drawn and self.speaks():
      self._write(f'\r{text}\x1b[K')
      self._drawn = text

  def _line(self, text: str) -> None:
    """Prints a line, in place of the progress line."""
    self._clear()
    if self.speaks():
      self._write(text + '\n')

  def _clear(self) -> None:
    """Removes the progress line."""
    if self._drawn:
      self._write('\r\x1b[K')
      self._drawn = ''

  def _write(self, text: str) -> None:
    stream = self._stream()
    with contextlib.suppress(ValueError, OSError):  # closed: nobody reads it
      stream.write(text)
      stream.flush()

  def _is_terminal(self) -> bool:
    stream = self._stream()
    return not stream.closed and stream.isatty()

  def _columns(self) -> int:
    """Returns the number of columns that fit on a line of the terminal."""
    columns = os.environ.get('COLUMNS', '')
    if columns.isdecimal() and int(columns):
      return int(columns) - 1
    with contextlib.suppress(ValueError, OSError):
      return (os.get_terminal_size(self._stream().fileno()).columns or 80) - 1
    return _COLUMNS


def _joined(text: str, fields: Iterable[str], columns: int) -> str:
  """Returns a text and as many of the fields as fit in the columns."""
  for field in fields:
    if len(text) + 2 + len(field) > columns:
      break
    text += '  ' + field
  return text


def _duration(secs: float) -> str:
  """Returns seconds as text; from 100 on in the form hours:minutes:seconds."""
  return f'{secs:.0f} s' if secs < 100 else str(
      datetime.timedelta(seconds=round(secs)))


def _is_first_by_environment() -> bool:
  """Returns whether this is the first process, by environment variables.

  It can be asked before jax is initialised and knows the process's number.
  """
  return all(os.environ.get(name, '0') in ('', '0') for name in (
      'JAX_PROCESS_ID', 'SLURM_PROCID'))


DISPLAY = Display(lambda: sys.stderr, speaks=_is_first_by_environment)
_ticks = threading.Event()  # set while there are phases
_thread: threading.Thread | None = None


def _watch() -> None:
  """Shows the phases of this process, in a separate thread."""
  while True:
    _ticks.wait()
    time.sleep(_TICK_SECS)
    if not DISPLAY.tick():
      _ticks.clear()


def _begin(what: str, **facts: Any) -> Phase:
  global _thread
  phase = DISPLAY.begin(what, **facts)
  if _thread is None or not _thread.is_alive():  # not yet, or after a fork
    _thread = threading.Thread(target=_watch, name='progress', daemon=True)
    _thread.start()
  _ticks.set()
  return phase


@contextlib.contextmanager
def phase(what: str, *, total: int = 0, unit: str = '', quiet: bool = False
         ) -> Iterator[Callable[[int], None]]:
  """Shows a phase while the body runs, if it takes long.

  Args:
    what: Text that begins a line, such as 'Loading the weights'.
    total: Number of units of work, for a bar. 0: unknown.
    unit: Name of one unit.
    quiet: True for a part of the work of a `ProgressBar`. It is named beside
      that bar and has no lines of its own.

  Yields:
    A function that sets the number of finished units.
  """
  work = _begin(what, total=total, unit=unit, is_quiet=quiet)
  failed = True
  try:
    yield lambda done: DISPLAY.advance(work, done)
    failed = False
  finally:
    DISPLAY.end(work, failed=failed)


def counted(items: Iterable[T], reach: Callable[[int], None]) -> Iterator[T]:
  """Yields the items, and reports after each how many were yielded.

  Args:
    items: Items to yield.
    reach: Function that sets the number in the bar; see `phase`.
  """
  for number, item in enumerate(items, start=1):
    yield item
    reach(number)


def hidden() -> contextlib.AbstractContextManager[None]:
  """Removes the progress line while the body prints its own lines."""
  return DISPLAY.hidden()


class Timer:
  """A timer of phases; `with timer('rollout'): ...` adds to a phase's seconds.

  Args:
    said: Texts to show on stderr while a phase runs, by the phase's name. Until
      the first `pop` they have their own lines, since the first step compiles.
      Phases without a text are only timed.
  """

  def __init__(self, said: Mapping[str, str] | None = None):
    self._secs: dict[str, float] = collections.defaultdict(float)
    self._said, self._is_first = said or {}, True

  @contextlib.contextmanager
  def __call__(self, phase: str) -> Iterator[None]:
    """Adds the seconds of the body to a phase."""
    start = time.perf_counter()
    try:
      with self._shown(phase):
        yield
    finally:
      self._secs[phase] += time.perf_counter() - start

  def _shown(self, name: str) -> contextlib.AbstractContextManager[Any]:
    text = self._said.get(name)
    if text is None:
      return contextlib.nullcontext()
    if self._is_first:
      return phase(f'First step, which compiles: {text}')
    return phase(text, quiet=True)

  def pop(self) -> dict[str, float]:
    """Returns {'timing_s/<phase>': seconds} since the last call, and resets."""
    secs, self._secs = self._secs, collections.defaultdict(float)
    self._is_first = False
    return {f'timing_s/{phase}': s for phase, s in secs.items()}


class ProgressBar:
  """Progress of a run: a bar on a terminal, otherwise a line now and then.

  Args:
    total: Number of units, such as steps, in the run.
    initial: Number of units that were done before this process.
    enabled: Whether to print anything; False on all processes but the first.
    unit: Name of one unit.
  """

  FORMATS = {  # formats used by `update`; other fields: name and value
      'reward': 'reward {:.2f}',  # mean
      'searches': 'searches {:.1f}',  # per question
      'tokens_per_sec': '{:,.0f} tok/s',
      'mixed': 'mixed {:.0%}',  # share of groups with mixed outcomes
  }

  def __init__(self, total: int, initial: int = 0, *, enabled: bool = True,
               unit: str = 'step'):
    self._phase = _begin(unit, total=total, initial=initial, unit=unit,
                         is_run=True) if enabled else None

  def update(self, done: int | None = None, **fields: float) -> None:
    """Sets the number of finished units and shows fields.

    By default, one more unit is finished.
    """
    if self._phase:
      done = self._phase.done + 1 if done is None else done
      DISPLAY.advance(self._phase, done, [
          self.FORMATS.get(name, name + ' {:.4g}').format(value)
          for name, value in fields.items()])

  def close(self) -> None:
    """Ends the bar."""
    if self._phase:
      DISPLAY.end(self._phase)
      self._phase = None
