# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Stop requests by SIGINT and SIGTERM, for training and for servers."""

from collections.abc import Callable
import math
import signal
import time

_POLL_SECS = 0.1


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
