# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Starts all programs of a process in one order on its devices.

A collective waits until all devices have reached it. If two threads start
programs at the same time, devices may get them in different orders and wait
forever. Therefore every jitted program that can span devices is started under
the locks of its devices. They are not held while a program runs. Programs that
share no device are not ordered, so that some devices sample while others train.
"""

from collections.abc import Callable
import contextlib
import functools
import threading
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

# The lock of each device. A program may be traced within another one, on the
# same devices.
_LOCKS: dict[Any, Any] = {}


class Ordered:
  """A jitted program that is started under the locks of its devices.

  It has the attributes of the program, such as `lower`.

  Args:
    program: The program.
    mesh: Mesh with all devices of the program. None: it may use any device.
  """

  def __init__(self, program: Callable[..., Any],
               mesh: Mesh | AbstractMesh | None = None):
    self._program, self._mesh = program, mesh

  def __call__(self, *arguments: Any, **options: Any) -> Any:
    """Starts the program and returns its results, which may not be ready."""
    with contextlib.ExitStack() as held:
      for lock in self._locks:  # in one order, so that threads do not deadlock
        held.enter_context(lock)
      return self._program(*arguments, **options)

  @functools.cached_property
  def _locks(self) -> list[Any]:
    devices = (self._mesh.local_devices if isinstance(self._mesh, Mesh) else
               jax.local_devices())
    return [_LOCKS.setdefault(device, threading.RLock())
            for device in sorted(devices, key=lambda device: device.id)]

  def __getattr__(self, name: str) -> Any:
    return getattr(self._program, name)
