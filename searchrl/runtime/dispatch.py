# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Starts all programs of a process in one order on its devices.

A collective waits until all devices have reached it. If two threads start
programs at the same time, devices may get them in different orders and wait
forever. Therefore every jitted program that can span devices is started under
one lock. The lock is not held while a program runs.
"""

from collections.abc import Callable
import threading
from typing import Any

_LOCK = threading.RLock()  # a program may be traced within another one


class Ordered:
  """A jitted program that is started under the lock of this module.

  It has the attributes of the program, such as `lower`.
  """

  def __init__(self, program: Callable[..., Any]):
    self._program = program

  def __call__(self, *arguments: Any, **options: Any) -> Any:
    """Starts the program and returns its results, which may not be ready."""
    with _LOCK:
      return self._program(*arguments, **options)

  def __getattr__(self, name: str) -> Any:
    return getattr(self._program, name)
