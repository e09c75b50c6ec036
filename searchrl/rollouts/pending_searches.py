# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Queries in now, their results later: searches that run while slots decode.

A search that raises, that answers another number of queries, or that is not
back in time becomes a SearchError for each of its queries. Its thread cannot be
ended; it is a daemon, so that it keeps no program from ending.
"""

from collections.abc import Callable, Hashable, Sequence
import queue
import threading
import time
from typing import Any

from searchrl.trajectory import Passages, Query, SearchError, SearchFn


class Searches:
  """A few calls of a search at a time, each in a thread of its own.

  Args:
    search: what answers; it must bear calls from several threads.
    timeout_secs: until a call counts as failed.
    calls: at a time; what is asked meanwhile makes up the next one.
    clock: seconds that only grow.
  """

  def __init__(self, search: SearchFn, *, timeout_secs: float, calls: int,
               clock: Callable[[], float] = time.monotonic):
    self._search, self._clock = search, clock
    self._timeout_secs, self._calls = timeout_secs, calls
    self._held = []  # (who, queries), not yet in a call
    self._running = {}  # call number -> (deadline, what was held)
    self._back = queue.SimpleQueue()  # (call number, results)
    self._started = 0

  def __len__(self) -> int:
    """How many have asked and have no results yet."""
    return len(self._held) + sum(
        len(asked) for _, asked in self._running.values())

  def ask(self, who: Hashable, queries: Sequence[Query]) -> None:
    """Queries that go into one call with others asked before `start`."""
    self._held.append((who, tuple(queries)))

  def start(self) -> None:
    """Lets what was asked be searched, unless too many calls are running."""
    if not self._held or len(self._running) >= self._calls:
      return
    number, asked = self._started, self._held
    self._started, self._held = number + 1, []
    self._running[number] = self._clock() + self._timeout_secs, asked
    queries = [query for _, its in asked for query in its]
    threading.Thread(target=self._call, args=(number, queries), daemon=True,
                     name=f'search-{number}').start()

  def _call(self, number: int, queries: list[Query]) -> None:
    try:
      results = list(self._search(queries))
      if len(results) != len(queries):
        error = SearchError('bad_response', f'{len(results)} results for '
                            f'{len(queries)} queries')
        results = [error] * len(queries)
    except Exception as error:  # whatever it is, the run must go on
      detail = f'{type(error).__name__}: {error}'
      results = [SearchError('exception', detail)] * len(queries)
    self._back.put((number, results))

  def all(self) -> dict[Any, list[Passages | SearchError]]:
    """Everybody's results, in the order of asking; waits for them."""
    found = {}
    while self._held or self._running:
      found |= self.some()
    return found

  def some(self) -> dict[Any, list[Passages | SearchError]]:
    """The results of one call at least, if any runs; waits for that."""
    self.start()
    found = {}
    while self._running and not found:
      earliest = min(deadline for deadline, _ in self._running.values())
      found |= self._take(max(earliest - self._clock(), 0))
    return found | self.ready()

  def ready(self) -> dict[Any, list[Passages | SearchError]]:
    """The results that are back; waits for nothing."""
    found = {}
    while more := self._take(0):
      found |= more
    self.start()
    return found

  def _take(self, wait_secs: float):
    """One call's results, or its failure, or nothing."""
    try:
      number, results = self._back.get(timeout=wait_secs)
    except queue.Empty:
      late = [number for number, (deadline, _) in self._running.items()
              if self._clock() >= deadline]
      if not late:
        return {}
      number, results = late[0], None
    if number not in self._running:  # it had timed out before
      return self._take(0)
    _, asked = self._running.pop(number)
    late = SearchError('timeout', f'after {self._timeout_secs:g} s')
    given = iter(results) if results is not None else None
    return {who: [next(given) if given else late for _ in queries]
            for who, queries in asked}
