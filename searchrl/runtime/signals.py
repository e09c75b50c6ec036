# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Stop requests by SIGINT and SIGTERM, and exit codes for a scheduler.

The exit code is 0 when the job is finished, 75 (EX_TEMPFAIL of sysexits.h) when
a signal stopped it and the same command resumes it, 70 when the watchdog ended
it or another process was late, and 1 after an error.
"""

from collections.abc import Callable
import math
import os
import signal
import sys
import time
import types
from typing import Any

EXIT_CODE = 75  # stopped, and can be resumed

_AGAIN_SECS = 0.01  # after an exception that Python could not raise
_POLL_SECS = 0.1
_STDERR = 2  # descriptor, because interrupted code may hold sys.stderr's lock


class Stopped(Exception):
  """Exception: a signal stopped a job early, and its work is saved.

  The message says how to resume the job.
  """


class Terminated(KeyboardInterrupt):
  """Exception at SIGTERM where nothing else handles it, as in an evaluation."""


def exit_at_sigterm() -> None:
  """Makes SIGTERM print a message and end the process, with exit code 75.

  It is for the time before the job begins.
  """
  def end(number, frame):
    say('Ended by SIGTERM before anything began. Run the same command to go '
        'on.')
    os._exit(EXIT_CODE)  # unfinished imports need no cleanup

  signal.signal(signal.SIGTERM, end)


def raise_at_sigterm() -> None:
  """Makes SIGTERM raise `Terminated` in the main thread, as Ctrl-C does.

  Python drops exceptions that are raised in a callback of its garbage collector
  or in `__del__`. If it drops the exception of a signal, the signal is sent
  again.
  """
  def terminate(number, frame):
    raise Terminated

  signal.signal(signal.SIGTERM, terminate)
  sys.unraisablehook = _signal_again


def _signal_again(dropped) -> None:
  """Handles an exception that Python could not raise, as in a finalizer.

  If a signal's handler raised it, the signal is sent to this process again.
  Other exceptions are reported as usual.
  """
  if not isinstance(dropped.exc_value, KeyboardInterrupt):
    sys.__unraisablehook__(dropped)
    return
  number = (signal.SIGTERM if isinstance(dropped.exc_value, Terminated)
            else signal.SIGINT)
  # A timer of the system, since a thread's start needs locks.
  def again(_, frame):
    if _is_in_hook(frame):  # on a busy machine; it would be dropped once more
      signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECS)
    else:
      signal.raise_signal(number)

  signal.signal(signal.SIGALRM, again)
  signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECS)


def _is_in_hook(frame: types.FrameType | None) -> bool:
  """Returns whether a hook for dropped exceptions is running."""
  hooks = (_signal_again.__code__,
           getattr(sys.unraisablehook, '__code__', None))
  while frame is not None:
    if frame.f_code in hooks:
      return True
    frame = frame.f_back
  return False


def ignore_more() -> None:
  """Ignores SIGTERM, so that it cannot change the exit code of the process."""
  signal.signal(signal.SIGTERM, signal.SIG_IGN)


def say(text: str) -> None:
  """Prints a line on stderr without waiting, also in a signal handler."""
  os.write(_STDERR, f'{text}\n'.encode())


class StopRequest:
  """A context manager that records whether Ctrl-C or SIGTERM has arrived.

  A later Ctrl-C raises KeyboardInterrupt. Use the context manager in the main
  thread only. At the end of the `with` block, the previous signal handlers are
  restored.

  Args:
    notice: Function that the signal handler calls at the first request.
  """

  def __init__(self, notice: Callable[[], None] = lambda: None):
    self.is_requested = False  # no lock, since a handler must not wait
    self._notice = notice
    self._previous: dict[signal.Signals, Any] = {}

  def wait(self, timeout_secs: float = math.inf) -> bool:
    """Waits for a signal; returns whether one has arrived."""
    deadline = time.monotonic() + timeout_secs
    while not self.is_requested and (left := deadline - time.monotonic()) > 0:
      time.sleep(min(_POLL_SECS, left))
    return self.is_requested

  def __enter__(self) -> 'StopRequest':
    for number in (signal.SIGINT, signal.SIGTERM):
      self._previous[number] = signal.signal(number, self._handle)
    return self

  def __exit__(self, *_) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def _handle(self, number: int, frame) -> None:
    if not self.is_requested:
      self.is_requested = True
      self._notice()
    elif number == signal.SIGINT:
      raise KeyboardInterrupt
