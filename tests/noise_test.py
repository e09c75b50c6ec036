# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""noise: passages are uniform, distinct, and the same in any batch."""

import collections

from searchrl.search import noise
from searchrl.search.corpus import Corpus
from searchrl.trajectory import Passage, Query, Question

CORPUS = Corpus(tuple(
    Passage(str(i), f'title {i}', f'text {i}', score=7.0) for i in range(10)))


def query(text='what?', uid='q', top_k=3):
  return Query(text, top_k, Question(uid, 'Where?', ('here',)))


def ids(passages):
  return [p.id for p in passages]


def test_a_draw_is_distinct_and_scores_zero():
  search = noise.random_passages(CORPUS, seed=0)
  for passages in search([query(str(i), top_k=6) for i in range(50)]):
    assert len(set(ids(passages))) == 6
    assert {p.score for p in passages} == {0.0}
    assert all(p.text == CORPUS[int(p.id)].text for p in passages)


def test_a_draw_does_not_depend_on_order_or_batch():
  queries = [query(f'text {i}', f'uid {j}') for i in range(4) for j in range(4)]
  together = noise.random_passages(CORPUS, seed=1)(queries)
  search = noise.random_passages(CORPUS, seed=1)
  alone = [search([q])[0] for q in reversed(queries)][::-1]
  assert together == alone
  assert together[0] == search([queries[0]] * 2)[1]


def test_a_draw_depends_on_seed_question_and_text():
  def draw(seed=0, **fields):
    return tuple(ids(noise.random_passages(CORPUS, seed=seed)(
        [query(top_k=10, **fields)])[0]))
  draws = [draw(), draw(seed=1), draw(uid='r'), draw(text='who?'),
           draw(text='b', uid='a'), draw(text='', uid='ab'),
           draw(text='a', uid='b')]
  assert draws[5] == ()
  assert len(set(draws)) == len(draws)


def test_every_passage_is_as_likely_in_every_place():
  search = noise.random_passages(CORPUS, seed=0)
  found = search([query(str(i), top_k=2) for i in range(4000)])
  for place in range(2):
    counts = collections.Counter(passages[place].id for passages in found)
    # 400 are expected of each; 100 is over five standard deviations.
    assert len(counts) == 10
    assert all(abs(count - 400) < 100 for count in counts.values())


def test_at_most_the_whole_corpus_and_nothing_for_a_blank_query():
  search = noise.random_passages(CORPUS, seed=0)
  whole, none, empty, blank = search([
      query(top_k=99), query(top_k=0), query(''), query(' \n')])
  assert sorted(ids(whole)) == sorted(ids(CORPUS))
  assert none == empty == blank == ()
  assert search([]) == []
