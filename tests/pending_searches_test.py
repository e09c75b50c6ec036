# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""pending_searches: who asked gets its results, late or failed ones as outcomes."""

import threading

import pytest
import tiny

from searchrl.rollouts import pending_searches
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
  asked = pending_searches.PendingSearches(
      lambda queries: calls.append(len(queries)) or echo(queries),
      timeout_secs=5, calls=2)
  asked.ask('a', [query('1'), query('2')])
  asked.ask('b', [])
  asked.ask('c', [query('3')])
  assert len(asked) == 3
  assert texts(asked.all()) == {'a': ['1', '2'], 'b': [], 'c': ['3']}
  assert calls == [3] and len(asked) == 0
  assert asked.all() == asked.ready() == asked.some() == {}


def test_no_more_calls_than_allowed_and_the_rest_goes_together():
  gates = {name: threading.Event() for name in '123'}
  calls = []

  def search(queries):
    calls.append([q.text for q in queries])
    assert gates[queries[0].text].wait(5)
    return echo(queries)

  asked = pending_searches.PendingSearches(search, timeout_secs=10, calls=2)
  for name in '12':
    asked.ask(name, [query(name)])
    asked.start()
  for name in '345':
    asked.ask(name, [query(name)])
    asked.start()
  assert asked.ready() == {} and len(asked) == 5
  gates['2'].set()
  assert texts(asked.some()) == {'2': ['2']}  # the second is back first
  gates['1'].set()
  gates['3'].set()
  assert texts(asked.all()) == {n: [n] for n in '1345'}
  assert sorted(calls) == [['1'], ['2'], ['3', '4', '5']]


@pytest.mark.parametrize('search, kind, detail', [
    (lambda q: 1 / 0, 'unavailable', 'ZeroDivisionError: division by zero'),
    (lambda q: [()], 'bad_response', '1 results for 2 queries')])
def test_what_goes_wrong_is_an_outcome_of_each_query(search, kind, detail):
  asked = pending_searches.PendingSearches(search, timeout_secs=5, calls=1)
  asked.ask('a', [query('1'), query('2')])
  assert asked.all() == {'a': [SearchError(kind, detail)] * 2}
  call, = asked.finished
  assert (call.queries, call.errors, call.timeouts) == (2, 2, 0)


def test_a_late_call_has_failed_and_what_it_brings_is_dropped():
  gate = threading.Event()

  def search(queries):
    if queries[0].text == 'slow':
      gate.wait(5)
    return echo(queries)

  asked = pending_searches.PendingSearches(search, timeout_secs=0.05, calls=1)
  asked.ask('a', [query('slow')])
  assert asked.all() == {'a': [SearchError('timeout', 'after 0.05 s')]}
  gate.set()
  asked.ask('a', [query('next')])
  assert texts(asked.all()) == {'a': ['next']}
  late, fine = asked.finished  # counted once, whatever comes of it later
  assert (late.queries, late.timeouts, late.errors, late.empty) == (1, 1, 1, 0)
  assert late.secs >= 0.05
  assert (fine.queries, fine.errors) == (1, 0)
