# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Stop requests by SIGINT and SIGTERM, and what they leave to a scheduler.

A process ends with 0 when its job is finished, with 75 when a signal stopped it
and the same command goes on (EX_TEMPFAIL of sysexits.h), with 70 when the
watchdog ended it, and with 1 at an error.
"""

from collections.abc import Callable
import math
import os
import signal
import time

EXIT_CODE = 75  # stopped, and can be resumed

_POLL_SECS = 0.1
_STDERR = 2  # the descriptor: what a signal interrupts may hold sys.stderr


class Stopped(Exception):
  """A signal has ended a job before its end, and what it did is saved.

  The message says how to go on.
  """


class Terminated(KeyboardInterrupt):
  """SIGTERM where nothing else answers it: while a job starts or evaluates."""


def exit_at_sigterm() -> None:
  """Makes SIGTERM end the process with a sentence: nothing has begun yet."""
  def end(number, frame):
    del number, frame
    say('Ended by SIGTERM before anything began. Run the same command to go '
        'on.')
    os._exit(EXIT_CODE)  # what is imported just now need not be unwound

  signal.signal(signal.SIGTERM, end)


def raise_at_sigterm() -> None:
  """Makes SIGTERM raise `Terminated` in the main thread, as Ctrl-C raises."""
  def terminate(number, frame):
    del number, frame
    raise Terminated

  signal.signal(signal.SIGTERM, terminate)


def ignore_more() -> None:
  """Lets no SIGTERM disturb the end of a process, and its exit code."""
  signal.signal(signal.SIGTERM, signal.SIG_IGN)


def say(text: str) -> None:
  """Prints a line on stderr; for handlers of signals, which may not wait."""
  os.write(_STDERR, f'{text}\n'.encode())


class StopRequest:
  """Records Ctrl-C or SIGTERM; a second Ctrl-C raises KeyboardInterrupt.

  A context manager for the main thread: at its end the previous handlers are
  restored.

  Args:
    notice: called in the signal handler when the first request arrives.
  """

  def __init__(self, notice: Callable[[], None] = lambda: None):
    self.asked = False  # a plain flag: a handler must not wait for a lock
    self._notice = notice
    self._previous = {}

  def wait(self, timeout_secs: float = math.inf) -> bool:
    """Waits for a signal; returns whether one has arrived."""
    deadline = time.monotonic() + timeout_secs
    while not self.asked and (left := deadline - time.monotonic()) > 0:
      time.sleep(min(_POLL_SECS, left))
    return self.asked

  def __enter__(self) -> 'StopRequest':
    for number in (signal.SIGINT, signal.SIGTERM):
      self._previous[number] = signal.signal(number, self._ask)
    return self

  def __exit__(self, *_) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def _ask(self, number: int, frame) -> None:
    del frame
    if not self.asked:
      self.asked = True
      self._notice()
    elif number == signal.SIGINT:
      raise KeyboardInterrupt
