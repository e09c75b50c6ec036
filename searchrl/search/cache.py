# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A cache around a SearchFn: results in memory, and in a SQLite file.

Memory holds the newest results and the file holds all results, so that a
repeated run does not search again. A result is stored under the name of the
index, the query's text and top_k. Errors are not stored. Each record has a
digest: a damaged record is searched again. A file that is not such a cache
raises an error.
"""

import collections
from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import json
import pathlib
import sqlite3
import threading
import time
from typing import Any, TypeVar

from searchrl.runtime import option_rules
from searchrl.search import engine_wrappers
from searchrl.trajectory import Passage, Passages, Query, SearchError, SearchFn

_FORMAT = 1
_PATIENCE_SECS = 30
_Key = tuple[str, int]  # text, top_k
Key = TypeVar('Key', bound=tuple)  # a tuple of JSON values


class Cached(engine_wrappers.Outer):
  """A search whose results are cached.

  Args:
    search: The inner search. Its results must depend on text and top_k alone.
    index: Name of the inner search in the file, so that one file can serve
      several. Change the name with the index, the encoder or an option.
    path: Path of a SQLite file on a disk of this machine; '': memory alone.
    entries: Largest number of results in memory.

  Raises:
    ValueError: `index` is empty, `entries` is negative, or the file is not a
      cache of this kind.
    OSError: The file cannot be used; see `Store`.
  """

  def __init__(self, search: SearchFn, *, index: str, path: str = '',
               entries: int = 100_000):
    if not index:
      raise ValueError('search.options.index must name what is searched, but '
                       "is empty. Write for instance index='wiki18-e5'.")
    option_rules.at_least(0, 'search.options.', entries=entries)
    self.inner = (search,)
    self._search, self._index, self._entries = search, index, entries
    self._store = Store(pathlib.Path(path)) if path else None
    self._recent: collections.OrderedDict[_Key, Passages] = (
        collections.OrderedDict())  # ordered from oldest to newest
    self._lock = threading.Lock()
    self._counts = engine_wrappers.Counts()

  def __call__(
      self, queries: Sequence[Query]) -> list[Passages | SearchError]:
    """Returns the passages, or a SearchError, of each query, in order.

    Only queries whose text and top_k are not cached go to the inner search, and
    equal ones only once. Passages are then cached, and SearchErrors are not.
    """
    keys = [(query.text, query.top_k) for query in queries]
    known = self._known([*dict.fromkeys(keys)])
    missing = {key: query for key, query in zip(keys, queries)
               if key not in known}
    fresh = dict(zip(missing, self._search([*missing.values()]) if missing
                     else (), strict=True))
    passages = {key: result for key, result in fresh.items()
                if not isinstance(result, SearchError)}
    self._keep(passages)
    if self._store:
      self._store.write(self._index, {
          key: [dataclasses.astuple(passage) for passage in found]
          for key, found in passages.items()})
    self._counts.add(queries=len(keys),
                     hits=sum(key not in missing for key in keys))
    results = known | fresh
    return [results[key] for key in keys]

  def pop(self) -> dict[str, float]:
    """Returns the metrics since the last `pop`, by name.

    They are the share of queries that were answered without the inner search,
    the counts of damaged and of unwritten records in the file, and the inner
    search's own metrics.
    """
    counts = self._counts.pop()
    faults = self._store.faults.pop() if self._store else counts
    return {
        'search/cache/hit_rate': counts['hits'] / max(counts['queries'], 1),
        'search/cache/damaged': faults['damaged'],
        'search/cache/unwritten': faults['unwritten'], **super().pop()}

  def _known(self, keys: Sequence[_Key]) -> dict[_Key, Passages | SearchError]:
    """Returns the results that are in memory or in the file.

    They become the newest results in memory.
    """
    with self._lock:
      recent = {key: self._recent[key] for key in keys if key in self._recent}
      for key in recent:
        self._recent.move_to_end(key)
    rest = [key for key in keys if key not in recent]
    records = self._store.read(self._index, rest) if self._store else {}
    stored = {key: tuple(Passage(*fields) for fields in record)
              for key, record in records.items()}
    self._keep(stored)
    return {**recent, **stored}

  def _keep(self, results: dict[_Key, Passages]) -> None:
    with self._lock:
      self._recent.update(results)
      while len(self._recent) > self._entries:
        self._recent.popitem(last=False)


class Store:
  """Results in a SQLite file, which processes on one machine may share.

  Attributes:
    faults: Counts of records that were 'damaged' when they were read, or that
      were 'unwritten' because SQLite could not write them.

  Args:
    path: Path of the file.
    field: Config field that names the file, for error messages.

  Raises:
    ValueError: The file is not a cache of this format, or is damaged.
    OSError: Another process has locked the file for 30 seconds, or it cannot
      be read or written.
  """

  def __init__(self, path: pathlib.Path, field: str = 'search.options.path'):
    self._path, self._lock, self._field = path, threading.Lock(), field
    self.faults = engine_wrappers.Counts()
    path.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    try:
      self._db = sqlite3.connect(
          path, timeout=_PATIENCE_SECS, check_same_thread=False)
      while not self._open():  # another process makes it
        if time.monotonic() > start + _PATIENCE_SECS:
          raise self._unusable('database is locked')
        time.sleep(0.05)
    except sqlite3.OperationalError as error:
      raise self._unusable(str(error)) from error
    except sqlite3.DatabaseError as error:
      raise self._not_a_cache(str(error)) from error

  def read(self, index: str, keys: Sequence[Key]) -> dict[Key, Any]:
    """Returns the stored results by key, without missing and damaged ones.

    The arguments are as in `write`, and the errors are those of the class.
    """
    keys_by_name = {_name(index, key): key for key in keys}
    with self._lock:
      try:
        rows = self._db.execute(
            'SELECT name, record, digest FROM answers WHERE name IN '
            '(SELECT value FROM json_each(?))',
            (json.dumps([*keys_by_name]),)).fetchall()
      except sqlite3.OperationalError as error:
        raise self._unusable(str(error)) from error
      except sqlite3.DatabaseError as error:
        raise self._not_a_cache(str(error)) from error
    whole = [(name, record) for name, record, digest in rows if isinstance(
        record, bytes) and digest == _digest(name, record)]
    self.faults.add(damaged=len(rows) - len(whole))
    return {keys_by_name[name]: json.loads(record) for name, record in whole}

  def write(self, index: str, results: Mapping[Key, Any]) -> None:
    """Writes results, which must be JSON values, to the file.

    A new result replaces the old result of its key. If SQLite cannot write, for
    instance to a full disk, the results are dropped, and counted in `faults`.

    Args:
      index: Name of the searched data.
      results: The result of each key, a tuple such as (query text, top_k).
    """
    rows = []
    for key, result in results.items():
      name, record = _name(index, key), json.dumps(result).encode()
      rows.append((name, record, _digest(name, record)))
    with self._lock:
      try:
        with self._db:
          self._db.executemany(
              'INSERT OR REPLACE INTO answers VALUES (?, ?, ?)', rows)
      except sqlite3.DatabaseError:  # a full disk must not lose results
        self.faults.add(unwritten=len(rows))

  def _open(self) -> bool:
    """Opens the file, and makes its table if it is new.

    Returns:
      True, or False if another process locks the file.

    Raises:
      ValueError: See the class.
    """
    try:
      self._db.execute('PRAGMA journal_mode=WAL')
    except sqlite3.OperationalError as error:
      if 'locked' in str(error):
        return False
      raise
    self._db.execute('PRAGMA synchronous=NORMAL')  # a crash may lose records
    with self._db:  # one transaction, for processes that open it together
      self._db.execute('BEGIN IMMEDIATE')
      tables = {name for name, in self._db.execute(
          "SELECT name FROM sqlite_master WHERE type = 'table'")}
      version, = self._db.execute('PRAGMA user_version').fetchone()
      if tables and (tables != {'answers'} or version != _FORMAT):
        raise self._not_a_cache(f'it holds {sorted(tables)}, format {version}')
      if not tables:
        self._db.execute('CREATE TABLE answers (name TEXT PRIMARY KEY, '
                         'record BLOB, digest TEXT) WITHOUT ROWID')
        self._db.execute(f'PRAGMA user_version = {_FORMAT}')
    verdict, = self._db.execute('PRAGMA quick_check(1)').fetchone()
    if verdict != 'ok':
      raise self._not_a_cache(verdict)
    return True

  def _unusable(self, reason: str) -> OSError:
    if 'locked' in reason:
      return OSError(f'{self._path} is locked by another process. Wait until '
                     'that process has ended.')
    return OSError(
        f'{self._field} must be a file that can be read and written, but '
        f'{self._path} cannot: {reason}. Check the disk, and the rights to the '
        'file.')

  def _not_a_cache(self, reason: str) -> ValueError:
    return ValueError(
        f'{self._field} must be a cache of this kind, or no file yet, but '
        f'{self._path} is not: {reason}. Remove the file, or name another; '
        'what it held is asked again.')


def _name(index: str, key: Key) -> str:
  return hashlib.sha256(json.dumps([index, *key]).encode()).hexdigest()


def _digest(name: str, record: bytes) -> str:
  return hashlib.sha256(name.encode() + record).hexdigest()
