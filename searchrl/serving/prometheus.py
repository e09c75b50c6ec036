# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of the search server."""

from collections.abc import Callable
import functools

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECS = (.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Metrics:
  """Metrics of one server, in their own registry.

  Args:
    waiting: Function that returns the number of queries that still wait for a
      call of the engine.
  """

  def __init__(self, waiting: Callable[[], int]):
    self.registry = CollectorRegistry()
    counter = functools.partial(Counter, namespace='searchrl',
                                subsystem='search', registry=self.registry)
    gauge = functools.partial(Gauge, namespace='searchrl',
                              subsystem='search', registry=self.registry)
    histogram = functools.partial(Histogram, namespace='searchrl',
                                  subsystem='search', registry=self.registry)
    self.requests = counter('requests', 'Requests, by status.', ['status'])
    self.active = gauge('active_requests', 'Requests under way.')
    gauge('waiting_queries', 'Queries that wait for the engine.').set_function(
        waiting)
    self._queries = counter('queries', 'Queries answered by the engine.')
    self._distinct = counter('engine_queries', 'Queries the engine was asked.')
    self.cut_queries = counter('cut_queries', 'Queries longer than the limit.')
    self.refused_connections = counter(
        'refused_connections', 'Requests above the limit of connections.')
    self.failures = counter('failures', "Faults of the server's own.")
    self.request_secs = histogram(
        'request_seconds', 'Time of a request.', buckets=_SECS)
    self._call_secs = histogram(
        'engine_seconds', 'Time of a call of the engine.', buckets=_SECS)
    self._call_queries = histogram(
        'engine_batch_queries', 'Queries of a call of the engine.',
        buckets=_SIZES)

  def add_call(self, queries: int, distinct: int, secs: float) -> None:
    """Counts a call of the engine: its queries, distinct ones, and seconds."""
    self._queries.inc(queries)
    self._distinct.inc(distinct)
    self._call_secs.observe(secs)
    self._call_queries.observe(queries)
