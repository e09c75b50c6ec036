# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""calls: what a call counts, and the metrics of some calls by hand."""

import pytest

from searchrl.search import call_metrics
from searchrl.trajectory import Passage, SearchError

FOUND = (Passage('a', 'Tarn', 'A river.'),)
LATE, DOWN = SearchError('timeout', 'after 3 s'), SearchError('unavailable')
IDLE = {'search/queries': 0, 'search/batch_size': 0, 'search/timeout_rate': 0,
        'search/failed_queries': 0, 'search/empty_rate': 0}


def test_a_call_counts_its_results_by_kind():
  assert call_metrics.count(0.5, [FOUND, (), LATE, DOWN, LATE, FOUND]) == call_metrics.Call(
      0.5, queries=6, timeouts=2, errors=3, empty=1)


def test_figures_of_three_calls():
  assert call_metrics.describe([
      call_metrics.count(0.010, [FOUND, (), LATE]),
      call_metrics.count(0.030, [DOWN, LATE, LATE, FOUND, FOUND, ()]),
      call_metrics.count(0.020, [FOUND])]) == pytest.approx({
          'search/queries': 10,
          'search/batch_size': 10 / 3,
          'search/timeout_rate': 0.3,
          'search/failed_queries': 4,
          'search/empty_rate': 0.2,  # a failed query is not an empty one
          'search/latency_ms/p50': 20,
          'search/latency_ms/p95': 29,  # nine tenths of the way from 20 to 30
      })


def test_without_a_call_there_is_no_latency():
  assert call_metrics.describe([]) == IDLE
