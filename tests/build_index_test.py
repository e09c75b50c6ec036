# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""build_index: the encoder's vectors, the same bytes however often killed."""

import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from configs import build_index as build_index_config
from searchrl.encoders import embedder
from searchrl.jobs import build_index
from searchrl.runtime import atomic_files
from searchrl.search import corpus as corpora
from searchrl.search import engines
from searchrl.search import mapped_corpus
from searchrl.search.index import dense
from searchrl.search.index import memory_estimate
from searchrl.search.index import vector_store
from searchrl.trajectory import Passage, Query, Question
import faiss_import_test
import fakes
import loopback
import tiny_bert

KINDS = tuple(kind for kind, package in (('scann', 'scann'), ('hnsw', 'faiss'))
              if importlib.util.find_spec(package))
ROOT = pathlib.Path(__file__).parents[1]
WORDS = ('river', 'mill', 'mountain', 'tarn', 'garonne', 'corn', 'sea')
PASSAGES = tuple(
    Passage(str(i), f'{WORDS[i % 7]} {i}', ' '.join(
        WORDS[(i * j) % 7] for j in range(1, 3 + i % 5))) for i in range(50))


@pytest.fixture(scope='module')
def bert(tmp_path_factory):
  return tiny_bert.make(tmp_path_factory.mktemp('encoder') / 'bert')


@pytest.fixture
def corpus(tmp_path):
  corpora.write(tmp_path / 'c.jsonl', PASSAGES)
  return tmp_path / 'c.jsonl'


def configured(corpus, path='', /, **changes):
  config = build_index_config.get_config()
  config.corpus, config.encoder.path = str(corpus), str(path)
  config.encoder.update(max_length=48, batch_tokens=384)
  config.ngrams.dim = 32
  config.store.update(dtype='float32', shard_rows=16)
  config.progress = False
  for name, value in changes.items():
    config.update_from_flattened_dict({name: value})
  config.lock()
  return config


def flags(corpus, path, workdir):
  return ['--config=configs/build_index.py', f'--workdir={workdir}',
          f'--config.corpus={corpus}', f'--config.encoder.path={path}',
          '--config.encoder.max_length=48', '--config.encoder.batch_tokens=384',
          '--config.store.dtype=float32', '--config.store.shard_rows=16']


def tree(folder):
  return {str(f.relative_to(folder)): f.read_bytes()
          for f in sorted((folder / 'vectors').rglob('*')) if f.is_file()}


def test_rows_are_the_encoders_and_a_run_searches_them(tmp_path, corpus, bert):
  build_index.run(configured(corpus, bert, build=KINDS), tmp_path / 'i')
  store = vector_store.open_(tmp_path / 'i/vectors')
  whole = corpora.read(corpus)
  encode = embedder.load(bert, embedder.Settings(max_length=48,
                                                 batch_tokens=384))
  np.testing.assert_allclose(
      store.read(0, 50), encode(whole.texts, 'passage'), atol=1e-6)
  assert store.recipe.encoder['query_prefix'] == 'query: '
  query = Query('mill and corn', 3, Question('q', '?', ('a',)))
  vector = encode([query.text], 'query')[0]
  best = np.argsort(-(store.read(0, 50) @ vector))[:3]
  for backend in ('exact', 'numpy', *KINDS):
    search = engines.make(
        'dense', mapped_corpus.open_(corpus), index=tmp_path / 'i',
        backend=backend, storage='float32',
        load_encoder=embedder.cached_loader())
    assert [int(p.id) for p in search([query])[0]] == best.tolist(), backend


def test_hashed_ngrams_need_no_weights(tmp_path, corpus):
  build_index.run(configured(corpus), tmp_path / 'i')
  found = engines.make('dense', corpora.read(corpus), index=tmp_path / 'i',
                       storage='float32')
  plain = engines.make('dense', corpora.read(corpus), dim=32)
  query = Query('tarn 10', 5, Question('q', '?', ('a',)))
  assert [p.id for p in found([query])[0]] == [p.id for p in plain([query])[0]]


