# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""in_memory: what vectors made now find, and how they are described."""

import numpy as np
import pytest

from searchrl.search.corpus import Corpus
from searchrl.search import engines
from searchrl.search.index import dense
from searchrl.search.index import in_memory
from searchrl.search.index import open_index
from searchrl.search.index import scann as scann_index
from searchrl.trajectory import Passage, Query, Question

QUESTION = Question('q', 'Where?', ('here',))


def make_corpus(count=40, seed=0):
  rng = np.random.default_rng(seed)
  words = [''.join(rng.choice(list('bdklmnrs'), 6)) for _ in range(count)]
  return Corpus(tuple(Passage(str(i), word, f'{word} is near {words[i - 1]}.')
                      for i, word in enumerate(words)))


CORPUS = make_corpus()
QUERIES = [Query(f'{p.title} near', 3, QUESTION) for p in CORPUS]


class Encoder:
  """Hashed n-grams that count how often they encode, with a digest."""

  def __init__(self, digest='d'):
    self.about, self.calls = {'digest': digest}, []

  def __call__(self, texts, kind):
    self.calls.append(kind)
    return dense.hashed_ngrams(texts, dim=64)


@pytest.fixture
def loader():
  """Makes the encoder of a path, the same one for the same path."""
  made = {}

  def load_encoder(about=None, *, path):
    assert about is None
    return made.setdefault(path, Encoder(path))

  load_encoder.made = made
  return load_encoder


@pytest.fixture(autouse=True)
def _forgetful():
  in_memory._index.cache_clear()
  in_memory._say_once.cache_clear()


def make(loader, corpus=CORPUS, **options):
  return engines.make('dense', corpus, load_encoder=loader,
                      **dict(encoder='e') | options)


@pytest.mark.parametrize('backend', ['auto', 'exact', 'scann', 'hnsw'])
def test_it_finds_what_comparing_with_every_passage_finds(loader, backend):
  if backend == 'scann':
    pytest.importorskip('scann')
  if backend == 'hnsw':
    pytest.importorskip('faiss')
  found = make(loader, backend=backend)(QUERIES)
  expected = dense.exact(CORPUS, Encoder())(QUERIES)
  for ours, theirs in zip(found, expected):
    assert [p.id for p in ours[:2]] == [p.id for p in theirs[:2]]
    np.testing.assert_allclose(  # ScaNN ranks by float16 rows
        [p.score for p in ours], [p.score for p in theirs], atol=1e-3)


@pytest.mark.slow
def test_a_search_with_a_tree_is_built_alike_and_prints_its_recall(loader):
  pytest.importorskip('scann')
  large = make_corpus(scann_index._TREE_FROM + 100)
  facts, found = [], []
  for _ in range(2):
    in_memory._index.cache_clear()
    facts.append(engines.describe(
        'dense', large, dict(encoder='e', backend='scann'),
        load_encoder=loader))
    found.append(make(loader, large, backend='scann')(QUERIES))
  assert facts[0] == facts[1] and found[0] == found[1]
  assert .95 <= facts[0]['recall@3'] <= 1
  with pytest.raises(ValueError, match='at least min_recall=1.1, but was'):
    make(loader, large, backend='scann', min_recall=1.1)


def test_a_sparse_graph_misses_some_alike_every_time_and_is_recorded(loader):
  pytest.importorskip('faiss')
  large = make_corpus(2000)
  queries = [Query(f'{p.title} near', 3, QUESTION) for p in large]
  sparse = dict(backend='hnsw', links=2, construction=2, visited=1)
  with pytest.raises(ValueError, match='hnsw must be at least min_recall=0.95'):
    make(loader, large, **sparse)
  found, facts = [], []
  for _ in range(2):
    in_memory._index.cache_clear()
    found.append(make(loader, large, **sparse, min_recall=0.0)(queries))
    facts.append(engines.describe(
        'dense', large, dict(encoder='e', **sparse, min_recall=0.0),
        load_encoder=loader))
  assert found[0] == found[1] and facts[0] == facts[1]
  assert facts[0] | sparse == facts[0] and 0 < facts[0]['recall@3'] < .95
  exact = make(loader, large, backend='exact')(queries)
  missed = sum(ours != theirs for ours, theirs in zip(
      [[p.id for p in ps] for ps in found[0]],
      [[p.id for p in ps] for ps in exact]))
  assert 100 < missed < 2000


