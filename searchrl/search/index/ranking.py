# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Queries ranked by several processes over one copy of the postings.

Threads would not help: a query takes some thirty calls of numpy of a few
microseconds each, between which the interpreter's lock is held. A forked
process would not be safe beside the threads of jax. So workers are processes
started afresh, with no more than numpy; they map the postings, which all share,
and talk over a socket each. They end when this process ends, however it does.

This process reads queries and results and ranks, too, so that nothing waits for
workers: they are started by the first call that is large enough, and used once
they are ready. One that dies is left out, with a warning, and what it was asked
is ranked here.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import io
import itertools
import mmap
from multiprocessing import connection
import os
import pathlib
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from typing import BinaryIO, Generic, TypeVar
import weakref

import numpy as np

from searchrl.search.index import maxscore

Task = TypeVar('Task')
Result = TypeVar('Result')
Asked = tuple[list[maxscore.Span], int]  # of a query: its spans, and k
Best = tuple[list[int], list[float]]  # positions, scores: arrays pickle slowly

_CALL = 2**21  # passages times queries of a call that is worth the workers
_WORK = 2**22  # passages times queries that are worth a message
_PIECE = 16  # queries a message, at most
_AHEAD = 8  # messages that wait at a worker, at most: queries differ a lot
_MOST = 8  # workers, unless more are asked for


@dataclasses.dataclass
class _Worker:
  """A process, and the numbers of the messages that it has not answered."""

  process: subprocess.Popen
  line: connection.Connection
  is_ready: bool = False
  sent: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass
class _Call(Generic[Task, Result]):
  """Tasks of one call, in pieces: to be ranked, being ranked, and done."""

  tasks: Sequence[Task]
  prepare: Callable[[Task], Asked]
  finish: Callable[[Best], Result]
  left: collections.deque[range]
  sent: dict[int, range] = dataclasses.field(default_factory=dict)  # by message
  results: dict[int, Result] = dataclasses.field(default_factory=dict)

  def asked(self, piece: range) -> list[Asked]:
    return [self.prepare(self.tasks[i]) for i in piece]

  def keep(self, piece: range, found: Sequence[Best]) -> None:
    self.results.update(zip(piece, map(self.finish, found)))


