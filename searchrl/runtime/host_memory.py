# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The memory of the host, where the arrays of CPU devices are."""

import ctypes
import gc
import importlib.metadata
import importlib.util
import os
import sys
from typing import Any

# Parameters of glibc's mallopt: malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_collected: set[int] = set()  # numbers of imported modules at past collections


def keep() -> None:
  """Lets a process that computes on CPUs keep the memory of freed arrays.

  glibc gives the memory of an array of 32 MiB or more back to the system as
  soon as the array is freed. An XLA program allocates its temporary arrays
  anew at each call, and the system then clears each page again. On some
  virtual machines, this took a third of the time of an update. Afterwards, the
  memory goes back only in `give_back`. Call it before JAX starts. On
  accelerators and without glibc, nothing is done.
  """
  option = _glibc('mallopt')
  if option and _computes_on_cpus():
    option(_ARENA_MAX, 1)  # the other ones hold no large arrays
    option(_MMAP_MAX, 0)
    option(_TRIM_THRESHOLD, -1)  # never


def give_back() -> None:
  """Gives the memory of freed arrays back to the system, where glibc has it.

  Until then, glibc keeps the memory of freed arrays for later arrays. After
  `keep` it keeps the memory of all arrays, and otherwise only of arrays below
  32 MiB. Larger arrays may not fit into this memory, and then take more.

  If modules were imported since the last call, garbage is collected first. Some
  modules keep the frames of an import in a cycle, and with them the arrays of
  the functions that called it, such as the weights that a run loads.
  """
  if len(sys.modules) not in _collected:
    gc.collect()
    _collected.add(len(sys.modules))
  trim = _glibc('malloc_trim')
  if trim:
    trim(0)


def _glibc(name: str) -> Any:
  """Returns a function of glibc, or None without glibc."""
  return getattr(ctypes.CDLL(None), name, None) if (
      sys.platform == 'linux') else None


def _computes_on_cpus() -> bool:
  """Returns whether JAX will use CPUs, as far as is known before it starts."""
  platforms = os.environ.get('JAX_PLATFORMS')
  if platforms:
    return platforms == 'cpu'
  return not (importlib.metadata.entry_points(group='jax_plugins') or any(
      importlib.util.find_spec(name) for name in ('jax_plugins', 'libtpu')))
