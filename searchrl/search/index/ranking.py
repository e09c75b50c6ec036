# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks queries in several processes, which share one copy of the postings.

Threads would not help: a query takes some thirty calls of numpy of a few
microseconds each, and Python code that holds the GIL runs between them. Forking
would not be safe in a process with threads of jax. Workers are therefore newly
started processes. They import only numpy and map the postings into memory.

This process also ranks queries, so that no call waits for the workers to start.
The first call that is large enough starts the workers. They are used once one
of them is ready. If a worker dies, this process ranks the queries that are
left, and the next large call starts new workers.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import process
import multiprocessing
from multiprocessing import context
import os
import signal
import sys
import threading
import types
from typing import TypeVar
import weakref

from searchrl.runtime import log
from searchrl.search.index import maxscore

Task = TypeVar('Task')
Result = TypeVar('Result')
Search = tuple[list[maxscore.Span], int]  # a query's spans, and k
Best = tuple[list[int], list[float]]  # positions, scores: arrays pickle slowly


_CALL = 2**21  # passages times queries from which a call uses the workers
_WORK = 2**24  # passages times queries per piece of a call
_PIECE = 64  # largest number of queries per piece
_MOST = 8  # default limit of the number of workers


class Ranking:
  """A ranker of queries, in this process and in workers; see this module.

  Args:
    postings: Postings of the index.
    workers: Number of processes, including this one. 0: one for each core that
      this process may use, at most 8.

  Raises:
    ValueError: The number of workers is negative.
  """

  def __init__(self, postings: maxscore.Postings, workers: int = 0):
    if workers < 0:
      raise ValueError('search.options.workers must be at least 1, or 0 for one'
                       f' a core, but is {workers}.')
    self._postings = postings
    self._count = workers or min(cores(), _MOST)
    if os.name != 'posix':  # other systems cannot pass open files to a process
      self._count = 1
    self._lock = threading.Lock()  # one large call at a time uses all cores
    self._pool: futures.ProcessPoolExecutor | None = None
    # Done when a worker has started.
    self._ready: futures.Future = futures.Future()

  def map(self, tasks: Sequence[Task], prepare: Callable[[Task], Search],
          finish: Callable[[Best], Result]) -> list[Result]:
    """Returns the results of all tasks, in their order.

    Args:
      tasks: Tasks, such as queries.
      prepare: Function from a task to the arguments of `Postings.best`: the
        spans of its terms, and k. It runs in this process.
      finish: Function from the best passages to a result. It runs in this
        process.
    """
    is_large = len(tasks) > 1 and len(tasks) * self._postings.size >= _CALL
    if self._count == 1 or not is_large:
      return [finish(_best(self._postings, prepare(task))) for task in tasks]
    results: dict[int, Result] = {}
    keep = lambda piece, best: results.update(zip(piece, map(finish, best)))
    with self._lock:
      if self._pool is None:
        self._start()
      try:
        self._share(len(tasks), lambda i: prepare(tasks[i]), keep)
      except process.BrokenProcessPool:
        self._pool = None
        log.say('Warning: a worker of the BM25 search has died. This process '
                'does its part, and the next large call starts another.')
      left = [i for i in range(len(tasks)) if i not in results]
      keep(left, (_best(self._postings, prepare(tasks[i])) for i in left))
    return [results[i] for i in range(len(tasks))]

  def _share(self, count: int, prepare: Callable[[int], Search],
             keep: Callable[[range, Iterable[Best]], None]) -> None:
    """Divides the queries of a call over the workers, piece by piece.

    Pieces are queued so that no worker waits. While all have work, this process
    ranks pieces, too.

    Args:
      count: Number of queries.
      prepare: Function from a query's number to its spans and k.
      keep: Function that receives the numbers of a piece and its results.
    """
    left = collections.deque(self._pieces(count))
    sent: collections.deque[tuple[range, futures.Future]] = collections.deque()
    while self._pool and (left or sent):
      while left and len(sent) < 2 * self._count and self._ready.done():
        searches = [prepare(i) for i in left[0]]
        sent.append((left.popleft(), self._pool.submit(_rank, searches)))
      if sent and (sent[0][1].done() or not left):
        piece, future = sent.popleft()
        keep(piece, future.result())
      else:
        piece = left.popleft()
        keep(piece, (_best(self._postings, prepare(i)) for i in piece))

  def _pieces(self, count: int) -> Iterator[range]:
    """Yields ranges of tasks, smaller near the end so that all end together."""
    limit = min(_PIECE, _WORK // self._postings.size)
    start = 0
    while start < count:
      size = max(1, min(limit, (count - start) // (4 * self._count)))
      yield range(start, start + size)
      start += size

  def _start(self) -> None:
    """Starts the workers, without waiting for them."""
    try:
      self._postings = self._postings.in_files()
      self._pool = futures.ProcessPoolExecutor(
          self._count - 1, _Context(), _initialize, (self._postings,))
      weakref.finalize(self, self._pool.shutdown, wait=False)
      for _ in range(self._count - 1):  # each of them starts a process
        self._ready = self._pool.submit(_rank, [])
    except OSError as error:
      self._pool, self._count = None, 1
      log.say(f'Warning: the BM25 search ranks in one process: {error}.')


def cores() -> int:
  """Returns the number of cores that this process may use."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


class _Process(context.SpawnProcess):
  """A spawned worker that does not import the `__main__` of its parent."""

  def start(self) -> None:
    """Starts the process, which does not import the parent's main file.

    A spawned process would import the file of `__main__`. Therefore an empty
    module takes the place of `__main__` until the process has started.
    """
    with _STARTING:
      main = sys.modules['__main__']
      sys.modules['__main__'] = types.ModuleType('__main__')
      try:
        super().start()
      finally:
        sys.modules['__main__'] = main


class _Context(context.SpawnContext):
  Process = _Process


_STARTING = threading.Lock()
_postings: maxscore.Postings  # set in each worker by _initialize


def _initialize(postings: maxscore.Postings) -> None:
  """Prepares a worker, which also ends when its parent process dies."""
  global _postings
  _postings = postings
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
  threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
  parent = multiprocessing.parent_process()
  assert parent
  parent.join()
  os._exit(1)


def _rank(searches: list[Search]) -> list[Best]:
  return [_best(_postings, search) for search in searches]


def _best(postings: maxscore.Postings, search: Search) -> Best:
  positions, scores = postings.best(*search)
  return positions.tolist(), scores.tolist()
