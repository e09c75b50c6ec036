# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Files of questions: finds the files that a config names, and reads records.

All records have the keys of FlashRAG's jsonl. The columns of Search-R1's
parquet files and of the forms in `forms` are renamed to these keys.
"""

from collections.abc import Collection, Iterator, Sequence
import collections
import csv
import dataclasses
import hashlib
import itertools
import pathlib
import re
from typing import Any

from searchrl.data import forms
from searchrl.data import jsonl
from searchrl.runtime import option_rules

SUFFIXES = ('.jsonl', '.jsonl.gz', '.parquet')  # names that a folder may hold
_SEPARATORS = {'.csv': ',', '.tsv': '\t'}
# Key of a record -> columns of a parquet file that may hold its value.
_COLUMNS = {'question': ('question', 'prompt'),
            'golden_answers': ('golden_answers', 'reward_model'),
            'id': ('id', 'extra_info')}
# Other columns in which benchmarks publish gold answers and ids.
_GOLDS = ('possible_answers', 'answers', 'answer')  # PopQA, SQuAD, HotpotQA
_IDS = ('_id', 'question_id', 'qid')  # HotpotQA and 2Wiki, TriviaQA
# Columns by which MuSiQue-Full and SQuAD 2.0 mark questions without an answer,
# and the value of such a question, in lower case.
_UNANSWERABLE = {'answerable': 'false', 'is_impossible': 'true'}
_LONGEST_FIELD = 2**31 - 1  # characters of a field of a csv file
_FORM = '{"id", "question", "golden_answers"}'  # form of a line, for errors
# Keys of a conversation, which may also have the key 'question'.
_CONVERSATION = {'completion', 'messages', 'segments'}
_ROWS = 1024  # rows of a parquet file that are read at a time
Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class File:
  """A file of questions, as a config names it."""

  path: pathlib.Path
  name: str = ''  # '': the only file, which needs no name
  is_named: bool = False  # True: the config gives the name; False: the stem


def named(text: str, field: str, *, may_be_folder: bool = False) -> list[File]:
  """Returns the files of questions that a config field names.

  If there are several, a file without a name gets its stem as a name.

  Args:
    text: Text of the config: 'path', 'name=path,name=path', or a directory. ''
      names no file.
    field: Config field that holds the text, for error messages.
    may_be_folder: True if the path may be a directory of files.

  Raises:
    ValueError: A name or path is empty, two names are equal, or the text has
      the address of an object store.
    FileNotFoundError: A file does not exist, or a directory holds no questions.
  """
  option_rules.on_this_machine(field, text)
  path = pathlib.Path(text)
  if not text:
    return []
  if may_be_folder and path.is_dir():
    files = _in_folder(path, field)
  elif path.is_file() or not set(text) & {',', '='}:
    files = [File(path)]
  else:
    files = [_file(part.strip(), text, field) for part in text.split(',')]
  if len(files) > 1:
    files = [dataclasses.replace(file, name=file.name or stem(file.path))
             for file in files]
  check_differ([file.name for file in files], field)
  for file in files:
    if not file.path.is_file():
      raise FileNotFoundError(
          'questions are read from a jsonl, csv, tsv or parquet file, but '
          f'{file.path} is not a file. Check {field}.')
  return files


def stem(file: pathlib.Path) -> str:
  """Returns a file's name without its suffix: 'dir/nq.jsonl.gz' -> 'nq'."""
  return file.name.removesuffix('.gz').rpartition('.')[0] or file.name


def _file(part: str, text: str, field: str) -> File:
  name, is_named, path = part.partition('=')
  if not is_named or '/' in name:  # the = is part of the path
    name, is_named, path = '', '', part
  if not path or (is_named and not re.fullmatch(r'[\w.+-]+', name)):
    raise ValueError(
        f'{field} must be a path, or name=path,name=path, with names of '
        f'letters, digits and any of _ . + -, but is {text!r}.')
  return File(pathlib.Path(path), name, bool(is_named))


def _in_folder(folder: pathlib.Path, field: str) -> list[File]:
  """Returns the files with questions in a directory, named by their stems."""
  paths = sorted(f for f in folder.iterdir() if f.name.endswith(SUFFIXES))
  files = [File(path, stem(path)) for path in paths if has_questions(path)]
  if not files:
    raise FileNotFoundError(
        f'{field} must be a file, or a folder of .jsonl and .parquet files '
        f'whose rows have a question, but {folder} holds '
        f'{", ".join(path.name for path in paths) or "neither"}.')
  return files


