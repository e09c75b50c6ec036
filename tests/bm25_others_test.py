# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""bm25_others: bm25s against ours; pyserini's calls against a stand-in."""

import sys
import types

import numpy as np
import pytest
import tiny

from searchrl.search.corpus import Corpus
from searchrl.search.index import bm25
from searchrl.search.index import bm25_others
from searchrl.trajectory import Passage, Query


def corpus(size=60, prefix=''):
  rng = np.random.default_rng(0)
  words = [f'w{i}x' for i in range(40)]
  texts = [' '.join(rng.choice(words, rng.integers(1, 20)))
           for _ in range(size)]
  return Corpus(tuple(
      Passage(f'{prefix}{i}', '', text) for i, text in enumerate(texts)))


def ask(search, *texts, top_k=5):
  return search([Query(text, top_k, tiny.question()) for text in texts])


def test_bm25s_ranks_as_ours_where_lengths_are_exact():
  # Below 40 terms Lucene's byte holds a length exactly.
  pytest.importorskip('bm25s')
  texts = ['w1x w2x', 'w3x w3x w4x', 'unseen w5x', '', 'unseen', 'W7X']
  ours = ask(bm25.bm25(corpus()), *texts)
  theirs = ask(bm25_others.bm25s(corpus()), *texts)
  for one, other in zip(ours, theirs, strict=True):
    np.testing.assert_allclose([p.score for p in one],
                               [p.score for p in other], rtol=1e-5)
    assert {p.id for p in one[:3]} == {p.id for p in other[:3]}
  assert theirs[3] == theirs[4] == () and len(theirs[0]) == 5


def test_bm25s_without_a_term_finds_nothing():
  pytest.importorskip('bm25s')
  empty = Corpus((Passage('0', 'The', 'of'),))
  assert ask(bm25_others.bm25s(empty), 'the') == [()]


@pytest.fixture
def pyserini(monkeypatch):
  """A module like pyserini's, whose index is ours; notes calls."""
  calls = []

  class LuceneSearcher:

    def __init__(self, folder):
      calls.append(('open', folder))
      self.corpus = corpus(prefix='d')
      self.search = bm25.bm25(self.corpus)
      self.num_docs = len(self.corpus)

    def set_bm25(self, k1, b):
      calls.append(('set', k1, b))

    def batch_search(self, queries, qids, k, threads):
      calls.append((queries, k, threads))
      found = ask(self.search, *queries, top_k=k)
      return {qid: [types.SimpleNamespace(docid=p.id, score=p.score)
                    for p in passages] for qid, passages in zip(qids, found)}

  module = types.ModuleType('pyserini.search.lucene')
  module.LuceneSearcher = LuceneSearcher
  for name in ('pyserini', 'pyserini.search'):
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
  monkeypatch.setitem(sys.modules, module.__name__, module)
  return calls


def test_lucene_gives_the_corpus_passages(pyserini, tmp_path):
  search = bm25_others.lucene(corpus(prefix='d'), index=str(tmp_path), k1=1.2)
  queries = [Query(text, k, tiny.question()) for text, k in (
      ('w1x', 2), (' ', 3), ('w2x w3x', 7), ('w4x', 0), ('unseen', 3))]
  assert search(queries) == bm25.bm25(corpus(prefix='d'))(queries)
  assert search([]) == []
  assert pyserini[:3] == [('open', str(tmp_path)), ('set', 1.2, 0.4),
                          (['w1x', 'w2x w3x', 'unseen'], 7, 4)]


def test_an_index_of_another_corpus_is_refused(pyserini, tmp_path):
  del pyserini
  with pytest.raises(ValueError, match='60 and 7 passages'):
    bm25_others.lucene(corpus(7), index=str(tmp_path))
  search = bm25_others.lucene(corpus(prefix='e'), index=str(tmp_path))
  with pytest.raises(ValueError, match="passage 'd.*does not have"):
    ask(search, 'w1x')
  with pytest.raises(FileNotFoundError, match='a folder of Lucene'):
    bm25_others.lucene(corpus(), index=str(tmp_path / 'no'))


@pytest.mark.parametrize('build, extra', [
    (lambda folder: bm25_others.bm25s(corpus()), 'bm25s'),
    (lambda folder: bm25_others.lucene(corpus(), index=folder), 'lucene')])
def test_a_missing_package_is_named_with_its_extra(
    build, extra, monkeypatch, tmp_path):
  for module in ('bm25s', 'pyserini', 'pyserini.search',
                 'pyserini.search.lucene'):
    monkeypatch.setitem(sys.modules, module, None)
  with pytest.raises(ImportError, match=rf"searchrl\[{extra}\]"):
    build(str(tmp_path))
