# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Searches that run in threads while slots decode, with a deadline each.

Queries are submitted by a slot, and the results are returned later under that
slot. A search that raises, returns a wrong number of results or misses its
deadline becomes a SearchError for each of its queries. Calls are counted here,
where the deadline is, so a late search counts once, as a timeout. A late thread
cannot be ended, but it is a daemon and does not keep the program alive.
"""

from collections.abc import Callable, Hashable, Sequence
import queue
import threading
import time
from typing import Any

from searchrl.search import call_metrics as calls_lib
from searchrl.search import engine_wrappers
from searchrl.trajectory import Passages, Query, SearchError, SearchFn

Results = dict[Any, list[Passages | SearchError]]  # results by owner of queries
_Entry = tuple[Hashable, tuple[Query, ...]]  # an owner, and its queries


class PendingSearches:
  """A limited number of concurrent search calls, each in its own thread.

  Args:
    search: The search engine, which must be thread-safe.
    timeout_secs: Seconds after which a call counts as failed.
    calls: Maximum number of calls at a time. Queries that come meanwhile are
      collected in the next call.
    clock: Function that returns monotonic seconds.

  Attributes:
    finished: The calls in the order in which they returned or timed out.
  """

  def __init__(self, search: SearchFn, *, timeout_secs: float, calls: int,
               clock: Callable[[], float] = time.monotonic):
    self.finished: list[calls_lib.Call] = []
    self._search = engine_wrappers.with_typed_errors(search)
    self._clock, self._timeout_secs, self._limit = clock, timeout_secs, calls
    self._held: list[_Entry] = []  # entries that are not yet in a call
    # Start and entries of each call, by its number.
    self._running: dict[int, tuple[float, list[_Entry]]] = {}
    self._back: queue.SimpleQueue[  # (call number, end, results)
        tuple[int, float, Sequence[Passages | SearchError]]
    ] = queue.SimpleQueue()
    self._started = 0

  def __len__(self) -> int:
    """Returns the number of owners that have no results yet."""
    return len(self._held) + sum(
        len(entries) for _, entries in self._running.values())

  def submit(self, owner: Hashable, queries: Sequence[Query]) -> None:
    """Holds queries for the next call, together with all that are held."""
    self._held.append((owner, tuple(queries)))

  def start(self) -> None:
    """Starts a call for all held queries, unless too many calls are running."""
    if not self._held or len(self._running) >= self._limit:
      return
    number, entries = self._started, self._held
    self._started, self._held = number + 1, []
    self._running[number] = self._clock(), entries
    queries = [query for _, batch in entries for query in batch]
    threading.Thread(target=self._call, args=(number, queries), daemon=True,
                     name=f'search-{number}').start()

  def _call(self, number: int, queries: list[Query]) -> None:
    results = self._search(queries)
    self._back.put((number, self._clock(), results))

  def all(self) -> Results:
    """Waits for all results; returns them in the order of submission."""
    results: Results = {}
    while self._held or self._running:
      results |= self.some()
    return results

  def some(self) -> Results:
    """Waits for the results of at least one call, if any is running."""
    self.start()
    results: Results = {}
    while self._running and not results:
      first = min(start for start, _ in self._running.values())
      results |= self._take(max(first + self._timeout_secs - self._clock(), 0))
    return results | self.ready()

  def ready(self) -> Results:
    """Returns the results that have arrived, without waiting."""
    results: Results = {}
    while arrived := self._take(0):
      results |= arrived
    self.start()
    return results

  def _take(self, wait_secs: float) -> Results:
    """Returns the results of one call, its timeout errors, or {}."""
    try:
      number, end, results = self._back.get(timeout=wait_secs)
    except queue.Empty:
      return self._give_up()
    if number not in self._running:  # it has timed out already
      return self._take(0)
    return self._finish(number, end, results)

  def _give_up(self) -> Results:
    """Returns the timeout errors of one late call, or {} if none is late."""
    now = self._clock()
    for number, (start, entries) in self._running.items():
      if now - start >= self._timeout_secs:
        error = SearchError('timeout', f'after {self._timeout_secs:g} s')
        return self._finish(
            number, now, [error] * sum(len(queries) for _, queries in entries))
    return {}

  def _finish(self, number: int, end: float,
              results: Sequence[Passages | SearchError]) -> Results:
    """Counts a call and returns its results by owner."""
    start, entries = self._running.pop(number)
    self.finished.append(calls_lib.count(end - start, results))
    remaining = iter(results)
    return {owner: [next(remaining) for _ in queries]
            for owner, queries in entries}
