# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""vector_store: what is read is what was written, whole or not at all."""

import dataclasses
import json

import numpy as np
import pytest

from searchrl.search.index import vector_store

ROWS = np.random.default_rng(0).normal(size=(70, 8)).astype(np.float32)
RECIPE = vector_store.Recipe(
    'corpus', {'digest': 'encoder', 'path': 'here'}, 70, 8, 'float32', 16)


def write(folder, recipe=RECIPE, rows=ROWS, shards=None):
  writer = vector_store.Writer(folder, recipe)
  for shard in writer.missing() if shards is None else shards:
    writer.write(shard, rows[slice(*recipe.span(shard))])
  return writer


def tree(folder):
  return {str(f.relative_to(folder)): f.read_bytes()
          for f in sorted(folder.rglob('*')) if f.is_file()}


@pytest.mark.parametrize('dtype, error', [
    ('float32', 0), ('float16', 2**-11), ('bfloat16', 2**-8),
    ('int8', 1 / 253)])
def test_rows_come_back_to_the_digits_of_their_storage(tmp_path, dtype, error):
  recipe = dataclasses.replace(RECIPE, dtype=dtype)
  store = write(tmp_path, recipe).finish()
  for start, stop in ((0, 70), (3, 5), (15, 33), (69, 70)):
    got = store.read(start, stop)
    assert got.dtype == np.float32
    largest = np.abs(ROWS[start:stop]).max(1, keepdims=True)
    assert (np.abs(got - ROWS[start:stop]) <= error * largest).all()
  np.testing.assert_allclose(store.mean, ROWS.mean(0), atol=1e-6)
  rows = np.concatenate([r for _, r in vector_store.blocks(store, 9)])
  assert rows.shape == (70, 8)


@pytest.mark.parametrize('dtype', vector_store.DTYPES)
def test_rows_of_zeros_are_rows_too(tmp_path, dtype):
  recipe = dataclasses.replace(RECIPE, dtype=dtype)
  store = write(tmp_path, recipe, rows=np.zeros_like(ROWS)).finish()
  assert not store.read(0, 70).any()


def test_int8_keeps_zeros_and_the_largest_exactly():
  rows = np.float32([[0, 0], [2, -4], [1e-30, 0]])
  whole, scales = vector_store.quantize(rows)
  np.testing.assert_array_equal(whole, [[0, 0], [64, -127], [127, 0]])
  np.testing.assert_allclose(whole[1] * scales[1], [2, -4], rtol=.01)
  again, again_scales = vector_store.quantize(whole * scales[:, None])
  np.testing.assert_array_equal(again, whole)
  np.testing.assert_allclose(again_scales, scales, rtol=1e-6)


@pytest.mark.parametrize('dtype', vector_store.DTYPES)
def test_a_store_finished_by_others_in_another_order_is_the_same_bytes(
    tmp_path, dtype):
  recipe = dataclasses.replace(RECIPE, dtype=dtype)
  first = write(tmp_path / 'a', recipe).finish()
  write(tmp_path / 'b', recipe, shards=[4, 1])
  assert vector_store.Writer(tmp_path / 'b', recipe).missing() == [0, 2, 3]
  second = write(tmp_path / 'b', recipe).finish()
  assert tree(tmp_path / 'a') == tree(tmp_path / 'b')
  assert first.fingerprint == second.fingerprint


def test_the_fingerprint_sees_rows_and_recipe_but_not_the_encoders_place(
    tmp_path):
  changed = ROWS.copy()
  changed[40, 3] += 1e-3
  recipes = [(RECIPE, ROWS), (RECIPE, changed)] + [
      (dataclasses.replace(RECIPE, **change), ROWS) for change in (
          dict(corpus='other'), dict(encoder={'digest': 'other'}),
          dict(dtype='bfloat16'))]
  found = [write(tmp_path / str(i), *pair).finish().fingerprint
           for i, pair in enumerate(recipes)]
  assert len(set(found)) == 5
  moved = dataclasses.replace(
      RECIPE, encoder={'digest': 'encoder', 'path': 'x'})
  assert write(tmp_path / 'm', moved).finish().fingerprint == found[0]


@pytest.mark.parametrize('change, message', [
    (dict(corpus='other'), "corpus: 'corpus' -> 'other'"),
    (dict(encoder={'digest': 'y'}), 'encoder'), (dict(dtype='int8'), 'dtype'),
    (dict(shard_rows=32), 'shard_rows: 16 -> 32')])
