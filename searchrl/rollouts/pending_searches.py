# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Calls of tools in threads, each with a deadline, while slots decode.

A slot, which is a row of the engine, submits the queries of a search or the
call of another tool. The slot is the owner of the results, which are returned
later with the slot as their key. Each tool has its own calls, so that a slow
tool does not delay other tools. If a call raises an error, returns a wrong
number of results or misses its deadline, each of its queries gets a
SearchError. Calls are counted here, where the deadline is checked, so a late
call counts once, as a timeout. Its thread cannot be ended, but it is a daemon
thread and does not keep the program alive.
"""

from collections.abc import Callable, Hashable, Sequence
import itertools
import queue
import threading
import time
from typing import Any

from searchrl.search import call_metrics as calls_lib
from searchrl.search import engine_wrappers
from searchrl.trajectory import (
    Passages, Query, SearchError, SearchFn, ToolCall, ToolResult)

Result = Passages | ToolResult | SearchError
Results = dict[Any, list[Result]]  # owner -> results of the owner's queries
_STOPPED_SECS = 1  # by which a wait is longer if the process was stopped
_Entry = tuple[Hashable, tuple[Query | ToolCall, ...]]  # an owner, its queries


class PendingSearches:
  """A limited number of concurrent search calls, each in its own thread.

  Args:
    search: The search engine, or an `engine_wrappers.toolset`; it must be
      thread-safe.
    timeout_secs: Seconds after which a call counts as failed.
    calls: Maximum number of simultaneous calls of a tool. Further queries are
      collected for the next call.
    clock: Function that returns monotonic seconds.

  Attributes:
    finished: The calls in the order in which they returned or timed out.
  """

  def __init__(self, search: SearchFn, *, timeout_secs: float, calls: int,
               clock: Callable[[], float] = time.monotonic):
    self.finished: list[calls_lib.Call] = []
    self._tools = {
        name: engine_wrappers.with_typed_errors(function)
        for name, function in engine_wrappers.tools_of(search).items()}
    self._clock, self._timeout_secs, self._limit = clock, timeout_secs, calls
    # Entries that are not yet in a call, by their tool.
    self._held: dict[str, list[_Entry]] = {}
    # Tool, start and entries of each call, by its number.
    self._running: dict[int, tuple[str, float, list[_Entry]]] = {}
    self._back: queue.SimpleQueue[  # (call number, end, results)
        tuple[int, float, Sequence[Result]]] = queue.SimpleQueue()
    self._started = 0

  def __len__(self) -> int:
    """Returns the number of owners that have no results yet."""
    return sum(map(len, self._held.values())) + sum(
        len(entries) for _, _, entries in self._running.values())

  def submit(self, owner: Hashable, queries: Sequence[Query | ToolCall],
             tool: str = 'search') -> None:
    """Adds an owner's queries to those that the tool's next call will answer.

    Nothing is called before `start`.
    """
    self._held.setdefault(tool, []).append((owner, tuple(queries)))

  def start(self) -> None:
    """Starts one call for each tool, with all queries submitted to the tool.

    A tool has to wait while its maximum number of calls is running.
    """
    for tool in [*self._held]:
      if sum(t == tool for t, _, _ in self._running.values()) < self._limit:
        self._start(tool, self._held.pop(tool))

  def _start(self, tool: str, entries: list[_Entry]) -> None:
    number = self._started
    self._started += 1
    self._running[number] = tool, self._clock(), entries
    queries = [query for _, batch in entries for query in batch]
    threading.Thread(target=self._call, args=(number, tool, queries),
                     daemon=True, name=f'{tool}-{number}').start()

  def _call(self, number: int, tool: str, queries: list[Query | ToolCall]
           ) -> None:
    results: Sequence[Result] = [
        SearchError('unavailable', f'the run has no tool {tool!r}')
    ] * len(queries)
    if tool in self._tools:
      results = self._tools[tool](queries)
    self._back.put((number, self._clock(), results))

  def all(self) -> Results:
    """Waits for all results, and returns {owner: results}.

    The dict is ordered by the start of the calls and, within a call, by the
    submission of the queries. The order in which calls end has no effect.
    """
    entries = [entry for *_, batch in self._running.values() for entry in batch]
    entries += itertools.chain.from_iterable(self._held.values())
    results: Results = {}
    while self._held or self._running:
      results |= self.some()
    return {owner: results[owner] for owner, _ in entries}

  def some(self) -> Results:
    """Waits until a call ends, and returns the results that have arrived.

    Results that were returned before are not returned again. If there is no
    call to wait for, it returns {} at once.
    """
    self.start()
    results: Results = {}
    while self._running and not results:
      first = min(start for _, start, _ in self._running.values())
      results |= self._take(max(first + self._timeout_secs - self._clock(), 0))
    return results | self.ready()

  def ready(self) -> Results:
    """Returns the results that have arrived, by owner, without waiting."""
    results: Results = {}
    while arrived := self._take(0):
      results |= arrived
    self.start()
    return results

  def _take(self, wait_secs: float) -> Results:
    """Returns the results of the call that ends next, by owner.

    It waits at most `wait_secs` seconds. If no call has ended by then, it
    returns the timeout errors of one late call, or {} if no call is late. The
    time of a wait in which the process was stopped counts for no call.
    """
    before = self._clock()
    try:
      number, end, results = self._back.get(timeout=wait_secs)
    except queue.Empty:
      elapsed = self._clock() - before
      if elapsed < wait_secs + _STOPPED_SECS:
        return self._give_up()
      self._running = {
          number: (tool, start + elapsed, entries)
          for number, (tool, start, entries) in self._running.items()}
      return {}
    if number not in self._running:  # it has timed out already
      return self._take(0)
    return self._finish(number, end, results)

  def _give_up(self) -> Results:
    """Returns the timeout errors of one late call, or {} if no call is late."""
    now = self._clock()
    for number, (_, start, entries) in self._running.items():
      if now - start >= self._timeout_secs:
        error = SearchError('timeout', f'after {self._timeout_secs:g} s')
        return self._finish(
            number, now, [error] * sum(len(queries) for _, queries in entries))
    return {}

  def _finish(self, number: int, end: float,
              results: Sequence[Result]) -> Results:
    """Adds an ended call to `finished`, and returns its results by owner."""
    tool, start, entries = self._running.pop(number)
    self.finished.append(calls_lib.count(  # may have ended before a late start
        max(end - start, 0), results, tool))
    remaining = iter(results)
    return {owner: [next(remaining) for _ in queries]
            for owner, queries in entries}
