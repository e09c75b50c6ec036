# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Counts and latencies of the calls of engines and tools, as metrics."""

from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from searchrl.trajectory import SearchError, ToolResult, is_search


@dataclasses.dataclass(frozen=True)
class Call:
  """One call of an engine or of another tool, for one or more queries."""

  secs: float  # seconds until the call returned or was given up
  queries: int
  timeouts: int = 0  # queries that ended in SearchError('timeout')
  errors: int = 0  # queries that ended in any SearchError
  empty: int = 0  # queries that succeeded and found no passage
  tool: str = 'search'
  wrong: int = 0  # calls by the policy that a tool rejected as wrong


def count(secs: float, results: Sequence[Any], tool: str = 'search') -> Call:
  """Returns the record of a finished call, with counts of its results by kind.

  Args:
    secs: Duration of the call in seconds.
    results: Result of each query of the call.
    tool: Name of the tool that was called.
  """
  errors = [result for result in results if isinstance(result, SearchError)]
  return Call(
      secs, len(results), timeouts=sum(e.kind == 'timeout' for e in errors),
      errors=len(errors), empty=sum(not result for result in results),
      tool=tool, wrong=sum(isinstance(result, ToolResult) and result.is_error
                           for result in results))


def describe(calls: Sequence[Call]) -> dict[str, float]:
  """Returns counts, rates and latencies of calls, as metrics by name.

  The names begin with search/ for all searches together, and with tool/NAME/
  for each other tool that was called. They end with:

    queries, failed_queries: Numbers of all and of failed queries.
    batch_size: Mean number of queries per call.
    timeout_rate: Share of queries that timed out; 0 without queries.
    empty_rate, only of searches: Share of queries that found nothing.
    wrong_rate, only of other tools: Share of calls that the tool rejected.
    latency_ms/p50, /p95: Percentiles over the calls; absent without calls.
  """
  tools = sorted({call.tool for call in calls if not is_search(call.tool)})
  metrics = _describe([call for call in calls if is_search(call.tool)],
                      'search')
  for tool in tools:
    own_calls = [call for call in calls if call.tool == tool]
    values = _describe(own_calls, f'tool/{tool}')
    del values[f'tool/{tool}/empty_rate']
    metrics |= values | {f'tool/{tool}/wrong_rate': sum(
        call.wrong for call in own_calls) / max(
            values[f'tool/{tool}/queries'], 1)}
  return metrics


def _describe(calls: Sequence[Call], group: str) -> dict[str, float]:
  """Returns the metrics of some calls, with names that begin with `group`/."""
  queries = sum(call.queries for call in calls)
  values = {
      f'{group}/queries': queries,
      f'{group}/batch_size': queries / max(len(calls), 1),
      f'{group}/timeout_rate': sum(c.timeouts for c in calls) / max(queries, 1),
      f'{group}/failed_queries': sum(c.errors for c in calls),
      f'{group}/empty_rate': sum(c.empty for c in calls) / max(queries, 1),
  }
  latencies = [1000 * call.secs for call in calls]
  return values | {
      f'{group}/latency_ms/p{percent}': float(np.percentile(latencies, percent))
      for percent in (50, 95) if calls}
