# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""What a server does in, its metrics as Prometheus reads them out."""

from __future__ import annotations

import bisect
import collections
from collections.abc import Iterator
import contextlib
import dataclasses
import threading
import time

from searchrl.serving.batcher import Call

_SECS = (.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Histogram:
  """Counts of values up to each bound, with their sum."""

  def __init__(self, bounds: tuple[float, ...]):
    self._bounds = bounds
    self._counts = [0] * (len(bounds) + 1)
    self._sum = 0.0

  def add(self, value: float) -> None:
    self._counts[bisect.bisect_left(self._bounds, value)] += 1
    self._sum += value

  def lines(self, name: str) -> Iterator[str]:
    total = 0
    for bound, count in zip((*self._bounds, '+Inf'), self._counts):
      total += count
      yield f'{name}_bucket{{le="{bound}"}} {total}'
    yield f'{name}_sum {self._sum}'
    yield f'{name}_count {total}'


@dataclasses.dataclass
class Record:
  """One request; its status is written when it is known."""

  status: int = 500


class Gauges:
  """Counts, for threads."""

  def __init__(self):
    self._lock = threading.Lock()
    self._idle = threading.Condition(self._lock)
    self._active = 0
    self._statuses = collections.Counter()
    self._refused = self._failures = self._queries = self._distinct = 0
    self._request_secs, self._call_secs = Histogram(_SECS), Histogram(_SECS)
    self._call_queries = Histogram(_SIZES)

  @contextlib.contextmanager
  def request(self) -> Iterator[Record]:
    """Around one request."""
    record, start = Record(), time.perf_counter()
    with self._lock:
      self._active += 1
    try:
      yield record
    finally:
      with self._lock:
        self._active -= 1
        self._statuses[record.status] += 1
        self._request_secs.add(time.perf_counter() - start)
        self._idle.notify_all()

  def called(self, call: Call) -> None:
    """The engine has been called."""
    with self._lock:
      self._queries += call.queries
      self._distinct += call.distinct
      self._call_secs.add(call.secs)
      self._call_queries.add(call.queries)

  def refused_connection(self) -> None:
    with self._lock:
      self._refused += 1

  def failed(self) -> None:
    """A fault of the server's own."""
    with self._lock:
      self._failures += 1

  def wait_until_idle(self, secs: float) -> bool:
    """Whether no request is being answered, now or within some seconds."""
    with self._idle:
      return self._idle.wait_for(lambda: not self._active, secs)

  def text(self, *, waiting: int) -> str:
    """All of it, in Prometheus' text format."""
    with self._lock:
      lines = []
      for name, kind, values in (
          ('requests_total', 'counter',
           [f'{{status="{status}"}} {n}'
            for status, n in sorted(self._statuses.items())]),
          ('active_requests', 'gauge', [f' {self._active}']),
          ('waiting_queries', 'gauge', [f' {waiting}']),
          ('queries_total', 'counter', [f' {self._queries}']),
          ('engine_queries_total', 'counter', [f' {self._distinct}']),
          ('refused_connections_total', 'counter', [f' {self._refused}']),
          ('failures_total', 'counter', [f' {self._failures}'])):
        lines.append(f'# TYPE searchrl_search_{name} {kind}')
        lines += [f'searchrl_search_{name}{value}' for value in values]
      for name, histogram in (('request_seconds', self._request_secs),
                              ('engine_seconds', self._call_secs),
                              ('engine_batch_queries', self._call_queries)):
        lines.append(f'# TYPE searchrl_search_{name} histogram')
        lines += histogram.lines(f'searchrl_search_{name}')
    return '\n'.join(lines) + '\n'
