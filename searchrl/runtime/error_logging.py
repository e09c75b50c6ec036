# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Log filters: a failed write gives one message instead of many tracebacks.

When a write fails, each of Orbax's threads first logs the error with a
traceback, and then Orbax raises it. asyncio logs the error again for each
array. tensorstore reports each write that ends after Orbax's event loop has
closed. Python reports each write that has not begun. All of these messages are
dropped, because the code that handles the raised error also reports it.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import logging
import os
import sys
import traceback
import warnings

_ORBAX = f'{os.sep}orbax{os.sep}checkpoint{os.sep}'


def drop_repeated_errors() -> None:
  """Makes this process drop log messages that repeat a failed write's error.

  Python's warning that a write of Orbax was never awaited is ignored, too.
  `sys.unraisablehook` is replaced by a hook that drops the error of a write
  whose event loop is closed, and passes all others to the hook before it.
  """
  for name in ('absl', 'asyncio'):
    logging.getLogger(name).addFilter(_is_new)
  warnings.filterwarnings(
      'ignore', r"coroutine 'async_serialize.*' was never awaited",
      RuntimeWarning)
  hook = sys.unraisablehook
  if getattr(hook, 'func', None) is not _unless_late:  # else already installed
    sys.unraisablehook = functools.partial(_unless_late, hook)


def _is_new(record: logging.LogRecord) -> bool:
  """Returns whether to keep a log record: False for a failed write in Orbax."""
  if record.levelno < logging.ERROR or not record.exc_info:
    return True
  _, error, trace = record.exc_info
  of_tensorstore = 'os_error_code=' in str(error)
  if record.name == 'asyncio' and of_tensorstore:  # may have no traceback
    return False
  return not (of_tensorstore or isinstance(error, OSError)) or not any(
      _ORBAX in frame.filename for frame in traceback.extract_tb(trace))


def _unless_late(hook: Callable[[sys.UnraisableHookArgs], None],
                 unraisable: sys.UnraisableHookArgs) -> None:
  """Calls the hook, unless a write only ended after its event loop was closed.

  Orbax closes the loop when another write has failed, which is reported.
  """
  is_late = (unraisable.object is None and
             isinstance(unraisable.exc_value, RuntimeError) and
             str(unraisable.exc_value) == 'Event loop is closed')
  if not is_late:
    hook(unraisable)
