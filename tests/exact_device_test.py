# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""exact_device: exact search by storage, placement and compiled program."""

import importlib.util
from typing import NamedTuple

import jax
import numpy as np
import pytest

from searchrl.runtime import devices
from searchrl.search.index import exact_device
from searchrl.search.index import exact_host
from searchrl.search.index import vector_store
from exact_host_test import brute_force, on_eight, unit


@pytest.mark.parametrize('dtype, least', [
    ('float16', .99), ('bfloat16', .95), ('int8', .95)])
def test_small_storage_keeps_float32_scores_and_nearly_all_ids(dtype, least):
  """Bunched as E5's: bfloat16 scores near 0.9 would be 0.004 apart."""
  rng = np.random.default_rng(0)
  common = unit(rng, 1, 64)
  rows = unit(rng, 3000, 64) * .5 + common
  rows /= np.linalg.norm(rows, axis=1, keepdims=True)
  vectors = rows[:100] + .3 * unit(rng, 100, 64)
  vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
  index = on_eight(vector_store.InMemory(rows), dtype=dtype, block_rows=100)
  scores, ids = index(vectors, 3)
  recall_of = exact_host.recall_of(vector_store.InMemory(rows), vectors, 3)
  assert recall_of(ids) > least
  exact = np.einsum('bd,bkd->bk', vectors, rows[ids])
  np.testing.assert_allclose(scores, exact, atol=2e-3)
  assert len(np.unique(scores)) > 250  # of 300: bfloat16 has no 250 there


class Counted(vector_store.InMemory):
  """Notes which rows are read."""

  def parts(self, start, stop):
    self.__dict__.setdefault('reads', []).append((start, stop))
    return super().parts(start, stop)


def test_each_row_is_read_once_a_block_at_a_time():
  source = Counted(unit(np.random.default_rng(0), 203, 4))
  on_eight(source, block_rows=10)
  assert max(stop - start for start, stop in source.reads) <= 10
  rows = [i for start, stop in source.reads for i in range(start, stop)]
  assert rows == list(range(203))


@pytest.mark.parametrize('piece', [3, 8192])
@pytest.mark.parametrize('stored', vector_store.DTYPES)
def test_rows_on_disk_arrive_as_they_are_stored(
    stored, piece, tmp_path, monkeypatch):
  monkeypatch.setattr(exact_device, '_PIECE', piece)
  rng = np.random.default_rng(4)
  writer = vector_store.Writer(tmp_path, vector_store.Recipe(
      'c', {'digest': 'e'}, 203, 16, stored, shard_rows=64))
  for shard in writer.missing():
    start, stop = writer.recipe.span(shard)
    writer.write(shard, unit(rng, stop - start, 16))
  store, vectors = writer.finish(), unit(rng, 30, 16)
  scores, ids = on_eight(store, block_rows=10)(vectors, 5)
  expected, order = brute_force(store.read(0, 203), vectors, 5)
  np.testing.assert_array_equal(ids, order)
  np.testing.assert_allclose(scores, expected, atol=1e-6)


def test_rows_beyond_a_types_range_are_refused():
  rows = np.ones((20, 4), np.float32)
  rows[13, 2] = 1e6
  with pytest.raises(ValueError, match='float16 must lie .*10 to 20 does'):
    exact_device.build(
        vector_store.InMemory(rows), dtype='float16', block_rows=10)