def test_what_is_built_is_not_built_again(tmp_path, corpus, capsys):
  pytest.importorskip('faiss')
  build_index.run(configured(corpus, build=('hnsw', 'bm25')), tmp_path / 'i')
  before = tree(tmp_path / 'i')
  printed = capsys.readouterr().out
  assert '50 passages x 32, float32' in printed and 'hnsw: ' in printed
  build_index.run(configured(corpus, build=('hnsw', 'bm25')), tmp_path / 'i')
  printed = capsys.readouterr().out
  assert printed.count('already built') == 2
  build_index.run(configured(corpus, build=('bm25',), **{'bm25.k1': 1.5}),
                  tmp_path / 'i')
  assert 'already built' not in capsys.readouterr().out
  query = Query('tarn 10', 5, Question('q', '?', ('a',)))
  whole = corpora.read(corpus)
  assert engines.make('bm25', whole, index=tmp_path / 'i')([query]) == (
      engines.make('bm25', whole, k1=1.5)([query]))
  build_index.run(configured(corpus, build=('hnsw',), **{'hnsw.links': 8}),
                  tmp_path / 'i')
  assert 'already built' not in capsys.readouterr().out
  assert tree(tmp_path / 'i') == before


def test_recall_is_measured_by_queries_that_a_search_answers(tmp_path, bert):
  """A search never asks a blank query, though the encoder has its vector."""
  pytest.importorskip('faiss')
  blank = (Passage('50', '', ' '), Passage('51', '', ''))
  corpora.write(tmp_path / 'c.jsonl', PASSAGES + blank)
  build_index.run(configured(tmp_path / 'c.jsonl', bert, build=('hnsw',)),
                  tmp_path / 'i')
  manifest = json.loads((tmp_path / 'i/hnsw/manifest.json').read_text())
  assert manifest['queries'] == 50


def test_bm25_alone_writes_no_vectors(tmp_path, corpus, capsys):
  config = configured(corpus, build=('bm25',))
  assert build_index_config.get_config('bm25').build == config.build
  build_index.run(config, tmp_path / 'i')
  assert not (tmp_path / 'i/vectors').exists()
  printed = capsys.readouterr().out
  assert 'bm25: about' in printed and 'vectors' not in printed
  assert 'each of its workers' in printed
  query = Query('tarn 10', 5, Question('q', '?', ('a',)))
  whole = corpora.read(corpus)
  assert engines.make('bm25', whole, index=tmp_path / 'i')([query]) == (
      engines.make('bm25', whole)([query]))
  with pytest.raises(FileNotFoundError, match='must hold manifest.json'):
    engines.make('dense', whole, index=tmp_path / 'i', storage='float32')
  build_index.run(configured(corpus), tmp_path / 'i')  # vectors, too
  build_index.run(configured(corpus), tmp_path / 'whole')
  assert tree(tmp_path / 'i') == tree(tmp_path / 'whole')


def test_a_build_killed_at_any_write_goes_on_to_the_same_bytes(
    tmp_path, corpus, monkeypatch):
  build_index.run(configured(corpus), tmp_path / 'whole')
  expected = tree(tmp_path / 'whole')
  write = atomic_files.write_json
  for deadly in range(6):  # the recipe, four shards, the manifest
    folder, calls = tmp_path / f'killed {deadly}', []

    def dies(file, value, deadly=deadly, calls=calls):
      calls.append(file)
      if len(calls) - 1 == deadly:
        file.with_name('.half').write_text('{')
        raise fakes.Killed
      write(file, value)

    monkeypatch.setattr(atomic_files, 'write_json', dies)
    with pytest.raises(fakes.Killed):
      build_index.run(configured(corpus), folder)
    monkeypatch.setattr(atomic_files, 'write_json', write)
    encoded, encode = [], dense.encoded
    monkeypatch.setattr(dense, 'encoded', lambda encoder, texts, kind: (
        encoded.extend(texts) or encode(encoder, texts, kind)))
    build_index.run(configured(corpus), folder)
    monkeypatch.setattr(dense, 'encoded', encode)
    done = max(deadly - 1, 0)  # shards whose note was written
    assert len(encoded) == 50 - min(16 * done, 50)
    found = {k: v for k, v in tree(folder).items() if '.half' not in k}
    assert found == expected


