# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""open_index: backends of an index agree; that of another corpus is refused."""

import concurrent.futures
import dataclasses
import json

import numpy as np
import pytest

from searchrl.runtime import workdir
from searchrl.search.corpus import Corpus
from searchrl.search import engines
from searchrl.search.index import approximate
from searchrl.search.index import dense
from searchrl.search.index import exact_device
from searchrl.search.index import open_index
from searchrl.search.index import vector_store
from searchrl.trajectory import Passage, Query, Question

DEVICES = 8

QUESTION = Question('q', '?', ('a',))
WORDS = ('river', 'mill', 'mountain', 'tarn', 'garonne', 'corn', 'sea',
         'bridge')
CORPUS = Corpus(tuple(
    Passage(str(i), f'{WORDS[i % 8]} {i}', f'{WORDS[i % 5]} and {WORDS[i % 7]}')
    for i in range(60)))
TEXTS = ('river 8', 'mill and corn', 'garonne bridge 12', '', 'the sea')


def queries(top_k=3):
  return [Query(text, top_k, QUESTION) for text in TEXTS]


def make_index(folder, corpus=CORPUS, kinds=(), about=None, dtype='float32'):
  encode = dense.ngram_encoder(corpus, dim=64)
  recipe = vector_store.Recipe(
      corpus.digest, about or dense.ngram_recipe(corpus, dim=64), len(corpus),
      64, dtype, 16)
  writer = vector_store.Writer(folder / 'vectors', recipe)
  for shard in writer.missing():
    writer.write(shard, encode(
        corpus.texts[slice(*recipe.span(shard))], 'passage'))
  store = writer.finish()
  for kind in kinds:
    approximate.build(kind, store, folder / kind, encode(TEXTS[:3], 'query'))
  return folder


def kinds_here():
  found = []
  for kind, package in open_index._PACKAGES.items():
    if open_index.importlib.util.find_spec(package):
      found.append(kind)
  return tuple(found)


@pytest.mark.parametrize('backend', ['auto', 'exact', 'numpy', 'scann', 'hnsw'])
def test_every_backend_finds_what_exact_search_in_memory_finds(
    tmp_path, backend):
  if backend in open_index._PACKAGES and backend not in kinds_here():
    pytest.skip(f'{backend} is not installed')
  folder = make_index(tmp_path, kinds=kinds_here())
  expected = engines.make('dense', CORPUS, dim=64)(queries())
  search = engines.make('dense', CORPUS, index=str(folder), backend=backend,
                        storage='float32')
  found = search(queries())
  assert found[3] == () and len(found) == 5
  for ours, theirs in zip(found, expected):
    assert [p.id for p in ours] == [p.id for p in theirs]
    np.testing.assert_allclose(
        [p.score for p in ours], [p.score for p in theirs], atol=1e-3)
  assert search([]) == []
  assert [len(p) for p in search(queries(0))] == [0] * 5
  assert len(search(queries(999))[0]) >= 32


def test_an_index_of_another_corpus_is_refused(tmp_path):
  folder = make_index(tmp_path)
  changed = list(CORPUS)
  changed[7] = dataclasses.replace(changed[7], text='else')
  for other in (Corpus(tuple(changed)), Corpus(CORPUS.passages[:59]),
                Corpus(CORPUS.passages[::-1])):
    with pytest.raises(ValueError, match='of the corpus that is searched'):
      engines.make('dense', other, index=folder)


def test_an_index_needs_its_own_encoder(tmp_path):
  about = {'kind': 'bert', 'digest': 'abc', 'path': 'somewhere'}
  folder = make_index(tmp_path, about=about)
  with pytest.raises(ValueError, match='needs load_encoder'):
    engines.make('dense', CORPUS, index=folder)
  loaded = []

  def load(about, *, path):
    loaded.append((about['digest'], path))
    return dense.ngram_encoder(CORPUS, dim=64)

  search = engines.make('dense', CORPUS, index=folder, encoder='moved',
                        load_encoder=load)
  assert loaded == [('abc', 'moved')] and search(queries())[0]
  narrow = lambda about, path: dense.ngram_encoder(CORPUS, dim=32)
  with pytest.raises(ValueError, match=r'shape \[B, 64\]'):
    engines.make('dense', CORPUS, index=folder, load_encoder=narrow)(queries())


@pytest.mark.parametrize('options, message', [
    (dict(encoder='tiny_e5'), 'encoder must be left out for an index of'),
    (dict(backend='ivf'), "one of auto, exact.*'ivf'"),
    (dict(storage='float64'), "float32, float16, bfloat16, int8.*'float64'"),
    (dict(memory_share=0.0), r'memory_share must lie in \(0, 1\]'),
    (dict(batch=0, backend='exact'), 'batch must be at least 1')])
def test_options_are_checked(tmp_path, options, message):
  folder = make_index(tmp_path)
  with pytest.raises(ValueError, match=message):
    engines.make('dense', CORPUS, index=folder, **options)
  with pytest.raises(ValueError, match="'nprobe' is given"):
    engines.make('dense', CORPUS, index=folder, nprobe=3)


