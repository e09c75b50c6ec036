# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A write that fails in, one message out: the threads of a save print nothing.

When a write fails, Orbax raises the error, and before that logs it with a
traceback in each of its threads; asyncio logs it once more for each array, and
tensorstore reports each that ends after Orbax's loop. What is raised is told by
who handles it.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import logging
import os
import sys
import traceback

_ORBAX = f'{os.sep}orbax{os.sep}checkpoint{os.sep}'


def tell_errors_once() -> None:
  """Has this process drop those messages, and no others."""
  for name in ('absl', 'asyncio'):
    logging.getLogger(name).addFilter(_is_news)
  told = sys.unraisablehook
  if getattr(told, 'func', None) is not _tell:  # else this was called before
    sys.unraisablehook = functools.partial(_tell, told)


def _is_news(record: logging.LogRecord) -> bool:
  """Whether a record is no write of Orbax's that failed, which it raises."""
  if record.levelno < logging.ERROR or not record.exc_info:
    return True
  _, error, trace = record.exc_info
  is_write = isinstance(error, OSError) or 'os_error_code=' in str(error)
  return not is_write or not any(
      _ORBAX in frame.filename for frame in traceback.extract_tb(trace))


def _tell(told: Callable[[sys.UnraisableHookArgs], None],
          unraisable: sys.UnraisableHookArgs) -> None:
  is_late = (unraisable.object is None and
             isinstance(unraisable.exc_value, RuntimeError) and
             str(unraisable.exc_value) == 'Event loop is closed')
  if not is_late:
    told(unraisable)