class Ranking:
  """Ranks queries here and in workers; see the top of this file.

  Args:
    postings: of the index.
    workers: processes, this one included; 0: one for each core that it may
      use, 8 at most.

  Raises:
    ValueError: workers is negative.
  """

  def __init__(self, postings: maxscore.Postings, workers: int = 0):
    if workers < 0:
      raise ValueError('search.options.workers must be at least 1, or 0 for one'
                       f' a core, but is {workers}.')
    self._postings = postings
    self._count = workers or min(cores(), _MOST)
    if os.name != 'posix':  # elsewhere no process is given files to share
      self._count = 1
    self._piece = max(1, min(_PIECE, _WORK // max(postings.size, 1)))
    self._lock = threading.Lock()  # one large call at a time has all cores
    self._workers: list[_Worker] | None = None  # None: not yet
    self._messages = itertools.count()

  def map(self, tasks: Sequence[Task], prepare: Callable[[Task], Asked],
          finish: Callable[[Best], Result]) -> list[Result]:
    """The results of all tasks, in their order.

    Args:
      tasks: such as queries.
      prepare: makes of a task what is ranked; called here.
      finish: makes a result of the best passages; called here.
    """
    is_large = len(tasks) > 1 and len(tasks) * self._postings.size >= _CALL
    if self._count == 1 or not is_large:
      return [finish(_best(self._postings, *prepare(task))) for task in tasks]
    call = _Call(tasks, prepare, finish, collections.deque(
        range(first, min(first + self._piece, len(tasks)))
        for first in range(0, len(tasks), self._piece)))
    with self._lock:
      if self._workers is None:
        self._start()
      while len(call.results) < len(tasks):
        self._go_on(call)
    return [call.results[i] for i in range(len(tasks))]

  def ready(self, timeout_secs: float) -> int:
    """Starts the workers, waits for them, and returns how many there are."""
    with self._lock:
      if self._workers is None:
        self._start()
      for worker in [*self._workers]:
        if not worker.is_ready and worker.line.poll(timeout_secs):
          self._receive(worker, None)
      return sum(worker.is_ready for worker in self._workers)

  def _go_on(self, call: _Call) -> None:
    """Takes what workers have done, gives them more, and does a piece."""
    share = len(call.left) // (4 * max(len(self._workers), 1))
    ahead = min(max(share, 1), _AHEAD)  # less at the end
    for worker in [*self._workers]:
      while worker in self._workers and worker.line.poll():
        self._receive(worker, call)
      while (call.left and worker in self._workers and worker.is_ready and
             len(worker.sent) < ahead):
        self._send(worker, call)
    if call.left:
      piece = call.left.popleft()
      call.keep(piece, [_best(self._postings, *asked)
                        for asked in call.asked(piece)])
    elif call.sent:
      connection.wait([w.line for w in self._workers if w.sent])

  def _send(self, worker: _Worker, call: _Call) -> None:
    piece, number = call.left.popleft(), next(self._messages)
    asked = call.asked(piece)
    worker.sent.add(number)
    call.sent[number] = piece
    try:
      worker.line.send((number, asked))
    except OSError:
      self._drop(worker, call)

  def _receive(self, worker: _Worker, call: _Call | None) -> None:
    """A message: that a worker is ready, or what it has ranked."""
    try:
      found = worker.line.recv()
    except (EOFError, OSError):
      self._drop(worker, call)
      return
    if not worker.is_ready:
      worker.is_ready = True
      return
    number, ranked = found
    worker.sent.discard(number)
    if number in call.sent:  # not of an earlier call, which failed
      call.keep(call.sent.pop(number), ranked)

  def _drop(self, worker: _Worker, call: _Call | None) -> None:
    """Leaves a dead worker out; others do what it was sent."""
    self._workers.remove(worker)
    for number in worker.sent:
      if call and number in call.sent:
        call.left.append(call.sent.pop(number))
    _end([worker])
    print('Warning: a worker of the BM25 search ended with exit code '
          f'{worker.process.returncode}; the others do its part.',
          file=sys.stderr, flush=True)

  def _start(self) -> None:
    files = self._postings.files
    if not files:  # a copy that all share
      files = tuple(_in_memory(array) for array in (
          self._postings.passages, self._postings.impacts))
      self._postings = maxscore.Postings(
          *map(mapped, files), self._postings.size, files)
    self._workers = []
    weakref.finalize(self, _end, self._workers)
    try:
      for _ in range(self._count - 1):
        self._workers.append(_begin(self._postings))
    except OSError as error:
      print('Warning: the BM25 search has fewer workers than '
            f'search.options.workers={self._count}: {error}.', file=sys.stderr,
            flush=True)


def _best(postings: maxscore.Postings, spans: list[maxscore.Span], k: int
         ) -> Best:
  positions, scores = postings.best(spans, k)
  return positions.tolist(), scores.tolist()


def cores() -> int:
  """The cores that this process may use."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def mapped(file: BinaryIO) -> np.ndarray:
  """The array of an .npy file, mapped; it stays what it is if it is removed.

  It does not move in the file: processes that share it do so at once.
  """
  found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
  head = io.BytesIO(found[:2**16])  # more than a header of one dimension has
  version = np.lib.format.read_magic(head)
  read = (np.lib.format.read_array_header_1_0 if version == (1, 0) else
          np.lib.format.read_array_header_2_0)
  shape, _, dtype = read(head)
  return np.frombuffer(found, dtype, *shape, offset=head.tell())


def _in_memory(array: np.ndarray) -> BinaryIO:
  """A file without a name that holds an array; in memory on Linux."""
  file = (os.fdopen(os.memfd_create('searchrl'), 'w+b')
          if hasattr(os, 'memfd_create') else tempfile.TemporaryFile())
  np.save(file, array)
  file.flush()
  return file


def _begin(postings: maxscore.Postings) -> _Worker:
  ours, theirs = socket.socketpair()
  root = str(pathlib.Path(__file__).parents[3])
  paths = [root, *filter(None, [os.environ.get('PYTHONPATH', '')])]
  numbers = [theirs.fileno(), *(file.fileno() for file in postings.files)]
  with theirs:
    process = subprocess.Popen(
        [sys.executable, '-P', '-m', __name__, *map(str, numbers),
         str(postings.size)],
        env=os.environ | {'PYTHONPATH': os.pathsep.join(paths)},
        pass_fds=numbers, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        start_new_session=True)  # Ctrl-C is not for it
  return _Worker(process, connection.Connection(ours.detach()))


def _end(workers: list[_Worker]) -> None:
  """Ends workers: they do when their line is closed."""
  for worker in workers:
    worker.line.close()
  for worker in workers:
    try:
      worker.process.wait(10)
    except subprocess.TimeoutExpired:
      worker.process.kill()
      worker.process.wait()


def _serve(line_number: str, *rest: str) -> None:
  """The program of a worker."""
  *numbers, size = rest
  files = tuple(os.fdopen(int(number), 'rb') for number in numbers)
  postings = maxscore.Postings(*map(mapped, files), int(size), files)
  line = connection.Connection(int(line_number))
  messages = queue.SimpleQueue()
  threading.Thread(target=_read, args=(line, messages), daemon=True).start()
  with contextlib.suppress(OSError):
    line.send(None)  # ready
    while message := messages.get():
      first, asked = message
      line.send((first, [_best(postings, *one) for one in asked]))


def _read(line: connection.Connection, messages: queue.SimpleQueue) -> None:
  """Reads all the time: who writes is never kept waiting by who writes back."""
  with contextlib.suppress(EOFError, OSError):
    while True:
      messages.put(line.recv())
  messages.put(None)


if __name__ == '__main__':
  _serve(*sys.argv[1:])