def test_another_corpus_or_encoder_does_not_go_on(tmp_path, corpus, bert):
  build_index.run(configured(corpus), tmp_path / 'i')
  with pytest.raises(ValueError, match='ngrams.dim: 32 -> 16'):
    build_index.run(configured(corpus, **{'ngrams.dim': 16}), tmp_path / 'i')
  corpora.write(corpus, PASSAGES[:49])  # the same path, another file
  with pytest.raises(ValueError, match="this command's corpus and encoder"):
    build_index.run(configured(corpus), tmp_path / 'i')
  config = configured(corpus, bert)
  config.allow_changes = True
  with pytest.raises(ValueError, match="this command's corpus and encoder"):
    build_index.run(config, tmp_path / 'i')


@pytest.mark.parametrize('changes, message', [
    (dict(corpus=''), 'corpus must be a jsonl file'),
    (dict(build=('ivf',)), "some of scann, hnsw, bm25, but is .'ivf'"),
    (dict(imports='x.memmap'), 'need encoder.path'),
    ({'store.dtype': 'float64'}, 'store.dtype must be one of'),
    ({'store.shard_rows': 0}, 'shard_rows of a store')])
def test_configs_are_checked(tmp_path, corpus, changes, message):
  with pytest.raises(ValueError, match=message):
    build_index.run(configured(corpus, **changes), tmp_path / 'i')
  assert not (tmp_path / 'i/vectors').exists()


def test_a_full_disk_is_found_before_anything_is_written(
    tmp_path, corpus, monkeypatch):
  monkeypatch.setattr(memory_estimate.shutil, 'disk_usage', lambda path: type(
      'Usage', (), {'free': 1000}))
  with pytest.raises(ValueError, match='must have room for 0.00 GiB'):
    build_index.run(configured(corpus), tmp_path / 'i')
  assert not (tmp_path / 'i/vectors').exists()


def test_a_vector_that_is_not_finite_is_named(tmp_path, corpus, monkeypatch):
  def encode(texts, kind):
    rows = np.ones((len(texts), 32), np.float32)
    rows[[i for i, text in enumerate(texts) if text.startswith('mill 36')]] = (
        np.nan)
    return rows
  monkeypatch.setattr(
      dense, 'ngram_encoder', lambda corpus, **options: encode)
  with pytest.raises(ValueError, match='finite'):
    build_index.run(configured(corpus), tmp_path / 'i')


@pytest.mark.parametrize('kind', ['e5_Flat.index', 'emb_e5.memmap'])
def test_vectors_of_other_programs_are_imported(tmp_path, corpus, bert, kind):
  encode = embedder.load(bert, embedder.Settings(max_length=48,
                                                 batch_tokens=384))
  rows = encode(corpora.read(corpus).texts, 'passage')
  rows = rows.astype(np.float16).astype(np.float32)  # as theirs were made
  write = (faiss_import_test.flat if kind.endswith('.index') else
           faiss_import_test.plain)
  path = write(tmp_path / kind, rows=rows)
  build_index.run(configured(corpus, bert, imports=str(path)), tmp_path / 'i')
  store = vector_store.open_(tmp_path / 'i/vectors')
  np.testing.assert_array_equal(store.read(0, 50), rows)
  assert store.recipe.encoder['imported'] == kind
  search = engines.make('dense', corpora.read(corpus), index=tmp_path / 'i',
                        load_encoder=embedder.cached_loader())
  assert search([Query('mill', 3, Question('q', '?', ('a',)))])[0]


