# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""approximate: ScaNN and HNSW against exact search; no wrong row, ever."""

import ctypes
import json
import sys

import numpy as np
import pytest

from searchrl.search.index import approximate
from searchrl.search.index import exact_host
from searchrl.search.index import hnsw
from searchrl.search.index import manifests
from searchrl.search.index import scann as scann_index
from searchrl.search.index import vector_store

PACKAGES = {'scann': 'scann', 'hnsw': 'faiss'}
DIM = 32


def clustered(count, seed=0, dim=DIM):
  """Unit rows around 40 centres and a common direction, and queries."""
  rng = np.random.default_rng(seed)
  centres = rng.normal(size=(40, dim)) + 2
  rows = centres[rng.integers(40, size=count)] + rng.normal(size=(count, dim))
  vectors = rows[rng.integers(count, size=200)] + .5 * rng.normal(
      size=(200, dim))
  return [(x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
          for x in (rows, vectors)]


def make_store(folder, rows, dtype='float32'):
  recipe = vector_store.Recipe(
      'c', {'kind': 'x', 'digest': 'e'}, *rows.shape, dtype, 4096)
  writer = vector_store.Writer(folder, recipe)
  for shard in writer.missing():
    writer.write(shard, rows[slice(*recipe.span(shard))])
  return writer.finish()


@pytest.fixture(scope='module')
def large(tmp_path_factory):
  """(store, rows, queries): enough for a tree in each of two parts."""
  rows, vectors = clustered(10_000)
  return make_store(tmp_path_factory.mktemp('large'), rows), rows, vectors


@pytest.fixture(scope='module', params=['scann', 'hnsw'])
def built(request, large, tmp_path_factory):
  """(kind, folder, manifest) of an index of `large`."""
  kind = request.param
  pytest.importorskip(PACKAGES[kind])
  folder = tmp_path_factory.mktemp(kind) / kind
  options = dict(part_rows=6000) if kind == 'scann' else {}
  store, _, vectors = large
  lines = []
  manifest = approximate.build(kind, store, folder, vectors, recall=.97,
                               say=lines.append, **options)
  assert lines
  return kind, folder, manifest


@pytest.fixture(params=['scann', 'hnsw'])
def kind(request):
  pytest.importorskip(PACKAGES[request.param])
  return request.param


def true_recall(index, rows, vectors):
  """recall@3 by float64 scores."""
  exact = vectors.astype(float) @ rows.T.astype(float)
  best = np.argsort(-exact, axis=1)[:, :3]
  _, ids = index(vectors, 3)
  return np.mean([np.isin(a, b).mean() for a, b in zip(ids, best)])


def test_recall_is_that_of_the_manifest_and_scores_are_the_true_ones(
    built, large):
  kind, folder, manifest = built
  store, rows, vectors = large
  index = approximate.open_(kind, store, folder, min_recall=.9)
  assert manifest['recall@3'] >= .97
  assert true_recall(index, rows, vectors) == pytest.approx(
      manifest['recall@3'], abs=.002)  # equal scores apart
  scores, ids = index(vectors, 10)
  assert (ids >= 0).all()
  np.testing.assert_allclose(
      scores, np.einsum('bd,bkd->bk', vectors, rows[ids]), atol=1e-4)
  assert (np.diff(scores) <= 0).all()
  other = clustered(10_000, seed=0)[0][:150]  # rows find themselves
  assert (index(other, 1)[1][:, 0] == np.arange(150)).mean() > .95


def test_both_parts_of_scann_are_searched(built, large):
  kind, folder, manifest = built
  if kind != 'scann':
    pytest.skip('HNSW has no parts')
  assert manifest['built']['edges'] == [0, 5000, 10_000]
  assert all(manifest['built']['leaves'])
  _, ids = approximate.open_(kind, large[0], folder, min_recall=0)(large[2], 3)
  assert (ids < 5000).any() and (ids >= 5000).any()


def test_more_than_it_can_give_is_what_there_is(built, large):
  kind, folder, _ = built
  store, rows, vectors = large
  index = approximate.open_(kind, store, folder, min_recall=0)
  for k in (33, 3000, 10_000, 99_999):
    scores, ids = index(vectors[:2], k)
    for score, row_ids, vector in zip(scores, ids, vectors):
      found = row_ids[row_ids >= 0]
      assert len(set(found)) == len(found) >= 32
      assert np.isneginf(score[row_ids < 0]).all()
      np.testing.assert_allclose(
          score[row_ids >= 0], rows[found] @ vector, atol=1e-4)


def test_one_query_is_found_as_in_a_batch(built, large):
  kind, folder, _ = built
  index = approximate.open_(kind, large[0], folder, min_recall=0)
  together = index(large[2][:9], 4)
  for i in range(9):
    alone = index(large[2][i:i + 1], 4)
    np.testing.assert_array_equal(alone[1][0], together[1][i])


@pytest.mark.parametrize('count, dim', [
    (1, 8), (2, 8), (3, 1), (17, 3), (200, 5), (4095, 8), (4096, 16),
    (4097, 7)])
def test_few_rows_or_dimensions_are_searched_exactly(
    tmp_path, kind, count, dim):
  rows, vectors = clustered(count, dim=dim)
  store = make_store(tmp_path / 'v', rows)
  approximate.build(kind, store, tmp_path / 'i', vectors, recall=.95)
  index = approximate.open_(kind, store, tmp_path / 'i', min_recall=.9)
  assert index(vectors, 5)[1].shape == (200, min(5, count))
  recall_of = exact_host.recall_of(store, vectors, min(3, count))
  recall = recall_of(index(vectors, 3)[1])
  assert recall >= (.99 if count < 4096 else .9)


def test_each_of_many_equal_rows_is_as_good_as_another(tmp_path, kind):
  """500 rows are equal; the oracle compares float64 scores."""
  rows, vectors = clustered(2000)
  rows[::4] = rows[0]
  vectors[:40] = rows[0]
  store = make_store(tmp_path / 'v', rows)
  manifest = approximate.build(kind, store, tmp_path / 'i', vectors)
  index = approximate.open_(kind, store, tmp_path / 'i', min_recall=0)
  exact = vectors.astype(float) @ rows.T.astype(float)
  least = np.sort(exact)[:, -3:-2] - 1e-6
  found = np.take_along_axis(exact, index(vectors, 3)[1], 1)
  assert manifest['recall@3'] == (found >= least).mean()
  assert kind == 'hnsw' or manifest['recall@3'] == 1


@pytest.mark.parametrize('rows', [
    np.zeros((5000, 8)), np.ones((5000, 8)), np.eye(8)[np.arange(5000) % 8],
    np.full((5000, 8), 1e-30), np.full((5000, 8), 1e15)],
    ids=['zeros', 'ones', 'few', 'tiny', 'huge'])
def test_rows_of_no_use_do_no_harm(tmp_path, kind, rows):
  store = make_store(tmp_path / 'v', rows.astype(np.float32))
  vectors = np.eye(8, dtype=np.float32)
  if kind == 'scann' and rows.max() > 1e12:
    with pytest.raises(ValueError, match='no value beyond 1e[+]12 for ScaNN, but '
                       "that of passage 0.* has 1e[+]15.*'exact'"):
      approximate.build(kind, store, tmp_path / 'i', vectors)
    return
  approximate.build(kind, store, tmp_path / 'i', vectors)
  index = approximate.open_(kind, store, tmp_path / 'i', min_recall=0)
  scores, ids = index(vectors, 3)
  valid = ids >= 0
  np.testing.assert_allclose(
      scores[valid], np.einsum('bd,bkd->bk', vectors, rows[ids])[valid],
      rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize('value', [1e13, 1e30, 3e38])
def test_rows_that_would_end_the_process_are_refused_before(tmp_path, value):
  pytest.importorskip('scann')
  rows = clustered(5000)[0]
  rows[77, 3] = -value
  with pytest.raises(ValueError, match='beyond 1e.12 for ScaNN, but that of '
                     'passage 77, counted from 0, has '):
    scann_index.build(vector_store.InMemory(rows), tmp_path)
  rows[77, 3] = 1e11  # and this is not too large
  scann_index.build(vector_store.InMemory(rows), tmp_path)


def test_scann_is_built_alike_every_time(tmp_path, large):
  pytest.importorskip('scann')
  trees = []
  for name in 'ab':
    folder = tmp_path / name
    folder.mkdir()
    scann_index.build(large[0], folder)
    trees.append({f.relative_to(folder): f.read_bytes()
                  for f in sorted(folder.rglob('*')) if f.is_file()})
  assert trees[0] == trees[1]


def test_the_last_ranking_is_by_the_rows_as_they_are_stored(tmp_path, large):
  """float16 would swap neighbours that are closer than its precision."""
  pytest.importorskip('scann')
  rows, vectors = large[1].copy(), large[2]
  rows[1::2] = rows[::2] + np.float32(2e-5) * rows[1::2]
  source = vector_store.InMemory(rows)
  facts = scann_index.build(source, tmp_path)
  index = scann_index.open_(tmp_path, facts, source, share=1., candidates=1000)
  assert true_recall(index, rows, vectors) > .995
  assert facts['rows'] == 'float32'
  half = make_store(tmp_path / 'half', rows, dtype='float16')
  (tmp_path / 'of_half').mkdir()
  assert scann_index.build(half, tmp_path / 'of_half')['rows'] == 'float16'
  with pytest.raises(ValueError, match='Build it again'):
    scann_index.open_(tmp_path, {'leaves': [3], 'edges': [0, 10_000]}, source,
                      share=1., candidates=50)


@pytest.fixture
def kernels():
  """ScaNN's shared library and its switches, which are put back."""
  pytest.importorskip('scann')
  path = scann_index._library().scann_ops_pybind.scann_pybind.__file__
  library = ctypes.CDLL(path)
  flags = [ctypes.c_bool.in_dll(library, name) for name in scann_index._FLAGS]
  before = [flag.value for flag in flags]
  yield path, flags
  for flag, value in zip(flags, before):
    flag.value = value


@pytest.mark.parametrize('features, expected', [
    ('fpu avx2 fma', [True, False]), ('fpu avx2', [False, False]),
    ('avx2 fma avx512f avx512dq avx512bw', [True, True]), ('', [False, False])])
def test_scann_uses_what_the_cpu_has(tmp_path, kernels, features, expected):
  path, flags = kernels
  for flag in flags:
    flag.value = False
  cpuinfo = tmp_path / 'cpuinfo'
  cpuinfo.write_text(
      f'model name\t: x\nflags\t\t: {features}\nbugs\t\t: avx2 fma\n')
  used = scann_index._use_cpu(path, str(cpuinfo))
  assert [flag.value for flag in flags] == expected
  assert len(used) == sum(expected)
  assert scann_index._use_cpu(path, str(tmp_path / 'none')) == ()


def test_kernels_of_scann_agree(built, large, kernels):
  kind, folder, _ = built
  if kind != 'scann':
    pytest.skip('of ScaNN')
  found = []
  for _ in range(2):  # as they are, and then the slow ones
    index = approximate.open_(kind, large[0], folder, min_recall=0)
    found.append(index(large[2], 3))
    for flag in kernels[1]:
      flag.value = False
  assert (found[0][1] == found[1][1]).mean() > .999
  np.testing.assert_allclose(found[0][0], found[1][0], atol=1e-4)


def test_an_index_below_the_least_recall_does_not_open(built, large):
  kind, folder, manifest = built
  with pytest.raises(ValueError, match=r'at least min_recall=1.01.*backend='):
    approximate.open_(kind, large[0], folder, min_recall=1.01)
  assert manifest['queries'] == 200


def test_settings_of_ones_own_need_no_measured_recall(built, large):
  kind, folder, manifest = built
  index = approximate.open_(kind, large[0], folder, min_recall=1.01,
                            **manifest['settings'])
  assert true_recall(index, *large[1:]) >= .96


def test_another_target_or_other_queries_tune_an_index_again(tmp_path, kind):
  rows, vectors = clustered(5000)
  store, said = make_store(tmp_path / 'v', rows), []

  def build(target, asked, queries=vectors):
    said.clear()
    approximate.build_if_changed(
        kind, store, tmp_path / 'i', queries, recall=target, asked=asked,
        say=said.append, **{'links': 4} if kind == 'hnsw' else {})
    return approximate.read_manifest(tmp_path / 'i', store)

  files = lambda: {f: f.read_bytes() for f in (tmp_path / 'i').rglob('*')
                   if f.is_file() and f.name != 'manifest.json'}
  low, before = build(.5, 'a'), files()
  assert build(.5, 'a') == low and 'already built, recall' in said[0]
  high = build(1.0, 'a')
  assert 'tuned again for recall.target=1.0' in said[0]
  assert len(high['measured']) > len(low['measured'])
  assert high['recall@3'] > low['recall@3'] and files() == before
  few = build(1.0, 'b', vectors[:50])
  assert few['queries'] == 50 and few['tuned_for'] == [1.0, 'b']
  approximate.open_(kind, store, tmp_path / 'i', min_recall=0)
  del few['tuned_for']  # as an older version wrote it
  few['recall@3'] = .9
  manifests.rewrite(tmp_path / 'i', few)
  assert build(.5, 'c') == few
  assert build(1.0, 'c')['tuned_for'] == [1.0, 'c']


def edited(folder, **changes):
  """Another manifest, as if it had been written so."""
  raw = json.loads((folder / 'manifest.json').read_text()) | changes
  del raw['seal']
  raw = {k: v for k, v in raw.items() if v is not ...}
  (folder / 'manifest.json').write_text(
      json.dumps(raw | {'seal': manifests.seal(raw)}))


@pytest.mark.parametrize('damage, message', [
    (lambda f: edited(f, **{'recall@3': ...}), 'must have a measured recall'),
    (lambda f: edited(f, **{'recall@3': None}), 'must have a measured recall'),
    (lambda f: edited(f, of='other'), 'built of the vectors beside it'),
    (lambda f: (f / 'manifest.json').write_text('['), 'must be whole'),
    (lambda f: (f / 'manifest.json').write_text('[]'), 'must be whole'),
    (lambda f: largest(f).write_bytes(b''), 'missing or cut'),
    (lambda f: largest(f).unlink(), 'missing or cut')])
def test_damage_is_named(tmp_path, kind, damage, message):
  rows, vectors = clustered(300)
  store = make_store(tmp_path / 'v', rows)
  approximate.build(kind, store, tmp_path / 'i', vectors)
  damage(tmp_path / 'i')
  with pytest.raises(ValueError, match=message):
    approximate.open_(kind, store, tmp_path / 'i', min_recall=0)


def test_a_flipped_bit_is_found_and_the_index_built_again(tmp_path, kind):
  rows, vectors = clustered(5000)
  store, said = make_store(tmp_path / 'v', rows), []
  build = lambda: approximate.build_if_changed(
      kind, store, tmp_path / 'i', vectors, recall=.9, say=said.append)
  build()
  for file in sorted(f for f in (tmp_path / 'i').rglob('*') if f.is_file()):
    whole = file.read_bytes()
    for bit in np.linspace(0, 8 * len(whole) - 1, 5).astype(int).tolist():
      flipped = bytearray(whole)
      flipped[bit // 8] ^= 1 << bit % 8
      file.write_bytes(flipped)
      with pytest.raises(ValueError, match=f'{file.name} must be .* again'):
        approximate.open_(kind, store, tmp_path / 'i', min_recall=0)
    file.write_bytes(whole)
  approximate.open_(kind, store, tmp_path / 'i', min_recall=0)
  build()
  assert 'already built' in said[-1]
  file.write_bytes(flipped)
  said.clear()
  build()
  assert f'{kind} is built again: ' in said[0]


def largest(folder):
  return max((f for f in folder.rglob('*') if f.is_file() and
              f.name not in ('manifest.json',)), key=lambda f: f.stat().st_size)


def test_files_that_could_run_code_are_refused(tmp_path):
  pytest.importorskip('scann')
  rows, vectors = clustered(300)
  store = make_store(tmp_path / 'v', rows)
  approximate.build('scann', store, tmp_path / 'i', vectors)
  (tmp_path / 'i/part_000/scann_docids.pkl').write_bytes(b'x')
  with pytest.raises(ValueError, match='could run code'):
    approximate.open_('scann', store, tmp_path / 'i', min_recall=0)


def test_there_is_no_index_without_its_manifest(tmp_path, kind):
  store = make_store(tmp_path / 'v', clustered(10)[0])
  with pytest.raises(FileNotFoundError, match='config.build'):
    approximate.open_(kind, store, tmp_path / 'none', min_recall=0)


def test_a_moved_index_loads(tmp_path, kind):
  rows, vectors = clustered(300)
  store = make_store(tmp_path / 'v', rows)
  approximate.build(kind, store, tmp_path / 'i', vectors)
  before = approximate.open_(kind, store, tmp_path / 'i', min_recall=0)(
      vectors, 3)
  (tmp_path / 'i').rename(tmp_path / 'moved')
  after = approximate.open_(kind, store, tmp_path / 'moved', min_recall=0)(
      vectors, 3)
  np.testing.assert_array_equal(before[1], after[1])


@pytest.mark.parametrize('kind', ['scann', 'hnsw'])
def test_a_missing_package_is_named_with_its_extra(tmp_path, kind, monkeypatch):
  monkeypatch.setitem(sys.modules, PACKAGES[kind], None)
  store = make_store(tmp_path / 'v', clustered(10)[0])
  with pytest.raises(ValueError, match=r"pip install 'searchrl\[search\]'"):
    approximate.build(kind, store, tmp_path / 'i', np.ones((1, DIM)))
  assert not (tmp_path / 'i').exists()


@pytest.mark.parametrize('options, message', [
    (dict(leaves=-1), 'leaves must be'), (dict(part_rows=0), 'part_rows'),
    (dict(soar=0.0), 'soar above 0')])
def test_options_of_scann_are_checked(tmp_path, options, message):
  pytest.importorskip('scann')
  with pytest.raises(ValueError, match=message):
    scann_index.build(vector_store.InMemory(np.eye(3)), tmp_path, **options)


def test_an_index_that_cannot_be_written_is_an_os_error(tmp_path):
  pytest.importorskip('faiss')
  with pytest.raises(OSError, match='missing/.* cannot be written: '):
    hnsw.build(vector_store.InMemory(np.eye(3, dtype=np.float32)),
               tmp_path / 'missing', links=4, construction=8)


@pytest.mark.parametrize('options', [dict(links=1), dict(construction=1)])
def test_options_of_hnsw_are_checked(tmp_path, options):
  pytest.importorskip('faiss')
  with pytest.raises(ValueError, match='construction must be at least 2'):
    hnsw.build(vector_store.InMemory(np.eye(3)), tmp_path, **options)


def test_what_to_build_is_checked(tmp_path):
  store = make_store(tmp_path / 'v', clustered(10)[0])
  with pytest.raises(ValueError, match="one of scann, hnsw, but is 'ivf'"):
    approximate.build('ivf', store, tmp_path / 'i', np.ones((1, DIM)))
  for recall, vectors in ((0, np.ones((1, DIM))), (.9, np.ones((0, DIM)))):
    with pytest.raises(ValueError, match=r'recall must lie in \(0, 1\]'):
      approximate.build('hnsw', store, tmp_path / 'i', vectors, recall=recall)
