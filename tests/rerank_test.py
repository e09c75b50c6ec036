# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""rerank: the order of the scores, in one call for all queries."""

import numpy as np
import pytest
import tiny

from searchrl.search import rerank
from searchrl.trajectory import Passage, Query, SearchError


def found(*names):
  return tuple(Passage(name, 'T', name, 9.0 - i)
               for i, name in enumerate(names))


def query(text='q', top_k=2):
  return Query(text, top_k, tiny.question())


def test_order_scores_and_one_call():
  calls, depths = [], []

  def engine(queries):
    depths.append([q.top_k for q in queries])
    return [{'q': found('bb', 'a', 'ccc', 'dd'), 'none': (),
             'late': SearchError('timeout'), 'zero': ()}[q.text]
            for q in queries]

  def score(pairs):
    calls.append(pairs)
    return np.array([len(text) for _, text in pairs], np.float32)

  search = rerank.reranked(engine, score, candidates=4)
  got = search([query(), query('none'), query('late'), query('zero', 0),
                query('q', 9)])
  assert depths == [[4, 4, 4, 0, 9]]
  names = [[p.id for p in passages] for passages in (got[0], got[4])]
  assert names == [['ccc', 'bb'], ['ccc', 'bb', 'dd', 'a']]  # a tie: as it was
  assert [p.score for p in got[0]] == [16.0, 15.0]
  assert got[1] == got[3] == () and got[2] == SearchError('timeout')
  assert calls == [[('q', f'(Title: "T") {name}')
                    for name in ('bb', 'a', 'ccc', 'dd')] * 2]


@pytest.mark.parametrize('scores', [[1.0], [1.0, float('nan')], [1.0] * 3])
def test_scores_that_are_not_one_finite_number_a_pair_are_refused(scores):
  search = rerank.reranked(lambda queries: [found('a', 'b')],
                           lambda pairs: scores)
  with pytest.raises(ValueError, match='one finite score a pair, 2 in all'):
    search([query()])
