# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Queries ranked by several processes over one copy of the postings.

Threads would not help: a query takes some thirty calls of numpy of a few
microseconds each, between which the interpreter's lock is held. A forked
process would not be safe beside the threads of jax. Workers are therefore
processes that are started afresh and import numpy alone. They map the shared
postings, and each communicates over a socket. They end when this process ends,
however it ends.

This process reads queries and results, and also ranks, so that nothing waits
for workers. The first call that is large enough starts them, and they are used
once they are ready. A worker that dies is removed with a warning, and this
process or the other workers rank its queries.
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
Asked = tuple[list[maxscore.Span], int]  # a query's spans, and k
Best = tuple[list[int], list[float]]  # positions, scores: arrays pickle slowly

_CALL = 2**21  # passages times queries from which a call uses the workers
_WORK = 2**22  # passages times queries per message
_PIECE = 16  # largest number of queries per message
_AHEAD = 8  # most messages that wait at a worker, since queries differ a lot
_MOST = 8  # default limit of the number of workers


@dataclasses.dataclass
class _Worker:
  """A process, and the numbers of the messages that it has not answered."""

  process: subprocess.Popen
  line: connection.Connection
  is_ready: bool = False
  sent: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass
class _Call(Generic[Task, Result]):
  """Tasks of a call, in pieces: to be ranked, being ranked, and done."""

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
  """Ranks queries in this process and in workers; see this module's docstring.

  Args:
    postings: Postings of the index.
    workers: Number of processes, this one included; 0: one for each core that
      it may use, at most 8.

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
    self._piece = max(1, min(_PIECE, _WORK // max(postings.size, 1)))
    self._lock = threading.Lock()  # one large call at a time uses all cores
    self._workers: list[_Worker] | None = None  # None: not started yet
    self._messages = itertools.count()

  def map(self, tasks: Sequence[Task], prepare: Callable[[Task], Asked],
          finish: Callable[[Best], Result]) -> list[Result]:
    """Returns the results of all tasks, in their order.

    Args:
      tasks: Tasks, such as queries.
      prepare: Function from a task to its spans and k; runs in this process.
      finish: Function from the best passages to a result; runs in this process.
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
    """Starts the workers, waits for them, and returns the number of them."""
    with self._lock:
      if self._workers is None:
        self._start()
      for worker in [*self._workers]:
        if not worker.is_ready and worker.line.poll(timeout_secs):
          self._receive(worker, None)
      return sum(worker.is_ready for worker in self._workers)

  def _go_on(self, call: _Call) -> None:
    """Collects the workers' results, sends them more, and ranks one piece."""
    share = len(call.left) // (4 * max(len(self._workers), 1))
    ahead = min(max(share, 1), _AHEAD)  # fewer near the end of the call
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
    """Receives a message, which says that a worker is ready or has results."""
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
    if number in call.sent:  # else it belongs to an earlier call, which failed
      call.keep(call.sent.pop(number), ranked)

  def _drop(self, worker: _Worker, call: _Call | None) -> None:
    """Removes a dead worker; its unanswered messages return to the queue."""
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
    if not files:  # makes a copy that all processes share
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
  """Returns the number of cores that this process may use."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def mapped(file: BinaryIO) -> np.ndarray:
  """Returns the array of an .npy file, mapped; it outlives the file's removal.

  Mapping does not move the file's position, so that processes that share the
  file can map it at the same time.
  """
  found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
  head = io.BytesIO(found[:2**16])  # longer than a one-dimensional header
  version = np.lib.format.read_magic(head)
  read = (np.lib.format.read_array_header_1_0 if version == (1, 0) else
          np.lib.format.read_array_header_2_0)
  shape, _, dtype = read(head)
  return np.frombuffer(found, dtype, *shape, offset=head.tell())


def _in_memory(array: np.ndarray) -> BinaryIO:
  """Returns an unnamed file that contains an array; in memory on Linux."""
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
        start_new_session=True)  # so that Ctrl-C does not reach the worker
  return _Worker(process, connection.Connection(ours.detach()))


def _end(workers: list[_Worker]) -> None:
  """Ends workers by closing their connections; kills them after 10 seconds."""
  for worker in workers:
    worker.line.close()
  for worker in workers:
    try:
      worker.process.wait(10)
    except subprocess.TimeoutExpired:
      worker.process.kill()
      worker.process.wait()


def _serve(line_number: str, *rest: str) -> None:
  """Runs a worker: ranks the queries of each message until the line closes."""
  *numbers, size = rest
  files = tuple(os.fdopen(int(number), 'rb') for number in numbers)
  postings = maxscore.Postings(*map(mapped, files), int(size), files)
  line = connection.Connection(int(line_number))
  messages = queue.SimpleQueue()
  threading.Thread(target=_read, args=(line, messages), daemon=True).start()
  with contextlib.suppress(OSError):
    line.send(None)  # means that the worker is ready
    while message := messages.get():
      first, asked = message
      line.send((first, [_best(postings, *one) for one in asked]))


def _read(line: connection.Connection, messages: queue.SimpleQueue) -> None:
  """Reads without pause, so that no sender waits while both sides send."""
  with contextlib.suppress(EOFError, OSError):
    while True:
      messages.put(line.recv())
  messages.put(None)


if __name__ == '__main__':
  _serve(*sys.argv[1:])
