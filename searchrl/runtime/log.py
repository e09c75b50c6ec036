# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The logger `searchrl`: the lines that a command writes to stderr.

It is a logger of Python's `logging`, so a program that uses the package may
give it other handlers and levels. A text that begins with 'Warning: ' has that
level, all others are for information. The flag `--verbosity` sets the level.
"""

import logging
import sys

from searchrl.runtime import progress

LOGGER = logging.getLogger('searchrl')
LEVELS = ('debug', 'info', 'warning', 'error')


class _Stderr(logging.Handler):
  """A handler that writes lines above the progress line of a terminal."""

  def emit(self, record: logging.LogRecord) -> None:
    with progress.hidden():
      print(self.format(record), file=sys.stderr, flush=True)


def say(text: str) -> None:
  """Logs a text, as a warning if it begins with "Warning: ", else as info."""
  is_warning = text.startswith('Warning: ')
  LOGGER.log(logging.WARNING if is_warning else logging.INFO, '%s', text)


def informs() -> bool:
  """Returns whether messages below the level of warnings are logged."""
  return LOGGER.isEnabledFor(logging.INFO)


def set_level(name: str) -> None:
  """Sets the level of the logger. With 'debug', lines also have a time."""
  LOGGER.setLevel(name.upper())
  form = '%(asctime)s %(message)s' if name == 'debug' else '%(message)s'
  for handler in LOGGER.handlers:
    handler.setFormatter(logging.Formatter(form))


if not LOGGER.handlers:
  LOGGER.addHandler(_Stderr())
  LOGGER.setLevel(logging.INFO)
  LOGGER.propagate = False  # absl's handler of the root would repeat the lines
