# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Every engine keeps one contract, and the guard keeps it when they fail."""

import pytest

from searchrl.search import engines
from searchrl.search.corpus import Corpus
from searchrl.trajectory import Passage, Query, Question, SearchError

QUESTION = Question('q', 'Where?', ('here',))
CORPUS = Corpus((
    Passage('a', 'Tarn', 'A river that joins the Garonne.'),
    Passage('b', 'Garonne', 'A river that reaches the sea.'),
))
ENGINES = ('bm25', 'dense', 'noise')


def query(text='river', top_k=2):
  return Query(text, top_k, QUESTION)


@pytest.mark.parametrize('name', ENGINES)
class TestContract:

  def test_one_tuple_of_passages_a_query_in_its_order(self, name):
    search = engines.make(name, CORPUS)
    texts = ('river', '', 'Tarn', 'the sea')
    found = search([query(text) for text in texts])
    assert len(found) == 4
    assert found == [search([query(text)])[0] for text in texts]
    for passages in found:
      assert isinstance(passages, tuple)
      for p in passages:
        assert isinstance(p.score, float)
        source = {q.id: q for q in CORPUS}[p.id]
        assert (p.title, p.text) == (source.title, source.text)
    assert search([]) == []

  def test_at_most_top_k_and_at_most_the_corpus(self, name):
    search = engines.make(name, CORPUS)
    sizes = [len(search([query(top_k=k)])[0]) for k in (0, 1, 2, 3, 100)]
    assert sizes == [0, 1, 2, 2, 2]

  @pytest.mark.parametrize('text', ['', ' ', '\n\t'])
  def test_a_blank_query_finds_nothing(self, name, text):
    assert engines.make(name, CORPUS)([query(text)]) == [()]

  @pytest.mark.parametrize('text', [
      '?', '\x00', '\ud800', 'x' * 10000, 'river ' * 2000, '😀', '</search>'])
  def test_no_text_is_too_strange(self, name, text):
    (found,) = engines.make(name, CORPUS)([query(text)])
    assert isinstance(found, tuple)

  def test_two_engines_of_one_kind_agree(self, name):
    queries = [query('river'), query('Garonne')]
    first, second = (engines.make(name, CORPUS, seed=3) for _ in range(2))
    assert first(queries) == second(queries)


@pytest.mark.parametrize('name, text', [('bm25', 'Tarn'), ('dense', 'tarns')])
def test_what_shares_words_comes_first(name, text):
  assert engines.make(name, CORPUS)([query(text)])[0][0].id == 'a'


def test_options_reach_the_engine():
  assert engines.make('dense', CORPUS, dim=32, n=2, batch=1)([query()])[0]
  with pytest.raises(ValueError, match='k1 must be'):
    engines.make('bm25', CORPUS, k1=-1)
  with pytest.raises(TypeError, match='dim'):
    engines.make('bm25', CORPUS, dim=3)


def test_the_seed_reaches_the_noise():
  queries = [query(str(i), 1) for i in range(20)]
  assert engines.make('noise', CORPUS, seed=1)(queries) != engines.make(
      'noise', CORPUS, seed=2)(queries)


def test_an_unknown_engine_is_refused_with_the_known_ones():
  with pytest.raises(ValueError, match="'bm25', 'dense' or 'noise'.*'bm52'"):
    engines.make('bm52', CORPUS)


def test_the_guard_passes_results_on():
  search = engines.make('bm25', CORPUS)
  queries = [query('river'), query('')]
  assert engines.guarded(search)(queries) == search(queries)
  assert engines.guarded(search)([]) == []


def test_the_guard_types_an_exception():
  def broken(queries):
    raise ConnectionError('no route')
  error = SearchError('unavailable', 'ConnectionError: no route')
  assert engines.guarded(broken)([query()] * 3) == [error] * 3


@pytest.mark.parametrize('results', [[], [()], [(), (), ()]])
def test_the_guard_types_a_wrong_number_of_results(results):
  error = SearchError(
      'bad_response', f'{len(results)} results for 2 queries')
  found = engines.guarded(lambda queries: results)([query()] * 2)
  assert found == [error] * 2


def test_the_guard_lets_the_user_stop_a_run():
  def interrupted(queries):
    raise KeyboardInterrupt
  with pytest.raises(KeyboardInterrupt):
    engines.guarded(interrupted)([query()])
