# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Makes the files that the papers use from published data sets.

data_sets.toml has a table for each file of questions, of passages and of
vectors. A table of questions has an entry for each data set; the tables of
passages and vectors are entries themselves. An entry has the keys

  at       the hub id of the data set and the file's path in it
  rows     its number of rows
  draw     the number of questions that are drawn from it at random

A table of questions may also have the key

  merged   a file of Search-R1 that has the rows of all entries

See configs/prepare_data.py.
"""

from collections.abc import Mapping
import collections
import json
import pathlib
import re
import shutil
import sys
import tomllib
from typing import Any

from etils import epath

from searchrl.data import golds
from searchrl.data import jsonl
from searchrl.data import questions as questions_lib
from searchrl.experiment import config_checks
from searchrl.models import weights
from searchrl.papers.known_models import MODELS
from searchrl.runtime import atomic_files
from searchrl.runtime import processes
from searchrl.runtime import progress
from searchrl.runtime import workdir as workdirs
from searchrl.search import corpus as corpora
from searchrl.search.index import faiss_import
from searchrl.trajectory import Question

TABLE = tomllib.loads(
    pathlib.Path(__file__).with_name('data_sets.toml').read_text('utf-8'))
NOTE = 'prepared.json'
_FREE = ('source', 'files', 'models', 'copy_to', 'seed', 'any_rows')
_SECS = 7 * 24 * 3600  # longest wait of the other processes
# Name, digest and rows of a file, the digests of its sources, and the options.
Entry = dict[str, Any]


def names() -> list[str]:
  """Returns the names of the papers' files of passages and of questions.

  Files of vectors are left out, because they can be computed.
  """
  return [*TABLE['passages'], *TABLE['questions']]


def run(config, workdir: str) -> None:
  """Makes the files that are missing or damaged in `workdir`.

  Args:
    config: Config of the job; see configs/prepare_data.py.
    workdir: Directory of the files and of prepared.json.

  Raises:
    FileNotFoundError: A file is neither in the folder nor in the hub.
    ValueError: A file is damaged or has another number of rows.
  """
  config_checks.check(config)
  folder = pathlib.Path(workdir)
  workdirs.Workdir(folder, config, _FREE).prepare()
  processes.on_first('prepared', lambda: _make(config, folder), _SECS)


def _make(config, folder: pathlib.Path) -> None:
  store = _store(config.copy_to) if config.copy_to else None
  for name in config.models:
    hub_id = MODELS[name].hub_id if name in MODELS else name
    with progress.phase(f'Fetching {hub_id}'):
      _say(f'{hub_id}: {weights.locate(hub_id)}')
  for name in config.files:
    entry = _made(name, config, folder)
    if store:
      _copy(folder / entry['file'], store, name, entry)


def _made(name: str, config, folder: pathlib.Path) -> Entry:
  """Returns the entry of a file, which is made unless it is intact."""
  entry = _entries(folder).get(name)
  if entry and _is_whole(folder / entry['file'], entry, config):
    _say(f'{folder / entry["file"]} is whole; nothing to do.')
    return entry
  if name in TABLE['questions']:
    entry = _make_questions(name, config, folder / f'{name}.jsonl')
  elif name in TABLE['passages']:
    entry = _make_passages(name, config, folder / f'{name}.jsonl')
  else:
    entry = _make_vectors(name, config, folder / f'{name}.index')
  file = folder / entry['file']
  entry |= {'sha256': _digest(file), 'seed': config.seed,
            'any_rows': config.any_rows}
  atomic_files.write_json(folder / NOTE, _entries(folder) | {name: entry})
  counts = ', '.join(f'{part} {rows:,}' for part, rows in entry['rows'].items())
  _say(f'{file}: {sum(entry["rows"].values()):,} rows ({counts}), sha256 '
       f'{entry["sha256"]}')
  return entry


def _is_whole(file: pathlib.Path, entry: Entry, config) -> bool:
  """Returns whether a file is intact and was made with the same options."""
  return (file.is_file() and entry['seed'] == config.seed
          and entry['any_rows'] <= config.any_rows
          and _digest(file) == entry['sha256'])


def _make_questions(name: str, config, target: pathlib.Path) -> Entry:
  """Writes a file of questions, each with the name of its set."""
  table = dict(TABLE['questions'][name])
  merged = table.pop('merged', '')
  whole = _in_folder(config.source, merged) if config.source and merged else None
  files = {'': whole} if whole else {
      part: _located(entry['at'], config.source)
      for part, entry in table.items()}
  questions, digests = [], {}
  for part, file in files.items():
    digests[str(file)] = _checked_digest(file)
    read, left_out = _questions(file, part)
    counts = collections.Counter(q.data_source for q in read)
    for source in [part] if part else table:
      _check_rows(counts[source], table[source]['rows'], file, source, config)
    read = [q for q in read if q.uid not in left_out]
    if draw := table.get(part, {}).get('draw'):
      read = questions_lib.subset(read, draw, config.seed)
    questions += read
  questions_lib.write(target, questions)
  return {'file': target.name, 'sources': digests, 'rows': dict(
      collections.Counter(q.data_source for q in questions))}


def _questions(file: pathlib.Path, part: str
              ) -> tuple[list[Question], Mapping[str, str]]:
  """Returns all questions of a file, and the places of unanswerable questions.

  A question is unanswerable if no text can match its gold answers, or if a gold
  answer is blank. The second result maps the uid of each such question to its
  place.
  """
  left_out: dict[str, str] = {}

  def admit(question: Question, place: str) -> None:
    if not question.answers:
      raise ValueError(f'{place} must have golden answers, but has none. Fetch '
                       'the file again.')
    try:
      golds.read(question.answers)
    except ValueError:
      left_out[question.uid] = place

  with progress.phase(f'Reading {file}'):
    questions = questions_lib.read(
        file, source=part, needs_golds=False, admit=admit)
  if left_out:
    _say(f'{file}: left out {len(left_out)} questions with golden answers that '
         f'no answer can match, such as {next(iter(left_out.values()))}.')
  return questions, left_out


def _make_passages(name: str, config, target: pathlib.Path) -> Entry:
  """Writes a published corpus as an uncompressed file.

  Each passage is checked before it is written.
  """
  table = TABLE['passages'][name]
  source = _located(table['at'], config.source)
  digest, rows = _checked_digest(source), 0
  with (progress.phase(f'Reading {source}', total=table['rows'], unit='passage')
        as reach, atomic_files.new_file(target) as unfinished,
        unfinished.open('wb') as file):
    for place, line in progress.counted(jsonl.lines(source), reach):
      data = line.encode()
      corpora.parse(data, place)
      file.write(data)
      rows += 1
    _check_rows(rows, table['rows'], source, name, config)
  return {'file': target.name, 'rows': {name: rows},
          'sources': {str(source): digest}}


def _make_vectors(name: str, config, target: pathlib.Path) -> Entry:
  """Joins the parts of a flat index of faiss."""
  table = TABLE['vectors'][name]
  sources = [_located(at, config.source) for at in table['at']]
  with (progress.phase(f'Joining {target}'),
        atomic_files.new_file(target) as unfinished,
        unfinished.open('wb') as file):
    for source in sources:
      with source.open('rb') as part:
        shutil.copyfileobj(part, file, 2**24)
  if not config.any_rows:
    try:
      faiss_import.open_(target, count=table['rows'], dim=table['dim'])
    except ValueError:
      target.unlink()
      raise
  return {'file': target.name, 'rows': {name: table['rows']},
          'sources': {str(file): _checked_digest(file) for file in sources}}


def _check_rows(count: int, published: int, file: pathlib.Path, part: str,
                config) -> None:
  if count != published and not config.any_rows:
    raise ValueError(
        f'{file} must have the {published:,} rows of {part} that were '
        f'published, but has {count:,}. Fetch it again, or take any number by '
        '--config.any_rows=True.')


def _located(at: str, source: str) -> pathlib.Path:
  """Returns the local path of a published file.

  Args:
    at: Place of the file on the hub: owner, data set and path.
    source: Folder of downloads that has the file. '': it is fetched.

  Raises:
    FileNotFoundError: The file is not there, or the hub cannot be reached.
  """
  if source:
    file = _in_folder(source, at)
    if file is None:
      raise FileNotFoundError(
          f'source must hold {at.split("/", 2)[2]}, but {source} does not. '
          f'Fetch it from the data set {at.rpartition("/")[0]} of the hub, or '
          'name the files to make without it by --config.files=...')
    return file
  import huggingface_hub  # slow to import
  owner, name, path = at.split('/', 2)
  try:
    with progress.phase(f'Fetching {at}'):
      return pathlib.Path(huggingface_hub.hf_hub_download(
          f'{owner}/{name}', path, repo_type='dataset'))
  except Exception as error:  # the hub raises its own, of many kinds
    raise FileNotFoundError(
        f'{path} of the data set {owner}/{name} could not be fetched: '
        f'{type(error).__name__} {str(error).rstrip(".")}. Log in by `hf auth login` if it asks '
        'for an account, run the same command again, or fetch it elsewhere and '
        'name its folder by --config.source=...') from error


def _in_folder(source: str, at: str) -> pathlib.Path | None:
  """Returns the path of a published file in a folder; None if it is not there.

  The file may be at its path in the data set, with or without the data set's
  name before it. It may be compressed, not compressed, or parquet.
  """
  folder = pathlib.Path(source)
  if not folder.is_dir():
    raise FileNotFoundError('source must be a folder of downloaded files, or '
                            f'empty for the hub, but {source} is no folder.')
  plain = at.removesuffix('.gz')
  stem, dot, _ = plain.rpartition('.')
  written = [at, plain, f'{plain}.gz', f'{stem}.parquet'] if dot else [at]
  return next((file for parts in (2, 1, 0) for name in written if (
      file := folder / name.split('/', parts)[-1]).is_file()), None)


def _checked_digest(file: pathlib.Path) -> str:
  """Returns a file's SHA-256. In the hub's cache it is also the file's name.

  Raises:
    ValueError: A file in the hub's cache does not have the content of its name.
  """
  digest, name = _digest(file), file.resolve().name
  if re.fullmatch('[0-9a-f]{64}', name) and name != digest:
    raise ValueError(
        f'{file} must have the SHA-256 {name} that the hub gives, but has '
        f'{digest}. Delete {file.resolve()} and run the same command again.')
  _say(f'{file}: sha256 {digest}')
  return digest


def _digest(file: pathlib.Path) -> str:
  with progress.phase(f'Hashing {file}'):
    return atomic_files.sha256(file)


def _entries(folder: Any) -> dict[str, Entry]:
  """Returns the entries in the prepared.json of a folder or store, by name."""
  return atomic_files.read_json(folder / NOTE) or {}


def _store(copy_to: str) -> epath.Path:
  """Returns a folder or an object store that gets a copy of the files."""
  try:
    store = epath.Path(copy_to)
    if '://' not in copy_to:
      store.mkdir(parents=True, exist_ok=True)
    _entries(store)
    return store
  except Exception as error:  # each store raises its own
    raise ValueError(
        'copy_to must be a folder, gs://BUCKET/FOLDER or s3://BUCKET/FOLDER '
        f'that can be read and written, but {copy_to} cannot: '
        f"{type(error).__name__} {error}. Stores need pip install "
        "'searchrl[gcs]' or 'searchrl[s3]', and your account.") from error


def _copy(file: pathlib.Path, store: epath.Path, name: str, entry: Entry
         ) -> None:
  """Copies a file to a store that lacks it, and records it there."""
  entries = _entries(store)
  if entries.get(name) == entry:
    return
  target = store / file.name
  with (progress.phase(f'Copying {file} to {target}'), file.open('rb') as opened,
        target.open('wb') as written):
    shutil.copyfileobj(opened, written, 2**24)
  if target.stat().length != file.stat().st_size:
    raise OSError(f'{target} must have {file.stat().st_size} bytes, but has '
                  f'{target.stat().length}. Run the same command again.')
  (store / NOTE).write_text(json.dumps(entries | {name: entry}, indent=1))
  _say(f'{target}: copied')


def _say(text: str) -> None:
  processes.say(text, sys.stdout)
