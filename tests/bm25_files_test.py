# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""bm25_files: on disk, the arrays of the index in memory, to the bit."""

import json

import numpy as np
import pytest

from searchrl.search.corpus import Corpus
from searchrl.search import engines
from searchrl.search.index import bm25
from searchrl.search.index import bm25_files
from searchrl.search.index import manifests
from searchrl.trajectory import Passage, Query, Question

WORDS = ('river', 'mill', 'mountains', 'tarn', 'garonne', 'corn', 'sea', 'the')


def make_corpus(size, seed=0):
  rng = np.random.default_rng(seed)
  return Corpus(tuple(
      Passage(str(i), WORDS[i % 8],
              ' '.join(rng.choice(WORDS, rng.integers(60))))
      for i in range(size)))


@pytest.mark.parametrize('block', [1, 7, 1000])
@pytest.mark.parametrize('k1, b', [(.9, .4), (1.5, 0), (0, 1)])
def test_arrays_are_those_of_the_index_in_memory(
    tmp_path, monkeypatch, block, k1, b):
  monkeypatch.setattr(bm25_files, '_BLOCK', block)
  corpus = make_corpus(50)
  expected = bm25.build(corpus.texts, k1=k1, b=b)
  bm25_files.build(
      corpus.texts, tmp_path / 'i', corpus=corpus.digest, k1=k1, b=b)
  found = bm25_files.load(tmp_path / 'i', corpus)
  assert found.terms == expected.terms
  assert found.postings.size == expected.postings.size
  for name in ('starts', 'passages', 'impacts'):
    ours, theirs = (getattr(one if name == 'starts' else one.postings, name)
                    for one in (found, expected))
    np.testing.assert_array_equal(ours, theirs)
    assert isinstance(ours.base, np.memmap)
  assert not list((tmp_path / 'i').glob('block_*'))


def test_a_run_finds_the_same(tmp_path):
  corpus = make_corpus(30)
  bm25_files.build(corpus.texts, tmp_path / 'bm25', corpus=corpus.digest)
  queries = [Query(text, 5, Question('q', '?', ('a',)))
             for text in ('river mill', 'Mountain', '', 'unknown', 'the')]
  assert engines.make('bm25', corpus, index=tmp_path)(queries) == (
      engines.make('bm25', corpus)(queries))
  with pytest.raises(TypeError, match='k1'):
    engines.make('bm25', corpus, index=tmp_path, k1=1.0)


def test_a_corpus_of_stop_words_has_no_term(tmp_path):
  corpus = Corpus((Passage('0', 'the', 'of and'), Passage('1', 'a', '')))
  bm25_files.build(corpus.texts, tmp_path / 'bm25', corpus=corpus.digest)
  query = Query('the river', 5, Question('q', '?', ('a',)))
  assert engines.make('bm25', corpus, index=tmp_path)([query]) == [()]


def edited(folder, **changes):
  """Another manifest, as if it had been written so."""
  file = folder / 'manifest.json'
  raw = json.loads(file.read_text()) | changes
  del raw['seal']
  file.write_text(json.dumps(raw | {'seal': manifests.seal(raw)}))


@pytest.mark.parametrize('damage, message', [
    (lambda f: edited(f, format=1), 'of format 3, but is of 1'),
    (lambda f: edited(f, bytes=None), 'must be whole, and of this version'),
    (lambda f: (f / 'manifest.json').write_text('{'), 'must be whole'),
    (lambda f: (f / 'terms.txt').write_text('x'), 'missing or cut'),
    (lambda f: (f / 'impacts.npy').unlink(), 'missing or cut')])
def test_damage_is_named(tmp_path, damage, message):
  corpus = make_corpus(9)
  bm25_files.build(corpus.texts, tmp_path / 'i', corpus=corpus.digest)
  damage(tmp_path / 'i')
  with pytest.raises(ValueError, match=message):
    bm25_files.load(tmp_path / 'i', corpus)


@pytest.mark.parametrize('name', [
    'terms.txt', 'starts.npy', 'passages.npy', 'impacts.npy', 'manifest.json'])
def test_a_flipped_bit_is_found_and_the_index_built_again(tmp_path, name):
  corpus, said = make_corpus(9), []
  folder = tmp_path / 'i'
  build = lambda: bm25_files.build_if_changed(
      corpus, folder, say=said.append, k1=.9)
  build()
  whole = (folder / name).read_bytes()
  for bit in np.linspace(0, 8 * len(whole) - 1, 40).astype(int).tolist():
    flipped = bytearray(whole)
    flipped[bit // 8] ^= 1 << bit % 8
    (folder / name).write_bytes(flipped)
    with pytest.raises(ValueError, match=f'{name} must be .* again'):
      bm25_files.load(folder, corpus)
  build()
  assert 'bm25 is built again' in said[-2]
  assert (folder / name).read_bytes() == whole
  build()
  assert said[-1] == 'bm25: already built'


def test_another_corpus_or_none_is_refused(tmp_path):
  corpus = make_corpus(9)
  bm25_files.build(corpus.texts, tmp_path / 'i', corpus=corpus.digest)
  with pytest.raises(ValueError, match='of the corpus that is searched'):
    bm25_files.load(tmp_path / 'i', make_corpus(9, seed=1))
  with pytest.raises(FileNotFoundError, match='build_index.py'):
    bm25_files.load(tmp_path, corpus)
  with pytest.raises(ValueError, match='k1 must be'):
    bm25_files.build(corpus.texts, tmp_path / 'j', corpus='', k1=-1)
  assert not (tmp_path / 'j').exists()