@pytest.mark.parametrize('backend, options', [
    ('hnsw', dict(links=4, construction=8, visited=2)), ('scann', {})])
def test_a_query_finds_the_same_beside_others_with_a_larger_top_k(
    loader, backend, options):
  pytest.importorskip('faiss' if backend == 'hnsw' else 'scann')
  large = make_corpus(scann_index._TREE_FROM + 100)
  search = make(loader, large, backend=backend, min_recall=0.0, **options)
  queries = [Query(f'{p.title} near', 2, QUESTION) for p in large][:200]
  alone = [search([query])[0] for query in queries]
  others = [Query('b near d', top_k, QUESTION) for top_k in (100, 0, 7)]
  *together, hundred, none, seven = search([*queries, *others])
  assert together == alone
  assert (len(hundred), none, len(seven)) == (100, (), 7)


def test_the_record_names_encoder_backend_and_recall(loader):
  base = {'engine': 'dense', 'corpus': CORPUS.digest, 'passages': 40,
          'encoder': {'path': 'e', 'digest': 'e'}}
  describe = lambda **options: engines.describe(
      'dense', CORPUS, dict(encoder='e') | options, load_encoder=loader)
  assert describe() == base | {'backend': 'exact'}
  if scann_index.available():
    assert describe(backend='scann') == base | {
        'backend': 'scann', 'recall@3': 1.0}
  ngrams = engines.describe('dense', CORPUS, dict(backend='exact'))
  assert ngrams['encoder'] == {
      'path': '', 'digest': dense.ngram_recipe(CORPUS)['digest']}


def test_a_corpus_is_encoded_once_for_the_record_and_all_its_searches(loader):
  engines.describe('dense', CORPUS, dict(encoder='e'), load_encoder=loader)
  again = Corpus(CORPUS.passages)  # read once more
  make(loader, again), make(loader, again)
  assert loader.made['e'].calls == ['passage']
  make(loader, encoder='f'), make(loader, make_corpus(seed=1))
  assert loader.made['f'].calls == ['passage']
  assert loader.made['e'].calls == ['passage'] * 2


def test_without_scann_the_search_is_exact_and_warns_once(
    loader, monkeypatch, capsys):
  monkeypatch.setattr(scann_index, 'available', lambda: False)
  found = make(loader, backend='scann')(QUERIES)
  assert found == make(loader, backend='exact')(QUERIES)
  facts = engines.describe('dense', CORPUS, dict(encoder='e', backend='scann'),
                          load_encoder=loader)
  assert facts['backend'] == 'exact' and 'recall@3' not in facts
  assert capsys.readouterr().err.count('the search is exact instead') == 1


def test_ngrams_need_no_loader():
  found = engines.make('dense', CORPUS, backend='exact')(QUERIES)
  assert found == engines.make('dense', CORPUS)(QUERIES)


def test_what_cannot_be_is_refused(loader, monkeypatch):
  with pytest.raises(ValueError, match="auto, exact, scann, hnsw without an "
                                       "index, but is 'numpy'"):
    make(loader, backend='numpy')
  with pytest.raises(TypeError, match="backend='exact' must not have links"):
    make(loader, backend='exact', links=4)
  with pytest.raises(ValueError, match="'visit' is given. Did you mean visited"):
    make(loader, backend='hnsw', visit=4)
  with pytest.raises(ValueError, match="encoder='e' needs load_encoder"):
    engines.make('dense', CORPUS, encoder='e')
  monkeypatch.setattr(open_index, 'EXACT_ON_HOST', 39)
  with pytest.raises(ValueError, match='at most 39 passages, but has 40.'):
    make(loader)


def test_caches_of_other_encoders_share_nothing(loader, tmp_path):
  path = str(tmp_path / 'c.sqlite')
  rates = []
  for encoder in ('e', 'f', 'e'):
    search = engines.make('cache', CORPUS, path=path, load_encoder=loader,
                          engine=dict(name='dense', encoder=encoder))
    search(QUERIES[:4])
    rates.append(search.pop()['search/cache/hit_rate'])
  assert rates == [0, 0, 1]
