# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Searches that run in threads while slots decode, with a deadline each.

Queries go in, results come out later, under the slot that asked. A search that
raises, that returns another number of results, or that misses its deadline
becomes a SearchError for each of its queries. Calls are counted here, where the
deadline is, so that a search that came too late counts once, as a timeout. A
late thread cannot be ended; it is a daemon and does not keep a program alive.
"""

from collections.abc import Callable, Hashable, Sequence
import queue
import threading
import time
from typing import Any

from searchrl.search import calls as calls_lib
from searchrl.search import wrapped
from searchrl.trajectory import Passages, Query, SearchError, SearchFn

Found = dict[Any, list[Passages | SearchError]]  # by who asked


class PendingSearches:
  """A few calls of a search at a time, each in a thread of its own.

  Args:
    search: the engine; it must bear calls from several threads.
    timeout_secs: until a call counts as failed.
    calls: at a time; what is asked meanwhile makes up the next one.
    clock: seconds that only grow.

  Attributes:
    finished: the calls that came back or were given up, in that order.
  """

  def __init__(self, search: SearchFn, *, timeout_secs: float, calls: int,
               clock: Callable[[], float] = time.monotonic):
    self.finished: list[calls_lib.Call] = []
    self._search = wrapped.with_typed_errors(search)
    self._clock, self._timeout_secs, self._limit = clock, timeout_secs, calls
    self._held = []  # (who, queries), not yet in a call
    self._running = {}  # call number -> (start, what was held)
    self._back = queue.SimpleQueue()  # (call number, end, results)
    self._started = 0

  def __len__(self) -> int:
    """How many have asked and have no results yet."""
    return len(self._held) + sum(
        len(asked) for _, asked in self._running.values())

  def ask(self, who: Hashable, queries: Sequence[Query]) -> None:
    """Holds queries for the next call, with all others held until `start`."""
    self._held.append((who, tuple(queries)))

  def start(self) -> None:
    """Starts a call for what is held, unless too many calls are running."""
    if not self._held or len(self._running) >= self._limit:
      return
    number, asked = self._started, self._held
    self._started, self._held = number + 1, []
    self._running[number] = self._clock(), asked
    queries = [query for _, own in asked for query in own]
    threading.Thread(target=self._call, args=(number, queries), daemon=True,
                     name=f'search-{number}').start()

  def _call(self, number: int, queries: list[Query]) -> None:
    results = self._search(queries)
    self._back.put((number, self._clock(), results))

  def all(self) -> Found:
    """Waits for everybody's results; in the order of asking."""
    found = {}
    while self._held or self._running:
      found |= self.some()
    return found

  def some(self) -> Found:
    """Waits for the results of one call at least, if any is running."""
    self.start()
    found = {}
    while self._running and not found:
      first = min(start for start, _ in self._running.values())
      found |= self._take(max(first + self._timeout_secs - self._clock(), 0))
    return found | self.ready()

  def ready(self) -> Found:
    """Returns the results that are back; waits for nothing."""
    found = {}
    while more := self._take(0):
      found |= more
    self.start()
    return found

  def _take(self, wait_secs: float) -> Found:
    """One call's results, or its timeout, or nothing."""
    try:
      number, end, results = self._back.get(timeout=wait_secs)
    except queue.Empty:
      return self._give_up()
    if number not in self._running:  # it had timed out before
      return self._take(0)
    return self._finish(number, end, results)

  def _give_up(self) -> Found:
    """The timeout of one late call, if there is any."""
    now = self._clock()
    late = [number for number, (start, _) in self._running.items()
            if now - start >= self._timeout_secs]
    if not late:
      return {}
    _, asked = self._running[late[0]]
    error = SearchError('timeout', f'after {self._timeout_secs:g} s')
    return self._finish(
        late[0], now, [error] * sum(len(queries) for _, queries in asked))

  def _finish(self, number: int, end: float, results) -> Found:
    """Counts a call and gives everybody in it their results."""
    start, asked = self._running.pop(number)
    self.finished.append(calls_lib.count(end - start, results))
    remaining = iter(results)
    return {who: [next(remaining) for _ in queries] for who, queries in asked}