def test_vectors_of_other_passages_are_refused(tmp_path, corpus, bert):
  encode = embedder.load(bert, embedder.Settings(max_length=48,
                                                 batch_tokens=384))
  rows = encode(corpora.read(corpus).texts, 'passage')
  for wrong in (rows[::-1], np.roll(rows, 1, 0), np.zeros_like(rows),
                np.full_like(rows, np.nan)):
    path = faiss_import_test.plain(tmp_path / 'x.memmap', wrong)
    with pytest.raises(ValueError, match='those of this corpus and encoder'):
      build_index.run(
          configured(corpus, bert, imports=str(path)), tmp_path / 'i')
  path = faiss_import_test.plain(tmp_path / 'x.memmap', rows)
  build_index.run(
      configured(corpus, bert, imports=str(path)), tmp_path / 'right')
  renamed = [Passage(str(i + 1), p.title, p.text)
             for i, p in enumerate(PASSAGES)]
  corpora.write(corpus, renamed)
  with pytest.raises(ValueError, match='ids 0, 1, 2'):
    build_index.run(configured(corpus, bert, imports=str(path)), tmp_path / 'i')


@pytest.mark.slow
def test_kill_9_costs_a_shard_at_most(tmp_path, bert):
  """The real program, killed again and again as soon as it has got further."""
  corpus = tmp_path / 'c.jsonl'
  corpora.write(corpus, [
      Passage(str(i), f'title {i}', 'word ' * (i % 40)) for i in range(400)])
  command = [sys.executable, '-m', 'searchrl.main']
  env = os.environ | {'XLA_FLAGS': ''}
  done = lambda: len(list((tmp_path / 'i/vectors/done').glob('0*.json')))
  kills, before = 0, 0
  while True:
    process = subprocess.Popen(
        command + flags(corpus, bert, tmp_path / 'i'), cwd=ROOT, env=env,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and done() < before + 4:
      time.sleep(.001)
    if process.poll() is not None:
      break
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert done() >= before
    kills, before = kills + 1, done()
  assert process.returncode == 0 and kills >= 3
  subprocess.run(command + flags(corpus, bert, tmp_path / 'whole'), cwd=ROOT,
                 env=env, check=True, capture_output=True)
  first, second = (
      {k: v for k, v in tree(tmp_path / name).items() if '/.' not in k}
      for name in ('i', 'whole'))
  assert first == second


@pytest.mark.slow
def test_two_processes_write_the_bytes_of_one(tmp_path, corpus, bert):
  for count in (1, 2):
    loopback.run(
        count, 'searchrl.main', *flags(
            corpus, bert, tmp_path / str(count)), devices=2,
        env={'PYTHONPATH': f'{ROOT}'}, timeout=300)
  assert tree(tmp_path / '1') == tree(tmp_path / '2')
  manifest = json.loads((tmp_path / '2/vectors/manifest.json').read_text())
  assert manifest['count'] == 50


def test_the_studys_hnsw_has_64_links_and_is_added_to_an_index(
    tmp_path, corpus, monkeypatch):
  faiss = pytest.importorskip('faiss')
  build_index.run(configured(corpus), tmp_path / 'i')
  before = tree(tmp_path / 'i')
  config = configured(corpus).unlock()
  study = build_index_config.get_config('hnsw64')
  config.update(build=study.build, hnsw=study.hnsw)
  build_index.run(config, tmp_path / 'i')
  assert tree(tmp_path / 'i') == before
  index = faiss.read_index(str(tmp_path / 'i/hnsw/hnsw.faiss'))
  ours = faiss.index_factory(32, 'HNSW64', faiss.METRIC_INNER_PRODUCT)
  assert index.hnsw.efConstruction == ours.hnsw.efConstruction
  assert index.hnsw.nb_neighbors(0) == ours.hnsw.nb_neighbors(0) == 128
  widths, parameters = [], faiss.SearchParametersHNSW
  monkeypatch.setattr(faiss, 'SearchParametersHNSW', lambda efSearch: (
      widths.append(efSearch), parameters(efSearch=efSearch))[1])
  query = Query('tarn 10', 5, Question('q', '?', ('a',)))
  found = engines.make('dense', corpora.read(corpus), index=tmp_path / 'i',
                       backend='hnsw', visited=16, min_recall=0.0)
  assert len(found([query])[0]) == 5 and widths == [ours.hnsw.efSearch] == [16]
  with pytest.raises(ValueError, match='visited must be 0 unless backend is'):
    engines.make('dense', corpora.read(corpus), index=tmp_path / 'i',
                 backend='exact', visited=16)
