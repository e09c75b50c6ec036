# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Queries of many callers in, each caller's results out, from few calls.

One thread owns the engine. What comes while it is busy makes up its next call,
so batches grow with the load and a lone query waits for nobody.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from concurrent import futures
import dataclasses
import threading
import time

from searchrl.trajectory import Passages, Query, SearchError, SearchFn


class Full(Exception):
  """So many queries wait that no more are taken."""


@dataclasses.dataclass
class _Item:
  queries: tuple[Query, ...]
  deadline: float
  future: futures.Future


@dataclasses.dataclass(frozen=True)
class Call:
  """One call of the engine."""

  queries: int  # that it answered
  distinct: int  # that the engine saw
  secs: float


class Batcher:
  """Puts callers' queries together; see the top of this file.

  Args:
    search: the engine, called by one thread at a time; what it raises becomes
      a SearchError('unavailable') of each query.
    batch_queries: of a call, at most, unless one caller alone brings more.
    gather_secs: that a call waits for company when the engine is idle.
    waiting_queries: more than these are not taken.
    on_call: told of every call.
    clock: seconds that only grow.
  """

  def __init__(self, search: SearchFn, *, batch_queries: int,
               gather_secs: float, waiting_queries: int,
               on_call: Callable[[Call], None] = lambda call: None,
               clock: Callable[[], float] = time.monotonic):
    self._search, self._clock, self._on_call = search, clock, on_call
    self._batch, self._gather_secs = batch_queries, gather_secs
    self._room = waiting_queries
    self._items = collections.deque()
    self._waiting = 0  # queries
    self._changed = threading.Condition()
    self._over = False
    self._thread = threading.Thread(
        target=self._work, name='batcher', daemon=True)
    self._thread.start()

  @property
  def waiting(self) -> int:
    """Queries that are in no call yet."""
    return self._waiting

  def submit(self, queries: Sequence[Query], deadline: float
             ) -> futures.Future[list[Passages | SearchError]]:
    """Results, in time; queries whose deadline has passed are not searched.

    Raises:
      Full: too many queries wait, or the batcher is closed.
    """
    item = _Item(tuple(queries), deadline, futures.Future())
    with self._changed:
      if self._over or self._waiting + len(item.queries) > self._room:
        raise Full
      self._items.append(item)
      self._waiting += len(item.queries)
      self._changed.notify()
    return item.future

  def close(self) -> None:
    """Answers what waits, takes no more, and ends the thread."""
    with self._changed:
      self._over = True
      self._changed.notify()
    self._thread.join()

  def _work(self) -> None:
    while True:
      with self._changed:
        idle = not self._items
        self._changed.wait_for(lambda: self._items or self._over)
        if not self._items:
          return
      if idle and self._gather_secs:
        time.sleep(self._gather_secs)
      batch = self._take()
      if batch:
        self._answer(batch)

  def _take(self) -> list[_Item]:
    """The oldest callers whose queries fit into one call and are wanted."""
    batch, size = [], 0
    with self._changed:
      while self._items and (
          not batch or size + len(self._items[0].queries) <= self._batch):
        item = self._items.popleft()
        self._waiting -= len(item.queries)
        if item.deadline < self._clock():
          late = SearchError('timeout', 'waited too long for the engine')
          item.future.set_result([late] * len(item.queries))
        else:
          batch.append(item)
          size += len(item.queries)
    return batch

  def _answer(self, batch: list[_Item]) -> None:
    """One call; equal queries are asked once."""
    start = self._clock()
    unique = {(q.text, q.top_k): q for item in batch for q in item.queries}
    try:
      results = list(self._search(list(unique.values())))
      if len(results) != len(unique):
        raise ValueError(
            f'{len(results)} results for {len(unique)} queries')
    except Exception as error:  # whatever it is, the next call may do better
      detail = f'{type(error).__name__}: {error}'
      results = [SearchError('unavailable', detail)] * len(unique)
    found = dict(zip(unique, results))
    self._on_call(Call(sum(len(item.queries) for item in batch), len(unique),
                       self._clock() - start))
    for item in batch:
      item.future.set_result([found[q.text, q.top_k] for q in item.queries])
