# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Meter: results pass unchanged; calls, queries and a clock set by hand."""

import pytest
import tiny

from searchrl.search import metered
from searchrl.search import wrapped
from searchrl.trajectory import Passage, Query, SearchError

FOUND = (Passage('a', 'Tarn', 'A river.'),)
RESULTS = {'found': FOUND, 'empty': (),
           'late': SearchError('timeout', 'after 3 s'),
           'down': SearchError('unavailable')}
IDLE = {'search/queries': 0, 'search/batch_size': 0, 'search/timeout_rate': 0,
        'search/failed_queries': 0, 'search/empty_rate': 0}


@pytest.fixture
def clock(monkeypatch):
  """Seconds that each call of the engine takes, from the first to the last."""
  secs, now = [], [100.0]

  def search(queries):
    now[0] += secs.pop(0)
    return [RESULTS[q.text] for q in queries]

  monkeypatch.setattr(metered.time, 'perf_counter', lambda: now[0])
  return secs, metered.Metered(search)


def queries(*texts):
  return [Query(text, 3, tiny.question()) for text in texts]


def test_results_pass_unchanged(clock):
  secs, search = clock
  secs += [1]
  assert search(queries(*RESULTS)) == list(RESULTS.values())


def test_figures_of_three_calls(clock):
  secs, search = clock
  secs += [0.010, 0.030, 0.020]
  search(queries('found', 'empty', 'late'))
  search(queries('down', 'late', 'late', 'found', 'found', 'empty'))
  search(queries('found'))
  assert search.pop() == pytest.approx({
      'search/queries': 10,
      'search/batch_size': 10 / 3,
      'search/timeout_rate': 0.3,
      'search/failed_queries': 4,
      'search/empty_rate': 0.2,  # a failed query is not an empty one
      'search/latency_ms/p50': 20,
      'search/latency_ms/p95': 29,  # nine tenths of the way from 20 to 30
  })


def test_pop_forgets_and_without_a_call_there_is_no_latency(clock):
  secs, search = clock
  assert search.pop() == IDLE
  secs += [0.5, 0.25]
  search(queries('late'))
  assert search.pop()['search/timeout_rate'] == 1
  assert search.pop() == IDLE
  search(queries('found', 'found'))
  assert search.pop() == IDLE | {
      'search/queries': 2, 'search/batch_size': 2,
      'search/latency_ms/p50': 250, 'search/latency_ms/p95': 250}


def test_a_guarded_failure_is_counted_and_timed():
  def broken(queries):
    raise ConnectionError('no route')
  search = metered.Metered(wrapped.with_typed_errors(broken))
  search(queries('found'))
  values = search.pop()
  assert values['search/queries'] == 1
  assert values['search/timeout_rate'] == values['search/empty_rate'] == 0
  assert values['search/latency_ms/p95'] >= 0
