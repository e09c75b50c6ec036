# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A corpus of passages, and its jsonl files.

A line has either {"id", "contents"}, where the first line of the contents is
the title in double quotes, or {"id", "title", "text"}. The columns of BEIR and
KILT, {"_id", "wikipedia_title", "text": [paragraphs]}, are read, too.
"""

import codecs
import collections
from collections.abc import Iterable, Iterator
import dataclasses
import functools
import gzip
import hashlib
import json
import pathlib
from typing import Any

from searchrl.runtime import gzip_files
from searchrl.runtime import option_rules
from searchrl.runtime import processes
from searchrl.trajectory import Passage


_IDS = ('_id', 'docid', 'kilt_id')  # BEIR and KILT, Tevatron, KILT
_TABLES = ('.parquet', '.tsv', '.csv')


@dataclasses.dataclass(frozen=True)
class Corpus:
  """The passages that an engine searches; row i of an index is passage i.

  Engines use only its length, [i], iteration, `texts` and `digest`.

  Raises:
    ValueError: There is no passage, or a title has more than one line.
  """

  passages: tuple[Passage, ...]

  def __post_init__(self):
    if not self.passages:
      raise ValueError('corpus must have passages, but this is a corpus with '
                       'no passages. Give it at least one.')
    for passage in self.passages:
      if '\n' in passage.title:
        raise ValueError(
            f'title must be one line, but that of passage {passage.id!r} is '
            f'{passage.title!r}. Join its lines.')

  def __len__(self) -> int:
    return len(self.passages)

  def __getitem__(self, i: int) -> Passage:
    return self.passages[i]

  def __iter__(self) -> Iterator[Passage]:
    return iter(self.passages)

  @property
  def texts(self) -> list[str]:
    """Title, line break and text of each passage, for engines to index."""
    return [text_of(passage) for passage in self]

  @functools.cached_property
  def ids_are_positions(self) -> bool:
    """True if the ids are '0', '1', '2', ... in order."""
    return all(p.id == str(i) for i, p in enumerate(self))

  @functools.cached_property
  def digest(self) -> str:
    """SHA-256, in hex, of the uncompressed file that `write` would write."""
    sha = hashlib.sha256()
    for passage in self:
      sha.update(format_line(passage))
    return sha.hexdigest()


def read(path: str | pathlib.Path) -> Corpus:
  """Reads a corpus from a jsonl file, with a passage in each line.

  This module's docstring has the forms of a line. Empty lines are skipped. The
  file is compressed by gzip if its name ends in .gz.

  Raises:
    FileNotFoundError: There is no such file.
    ValueError: A line is not a passage, an id occurs twice, or the file has no
      passage or is truncated.
  """
  path, passages = locate(path), []
  numbers: dict[str, int] = {}  # id -> number of its line
  with gzip_files.opened(path) as file:
    for number, _, passage in parse_lines(file, path):
      first = numbers.setdefault(passage.id, number)
      if first != number:
        raise repeated_id(path, passage.id, first, number)
      passages.append(passage)
  return Corpus(tuple(passages))


def locate(path: str | pathlib.Path) -> pathlib.Path:
  """Returns the path of a corpus after checking that the file exists.

  Raises:
    FileNotFoundError: There is no such file.
    ValueError: The file is a table, such as a csv or parquet file, or is not on
      this machine.
  """
  option_rules.on_this_machine('corpus', path)
  path = pathlib.Path(path)
  if not path.is_file():
    raise FileNotFoundError(
        f'corpus must be a jsonl file, but there is none at {path}'
        f'{", which is a folder" if path.is_dir() else ""}. Check the path.')
  if path.name.removesuffix('.gz').endswith(_TABLES):
    raise ValueError(
        f'corpus must be a jsonl file, but {path} is a table. Write each row as '
        'a line {"id", "title", "text"}; docs/data.md has a command for it.')
  return path


def parse_lines(file: Iterable[bytes], path: pathlib.Path
               ) -> Iterator[tuple[int, int, Passage]]:
  """Yields the number, byte offset and passage of each line that is not empty.

  Lines are numbered from 1, and empty lines count. `path` is for messages. If
  passages have neither title nor text, a warning counts them at the end.

  Raises:
    ValueError: No line has a passage, or a line is not a passage.
  """
  start, count, blank = 0, 0, []
  for number, line in enumerate(file, 1):
    if line.removeprefix(codecs.BOM_UTF8).strip():
      passage = parse(line, f'line {number} of {path}')
      count += 1
      if not text_of(passage).strip():
        blank.append(number)
      yield number, start, passage
    start += len(line)
  if not count:
    raise ValueError(f'corpus must have passages, but {path} is a corpus with '
                     'no passages. Give it at least one line.')
  if blank:
    processes.say(
        f'Warning: {len(blank)} of the {count} passages of {path} have neither '
        f'title nor text, such as line {blank[0]}. An engine may return them. '
        'Drop these lines.')


def repeated_id(path: pathlib.Path, uid: str, first: int, second: int
               ) -> ValueError:
  """Returns the error for two lines with the same id."""
  return ValueError(
      f'id must be unique, but that of line {second} of {path} is {uid!r}, as '
      f'in line {first}. Drop or rename one of them.')


def write(path: str | pathlib.Path, passages: Iterable[Passage]) -> None:
  """Writes passages as {"id", "contents"} lines, without their scores.

  The file is compressed by gzip if its name ends in .gz.

  Raises:
    ValueError: Two passages have the same id, there is no passage, or a title
      has more than one line.
  """
  path = pathlib.Path(path)
  corpus = Corpus(tuple(passages))
  (uid, count), = collections.Counter(p.id for p in corpus).most_common(1)
  if count > 1:
    raise ValueError(f'the ids of a corpus must be unique, but {uid!r} occurs '
                     f'{count} times. Rename all but one.')
  with (gzip.open if path.suffix == '.gz' else open)(path, 'wb') as file:
    file.writelines(map(format_line, corpus))


def text_of(passage: Passage) -> str:
  """Returns title, line break and text: the input of engines and encoders."""
  return f'{passage.title}\n{passage.text}'


def format_line(passage: Passage) -> bytes:
  """Returns the line that `write` writes for a passage."""
  contents = f'"{passage.title}"\n{passage.text}'
  return json.dumps({'id': passage.id, 'contents': contents}).encode() + b'\n'


def parse(line: bytes, place: str) -> Passage:
  """Returns the passage of a line; this module's docstring has the forms.

  Args:
    line: JSON object in UTF-8.
    place: Name of the line in errors, such as 'line 3 of c.jsonl'.

  Raises:
    ValueError: The line has another form, or its title has several lines.
  """
  try:
    record = json.loads(line)
  except (ValueError, RecursionError) as error:
    why = error if isinstance(error, ValueError) else type(error).__name__
    raise ValueError(
        f'a line must be a JSON object, but {place} is not: {why}. Write one '
        'object a line, in UTF-8.') from error
  if not isinstance(record, dict):
    raise ValueError(f'a line must be a JSON object, but {place} holds '
                     f'{type(record).__name__}. Write one object a line.')
  record = _renamed(record)
  uid = record.get('id')
  if isinstance(uid, float) and uid.is_integer():
    uid = int(uid)  # pandas writes whole numbers so beside a missing one
  if isinstance(uid, bool) or not isinstance(uid, str | int):
    raise ValueError(f'id must be a string or an integer, but that of {place} '
                     f'is {repr(uid)[:80]}. Give every passage its own.')
  return Passage(str(uid), *_title_and_text(record, place))


def _renamed(record: dict[str, Any]) -> dict[str, Any]:
  """Returns a record with our keys in place of BEIR's, Tevatron's or KILT's."""
  ids = [name for name in _IDS if name in record]
  if 'id' not in record and ids:
    record = {'title': '', **record, 'id': record[ids[0]]}
  if 'wikipedia_title' in record:
    record = {**record, 'title': record['wikipedia_title']}
  text = record.get('text')
  if isinstance(text, dict):
    text = text.get('paragraph')
  if isinstance(text, list) and all(isinstance(part, str) for part in text):
    record = {**record, 'text': '\n'.join(part.strip() for part in text)}
  title = record.get('title')
  is_missing = 'title' in record and (title is None or title != title)
  return record | {'title': ''} if is_missing else record


