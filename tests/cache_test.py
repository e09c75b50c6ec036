# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""cache: the answers of the engine, asked once; damage is never shown."""

import functools
import multiprocessing
import pathlib
import sqlite3
from unittest import mock

import pytest
import tiny

from searchrl.search import cache
from searchrl.search import engine_wrappers
from searchrl.trajectory import Passage, Query, SearchError


class Engine:
  """Answers with the text and top_k; notes what it is asked; may fail."""

  def __init__(self, name='e'):
    self.name, self.asked, self.fails = name, [], False

  def __call__(self, queries):
    self.asked.append([(q.text, q.top_k) for q in queries])
    if self.fails:
      return [SearchError('unavailable')] * len(queries)
    return [answer(q.text, q.top_k, self.name) for q in queries]

  def pop(self):
    return {'search/inner': 3}

  def wait(self):
    self.asked.append('wait')


def answer(text, top_k, name='e'):
  return tuple(Passage(f'{name}{i}', 'Titel "é"', f'{text}\n{i}', 0.1 / (i + 1))
               for i in range(top_k))


def ask(search, *keys):
  return search([Query(text, k, tiny.question()) for text, k in keys])


KEYS = [('a', 1), ('b', 2), ('a', 1), ('a', 2), ('', 0), ('\ud800 \x00 東', 1)]


@pytest.mark.parametrize('kept', ['memory', 'disk', 'both'])
def test_answers_are_those_of_the_engine_and_asked_once(kept, tmp_path):
  engine = Engine()
  search = cache.Cached(
      engine, index='i', entries=0 if kept == 'disk' else 100,
      path='' if kept == 'memory' else str(tmp_path / 'd' / 'c.sqlite'))
  for _ in range(2):
    assert ask(search, *KEYS) == [answer(*key) for key in KEYS]
    assert search([]) == []
  assert engine.asked == [list(dict.fromkeys(KEYS))]
  assert search.pop() == {'search/cache/hit_rate': 0.5,
                          'search/cache/damaged': 0,
                          'search/cache/unwritten': 0, 'search/inner': 3}
  ask(search, ('a', 1), ('new', 1), ('new', 1), ('b', 2))
  assert search.pop()['search/cache/hit_rate'] == 0.5


def test_a_file_outlives_the_run_and_serves_one_index_alone(tmp_path):
  path = str(tmp_path / 'c.sqlite')
  ask(cache.Cached(Engine(), index='i', path=path), *KEYS)
  again, other = Engine(), Engine('f')
  assert ask(cache.Cached(again, index='i', path=path), *KEYS) == [
      answer(*key) for key in KEYS]
  assert not again.asked
  assert ask(cache.Cached(other, index='j', path=path), ('a', 1)) == [
      answer('a', 1, 'f')]


def test_failures_are_asked_again(tmp_path):
  engine = Engine()
  search = cache.Cached(engine, index='i', path=str(tmp_path / 'c.sqlite'))
  engine.fails = True
  assert ask(search, ('a', 1))[0].kind == 'unavailable'
  engine.fails = False
  assert ask(search, ('a', 1)) == [answer('a', 1)]


def test_memory_keeps_the_newest():
  engine = Engine()
  search = cache.Cached(engine, index='i', entries=2)
  for key in (('a', 1), ('b', 1), ('a', 1), ('c', 1), ('a', 1), ('b', 1)):
    assert ask(search, key) == [answer(*key)]
  assert engine.asked == [[(t, 1)] for t in 'abcb']


@pytest.mark.parametrize('change, damaged', [
    ("UPDATE answers SET record = x'5b5d'", 2),  # [] is a legal record
    ('UPDATE answers SET record = CAST(record AS TEXT)', 2),
    ("UPDATE answers SET digest = ''", 2),
    ('UPDATE answers SET record = (SELECT record FROM answers AS o '
     'WHERE o.name != answers.name LIMIT 1)', 1)])  # the other has it already
def test_a_damaged_record_is_asked_again_and_counted(
    change, damaged, tmp_path):
  path = tmp_path / 'c.sqlite'
  ask(cache.Cached(Engine(), index='i', path=str(path)), ('a', 1), ('b', 1))
  with sqlite3.connect(path) as db:
    db.execute(change)
  engine = Engine()
  search = cache.Cached(engine, index='i', path=str(path))
  assert ask(search, ('a', 1), ('b', 1)) == [answer('a', 1), answer('b', 1)]
  assert len(engine.asked[0]) == damaged
  assert search.pop()['search/cache/damaged'] == damaged
  assert ask(cache.Cached(Engine(), index='i', path=str(path)), ('a', 1)) == [
      answer('a', 1)]  # it has been written anew


def test_bytes_that_rot_are_never_shown(tmp_path):
  path = tmp_path / 'c.sqlite'
  keys = [(f'{i} ' * 20, 3) for i in range(40)]
  search = cache.Cached(Engine(), index='i', path=str(path))
  ask(search, *keys)
  search._store._db.close()
  whole = path.read_bytes()
  refused = 0
  for place in range(0, len(whole), 997):
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xff]) +
                     whole[place + 1:])
    try:
      found = ask(cache.Cached(Engine(), index='i', path=str(path)), *keys)
    except ValueError as error:
      assert 'Remove the file' in str(error)
      refused += 1
    else:
      assert found == [answer(*key) for key in keys]
    for rest in tmp_path.glob('c.sqlite-*'):
      rest.unlink()
  assert refused


