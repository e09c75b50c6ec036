# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads files that may be compressed by gzip."""

from collections.abc import Iterator
import contextlib
import gzip
import pathlib
from typing import Any
import zlib


@contextlib.contextmanager
def opened(path: pathlib.Path) -> Iterator[Any]:
  """Opens a file for reading bytes; it is unpacked if its name ends in .gz.

  Raises:
    ValueError: A file named *.gz is truncated, or not of gzip.
  """
  try:
    with (gzip.open if path.suffix == '.gz' else open)(path, 'rb') as file:
      yield file
  except (EOFError, gzip.BadGzipFile, zlib.error) as error:
    raise ValueError(
        'a file whose name ends in .gz must be a whole gzip file, but '
        f'{path} is not: {error}. Fetch or compress it again.') from error