def test_a_folder_of_another_recipe_is_refused(tmp_path, change, message):
  write(tmp_path, shards=[0])
  before = tree(tmp_path)
  with pytest.raises(ValueError, match=message):
    vector_store.Writer(tmp_path, dataclasses.replace(RECIPE, **change))
  assert tree(tmp_path) == before


def test_an_unfinished_store_does_not_open(tmp_path):
  writer = write(tmp_path, shards=[0, 2])
  with pytest.raises(ValueError, match='3 are not, shard 1 first'):
    writer.finish()
  with pytest.raises(FileNotFoundError, match='finish building it'):
    vector_store.open_(tmp_path)


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_the_passage_of_a_bad_vector_is_named(tmp_path, bad):
  rows = ROWS.copy()
  rows[37, 5] = bad
  with pytest.raises(ValueError, match='passage 37, counted from 0'):
    write(tmp_path, rows=rows)
  assert vector_store.Writer(tmp_path, RECIPE).missing() == [2, 3, 4]
  with pytest.raises(ValueError, match='passage 37'):
    vector_store.InMemory(rows)


def test_what_is_too_large_for_float16_is_refused(tmp_path):
  recipe = dataclasses.replace(RECIPE, dtype='float16')
  with pytest.raises(ValueError, match='below 65,504, but one has'):
    write(tmp_path, recipe, rows=ROWS * 1e5)


@pytest.mark.parametrize('rows', [ROWS[:15], ROWS[:16, :7], ROWS[0]])
def test_rows_of_another_shape_are_refused(tmp_path, rows):
  with pytest.raises(ValueError, match='shape'):
    vector_store.Writer(tmp_path, RECIPE).write(0, rows)


def cut(file):
  file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize('damage, message', [
    (lambda f: (f / 'rows/c/2/0').unlink(), 'shard 2 of .* missing or cut'),
    (lambda f: cut(f / 'rows/c/2/0'), 'shard 2 of .* missing or cut'),
    (lambda f: (f / 'done/000001.json').unlink(), 'shard 1'),
    (lambda f: cut(f / 'done/000001.json'), None),
    (lambda f: (f / 'manifest.json').write_text('{'), 'manifest.json must be'),
    (lambda f: (f / 'manifest.json').write_text('{}'), 'manifest.json must be'),
    (lambda f: (f / 'manifest.json').write_text(json.dumps(json.loads(
        (f / 'manifest.json').read_text()) | {'format': 9})), 'format 1'),
    (lambda f: (f / 'manifest.json').write_text(json.dumps(json.loads(
        (f / 'manifest.json').read_text()) | {'mean': [0]})), 'must be'),
    (lambda f: (f / 'manifest.json').write_text(
        (f / 'manifest.json').read_text().replace('int": "', 'int": "0')),
     'manifest.json must be as it was written')])
def test_damage_is_found_when_a_store_is_opened(tmp_path, damage, message):
  write(tmp_path).finish()
  damage(tmp_path)
  if message is None:  # a line break at the end may go
    assert vector_store.open_(tmp_path).count == 70
    return
  with pytest.raises(ValueError, match=message):
    vector_store.open_(tmp_path)


def test_a_flipped_bit_is_found_when_it_is_read(tmp_path):
  store = write(tmp_path).finish()
  file = tmp_path / 'rows/c/2/0'
  raw = bytearray(file.read_bytes())
  raw[40] ^= 4
  file.write_bytes(raw)
  store = vector_store.open_(tmp_path)
  np.testing.assert_array_equal(store.read(0, 32), ROWS[:32])
  with pytest.raises(ValueError, match='must be readable'):
    store.read(32, 48)


def test_a_cut_shard_is_written_again(tmp_path):
  write(tmp_path, shards=[0, 1])
  cut(tmp_path / 'rows/c/1/0')
  assert vector_store.Writer(tmp_path, RECIPE).missing() == [1, 2, 3, 4]
  np.testing.assert_array_equal(write(tmp_path).finish().read(0, 70), ROWS)


@pytest.mark.parametrize('change, message', [
    (dict(dtype='float64'), "float32, float16, bfloat16, int8.* 'float64'"),
    (dict(count=0), 'count .* at least 1'), (dict(dim=0), 'dim'),
    (dict(shard_rows=0), 'shard_rows')])
def test_recipes_are_checked(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(RECIPE, **change)
