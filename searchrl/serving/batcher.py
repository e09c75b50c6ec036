# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Dynamic batching: combines queries of many callers into few engine calls.

One thread owns the engine. Queries that arrive while it is busy form its next
call. Batches therefore grow with the load, and a single query does not wait for
others.
"""

import collections
from collections.abc import Callable, Sequence
from concurrent import futures
import dataclasses
import threading
import time

from searchrl.trajectory import Passages, Query, SearchError, SearchFn


Results = list[Passages | SearchError]


class Full(Exception):
  """Exception: too many queries are waiting, so no more are accepted."""


@dataclasses.dataclass
class _Item:
  """Queries from one caller that go into one call."""

  queries: Sequence[Query]
  deadline: float  # by time.monotonic()
  future: futures.Future[Results]


class Batcher:
  """A thread that combines queries of several callers into one search.

  Args:
    search: Search engine, called by one thread at a time. An exception becomes
      a SearchError('unavailable') for each query.
    batch_queries: Maximum number of queries in a call.
    gather_secs: Seconds that an idle batcher waits for more queries before it
      calls the engine.
    waiting_queries: Maximum number of waiting queries. `submit` refuses queries
      that would exceed it.
    on_call: Function that receives, for each call, its number of queries, its
      number of distinct queries, and its seconds.

  Attributes:
    waiting: Number of queries that have not been sent to the engine yet.
  """

  def __init__(self, search: SearchFn, *, batch_queries: int,
               gather_secs: float, waiting_queries: int,
               on_call: Callable[[int, int, float], None] = lambda *_: None):
    self._search, self._on_call = search, on_call
    self._batch, self._gather_secs = batch_queries, gather_secs
    self._waiting_limit, self.waiting = waiting_queries, 0
    self._items: collections.deque[_Item] = collections.deque()
    self._changed = threading.Condition()
    self._closing = False
    self._thread = threading.Thread(
        target=self._work, name='batcher', daemon=True)
    self._thread.start()

  def submit(self, queries: Sequence[Query], deadline: float
             ) -> list[futures.Future[Results]]:
    """Adds queries to those that wait for the engine, and returns at once.

    If a future is cancelled before the engine is called for its queries, these
    are not searched. If the deadline has passed by then, they get
    SearchError('timeout').

    Args:
      queries: Queries of one caller.
      deadline: Time after which the queries are not searched, by
        time.monotonic().

    Returns:
      Futures of the results, in the order of the queries. Each future has the
      results of at most `batch_queries` queries.

    Raises:
      Full: Too many queries are waiting, or the batcher is closed.
    """
    items = [
        _Item(queries[i:i + self._batch], deadline, futures.Future())
        for i in range(0, len(queries), self._batch)]
    with self._changed:
      if self._closing or self.waiting + len(queries) > self._waiting_limit:
        raise Full
      self._items.extend(items)
      self.waiting += len(queries)
      self._changed.notify()
    return [item.future for item in items]

  def close(self, within_secs: float) -> None:
    """Accepts no more queries, answers the waiting ones, ends the thread.

    It returns after `within_secs` at the latest.
    """
    with self._changed:
      self._closing = True
      self._changed.notify()
    self._thread.join(within_secs)

  def _work(self) -> None:
    while True:
      with self._changed:
        was_idle = not self._items
        self._changed.wait_for(lambda: self._items or self._closing)
        if not self._items:
          return
      if was_idle and self._gather_secs:
        time.sleep(self._gather_secs)
      if batch := self._take():
        self._answer(batch)

  def _take(self) -> list[_Item]:
    """Returns the oldest items, as many as one call may have.

    They leave the queue. Cancelled items are dropped, and late items get
    SearchError('timeout').
    """
    batch: list[_Item] = []
    size = 0
    with self._changed:
      while self._items and (
          not batch or size + len(self._items[0].queries) <= self._batch):
        item = self._items.popleft()
        self.waiting -= len(item.queries)
        if not item.future.set_running_or_notify_cancel():
          continue
        if item.deadline < time.monotonic():
          late = SearchError('timeout', 'waited too long for the engine')
          item.future.set_result([late] * len(item.queries))
        else:
          batch.append(item)
          size += len(item.queries)
    return batch

  def _answer(self, batch: list[_Item]) -> None:
    """Answers items by one engine call, in which each query occurs once."""
    start = time.monotonic()
    unique = {(q.text, q.top_k): q for item in batch for q in item.queries}
    try:
      results = list(self._search(list(unique.values())))
      if len(results) != len(unique):
        raise ValueError(f'{len(results)} results for {len(unique)} queries')
    except Exception as error:  # any exception; the next call may succeed
      detail = f'{type(error).__name__}: {error}'
      results = [SearchError('unavailable', detail)] * len(unique)
    by_query = dict(zip(unique, results))
    self._on_call(sum(len(item.queries) for item in batch), len(unique),
                  time.monotonic() - start)
    for item in batch:
      item.future.set_result([by_query[q.text, q.top_k] for q in item.queries])
