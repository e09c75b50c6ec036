# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Watchdog: ends a process whose heartbeats stop, and dumps its stacks.

A process that is alive but stuck raises no error, and collectives wait for it
forever. Therefore a run sends heartbeats, and its process ends when they stop.
The launcher then restarts all processes, which resume.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
import faulthandler
import os
import statistics
import threading
import time

EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h: an internal error

_FACTOR = 10  # limit in units of the median interval
_CHECKS = 60  # number of checks in `floor_secs`
_STDERR = 2  # descriptor, because a stuck thread may hold sys.stderr's lock


class Watchdog:
  """A watchdog that ends the process if no beat comes for a while.

      with watchdog.Watchdog(floor_secs=1800) as dog:
        for step in steps:
          dog.beat(f'step {step}')
          ...

  The limit between two beats is 10 times the median of the last 64 intervals,
  but at least `floor_secs`. Time for which the process was stopped, as by
  SIGSTOP or a suspended SLURM job, does not count. The watchdog runs in a
  thread. It cannot end the process while another thread keeps the interpreter's
  lock (GIL).

  Args:
    floor_secs: Smallest limit, in seconds. It must be longer than the longest
      compilation, save or evaluation without a beat.
    clock: Monotonic clock, in seconds.

  Raises:
    ValueError: `floor_secs` is not positive.
  """

  def __init__(self, floor_secs: float,
               clock: Callable[[], float] = time.monotonic):
    if floor_secs <= 0:
      raise ValueError(f'floor_secs must be above 0, but is {floor_secs}. Give '
                       'a watchdog some minutes.')
    self._floor, self._clock = floor_secs, clock
    self._over = threading.Event()
    self._intervals: collections.deque[float] = collections.deque(maxlen=64)
    self._thread = threading.Thread(
        target=self._watch, name='watchdog', daemon=True)
    self._tag, self._last = 'the start', clock()

  def __enter__(self) -> Watchdog:
    self._last = self._clock()
    self._thread.start()
    return self

  def __exit__(self, *_) -> None:
    self._over.set()
    self._thread.join(timeout=5)

  def beat(self, tag: str) -> None:
    """Records a heartbeat. `tag` describes the next activity of the run."""
    now = self._clock()
    self._intervals.append(now - self._last)
    self._tag, self._last = tag, now

  def limit_secs(self) -> float:
    """Returns the number of seconds within which the next beat must come."""
    intervals = list(self._intervals)  # at once; another thread appends
    return max(_FACTOR * statistics.median(intervals or [0]), self._floor)

  def report(self, stopped_secs: float = 0) -> str:
    """Returns a text if the next heartbeat is overdue, else ''.

    Args:
      stopped_secs: Seconds since the last beat that do not count.
    """
    limit = self.limit_secs()
    silent = self._clock() - self._last - stopped_secs
    if silent <= limit:
      return ''
    return (f'Watchdog: no beat for {silent:.0f} s after {self._tag!r}, but '
            f'{limit:.0f} s is the limit ({_FACTOR} x the median interval, at '
            f'least {self._floor:g} s).')

  def _watch(self) -> None:
    pause, stopped, before = self._floor / _CHECKS, 0.0, self._clock()
    while not (report := self.report(stopped)):
      if self._over.wait(pause):
        return
      now, last = self._clock(), self._last
      if last > before:
        stopped = 0.0
      # A much longer wait means that the process was stopped meanwhile.
      stopped += max(now - max(before, last) - 2 * pause, 0)
      before = now
    report += (f'\nThe process ends with code {EXIT_CODE}; restart all '
               'processes. What each thread was doing:\n')
    try:
      os.write(_STDERR, report.encode())
      faulthandler.dump_traceback(_STDERR, all_threads=True)
    finally:  # even if stderr is closed
      os._exit(EXIT_CODE)  # sys.exit would wait for stuck threads
