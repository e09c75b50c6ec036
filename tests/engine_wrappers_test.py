# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""wrapped: typed errors; metrics and waits of inner searches."""

import dataclasses

import numpy as np
import pytest
import tiny

from searchrl.search import fusion
from searchrl.search import rerank
from searchrl.search import engine_wrappers
from searchrl.trajectory import (
    Action, Passage, Query, SearchError, ToolCall, ToolResult, Turn)


def query(text='river'):
  return Query(text, 2, tiny.question())


def test_results_pass_unchanged():
  results = {'river': (Passage('a', 'Tarn', 'A river.', 2.0),), '': (),
             'late': SearchError('timeout', 'after 3 s')}
  search = lambda queries: [results[q.text] for q in queries]
  queries = [query(text) for text in results]
  assert engine_wrappers.with_typed_errors(search)(queries) == search(queries)
  assert engine_wrappers.with_typed_errors(search)([]) == []


def test_who_asks_reaches_every_part_of_an_engine():
  said = Turn((1, 2), (-0.1, -0.2), Action('search', ('river',)))
  asks = Query('river', 2, tiny.question(), step=7, sample=3, turn=1,
               turns=(said, said))
  asked = []

  def note(queries):
    asked.extend(queries)
    return [(Passage('a', 'Tarn', 'A river.'),)] * len(queries)

  part = engine_wrappers.with_typed_errors(note)
  inner = rerank.reranked(part, lambda pairs: [0.5] * len(pairs), candidates=9)
  search = engine_wrappers.with_typed_errors(rerank.reranked(
      fusion.fused([note, inner], depth=9), lambda pairs: [0.5] * len(pairs)))
  assert len(search([asks])[0]) == 1
  assert [q.top_k for q in asked] == [10, 10]  # as deep as the rerankers read
  assert [dataclasses.replace(q, top_k=2) for q in asked] == [asks, asks]


def test_an_exception_is_typed():
  def broken(queries):
    raise ConnectionError('no route')
  error = SearchError('unavailable', 'ConnectionError: no route')
  assert engine_wrappers.with_typed_errors(broken)([query()] * 3) == [error] * 3


@pytest.mark.parametrize('results', [[], [()], [(), (), ()]])
def test_a_wrong_number_of_results_is_typed(results):
  error = SearchError(
      'bad_response', f'{len(results)} results for 2 queries')
  found = engine_wrappers.with_typed_errors(lambda queries: results)([query()] * 2)
  assert found == [error] * 2


@pytest.mark.parametrize('result', [
    None, 'river', {}, (None,), ('river',), ({'text': 'a'},),
    (Passage('a', 'T', None),), (Passage(3, 'T', 'x'),),
    (Passage('a', 'T', 'x', float('nan')),), (Passage('a', 'T', 'x', '1'),),
    ToolResult('x')])
def test_a_result_of_another_type_is_typed(result):
  right = (Passage('a', 'T', 'x', 1.0),)
  found = engine_wrappers.with_typed_errors(lambda queries: [right, result])(
      [query()] * 2)
  assert found[0] == right and found[1].kind == 'bad_response'
  assert found[1].detail.startswith('Passages with texts and scores must be ')


@pytest.mark.parametrize('result', [
    None, 'x', 3, (), ToolResult(3), ToolResult('x', passages=('y',))])
def test_a_result_of_a_tool_is_typed_too(result):
  right = ToolResult('x', passages=(Passage('a', 'T', 'x', 1.0),))
  calls = [ToolCall('echo', {}, tiny.question())] * 2
  found = engine_wrappers.with_typed_errors(lambda _: [right, result])(calls)
  assert found[0] == right and found[1].kind == 'bad_response'
  assert found[1].detail.startswith('a ToolResult must be returned')


def test_passages_have_scores_of_python():
  many = [Passage(f'{n}', 'T', 'x', np.float32(n) / 4) for n in range(3)]
  found, = engine_wrappers.with_typed_errors(lambda queries: [many])([query()])
  assert found == tuple(many) and isinstance(found, tuple)
  assert [type(passage.score) for passage in found] == [float] * 3


def test_the_user_can_stop_a_run():
  def interrupted(queries):
    raise KeyboardInterrupt
  with pytest.raises(KeyboardInterrupt):
    engine_wrappers.with_typed_errors(interrupted)([query()])


class Inner:
  """A search with metrics, which notes that it waits."""

  def __init__(self, **metrics):
    self.metrics, self.waits = metrics, 0

  def __call__(self, queries):
    return [()] * len(queries)

  def pop(self):
    metrics, self.metrics = self.metrics, {}
    return metrics

  def wait(self):
    self.waits += 1


def test_metrics_are_added_up_and_waits_passed_on():
  inner = Inner(tries=2, hits=1), Inner(tries=3)
  search = engine_wrappers.with_typed_errors(engine_wrappers.Wrapped(inner[0], inner))
  assert search([query()]) == [()]
  assert engine_wrappers.pop(search) == {'tries': 5, 'hits': 1}
  assert engine_wrappers.pop(search) == {}
  engine_wrappers.wait(search)
  assert [one.waits for one in inner] == [1, 1]


def test_a_plain_function_has_no_metrics_and_never_waits():
  search = engine_wrappers.with_typed_errors(lambda queries: [()] * len(queries))
  assert engine_wrappers.pop(search) == {}
  engine_wrappers.wait(search)  # returns at once