def test_no_device_has_less_than_a_block_if_it_is_not_alone():
  source = vector_store.InMemory(np.eye(20, dtype=np.float32))
  for block_rows, wanted in ((30, 1), (10, 2), (1, 8)):
    devices_ = jax.local_devices()[:-(-20 // block_rows)]
    rows, _ = exact_device._place(
        source, source.mean, 'float32', block_rows,
        exact_device.Mesh(np.array(devices_), ('rows',)))
    assert len(rows[0].sharding.device_set) == wanted


def test_a_gpu_has_at_most_64_blocks():
  class Device(NamedTuple):
    platform: str

  for platform, chips, wanted in (
      ('gpu', 1, 328_365), ('gpu', 8, 65_536), ('tpu', 1, 65_536)):
    assert exact_device.rows_per_block(
        21_015_324, [Device(platform)] * chips) == wanted
  assert -(-21_015_324 // 328_365) == 64


def test_one_program_serves_every_number_of_queries():
  index = exact_device.build(
      vector_store.InMemory(np.eye(7, dtype=np.float32)), batch=4)
  before = exact_device.top_k._cache_size()
  for count in range(1, 10):
    index(np.ones((count, 7), np.float32), 2)
  assert exact_device.top_k._cache_size() == before + 1


def test_three_bfloat16_vectors_sum_up_to_a_float32_one_exactly():
  vectors = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
  parts = exact_device.parts_of(vectors, True)
  assert parts.shape == (3, 50, 8)
  np.testing.assert_array_equal(parts.astype(np.float64).sum(0), vectors)


@pytest.mark.parametrize('dtype', ['bfloat16', 'int8'])
def test_split_queries_find_what_whole_ones_find(dtype):
  """Accelerators take split queries: rows are rounded, queries are not."""
  rng = np.random.default_rng(4)
  source, vectors = vector_store.InMemory(unit(rng, 300, 24)), unit(rng, 9, 24)
  found = [on_eight(source, dtype=dtype, split=split)(vectors, 10)
           for split in (False, True)]
  np.testing.assert_array_equal(found[0][1], found[1][1])
  np.testing.assert_allclose(found[0][0], found[1][0], atol=2e-7)


@pytest.mark.parametrize('columns, k, values', [
    (4096, 10, None), (4000, 10, 9), (4096, 1, 2), (900, 3, 4), (256, 30, None)])
def test_the_best_columns_are_those_of_a_stable_sort(columns, k, values):
  """There are ties, and columns and a row that are all minus infinity."""
  rng = np.random.default_rng(columns + k)
  scores = (rng.normal(size=(20, columns)) if values is None else
            rng.integers(values, size=(20, columns))).astype(np.float32)
  scores[:, columns // 2:] = -np.inf if k % 2 else 1
  scores[3] = -np.inf
  top, places = jax.jit(exact_device.best_columns, static_argnums=1)(scores, k)
  expected = np.argsort(-scores, axis=1, kind='stable')[:, :k]
  np.testing.assert_array_equal(places, expected)
  np.testing.assert_array_equal(
      top, np.take_along_axis(scores, expected, axis=1))


@pytest.mark.slow
@pytest.mark.skipif(
    not importlib.util.find_spec('libtpu'),
    reason="no libtpu: pip install 'jax[tpu]' to compile for TPUs")
def test_wikipedia_fits_a_v5e_16_with_next_to_no_temporaries():
  """21 million rows of 768 in bfloat16, compiled without the chips."""
  count, dim, batch = 21_015_324, 768, 512
  mesh = exact_device.Mesh(np.array(devices.to_compile_for(
      devices.KINDS['v5e'], 16)).reshape(-1), ('rows',))
  blocks = -(-count // 16 // 65_536)
  shape = (16 * blocks, -(-count // 16 // blocks) + 1, dim)
  abstract = lambda shape, dtype, *axes: jax.ShapeDtypeStruct(
      shape, dtype, sharding=exact_device.on(mesh, *axes))
  memory = exact_device.top_k.lower(
      [abstract(shape, vector_store.DTYPES['bfloat16'], 'rows')],
      [abstract(shape[:2], np.float32, 'rows')],
      abstract((3, batch, dim), vector_store.DTYPES['bfloat16']), k=10,
      count=count, mesh=mesh,
  ).compile().memory_analysis()
  assert memory.argument_size_in_bytes < 2.1e9  # of a chip's 16 GB
  assert memory.temp_size_in_bytes < .2e9


@pytest.mark.parametrize('count', [16, 17, 64, 81, 150])
def test_many_queries_are_taken_at_once_and_found_alike(count):
  rng = np.random.default_rng(count)
  rows, vectors = unit(rng, 30, 8), unit(rng, count, 8)
  index = on_eight(vector_store.InMemory(rows), batch=4)
  _, ids = index(vectors, 3)
  np.testing.assert_array_equal(ids, brute_force(rows, vectors, 3)[1])


@pytest.mark.parametrize('options, message', [
    (dict(dtype='float64'), "one of float32.*'float64'"),
    (dict(batch=0), 'batch must be at least 1')])
def test_options_are_checked(options, message):
  with pytest.raises(ValueError, match=message):
    exact_device.build(vector_store.InMemory(np.eye(2)), **options)
