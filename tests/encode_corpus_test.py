# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""encode_corpus: rows in passage order, and only what is missing."""

import numpy as np
import pytest

from searchrl.encoders import encode_corpus
from searchrl.search import corpus as corpora
from searchrl.search.index import vector_store
from searchrl.trajectory import Passage
import faiss_import_test

ROWS = np.random.default_rng(0).normal(size=(10, 5)).astype(np.float32)
RECIPE = vector_store.Recipe('corpus', {'digest': 'e'}, 10, 5, 'float32', 4)


def make_corpus(first=0):
  return corpora.Corpus(tuple(
      Passage(str(first + i), f't{i}', f'{i}') for i in range(10)))


def encode(texts, kind):
  assert kind == 'passage'
  return ROWS[[int(text.split('\n')[1]) for text in texts]]


def test_rows_are_those_of_the_passages_in_pieces(monkeypatch):
  monkeypatch.setattr(encode_corpus, '_PIECE', 3)
  pieces = list(encode_corpus.encoded_rows(make_corpus(), encode)(2, 10))
  assert [len(piece) for piece in pieces] == [3, 3, 2]
  np.testing.assert_array_equal(np.concatenate(pieces), ROWS[2:])


def test_only_missing_shards_are_asked_for(tmp_path):
  vector_store.Writer(tmp_path, RECIPE).write(1, ROWS[4:8])
  spans = []

  def rows_of(start, stop):
    spans.append((start, stop))
    yield ROWS[start:start + 1]
    yield ROWS[start + 1:stop]

  store = encode_corpus.fill(tmp_path, RECIPE, rows_of, progress=False)
  np.testing.assert_array_equal(store.read(0, 10), ROWS)
  assert spans == [(0, 4), (8, 10)]
  encode_corpus.fill(tmp_path, RECIPE, rows_of, progress=False)
  assert len(spans) == 2


def test_imported_rows_are_read_once_the_encoder_agrees(tmp_path):
  path = faiss_import_test.plain(tmp_path / 'e.memmap', ROWS)
  rows_of = encode_corpus.imported_rows(path, make_corpus(), encode, 5)
  np.testing.assert_array_equal(np.concatenate(list(rows_of(3, 9))), ROWS[3:9])
  with pytest.raises(ValueError, match='ids 0, 1, 2'):
    encode_corpus.imported_rows(path, make_corpus(first=1), encode, 5)
  with pytest.raises(ValueError, match='those of this corpus and encoder'):
    encode_corpus.imported_rows(
        path, make_corpus(), lambda texts, kind: -encode(texts, kind), 5)
