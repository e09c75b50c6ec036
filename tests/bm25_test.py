# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""bm25: against its formula in plain loops, and Lucene's own numbers."""

from concurrent import futures
import dataclasses
import math
import time

from bm25_oracle import all_scores
from bm25_oracle import top
import numpy as np
import pytest

from searchrl.search.corpus import Corpus
from searchrl.search.index import bm25
from searchrl.trajectory import Passage, Query, Question

QUESTION = Question('q', 'Where?', ('here',))
RIVERS = Corpus((
    Passage('0', 'Rivers', 'The river Tarn rises on Mount Lozere and joins the '
            'river Garonne.'),
    Passage('1', 'The Tarn', 'Gorges of the Tarn attract canoeists, climbers '
            'and hikers; the gorges are 53 km long.'),
    Passage('2', 'Mills', 'Water mills along a river ground the village\'s '
            'corn. Milling ended when the mill burned, and the miller\'s heirs '
            'sold 1,200 stones to a builder who was repairing bridges, walls, '
            'churches, houses, barns, towers, roads, quays, locks, weirs, '
            'canals, gates, wells, sheds, ovens, and other buildings in '
            'neighbouring villages, towns and cities of that country during '
            'nineteen years.'),
    Passage('3', 'Bridges', 'A bridge crosses the Garonne.'),
    Passage('4', 'Bridges', 'A bridge crosses the Garonne.'),
    Passage('5', 'The', 'To be or not to be'),
))


def run(search, *texts, top_k=3):
  return search([Query(text, top_k, QUESTION) for text in texts])


