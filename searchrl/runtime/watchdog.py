# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Watchdog: ends a process whose heartbeats stop, and dumps its stacks.

A process that is alive but stuck raises no error, and collectives wait for it
forever. So a run sends heartbeats, and its process ends when they stop. The
launcher then restarts all processes, which resume.
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

_STDERR = 2  # descriptor, because a stuck thread may hold sys.stderr's lock


class Watchdog:
  """A watchdog that ends the process if no beat comes for a while.

      with watchdog.Watchdog(floor_secs=1800) as dog:
        for step in steps:
          dog.beat(f'step {step}')
          ...

  The limit is max(factor * median of the last 64 intervals, floor_secs). A
  thread that never releases the interpreter's lock stops the watchdog, too.

  Args:
    floor_secs: Smallest limit. It must be longer than the longest compilation,
      save or evaluation without a beat.
    factor: Limit in units of the median interval.
    file: File to which the report is also appended. It is made if missing.
    on_timeout: Function that is called with the report instead of ending the
      process.
    clock: Function that returns seconds that never decrease.
    wait: Function that sleeps at most so many seconds, and returns True if the
      watch is over.

  Raises:
    ValueError: `floor_secs` or `factor` is too small.
  """

  def __init__(
      self, floor_secs: float, factor: float = 10, *,
      file: str | os.PathLike[str] | None = None,
      on_timeout: Callable[[str], None] | None = None,
      clock: Callable[[], float] = time.monotonic,
      wait: Callable[[float], bool] | None = None,
  ):
    if floor_secs <= 0 or factor <= 1:
      raise ValueError(
          'a watchdog needs floor_secs > 0 and factor > 1, but they are '
          f'{floor_secs} and {factor}. Take minutes, and about 10.')
    self._floor, self._factor, self._file = floor_secs, factor, file
    self._on_timeout, self._clock = on_timeout, clock
    self._over = threading.Event()
    self._wait = wait or self._over.wait
    self._intervals = collections.deque(maxlen=64)
    self._lock = threading.Lock()
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
    """Records a heartbeat. `tag` says what the run does next."""
    with self._lock:
      now = self._clock()
      self._intervals.append(now - self._last)
      self._tag, self._last = tag, now

  def limit_secs(self) -> float:
    """Returns the number of seconds within which the next beat must come."""
    with self._lock:
      median = statistics.median(self._intervals) if self._intervals else 0
    return max(self._factor * median, self._floor)

  def _watch(self) -> None:
    while not self._over.is_set():
      limit = self.limit_secs()
      silent = self._clock() - self._last
      if silent > limit:
        return self._end(
            f'Watchdog: no beat for {silent:.0f} s after {self._tag!r}, but '
            f'{limit:.0f} s is the limit ({self._factor:g} x the median '
            f'interval, at least {self._floor:g} s).')
      if self._wait(limit - silent + 1e-3):
        return None

  def _end(self, report: str) -> None:
    if self._on_timeout:
      return self._on_timeout(report)
    report += (f'\nThe process ends with code {EXIT_CODE}; restart all '
               'processes. What each thread was doing:\n')
    try:
      _dump(_STDERR, report)
      if self._file:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        _dump(os.open(self._file, flags, 0o644), report)
    finally:  # even if stderr is closed or the disk is full
      os._exit(EXIT_CODE)  # sys.exit would wait for stuck threads


def _dump(descriptor: int, report: str) -> None:
  os.write(descriptor, report.encode())
  faulthandler.dump_traceback(descriptor, all_threads=True)
