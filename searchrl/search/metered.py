# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A SearchFn in, the same one out, and what its calls were like as metrics."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import time

import numpy as np

from searchrl.search import wrapped
from searchrl.trajectory import Passages, Query, SearchError, SearchFn


@dataclasses.dataclass(frozen=True)
class _Call:
  """One call of the engine, which answers many queries."""

  secs: float
  queries: int
  timeouts: int  # queries that ended in SearchError('timeout')
  errors: int  # queries that ended in any SearchError
  empty: int  # queries that succeeded and found no passage


class Metered:
  """A SearchFn that counts and times what goes through it.

  Args:
    search: what answers; put `engines.guarded` inside, for a call that raises
      is not counted.
  """

  def __init__(self, search: SearchFn):
    self._search = search
    self._calls = []

  def __call__(
      self, queries: Sequence[Query]) -> Sequence[Passages | SearchError]:
    start = time.perf_counter()
    results = self._search(queries)
    secs = time.perf_counter() - start
    self._calls.append(_Call(
        secs, len(queries),
        timeouts=sum(isinstance(r, SearchError) and r.kind == 'timeout'
                     for r in results),
        errors=sum(isinstance(r, SearchError) for r in results),
        empty=sum(not isinstance(r, SearchError) and not r for r in results)))
    return results

  def pop(self) -> dict[str, float]:
    """Metrics of the calls since the last `pop`, which it forgets.

    Those that the search itself keeps are among them.

    Latencies are percentiles over calls, in milliseconds; without a call there
    are none. Rates are shares of the queries; of none, 0.
    """
    calls, self._calls = self._calls, []
    queries = sum(call.queries for call in calls)
    values = {
        'search/queries': queries,
        'search/batch_size': queries / max(len(calls), 1),
        'search/timeout_rate': sum(c.timeouts for c in calls) / max(queries, 1),
        'search/failed_queries': sum(c.errors for c in calls),
        'search/empty_rate': sum(c.empty for c in calls) / max(queries, 1),
    } | wrapped.pop(self._search)
    if calls:
      latencies = [1000 * call.secs for call in calls]
      for percent in (50, 95):
        values[f'search/latency_ms/p{percent}'] = float(
            np.percentile(latencies, percent))
    return values

  def wait(self) -> None:
    """Waits while the search is out of order, if it can tell."""
    wrapped.wait(self._search)