def has_questions(file: pathlib.Path) -> bool:
  """Returns whether a file has questions, by its columns or its first row.

  Passages are none, nor are conversations, even with a key 'question'. Tables
  in csv or tsv are always taken to have questions.
  """
  if file.suffix in _SEPARATORS:
    return True  # nothing else is read from such a table
  if file.suffix == '.parquet':
    names = _parquet(file).schema_arrow.names
    return bool({*names} & {*_COLUMNS['question']}
                or _has_form(names, file))
  place, first = next(jsonl.lines(file), (str(file), '{}'))
  record = jsonl.loads(first, 'JSON', place)
  return isinstance(record, dict) and (
      not _CONVERSATION.intersection(record)
      and ('question' in record or _has_form(record, file)))


def _has_form(names: Collection[str], file: pathlib.Path) -> bool:
  """Returns whether a file's columns are those of a benchmark's questions.

  Passages of BEIR without titles have the columns of its queries, but are in a
  file named corpus.
  """
  form = forms.detect_format(names)
  return form is not None and (form.name, stem(file)) != ('beir', 'corpus')


def check_differ(names: Sequence[str], field: str) -> None:
  """Raises a ValueError if two names are equal.

  The error names `field`, the config field that has the names.
  """
  twice = [n for n, count in collections.Counter(names).items() if count > 1]
  if twice:
    raise ValueError(
        f'{field} must name its files differently, but {twice[0]!r} is the '
        'name of two. Write name=path,name=path.')


def records(file: pathlib.Path, *, needs_golds: bool
           ) -> Iterator[tuple[str, Record]]:
  """Yields each row of a file of questions as (place, record).

  A place is a text such as 'FILE, line 3' or 'FILE, row 3'. A record has the
  keys of FlashRAG's jsonl, such as question and golden_answers.

  Args:
    file: Path of a jsonl, parquet, csv or tsv file.
    needs_golds: True if a parquet file must have a column of gold answers.

  Raises:
    ValueError: A row is not a JSON object, or a table is invalid, lacks columns
      or cannot be read because pyarrow is not installed.
  """
  is_parquet = file.suffix == '.parquet'
  rows = _parquet_rows(file, needs_golds) if is_parquet else (
      _separated_rows(file) if file.suffix in _SEPARATORS else (
          (place, jsonl.loads(line, _FORM, place))
          for place, line in jsonl.lines(file)))
  for place, row in rows:
    if not isinstance(row, dict):
      raise ValueError(
          f'{place} must be {_FORM}, but {str(row)[:80]!r} is '
          f'a JSON {type(row).__name__}. Write one object a line.')
    form = forms.detect_format(row)
    if form:
      yield place, _converted(form, row, place)
    elif is_parquet or not {'question', 'golden_answers'} <= {*row} and (
        {'prompt', 'reward_model', *_GOLDS} & {*row}
        or 'question' in row and 'id' not in row):
      yield place, _renamed(row, place)
    else:
      yield place, row


def is_answerable(record: Record) -> bool:
  """Returns False for a record that is marked as having no answer."""
  return not any(str(record.get(name)).lower() == value
                 for name, value in _UNANSWERABLE.items())


def _converted(form: forms.Form, row: Record, place: str) -> Record:
  try:
    return form.convert(row)
  except (KeyError, TypeError, AttributeError, ValueError) as error:
    raise ValueError(
        f'{place} must have what {form.name} has, {", ".join(form.columns)}, '
        f'but {str(row)[:80]!r} has not: {type(error).__name__} '
        f'{error}.') from error


def _parquet(file: pathlib.Path):
  try:
    from pyarrow import parquet  # an optional dependency
  except ImportError as error:
    raise ValueError(
        f'{file} is read by pyarrow, which is not installed: '
        "pip install 'searchrl[parquet]' (or pip install pyarrow).") from error
  try:
    return parquet.ParquetFile(file)
  except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
    raise ValueError(f'{file} must be a parquet file, but cannot be read as '
                     f'one: {error}.') from error


