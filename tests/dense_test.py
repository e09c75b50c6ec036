# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""dense: exact search against numpy, and the hashed encoder by hand."""

import hashlib
import math
import zlib

import numpy as np
import pytest

from searchrl.search.corpus import Corpus
from searchrl.search.index import dense
from searchrl.search.index import exact_device
from searchrl.trajectory import Passage, Query, Question

QUESTION = Question('q', 'Where?', ('here',))
RIVERS = Corpus((
    Passage('a', 'Tarn', 'A river that joins the Garonne.'),
    Passage('b', 'Mills', 'Mills along the water grind corn.'),
    Passage('c', 'Lozère', 'A mountain where the Tarn rises.'),
))


def numbered(size):
  return Corpus(tuple(Passage(str(i), f't{i}', '') for i in range(size)))


def run(search, *texts, top_k=3):
  return search([Query(text, top_k, QUESTION) for text in texts])


def table_encoder(rows, vectors):
  """Passages are `rows` in order; the query 'i' is vectors[i]."""
  return lambda texts, kind: (
      rows if kind == 'passage' else vectors[[int(text) for text in texts]])


@pytest.mark.parametrize('queries, batch', [(1, 4), (4, 4), (11, 4), (5, 64)])
def test_ids_and_scores_are_those_of_brute_force(queries, batch):
  rng = np.random.default_rng(queries)
  rows = rng.normal(size=(37, 16)).astype(np.float32)
  vectors = rng.normal(size=(queries, 16)).astype(np.float32)
  search = dense.exact(
      numbered(37), table_encoder(rows, vectors), batch=batch)
  found = run(search, *map(str, range(queries)), top_k=5)
  scores = vectors.astype(np.float64) @ rows.T.astype(np.float64)
  for passages, expected in zip(found, scores, strict=True):
    order = np.argsort(-expected, kind='stable')[:5]
    assert [int(p.id) for p in passages] == order.tolist()
    np.testing.assert_allclose(
        [p.score for p in passages], expected[order], rtol=1e-5, atol=1e-5)


def test_ties_go_to_the_lower_position_and_top_k_may_differ():
  rows = np.array([[0, 1], [1, 0], [1, 0], [0, 1]], np.float32)
  search = dense.exact(
      numbered(4), table_encoder(rows, np.eye(2, dtype=np.float32)), batch=2)
  found = search([Query('0', 3, QUESTION), Query('1', 1, QUESTION),
                  Query('1', 99, QUESTION), Query('1', 0, QUESTION)])
  assert [[p.id for p in passages] for passages in found] == [
      ['1', '2', '0'], ['0'], ['0', '3', '1', '2'], []]


def test_one_program_serves_every_number_of_queries():
  search = dense.exact(RIVERS, dense.ngram_encoder(RIVERS, dim=48), batch=4)
  before = exact_device.top_k._cache_size()
  for count in range(1, 10):
    run(search, *['tarn'] * count)
  assert exact_device.top_k._cache_size() == before + 1


def test_blank_queries_and_unknown_letters_find_nothing():
  search = dense.exact(RIVERS, dense.ngram_encoder(RIVERS))
  found = run(search, '', '  ', '?!', 'zzzz', 'the river')
  assert found[:4] == [()] * 4
  assert found[4][0].id == 'a'
  assert search([]) == []


def test_results_do_not_depend_on_the_batch():
  search = dense.exact(RIVERS, dense.ngram_encoder(RIVERS), batch=4)
  texts = ('where does the Tarn rise', 'grinding corn', 'Garonne')
  found = run(search, *texts)
  assert [passages[0].id for passages in found] == ['c', 'b', 'a']
  assert found == [run(search, text)[0] for text in texts]


@pytest.mark.parametrize('rows', [
    np.zeros(3), np.zeros((2, 4)), np.full((3, 4), np.nan)])
def test_a_bad_encoder_is_named(rows):
  with pytest.raises(ValueError, match='one finite row for each passage, 3'):
    dense.exact(RIVERS, lambda texts, kind: rows)


def test_sizes_are_checked():
  with pytest.raises(ValueError, match='batch must be at least 1'):
    dense.exact(RIVERS, dense.ngram_encoder(RIVERS), batch=0)
  for options in (dict(dim=0), dict(n=0)):
    with pytest.raises(ValueError, match='dim and n must be at least 1'):
      dense.hashed_ngrams(['a'], **options)


def test_a_vector_is_its_definition_in_plain_loops():
  text, dim = 'Tarn, tarn and OX', 16
  weights = {' ta': 2.0, 'tar': 0.5, ' ox': 1.5, 'ox ': 1.0, 'and': 0.3}
  grams = []
  for word in (' tarn ', ' tarn ', ' and ', ' ox '):
    grams += [word[i:i + 3] for i in range(len(word) - 2)]
  for table in (None, weights):
    expected = [0.0] * dim
    for gram in set(grams):
      code = zlib.crc32(gram.encode())
      size = (1 + math.log(grams.count(gram))) * (
          1 if table is None else table.get(gram, 0))
      expected[code % dim] += -size if code >= 2**31 else size
    norm = math.sqrt(sum(x * x for x in expected))
    (row,) = dense.hashed_ngrams([text], dim=dim, weights=table)
    np.testing.assert_allclose(row, np.array(expected) / norm, atol=1e-6)


def test_rows_have_length_one_or_zero():
  rows = dense.hashed_ngrams(['Garonne', 'x', '', '...', '東京'])
  assert rows.dtype == np.float32 and rows.shape == (5, 512)
  np.testing.assert_allclose(
      np.linalg.norm(rows, axis=1), [1, 1, 0, 0, 1], atol=1e-6)


def test_words_keep_their_combining_marks():
  """Without them, these pairs of words would have the same consonants."""
  for text, other in (('हिन्दी', 'हन्द'), ('மொழி', 'மழ'), ('পানি', 'পনি')):
    one, two = dense.hashed_ngrams([text, other])
    assert abs(float(one @ two)) < 0.9
  grams = [' हि', 'हिन', 'िन्', 'न्द', '्दी', 'दी ']
  assert dense._count_grams('हिन्दी', 3) == dict.fromkeys(grams, 1)


def test_vectors_are_the_same_in_every_process():
  rows = dense.hashed_ngrams(RIVERS.texts, dim=64)
  rounded = np.round(rows * 1000).astype('<i4')
  digest = hashlib.sha256(rounded.tobytes()).hexdigest()
  assert digest[:16] == 'bae8b1db1523bc87'
