# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Counts and latencies of a search engine's calls, as metrics of a step."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

import numpy as np

from searchrl.trajectory import Passages, SearchError


@dataclasses.dataclass(frozen=True)
class Call:
  """A call of an engine, which answers many queries."""

  secs: float  # seconds until the call returned or was given up
  queries: int
  timeouts: int = 0  # queries that ended in SearchError('timeout')
  errors: int = 0  # queries that ended in any SearchError
  empty: int = 0  # queries that succeeded and found no passage


def count(secs: float, results: Sequence[Passages | SearchError]) -> Call:
  """Returns a finished call, given its duration and each query's result."""
  errors = [result for result in results if isinstance(result, SearchError)]
  return Call(
      secs, len(results), timeouts=sum(e.kind == 'timeout' for e in errors),
      errors=len(errors), empty=sum(not result for result in results))


def describe(calls: Sequence[Call]) -> dict[str, float]:
  """Returns the metrics of some calls.

  Latencies are percentiles over the calls, in milliseconds; they are absent if
  there are no calls. Rates are shares of the queries, and 0 without queries.
  """
  queries = sum(call.queries for call in calls)
  values = {
      'search/queries': queries,
      'search/batch_size': queries / max(len(calls), 1),
      'search/timeout_rate': sum(c.timeouts for c in calls) / max(queries, 1),
      'search/failed_queries': sum(c.errors for c in calls),
      'search/empty_rate': sum(c.empty for c in calls) / max(queries, 1),
  }
  latencies = [1000 * call.secs for call in calls]
  return values | {
      f'search/latency_ms/p{percent}': float(np.percentile(latencies, percent))
      for percent in (50, 95) if calls}