def _parquet_rows(file: pathlib.Path, needs_golds: bool
                 ) -> Iterator[tuple[str, Record]]:
  """Yields (place, row) of a parquet file, with only the needed columns."""
  table = _parquet(file)
  names = table.schema_arrow.names
  form = forms.detect_format(names)
  columns = form.columns if form else (
      *(name for group in _COLUMNS.values() for name in group), *_GOLDS, *_IDS,
      *_UNANSWERABLE, 'answer_aliases', 'data_source', 'supporting_facts',
      *_metadata_columns(table.schema_arrow))
  others = {'golden_answers': _GOLDS, 'id': (*_GOLDS, *_IDS)}
  lacks = [] if form else [
      ' or '.join(group) for key, group in _COLUMNS.items()
      if not {*group, *others.get(key, ())} & {*names}
      and (needs_golds or key == 'question')]
  if lacks:
    raise ValueError(
        f'{file} must have the columns of Search-R1 or FlashRAG, but lacks '
        f'{", ".join(lacks)}; it has {", ".join(names)}.')
  number = itertools.count(1)
  batches = table.iter_batches(batch_size=_ROWS, columns=[
      name for name in columns  # a prompt is long, and has the question
      if name != 'prompt' or 'question' not in names])
  try:
    for batch in batches:
      for row in batch.to_pylist():
        if isinstance(row.get('metadata'), bytes):
          row['metadata'] = row['metadata'].decode()
        elif isinstance(row.get('metadata'), list):  # a map
          row['metadata'] = dict(row['metadata'])
        yield f'{file}, row {next(number)}', row
  except OSError as error:  # a damaged page
    raise ValueError(f'{file} must be a whole parquet file, but: {error} Fetch '
                     'or write it again.') from error


def _separated_rows(file: pathlib.Path) -> Iterator[tuple[str, Record]]:
  """Yields (place, row) of a csv or tsv file, whose first row names columns."""
  csv.field_size_limit(_LONGEST_FIELD)
  with file.open(encoding='utf-8-sig', newline='') as stream:
    rows = csv.DictReader(
        stream, delimiter=_SEPARATORS[file.suffix], strict=True)
    place = f'{file}, row 1'
    try:
      for name, count in collections.Counter(rows.fieldnames).items():
        if count > 1:
          raise csv.Error(f'{name!r} is the name of {count} of them')
      for number, row in enumerate(rows, start=1):
        place = f'{file}, row {number}'
        if None in row or None in row.values():
          raise csv.Error(f'it has not {len(rows.fieldnames or ())} fields')
        yield place, {name: value or None for name, value in row.items()
                      if value or name in _GOLDS}
        place = f'{file}, row {number + 1}'
    except (csv.Error, UnicodeDecodeError) as error:
      raise ValueError(
          f'{place} must have a field in UTF-8 for each name in the first row, '
          f'but: {error}. Fetch or write the file again.') from error


def _metadata_columns(schema: Any) -> list[str]:
  """Returns the names of the metadata columns to read from a parquet file.

  If the column has structs, only the parts that are needed are read, because
  others may contain long articles. Otherwise, as for JSON texts, it is read
  whole.
  """
  is_whole = 'metadata' in schema.names and not str(
      schema.field('metadata').type).startswith('struct<')
  return ['metadata'] if is_whole else [
      f'metadata.{name}' for name in (
          'hops', 'data_source', 'chain', 'poor_queries', 'passages',
          'supporting_facts')]


def _renamed(row: Record, place: str) -> Record:
  """Returns a row of Search-R1 or another benchmark with FlashRAG's keys.

  Raises:
    ValueError: The row lacks what a key needs; the error names its `place`.
  """
  record = {name: row[name] for name in (
      'id', 'question', 'golden_answers', 'data_source', 'metadata',
      'supporting_facts', *_UNANSWERABLE)
            if row.get(name) is not None}
  try:
    if 'question' not in record:
      prompt = row['prompt']
      text = prompt if isinstance(prompt, str) else prompt[-1]['content']
      record['question'] = text.partition('Question:')[2] or text
    if 'golden_answers' not in record and row.get('reward_model'):
      record['golden_answers'] = row['reward_model']['ground_truth']
    is_published = 'golden_answers' not in record
    if is_published and any(row.get(name) is not None for name in _GOLDS):
      record['golden_answers'] = _published_golds(row)
    names = [name for name in _IDS if row.get(name) is not None]
    if 'id' not in record and names:
      record['id'] = row[names[0]]
    elif 'id' not in record and is_published and not row.get('extra_info'):
      record['id'] = hashlib.sha256(
          record['question'].strip().encode()).hexdigest()[:16]
    elif 'id' not in record:
      record['id'] = row['extra_info']['index']
  except (KeyError, TypeError, IndexError, AttributeError) as error:
    raise ValueError(
        f'{place} must have prompt, reward_model.ground_truth.target and '
        f'extra_info.index where it has no question, golden_answers or id, but '
        f'{str(row)[:80]!r} has not: {type(error).__name__} {error}.'
    ) from error
  return record


def _published_golds(row: Record) -> Any:
  """Returns a benchmark's gold answers, with MuSiQue's aliases."""
  value = next(row[name] for name in _GOLDS if row.get(name) is not None)
  aliases = row.get('answer_aliases')
  return [value, *aliases] if aliases and isinstance(value, str) else value