@pytest.mark.parametrize('bytes_', [
    b'not a database, but long enough to be taken for one' * 99, b'{}'])
def test_a_file_of_another_kind_is_refused(bytes_, tmp_path):
  path = tmp_path / 'c.sqlite'
  path.write_bytes(bytes_)
  with pytest.raises(ValueError, match='must be a cache.*Remove the file'):
    cache.Cached(Engine(), index='i', path=str(path))
  assert path.read_bytes() == bytes_


def test_a_database_of_something_else_is_refused(tmp_path):
  path = tmp_path / 'c.sqlite'
  with sqlite3.connect(path) as db:
    db.execute('CREATE TABLE mine (x)')
  with pytest.raises(ValueError, match="holds .'mine'., format 0"):
    cache.Cached(Engine(), index='i', path=str(path))


def _fill(path, first):
  search = cache.Cached(Engine(), index='i', path=path)
  for i in range(first, first + 40):
    assert ask(search, (f'{i}', 2)) == [answer(f'{i}', 2)]


def test_processes_share_a_file(tmp_path):
  path = str(tmp_path / 'c.sqlite')
  context = multiprocessing.get_context('spawn')
  both = [context.Process(target=_fill, args=(path, first))
          for first in (0, 20)]
  for process in both:
    process.start()
  for process in both:
    process.join(60)
  assert [process.exitcode for process in both] == [0, 0]
  engine = Engine()
  search = cache.Cached(engine, index='i', path=path)
  keys = [(f'{i}', 2) for i in range(60)]
  assert ask(search, *keys) == [answer(*key) for key in keys]
  assert not engine.asked


def test_a_file_is_a_cache_at_once_or_not_yet(tmp_path):
  """A process that dies while it makes the file leaves none of its parts."""
  path = tmp_path / 'c.sqlite'
  seen = []

  class Connection(sqlite3.Connection):
    def execute(self, *arguments):
      with sqlite3.connect(path) as other:  # what the others see meanwhile
        seen.append((
            other.execute('SELECT name FROM sqlite_master').fetchall(),
            other.execute('PRAGMA user_version').fetchone()))
      return super().execute(*arguments)

  with mock.patch.object(cache, 'sqlite3', wraps=sqlite3) as module:
    module.connect = functools.partial(sqlite3.connect, factory=Connection)
    store = cache.Store(path)
  store.write('i', {('a', 1): [1]})
  assert {(len(names), version) for names, (version,) in seen} == {
      (0, 0), (1, cache._FORMAT)}


def _open_at_once(path, barrier):
  for number in range(20):
    barrier.wait(60)
    cache.Store(pathlib.Path(f'{path}{number}'))


def test_processes_open_a_new_file_together(tmp_path):
  context = multiprocessing.get_context('spawn')
  barrier = context.Barrier(4)
  group = [context.Process(target=_open_at_once, args=(
      tmp_path / 'c', barrier)) for _ in range(4)]
  for process in group:
    process.start()
  for process in group:
    process.join(120)
  assert [process.exitcode for process in group] == [0] * 4


def test_a_file_that_stays_locked_is_named(tmp_path, monkeypatch):
  monkeypatch.setattr(cache, '_PATIENCE_SECS', 0.1)
  path = tmp_path / 'c.sqlite'
  with sqlite3.connect(path) as other:
    other.execute('BEGIN EXCLUSIVE')
    with pytest.raises(OSError, match='c.sqlite is locked by another process'):
      cache.Store(path)
    other.rollback()
  cache.Store(path)


def test_a_cache_that_another_process_writes_to_is_locked(
    tmp_path, monkeypatch):
  monkeypatch.setattr(cache, '_PATIENCE_SECS', 0.1)
  path = tmp_path / 'c.sqlite'
  cache.Store(path).write('i', {('q', 2): [1]})
  other = sqlite3.connect(path, isolation_level=None)
  other.execute('BEGIN IMMEDIATE')
  with pytest.raises(OSError, match='c.sqlite is locked by another process'):
    cache.Store(path)
  other.execute('ROLLBACK')
  assert cache.Store(path).read('i', [('q', 2)]) == {('q', 2): [1]}


def test_a_place_that_cannot_be_a_file_is_named_and_not_to_be_removed(tmp_path):
  with pytest.raises(OSError, match=(
      'search.options.path must be a file that can be read and written, but '
      '.* cannot: unable to open .*Check the disk')):
    cache.Store(tmp_path)


def test_it_waits_for_the_search_inside():
  engine = Engine()
  engine_wrappers.wait(cache.Cached(engine, index='i'))
  assert engine.asked == ['wait']


def test_a_disk_that_takes_nothing_costs_no_answer(tmp_path):
  path = tmp_path / 'c.sqlite'
  search = cache.Cached(Engine(), index='i', path=str(path))
  with sqlite3.connect(path) as db:
    db.execute('CREATE TRIGGER no BEFORE INSERT ON answers '
               "BEGIN SELECT RAISE(ABORT, 'disk full'); END")
  assert ask(search, ('a', 1)) == [answer('a', 1)]
  assert search.pop()['search/cache/unwritten'] == 1


def test_options_are_checked():
  with pytest.raises(ValueError, match='index must name'):
    cache.Cached(Engine(), index='')
  with pytest.raises(ValueError, match='entries must be'):
    cache.Cached(Engine(), index='i', entries=-1)
