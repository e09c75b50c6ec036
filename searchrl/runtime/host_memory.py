# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The memory of the host, where the arrays of CPU devices are."""

import ctypes
import sys


def give_back() -> None:
  """Gives the memory of freed arrays back to the system, where glibc has it.

  glibc keeps the memory of freed arrays of less than 32 MiB, and large arrays
  that are made next do not fit into it. Elsewhere, nothing is done.
  """
  trim = sys.platform == 'linux' and getattr(
      ctypes.CDLL(None), 'malloc_trim', None)
  if trim:
    trim(0)
