# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads and writes jsonl files; an error names the line that is wrong."""

from collections.abc import Iterable, Iterator
import codecs
import json
import pathlib
from typing import Any

from searchrl.runtime import atomic_files
from searchrl.runtime import gzip_files


def lines(file: pathlib.Path) -> Iterator[tuple[str, str]]:
  """Yields ('FILE, line 3', text) of each line that is not blank.

  A byte-order mark at the start is skipped. A file named *.gz is unpacked.

  Raises:
    ValueError: A line is not UTF-8, or a .gz file is truncated.
  """
  with gzip_files.opened(file) as stream:
    for number, line in enumerate(stream, start=1):
      if number == 1:
        line = line.removeprefix(codecs.BOM_UTF8)
      if line.strip():
        place = f'{file}, line {number}'
        yield place, _decoded(line, place)


def write(path: str | pathlib.Path, rows: Iterable[Any]) -> None:
  """Writes a line of JSON for each row, atomically.

  A lone surrogate, which UTF-8 cannot encode, is written as its JSON escape.
  """
  with (atomic_files.new_file(pathlib.Path(path)) as unfinished,
        unfinished.open('w', encoding='utf-8', errors='backslashreplace'
                       ) as file):
    for row in rows:
      file.write(json.dumps(row, ensure_ascii=False) + '\n')


def _decoded(line: bytes, place: str) -> str:
  try:
    return line.decode('utf-8')
  except UnicodeDecodeError as error:
    raise ValueError(
        f'a line must be JSON in UTF-8, but {place} is not: {error}. It may be '
        'of another encoding, so convert it.') from error


def loads(text: str, must_be: str, place: str) -> Any:
  """Returns the JSON value of a line.

  Args:
    text: Text of the line.
    must_be: Description of a valid line, for the error.
    place: File and number of the line, for the error.

  Raises:
    ValueError: The text is not JSON, or its brackets are nested too deeply.
  """
  try:
    return json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ValueError(
        f'{place} must be {must_be}, but {text.strip()[:80]!r} is not: '
        f'{type(error).__name__} {error}.') from error
