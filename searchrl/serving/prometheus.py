# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of the search server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import functools
import time

import prometheus_client

from searchrl.serving.batcher import Call

_SECS = (.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclasses.dataclass
class Record:
  """One request, whose HTTP status is set when it is known."""

  status: int = 500


class Metrics:
  """Metrics of one server, in their own registry.

  Args:
    waiting: Function that returns the number of queries in no call yet.
  """

  def __init__(self, waiting: Callable[[], int]):
    self.registry = prometheus_client.CollectorRegistry()
    counter, gauge, histogram = (
        functools.partial(kind, namespace='searchrl', subsystem='search',
                          registry=self.registry)
        for kind in (prometheus_client.Counter, prometheus_client.Gauge,
                     prometheus_client.Histogram))
    self._requests = counter('requests', 'Requests, by status.', ['status'])
    self._active = gauge('active_requests', 'Requests under way.')
    gauge('waiting_queries', 'Queries that wait for the engine.').set_function(
        waiting)
    self._queries = counter('queries', 'Queries answered by the engine.')
    self._distinct = counter('engine_queries', 'Queries the engine was asked.')
    self._cut = counter('cut_queries', 'Queries longer than the limit.')
    self._refused = counter(
        'refused_connections', 'Requests above the limit of connections.')
    self._failures = counter('failures', "Faults of the server's own.")
    self._request_secs = histogram(
        'request_seconds', 'Time of a request.', buckets=_SECS)
    self._call_secs = histogram(
        'engine_seconds', 'Time of a call of the engine.', buckets=_SECS)
    self._call_queries = histogram(
        'engine_batch_queries', 'Queries of a call of the engine.',
        buckets=_SIZES)

  @contextlib.contextmanager
  def request(self) -> Iterator[Record]:
    """Counts and times one request."""
    record, start = Record(), time.perf_counter()
    self._active.inc()
    try:
      yield record
    finally:
      self._active.dec()
      self._requests.labels(str(record.status)).inc()
      self._request_secs.observe(time.perf_counter() - start)

  def add_call(self, call: Call) -> None:
    """Counts one call of the engine."""
    self._queries.inc(call.queries)
    self._distinct.inc(call.distinct)
    self._call_secs.observe(call.secs)
    self._call_queries.observe(call.queries)

  def add_cut(self, queries: int) -> None:
    """Counts queries of a request that were longer than the limit."""
    self._cut.inc(queries)

  def add_refused(self) -> None:
    """Counts a request that was above the limit of connections."""
    self._refused.inc()

  def add_failure(self) -> None:
    """Counts an internal error of the server."""
    self._failures.inc()
