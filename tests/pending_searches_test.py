# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""pending_searches: results by owner, late or failed ones as outcomes."""

import queue
import threading

import pytest
import tiny

from searchrl.rollouts import pending_searches
from searchrl.search import engine_wrappers
from searchrl.trajectory import Passage, Query, SearchError


def query(text):
  return Query(text, 1, tiny.question())


def echo(queries):
  return [(Passage(q.text, '', ''),) for q in queries]


def texts(found):
  return {who: [result[0].id for result in results]
          for who, results in found.items()}


def test_all_who_asked_before_the_start_share_one_call():
  calls = []
  pending = pending_searches.PendingSearches(
      lambda queries: calls.append(len(queries)) or echo(queries),
      timeout_secs=5, calls=2)
  pending.submit('a', [query('1'), query('2')])
  pending.submit('b', [])
  pending.submit('c', [query('3')])
  assert len(pending) == 3
  assert texts(pending.all()) == {'a': ['1', '2'], 'b': [], 'c': ['3']}
  assert calls == [3] and len(pending) == 0
  assert pending.all() == pending.ready() == pending.some() == {}


def test_results_of_several_tools_come_in_the_order_of_submission():
  second_has_ended = threading.Event()

  def slow(queries):
    assert second_has_ended.wait(5)
    return echo(queries)

  def fast(calls):
    second_has_ended.set()
    return echo(calls)

  pending = pending_searches.PendingSearches(
      engine_wrappers.toolset({'search': slow, 'open': fast}), timeout_secs=10,
      calls=1)
  for owner, tool in ((3, 'search'), (1, 'open'), (2, 'search')):
    pending.submit(owner, [query(str(owner))], tool)
  assert [*texts(pending.all()).items()] == [(3, ['3']), (2, ['2']), (1, ['1'])]


def test_no_more_calls_than_allowed_and_the_rest_goes_together():
  gates = {name: threading.Event() for name in '123'}
  calls = []

  def search(queries):
    calls.append([q.text for q in queries])
    assert gates[queries[0].text].wait(5)
    return echo(queries)

  pending = pending_searches.PendingSearches(search, timeout_secs=10, calls=2)
  for name in '12':
    pending.submit(name, [query(name)])
    pending.start()
  for name in '345':
    pending.submit(name, [query(name)])
    pending.start()
  assert pending.ready() == {} and len(pending) == 5
  gates['2'].set()
  assert texts(pending.some()) == {'2': ['2']}  # the second is back first
  gates['1'].set()
  gates['3'].set()
  assert texts(pending.all()) == {n: [n] for n in '1345'}
  assert sorted(calls) == [['1'], ['2'], ['3', '4', '5']]


@pytest.mark.parametrize('search, kind, detail', [
    (lambda q: 1 / 0, 'unavailable', 'ZeroDivisionError: division by zero'),
    (lambda q: [()], 'bad_response', '1 results for 2 queries')])
def test_what_goes_wrong_is_an_outcome_of_each_query(search, kind, detail):
  pending = pending_searches.PendingSearches(search, timeout_secs=5, calls=1)
  pending.submit('a', [query('1'), query('2')])
  assert pending.all() == {'a': [SearchError(kind, detail)] * 2}
  call, = pending.finished
  assert (call.queries, call.errors, call.timeouts) == (2, 2, 0)


def test_a_late_call_has_failed_and_what_it_brings_is_dropped():
  gate = threading.Event()

  def search(queries):
    if queries[0].text == 'slow':
      gate.wait(5)
    return echo(queries)

  pending = pending_searches.PendingSearches(search, timeout_secs=0.05, calls=1)
  pending.submit('a', [query('slow')])
  assert pending.all() == {'a': [SearchError('timeout', 'after 0.05 s')]}
  gate.set()
  pending.submit('a', [query('next')])
  assert texts(pending.all()) == {'a': ['next']}
  late, fine = pending.finished  # counted once, whatever comes of it later
  assert (late.queries, late.timeouts, late.errors, late.empty) == (1, 1, 1, 0)
  assert late.secs >= 0.05
  assert (fine.queries, fine.errors) == (1, 0)


@pytest.mark.parametrize('stopped_secs', [0, 100])
def test_the_time_of_a_stopped_process_counts_for_no_call(stopped_secs):
  """The clock is a fake, which the first wait puts forward."""
  now, gate, waits = [0.0], threading.Event(), []

  class Answers(queue.SimpleQueue):

    def get(self, timeout):
      if not timeout:
        return super().get(block=False)
      waits.append(timeout)
      if len(waits) == 1:
        now[0] += timeout + stopped_secs
        raise queue.Empty
      gate.set()
      return super().get()

  def search(queries):
    gate.wait()
    return echo(queries)

  pending = pending_searches.PendingSearches(
      search, timeout_secs=4, calls=1, clock=lambda: now[0])
  pending._back = Answers()
  pending.submit('a', [query('1')])
  results = pending.some()
  gate.set()
  call, = pending.finished
  if stopped_secs:
    assert texts(results) == {'a': ['1']}
    assert waits == [4, 4] and (call.timeouts, call.secs) == (0, 0)
  else:
    assert results == {'a': [SearchError('timeout', 'after 4 s')]}
    assert waits == [4] and (call.timeouts, call.secs) == (1, 4)