def test_a_missing_index_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match='build_index.py'):
    engines.make('dense', CORPUS, index=tmp_path)
  folder = make_index(tmp_path)
  with pytest.raises(FileNotFoundError, match='config.build'):
    engines.make('dense', CORPUS, index=folder, backend='hnsw')


@pytest.mark.parametrize('free, host_rows, built, expected', [
    (None, 60, ('scann', 'hnsw'), 'exact'),  # few rows on a CPU
    (None, 59, ('scann', 'hnsw'), 'scann'),
    (None, 59, ('hnsw',), 'hnsw'),
    (None, 59, (), 'exact'),  # fits the host's memory
    (60 * 64 * 4 * 2, 0, ('scann',), 'exact'),  # half of an accelerator's
    (60 * 64 * 4 * 2 - 1, 60, ('scann',), 'scann'),
    (0, 60, (), 'numpy')])
def test_auto_goes_by_size_and_memory(
    tmp_path, monkeypatch, free, host_rows, built, expected):
  folder = make_index(tmp_path)
  for kind in built:
    (folder / kind).mkdir()
    (folder / kind / 'manifest.json').write_text('{}')
  monkeypatch.setattr(exact_device, 'free_bytes', lambda: free)
  monkeypatch.setattr(open_index, 'EXACT_ON_HOST', host_rows)
  monkeypatch.setattr(open_index.importlib.util, 'find_spec', lambda name: name)
  store = open_index.open_store(folder, CORPUS)
  choose = lambda: open_index.choose(
      store, folder, storage='float32', memory_share=.5)
  assert choose() == expected
  monkeypatch.setattr(open_index.importlib.util, 'find_spec', lambda name: None)
  assert choose() not in ('scann', 'hnsw')


def test_a_search_from_disk_is_announced(tmp_path, monkeypatch, capsys):
  folder = make_index(tmp_path)
  monkeypatch.setattr(exact_device, 'free_bytes', lambda: 0)
  engines.make('dense', CORPUS, index=folder)
  assert 'are searched from disk' in capsys.readouterr().err
  assert 'not on the devices' in str(
      open_index.rows_on_devices(0.0, 1, index=folder))
  assert open_index.rows_on_devices(0.0, 1, index=folder, backend='numpy') == {}


def test_processes_split_the_rows_of_one_index(tmp_path):
  folder = make_index(tmp_path)
  rows = open_index.rows_on_devices(0.0, 4, index=folder, backend='mesh')
  assert [*rows.values()] == [60 * 64 * 2 / 4]  # bfloat16
  assert 'over 4 processes' in str(
      open_index.rows_on_devices(0.0, 4, index=folder))


def test_training_and_evaluation_share_one_index(tmp_path, monkeypatch):
  folder = make_index(tmp_path)
  builds, build = [], exact_device.build
  monkeypatch.setattr(exact_device, 'build', lambda *args, **kwargs: (
      builds.append(args) or build(*args, **kwargs)))
  first, second = (engines.make('dense', CORPUS, index=str(folder))
                   for _ in range(2))
  assert len(builds) == 1
  assert first(queries()) == second(queries())


def test_the_record_of_a_run_has_index_and_recall(tmp_path):
  folder = make_index(tmp_path, kinds=kinds_here()[-1:])
  facts = engines.describe('dense', CORPUS, {'index': folder})
  assert facts['corpus'] == facts['index']['corpus'] == CORPUS.digest
  store = open_index.open_store(folder, CORPUS)
  assert facts['index']['fingerprint'] == store.fingerprint
  for kind in kinds_here()[-1:]:
    assert 0 <= facts['index'][kind]['recall@3'] <= 1
  plain = {'engine': 'bm25', 'corpus': CORPUS.digest, 'passages': 60}
  assert engines.describe('bm25', CORPUS, {}) == plain
  parts = (dict(name='bm25'), dict(name='dense', index=folder))
  assert engines.describe('fusion', CORPUS, {'engines': parts}) == {
      **plain, 'engine': 'fusion', 'engines': [plain, facts]}


def test_a_run_whose_index_became_another_does_not_go_on(tmp_path):
  note = lambda **rest: workdir.note(
      tmp_path, 'search', {'index': {'fingerprint': 'a', 'count': 3}}, **rest)
  note()
  note()
  other = {'index': {'fingerprint': 'b', 'count': 3}}
  with pytest.raises(ValueError, match="index.fingerprint: 'a' -> 'b'"):
    workdir.note(tmp_path, 'search', other)
  workdir.note(tmp_path, 'search', other, allow_changes=True)
  assert json.loads((tmp_path / 'search.json').read_text()) == other


@pytest.mark.parametrize('backend', ['exact', 'numpy', 'scann', 'hnsw'])
def test_threads_may_search_at_the_same_time(tmp_path, backend):
  if backend in open_index._PACKAGES and backend not in kinds_here():
    pytest.skip(f'{backend} is not installed')
  folder = make_index(tmp_path, kinds=kinds_here())
  search = engines.make('dense', CORPUS, index=str(folder), backend=backend)
  calls = [queries(k)[i:i + 2] for k in (1, 3) for i in range(4)] * 5
  expected = [search(call) for call in calls]
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    assert list(pool.map(search, calls)) == expected
