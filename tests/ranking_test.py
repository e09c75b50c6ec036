# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""ranking: the same results from several processes, which come and go alone."""

from concurrent import futures
from multiprocessing import context
import gc
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest
import servers
import tiny

from searchrl.search import engines
from searchrl.search.corpus import Corpus
from searchrl.search.index import bm25
from searchrl.search.index import bm25_files
from searchrl.search.index import ranking
from searchrl.trajectory import Passage, Query


def random_corpus(count, seed=0, words=3000):
  rng = np.random.default_rng(seed)
  drawn = np.minimum(rng.zipf(1.3, (count, 30)), words)
  return Corpus(tuple(Passage(str(i), f'p{i}', ' '.join(
      f'w{word}x' for word in row)) for i, row in enumerate(drawn)))


CORPUS = random_corpus(4000)
QUERIES = [Query(' '.join(CORPUS[7 * i % 4000].text.split()[i % 9:i % 9 + 6]),
                 i % 5, tiny.question()) for i in range(700)]


@pytest.fixture(scope='module')
def index():
  return bm25.build(CORPUS.texts)


@pytest.fixture(scope='module')
def expected(index):
  return bm25.searcher(CORPUS, index, workers=1)(QUERIES)


@pytest.fixture(name='ranks')
def make_ranks(monkeypatch):
  """The Ranking of each searcher that a test makes, in order."""
  made, init = [], ranking.Ranking.__init__

  def noted(self, *args):
    init(self, *args)
    made.append(self)

  monkeypatch.setattr(ranking.Ranking, '__init__', noted)
  return made


def start(ranks):
  """Starts the workers of a Ranking and waits until one is ready."""
  ranks._start()
  ranks._ready.result(60)
  return [*ranks._pool._processes.values()]


def here(monkeypatch, then=lambda: None):
  """Counts the queries that this process ranks."""
  ranked, best = [], ranking._best

  def counting(*args):
    ranked.append(args)
    then()
    return best(*args)

  monkeypatch.setattr(ranking, '_best', counting)
  return ranked


@pytest.mark.parametrize('workers', [2, 9])
def test_results_are_those_of_one_process_to_the_bit(
    index, expected, ranks, monkeypatch, workers):
  search = bm25.searcher(CORPUS, index, workers=workers)
  assert len(start(ranks[0])) == workers - 1
  ranked = here(monkeypatch)
  assert search(QUERIES) == expected
  assert 0 < len(ranked) < len(QUERIES)  # others did the rest
  assert search(QUERIES[::-1]) == expected[::-1]
  assert search(QUERIES[:3]) == expected[:3] and search([]) == []


def test_of_calls_at_once_each_gets_its_own_results(index, expected, ranks):
  search = bm25.searcher(CORPUS, index, workers=2)
  start(ranks[0])
  with futures.ThreadPoolExecutor(4) as pool:
    found = list(pool.map(
        lambda shift: search(QUERIES[shift:] + QUERIES[:shift]), range(12)))
  assert found == [expected[n:] + expected[:n] for n in range(12)]


@pytest.mark.slow
def test_messages_larger_than_any_buffer_hang_neither_side(
    index, ranks, monkeypatch):
  monkeypatch.setattr(ranking, '_CALL', 1)
  monkeypatch.setattr(ranking, '_PIECE', 8)
  long = [Query(' '.join(f'w{word}x' for word in range(i, i + 900)), 3000,
                tiny.question()) for i in range(80)]
  search = bm25.searcher(CORPUS, index, workers=2)
  start(ranks[0])
  assert search(long) == bm25.searcher(CORPUS, index, workers=1)(long)


def test_small_calls_start_no_process(index, expected, ranks):
  search = bm25.searcher(CORPUS, index, workers=2)
  for start in range(0, 700, 100):
    assert search(QUERIES[start:start + 100]) == expected[start:start + 100]
  assert ranks[0]._pool is None
  search(QUERIES)  # does not wait for it
  assert len(ranks[0]._pool._processes) == 1
  assert bm25.searcher(CORPUS, index, workers=1)(QUERIES) == expected
  assert ranks[1]._pool is None


@pytest.mark.parametrize('when', ['before', 'meanwhile'])
def test_a_worker_that_is_killed_costs_a_warning_and_no_result(
    index, expected, ranks, monkeypatch, capsys, when):
  search = bm25.searcher(CORPUS, index, workers=3)
  victim = start(ranks[0])[0]
  if when == 'before':
    victim.kill()
    victim.join()
  else:
    here(monkeypatch, victim.kill)
  assert search(QUERIES) == expected
  servers.until(lambda: ranks[0]._pool is None or search(QUERIES) != expected)
  assert capsys.readouterr().err == (
      'Warning: a worker of the BM25 search has died. This process does its '
      'part, and the next large call starts another.\n')
  assert search(QUERIES) == expected and not capsys.readouterr().err
  ranks[0]._ready.result(60)
  assert len(ranks[0]._pool._processes) == 2


