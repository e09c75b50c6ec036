# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads files that may be compressed by gzip."""

from collections.abc import Iterator
import contextlib
import gzip
import pathlib
from typing import Any
import zlib

_FIRST_BYTES = {b'\x1f\x8b': 'gzip', b'BZh': 'bzip2', b'\xfd7zXZ\0': 'xz',
                b'\x28\xb5\x2f\xfd': 'zstd'}


@contextlib.contextmanager
def opened(path: pathlib.Path) -> Iterator[Any]:
  """Opens a file for reading bytes; it is unpacked if its name ends in .gz.

  Raises:
    ValueError: A file named *.gz is truncated, or not of gzip; or the bytes are
      compressed by another program, or by gzip in a file of another name.
  """
  try:
    with (gzip.open if path.suffix == '.gz' else open)(path, 'rb') as file:
      first_bytes = file.peek(8)
      for start, program in _FIRST_BYTES.items():
        if first_bytes.startswith(start):
          raise ValueError(
              f'a file must be text, but {path}, line 1 is not: it is '
              f'compressed by {program}, so give it a name in .gz'
              f'{" and compress it by gzip" * (program != "gzip")}, or unpack '
              'it.')
      yield file
  except (EOFError, gzip.BadGzipFile, zlib.error) as error:
    raise ValueError(
        'a file whose name ends in .gz must be a whole gzip file, but '
        f'{path} is not: {error}. Fetch or compress it again.') from error
