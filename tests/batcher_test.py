# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""batcher: few calls of the engine, results by caller, and what is dropped."""

import concurrent.futures
import time

import pytest
import servers
from servers import ask
import tiny

from searchrl.serving import batcher as batchers
from searchrl.trajectory import Query, SearchError


def queries(*texts):
  return [Query(text, 1, tiny.question()) for text in texts]


def make(search, **options):
  return batchers.Batcher(search, **dict(
      batch_queries=4, gather_secs=0.0, waiting_queries=10) | options)


def ids(future):
  return [found.id for found, in future.result(20)]


def test_concurrent_requests_make_batches_and_equal_queries_are_asked_once():
  held = servers.Held()
  with (servers.serving(held, gather_secs=0.0) as server,
        concurrent.futures.ThreadPoolExecutor(41) as pool):
    first = pool.submit(ask, server, queries=['first'])
    assert held.asked.wait(20)
    rest = [pool.submit(ask, server, queries=[f'q{i % 20}', 'both'])
            for i in range(40)]
    servers.until(lambda: server.batcher.waiting == 80)
    held.go.set()
    assert first.result()[0] == 200
    for i, done in enumerate(rest):
      lists = done.result()[2]['result']
      assert [l[0]['id'] for l in lists] == [f'q{i % 20}', 'both']
  assert held.batches[0] == ['first'] and len(held.batches) == 2
  assert sorted(held.batches[1]) == sorted(['both'] + [
      f'q{i}' for i in range(20)])


def test_a_large_request_goes_in_slices_and_others_between_them_are_kept():
  held = servers.Held()
  batcher = make(held)
  first, = batcher.submit(queries('x'), time.monotonic() + 20)
  assert held.asked.wait(20)
  slices = batcher.submit(queries(*'abcdef'), time.monotonic() + 20)
  other, = batcher.submit(queries('g', 'h'), time.monotonic() + 20)
  assert batcher.waiting == 8 and batcher.submit([], 0.0) == []
  with pytest.raises(batchers.Full):
    batcher.submit(queries(*'klm'), time.monotonic() + 20)
  held.go.set()
  assert [ids(part) for part in slices] == [list('abcd'), list('ef')]
  assert ids(first) == ['x'] and ids(other) == ['g', 'h']
  assert held.batches == [['x'], list('abcd'), list('efgh')]
  batcher.close(20)


def test_what_is_cancelled_or_late_is_not_searched():
  held = servers.Held()
  batcher = make(held)
  first, = batcher.submit(queries('x'), time.monotonic() + 20)
  assert held.asked.wait(20)
  gone, = batcher.submit(queries('gone'), time.monotonic() + 20)
  late, = batcher.submit(queries('late'), time.monotonic() - 1)
  kept, = batcher.submit(queries('kept'), time.monotonic() + 20)
  assert gone.cancel() and not first.cancel()
  held.go.set()
  assert ids(kept) == ['kept']
  assert [error.kind for error in late.result(20)] == ['timeout']
  assert held.batches == [['x'], ['kept']]
  batcher.close(20)
  with pytest.raises(batchers.Full):
    batcher.submit(queries('after'), time.monotonic() + 20)


@pytest.mark.parametrize('broken', [lambda queries: 1 / 0, lambda queries: []])
def test_a_failing_engine_fails_its_call_and_goes_on(broken):
  is_broken = [True, False]
  batcher = make(lambda asked: broken(asked) if is_broken.pop(0) else
                 servers.echo(asked))
  failed, = batcher.submit(queries('a', 'b'), time.monotonic() + 20)
  errors = failed.result(20)
  assert len(errors) == 2 and {type(error) for error in errors} == {SearchError}
  assert {error.kind for error in errors} == {'unavailable'}
  good, = batcher.submit(queries('a'), time.monotonic() + 20)
  assert ids(good) == ['a']
  batcher.close(20)


def test_a_stuck_engine_does_not_hold_up_the_end():
  held = servers.Held()
  batcher = make(held)
  batcher.submit(queries('a'), time.monotonic() + 20)
  assert held.asked.wait(20)
  start = time.monotonic()
  batcher.close(0.1)
  assert time.monotonic() - start < 10
  held.go.set()