def _is_quoted(title: str) -> bool:
  return len(title) > 1 and title[0] == title[-1] == '"'


def _split(contents: str) -> tuple[str, str]:
  """Returns the first line of contents, without quotes, and the other lines."""
  title, line_break, text = contents.partition('\n')
  if line_break and _is_quoted(title):  # as `write` writes it
    return title[1:-1], text
  if '\r' in title:
    contents = contents.replace('\r\n', '\n').replace('\r', '\n')
  title, _, text = contents.removeprefix('\ufeff').partition('\n')
  bare = title.strip()
  return (bare[1:-1] if _is_quoted(bare) else title), text


def _bare(title: str) -> str:
  """Returns a title without the quotes that Search-R1's server leaves out."""
  return title.strip().strip('"')


def title_and_text(record: dict[str, Any]) -> tuple[str, str] | None:
  """Returns the title and the text of a passage with this library's keys.

  The first line of `contents` is the title. But if it has no quotes and the
  record has another `title`, that is used, and all `contents` are the text. The
  result is None if the record has neither contents, nor title and text, as
  strings. A title from the field `title` may have several lines.
  """
  match record:
    case {'contents': str(contents)}:
      title, text = _split(contents)
      other = record.get('title')
      line = contents.partition('\n')[0].strip()
      if isinstance(other, str) and other.strip() and (
          _bare(other) != _bare(title)) and not (text and _is_quoted(line)):
        return other.strip('\r\n'), contents  # these are the text alone
      return title, text
    case {'title': str(title), 'text': str(text)} if 'contents' not in record:
      return title.strip('\r\n'), text
  return None


def _title_and_text(record: dict[str, Any], place: str) -> tuple[str, str]:
  """Returns title and text; raises a ValueError, which names the place."""
  parts = title_and_text(record)
  if parts is None:
    kinds = ', '.join(f'{key}: {type(value).__name__}'
                      for key, value in sorted(record.items()))
    raise ValueError(
        f'a passage must have contents, or title and text, as strings, but '
        f'{place} has {kinds:.200}. Put \'"Title"\\ntext\' into contents.')
  if '\n' in parts[0]:
    raise ValueError(f'title must be one line, but that of {place} is '
                     f'{parts[0][:80]!r}. Join its lines.')
  return parts