def random_corpus(rng, size, words=60):
  """Texts of 0 to 300 made-up words, the frequent ones far more frequent."""
  names = [f'w{i}x' for i in range(words)]
  shares = np.arange(1, words + 1) / sum(range(words + 1))
  lengths = rng.integers(0, 300, size) // rng.integers(1, 9, size)
  lengths[size // 2] = 0
  texts = [' '.join(rng.choice(names, n, p=shares)) for n in lengths]
  return Corpus(tuple(Passage(str(i), '', t) for i, t in enumerate(texts)))


def lossy_oracle(length):
  """Above 40, what exceeds 24 keeps its four highest bits."""
  rest, lost = max(length - 24, 0), 0
  while rest > 15:
    rest, lost = rest // 2, lost + 1
  return min(length, 24) + rest * 2 ** lost


def scores_oracle(texts, query, k1, b):
  docs = [text.split() for text in texts]
  filled = [doc for doc in docs if doc]
  mean = sum(len(doc) for doc in filled) / len(filled)
  scores = []
  for doc in docs:
    score = 0.0
    for term in query.split():
      df = sum(term in other for other in docs)
      tf = doc.count(term)
      if tf:
        idf = math.log(1 + (len(filled) - df + 0.5) / (df + 0.5))
        norm = k1 * (1 - b + b * lossy_oracle(len(doc)) / mean)
        score += idf * tf / (tf + norm)
    scores.append(score)
  return scores


@pytest.mark.parametrize('k1, b', [
    (0.9, 0.4), (1.5, 0.75), (0.0, 0.0), (2.0, 1.0)])
def test_scores_and_order_are_those_of_the_formula(k1, b):
  rng = np.random.default_rng(3)
  corpus = random_corpus(rng, 40)
  queries = [' '.join(f'w{i}x' for i in rng.integers(0, 70, 5))
             for _ in range(12)] + ['w1x w1x w2x w1x']
  found = run(bm25.bm25(corpus, k1=k1, b=b), *queries, top_k=40)
  for query, passages in zip(queries, found, strict=True):
    expected = scores_oracle([p.text for p in corpus], query, k1, b)
    actual = {int(p.id): p.score for p in passages}
    assert set(actual) == {i for i, score in enumerate(expected) if score > 0}
    for i, score in actual.items():
      np.testing.assert_allclose(score, expected[i], rtol=2e-6)
    order = [(-p.score, int(p.id)) for p in passages]
    assert order == sorted(order)


@pytest.mark.parametrize('query, expected', [
    ('river Tarn', {0: 1.1964443, 1: 0.62364924, 2: 0.32925743}),
    ('river river Tarn', {0: 1.8951576, 2: 0.65851486, 1: 0.62364924}),
    ('Who repaired the bridges?', {2: 1.2454631, 3: 0.40874916, 4: 0.40874916}),
    ("the miller's mills", {2: 1.5012758}),
    ('crossing the Garonne', {3: 0.86390257, 4: 0.86390257, 0: 0.30643624}),
])
def test_scores_and_order_are_those_of_lucene(query, expected):
  # Written by Lucene 9.5.0: EnglishAnalyzer, BM25Similarity(0.9, 0.4), titles
  # and texts in one field, each term a clause boosted by its count.
  (found,) = run(bm25.bm25(RIVERS), query, top_k=10)
  assert [int(p.id) for p in found] == list(expected)
  np.testing.assert_allclose(
      [p.score for p in found], list(expected.values()), rtol=1e-6)


def test_top_k_is_the_head_of_the_whole_ranking():
  search = bm25.bm25(random_corpus(np.random.default_rng(0), 50, words=8))
  (whole,) = run(search, 'w1x w2x', top_k=50)
  for k in (0, 1, 2, 7, len(whole), 1000):
    assert run(search, 'w1x w2x', top_k=k) == [whole[:k]]


@pytest.mark.parametrize('words', [4, 60, 3000])
def test_the_best_are_those_of_all_scores_to_the_bit(words):
  rng = np.random.default_rng(words)
  texts = random_corpus(rng, 300, words).texts
  index = bm25.build(texts + texts[::-1])  # every passage ties with its copy
  names = [f'w{i}x' for i in range(words + 1)]
  queries = [' '.join(rng.choice(names, size)) for size in (0, 1, 2, 5, 9, 30)
             for _ in range(8)]
  expected = {(text, k): top(all_scores(index, text), k)
              for text in queries for k in (0, 1, 3, 20, 1000)}

  def check(asked):
    text, k = asked
    positions, scores = index.postings.best(index.spans(text), k)
    assert positions.tolist() == expected[asked].tolist()
    assert scores.dtype == np.float32
    assert scores.tolist() == all_scores(index, text)[positions].tolist()

  with futures.ThreadPoolExecutor(8) as pool:  # they share the index's arrays
    list(pool.map(check, expected))
  assert not any(zeros.any() for zeros in index.postings._zeros)


def test_frequent_terms_are_looked_up_and_not_summed():
  texts = ['common ' * (1 + i % 9) for i in range(900)]
  for i in range(0, 900, 100):
    texts[i] += ' rare'
  index = bm25.build(texts)
  looked_up = []

  class Passages(np.ndarray):

    def __getitem__(self, at):
      looked_up.append(at)
      return super().__getitem__(at)

  counting = dataclasses.replace(index, postings=dataclasses.replace(
      index.postings, passages=index.postings.passages.view(Passages)))
  positions, _ = counting.postings.best(counting.spans('common rare'), 3)
  assert positions.tolist() == top(
      all_scores(index, 'common rare'), 3).tolist()
  # The postings of the rare term, and of the other as many as it has passages.
  sizes = [len(index.postings.passages[at]) for at in looked_up
           if not isinstance(at, slice)]
  assert max(sizes) <= 9 and len(sizes) > 0


def test_ties_go_to_the_lower_position():
  corpus = Corpus(tuple(Passage(str(9 - i), 'same', 'words') for i in range(9)))
  (found,) = run(bm25.bm25(corpus), 'words', top_k=4)
  assert [p.id for p in found] == ['9', '8', '7', '6']
  assert len({p.score for p in found}) == 1


@pytest.mark.parametrize('text', ['', '  ', '?!', 'to be or not', 'unseen'])
def test_nothing_is_found_where_nothing_matches(text):
  assert run(bm25.bm25(RIVERS), text, 'Tarn')[0] == ()


def test_a_corpus_of_stop_words_finds_nothing():
  assert run(bm25.bm25(Corpus((Passage('0', 'The', 'of'),))), 'the') == [()]


def test_results_do_not_depend_on_the_batch():
  search = bm25.bm25(RIVERS)
  texts = ('river Tarn', 'mill', '', 'bridge')
  assert run(search, *texts) == [run(search, text)[0] for text in texts]
  assert search([]) == []


def test_parameters_are_checked():
  for options in (dict(k1=-1), dict(b=1.1), dict(b=float('nan'))):
    with pytest.raises(ValueError, match='k1 must be at least 0 and b in'):
      bm25.bm25(RIVERS, **options)


def test_lengths_in_one_byte():
  lengths = np.arange(5000)
  codes = bm25.encode_length(lengths)
  assert codes.dtype == np.uint8
  decoded = bm25.decode_length(codes)
  assert decoded.tolist() == [lossy_oracle(n) for n in range(5000)]
  assert decoded[:42].tolist() == list(range(41)) + [40]
  assert decoded[[55, 56, 57, 100, 1000]].tolist() == [54, 56, 56, 96, 984]
  largest = bm25.encode_length(np.array([2**31 - 1]))
  assert largest.tolist() == [255]
  every = np.arange(256).astype(np.uint8)
  assert (bm25.encode_length(bm25.decode_length(every)) == every).all()


def test_terms_are_those_of_lucene():
  text = ("O’Neil's 1,000.5 U.S.A. rock'n'roll km² foo:bar 10:30 x_y __ "
          "it's DOGS' ΣΟΦΟΣ İznik 東京タワー naïve")
  assert bm25.analyze(text) == [
      'o’neil', '1,000.5', 'u.s.a', "rock'n'rol", 'km', 'foo:bar', '10', '30',
      'x_y', 'dog', 'σοφοσ', 'iznik', '東', '京', 'タワー', 'naïv']


@pytest.mark.parametrize('text', [
    '_' * 100_000, 'a_' * 50_000, "x'" * 50_000, '1.' * 50_000, '東_' * 30_000])
def test_the_time_of_an_analysis_grows_with_the_length_of_a_text(text):
  begun = time.process_time()
  bm25.analyze(text)
  assert time.process_time() - begun < 3  # a tenth of a second


@pytest.mark.parametrize('words, stems', [  # stems are Lucene's
    ('generalizations oscillators hopefulness', 'gener oscil hope'),
    ('possibly agreement replacement', 'possibl agreement replac'),
    ('geology analogy', 'geologi analog'),
    ('skies sky dying happy', 'ski sky dy happi'),
    ('feed agreed plastered bled sing', 'feed agre plaster bled sing'),
    ('hopping hoped falling filing hissing', 'hop hope fall file hiss'),
    ('controlling roll rate cease', 'control roll rate ceas'),
    ('adoption opinion ion', 'adopt opinion ion'),
    ('ties us as ox', 'ti us as ox'),
    ('aed eed oed', 'a eed o'),
])
def test_stems(words, stems):
  assert [bm25.stem(word) for word in words.split()] == stems.split()


def test_bm25s_ranks_as_ours_where_lengths_are_exact():
  # Up to 40 terms, Lucene's byte holds a length exactly; bm25s rounds none.
  library = pytest.importorskip('bm25s')
  rng = np.random.default_rng(0)
  words = [f'w{i}x' for i in range(40)]
  corpus = Corpus(tuple(
      Passage(str(i), '', ' '.join(rng.choice(words, rng.integers(1, 20))))
      for i in range(60)))
  theirs = library.BM25(k1=0.9, b=0.4, method='lucene')
  theirs.index([bm25.analyze(text) for text in corpus.texts],
               show_progress=False)
  texts = ['w1x w2x', 'w3x w3x w4x', 'unseen w5x', 'W7X']
  for text, found in zip(texts, run(bm25.bm25(corpus), *texts, top_k=5)):
    terms = [term for term in bm25.analyze(text) if term != 'unseen']
    scores = theirs.get_scores(terms)
    np.testing.assert_allclose([p.score for p in found],
                               np.sort(scores)[::-1][:5], rtol=1e-5)
    np.testing.assert_allclose([scores[int(p.id)] for p in found],
                               [p.score for p in found], rtol=1e-5)