def test_a_call_that_fails_leaves_nothing_for_the_next(index, expected, ranks):
  class Torn:

    def __getitem__(self, i):
      if i % 5 == 0 and self.is_torn:
        raise OSError('the disk is gone')
      return CORPUS[i]

  corpus = Torn()
  corpus.is_torn = True
  search = bm25.searcher(corpus, index, workers=2)
  start(ranks[0])
  for _ in range(3):
    with pytest.raises(OSError, match='the disk is gone'):
      search(QUERIES)
  corpus.is_torn = False
  assert search(QUERIES[::-1]) == expected[::-1]


def test_an_index_on_disk_is_shared_as_it_was_when_it_was_opened(
    tmp_path, index, expected, ranks, monkeypatch):
  bm25_files.build(CORPUS.texts, tmp_path / 'bm25', corpus=CORPUS.digest)
  search = engines.make('bm25', CORPUS, index=str(tmp_path), workers=2)
  other = random_corpus(4000, seed=1)
  bm25_files.build(other.texts, tmp_path / 'bm25', corpus=other.digest)
  start(ranks[0])
  ranked = here(monkeypatch)
  assert search(QUERIES) == expected and len(ranked) < len(QUERIES)


def running(pid):
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  return pathlib.Path(f'/proc/{pid}/stat').read_text().rsplit(
      ') ', 1)[1][0] != 'Z'


@pytest.mark.parametrize('number', [None, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.skipif(not os.path.isdir('/proc/self'), reason='reads /proc')
def test_workers_end_with_their_process_however_it_ends(number):
  program = """if True:
      import multiprocessing, sys
      from searchrl.search.index import bm25, ranking
      ranks = ranking.Ranking(bm25.build(['a river', 'an alp']).postings, 3)
      ranks._start()
      ranks._ready.result(60)
      print(*(p.pid for p in multiprocessing.active_children()), flush=True)
      sys.stdin.read()"""
  with subprocess.Popen(
      [sys.executable, '-c', program], text=True, stdin=subprocess.PIPE,
      stdout=subprocess.PIPE, cwd=pathlib.Path(__file__).parents[1]) as process:
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2 and all(map(running, pids))
    if number is None:
      process.stdin.close()
    else:
      process.send_signal(number)
    process.wait(60)
  servers.until(lambda: not any(map(running, pids)))


def test_where_no_process_can_be_started_this_one_does_it_all(
    index, expected, monkeypatch, capsys):
  def refuse(*_, **__):
    raise BlockingIOError(11, 'Resource temporarily unavailable')

  monkeypatch.setattr(context.SpawnProcess, 'start', refuse)
  search = bm25.searcher(CORPUS, index, workers=3)
  assert search(QUERIES) == search(QUERIES) == expected
  assert capsys.readouterr().err == (
      'Warning: the BM25 search ranks in one process: [Errno 11] Resource '
      'temporarily unavailable.\n')


def test_workers_end_when_their_search_is_gone(index, ranks):
  search = bm25.searcher(CORPUS, index, workers=2)
  process, = start(ranks[0])
  # A wait of our own would take the exit code from the pool's thread or lose
  # it, so this waits for the thread, which waits for the process.
  thread = ranks[0]._pool._executor_manager_thread
  ranks.clear()
  del search
  gc.collect()  # where a cycle holds it
  thread.join(60)
  assert not thread.is_alive() and process.exitcode == 0


def test_a_worker_imports_neither_the_program_nor_jax(tmp_path):
  program = tmp_path / 'program.py'
  program.write_text('''
import pathlib, sys
from searchrl.search.index import bm25, ranking
with open('runs', 'a') as file:
  file.write('x')
ranks = ranking.Ranking(bm25.build(['a river', 'an alp']).postings, 2)
ranks._start()
ranks._ready.result(60)
print(ranks._pool.submit(eval, "sorted(__import__('sys').modules)").result())
''')
  modules = subprocess.run(
      [sys.executable, program], cwd=tmp_path, check=True, text=True,
      capture_output=True, env=os.environ | {
          'PYTHONPATH': str(pathlib.Path(__file__).parents[1])})
  assert "'numpy'" in modules.stdout and "'jax'" not in modules.stdout
  assert (tmp_path / 'runs').read_text() == 'x' and not modules.stderr


def test_the_number_of_workers_is_checked_and_by_default_that_of_the_cores(
    ranks, monkeypatch):
  with pytest.raises(ValueError, match='workers must be at least 1, or 0 for'):
    engines.make('bm25', CORPUS, workers=-1)
  monkeypatch.setattr(ranking, 'cores', lambda: 5)
  engines.make('bm25', CORPUS)
  assert ranks[-1]._count == 5
