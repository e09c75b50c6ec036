# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""An error in, one message out: the threads of a save print nothing of it.

When a write fails, Orbax raises the error, and before that logs it with a
traceback in each of its threads; asyncio logs it once more for each array, and
tensorstore reports each that ends after Orbax's loop. What is raised is told by
who handles it.
"""

from __future__ import annotations

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
  sys.unraisablehook = lambda unraisable: (
      None if _is_of_closed_loop(unraisable) else told(unraisable))


def _is_news(record: logging.LogRecord) -> bool:
  """Whether a record is no error that Orbax raises, too."""
  if record.levelno < logging.ERROR or not record.exc_info:
    return True
  frames = traceback.extract_tb(record.exc_info[2])
  return not any(_ORBAX in frame.filename for frame in frames)


def _is_of_closed_loop(unraisable: sys.UnraisableHookArgs) -> bool:
  return (unraisable.object is None and
          isinstance(unraisable.exc_value, RuntimeError) and
          str(unraisable.exc_value) == 'Event loop is closed')
