# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""tensors: every device reads its slice, one leaf at a time; exports are whole.

What is refused, and bitwise round trips, are in weights_test.
"""

import collections
import json
import shutil
import tracemalloc

import jax
import numpy as np
import pytest
import safetensors.numpy
import tiny

from searchrl.models import families
from searchrl.models import tensors
from searchrl.models import transformer
from searchrl.models import weights
from searchrl.runtime import mesh as meshes

DEVICES = 8

# Eight heads, for eight ways; sizes that no two dimensions share.
CONFIG = transformer.TransformerConfig(
    vocab_size=96, hidden_size=64, num_hidden_layers=6, num_attention_heads=8,
    num_key_value_heads=8, head_dim=4, intermediate_size=80,
    tie_word_embeddings=False)


def save(folder, params, **options):
  weights.save(folder, params, CONFIG, tokenizer_from=folder, eos_id=0,
               **options)


@pytest.fixture(scope='module')
def params():
  return tiny.params(CONFIG)


@pytest.fixture(scope='module')
def model(params, tmp_path_factory):
  folder = tmp_path_factory.mktemp('source') / 'model'
  save(folder, params, shard_bytes=100_000)
  return folder


@pytest.fixture
def reads(monkeypatch):
  """Tensor -> bytes of each read."""
  found, read = collections.defaultdict(list), tensors.Folder.read

  def counted(self, name, index):
    value = read(self, name, index)
    found[name].append(value.nbytes)
    return value

  monkeypatch.setattr(tensors.Folder, 'read', counted)
  return found


@pytest.mark.parametrize('sizes', [
    dict(fsdp=8), dict(tensor=8), dict(fsdp=2, tensor=4),
    dict(data=2, fsdp=2, tensor=2)], ids=str)
def test_each_device_is_given_its_slice_and_no_more_is_read(
    model, params, reads, sizes):
  mesh = meshes.make(**{'data': 1, **sizes})
  sharding_of = lambda axes: meshes.sharding(mesh, axes)
  loaded = weights.load(model, CONFIG, sharding_of=sharding_of)
  jax.tree.map(np.testing.assert_array_equal, loaded, params)
  axes = jax.tree.map(sharding_of, transformer.logical_axes(CONFIG),
                      is_leaf=lambda x: isinstance(x, tuple))
  jax.tree.map(lambda x, sharding: x.sharding.is_equivalent_to(
      sharding, x.ndim) or pytest.fail(str(x.sharding)), loaded, axes)
  gate = loaded['layers']['gate']['kernel']
  ways = mesh.shape['fsdp'] * mesh.shape['tensor']
  assert {s.data.nbytes for s in gate.addressable_shards} == {
      gate.nbytes // ways}
  shapes = tensors.shapes(transformer.abstract(CONFIG), families.NAMES)
  for name, sizes in reads.items():
    assert sum(sizes) == np.prod(shapes[name]) * 4, name  # once each
  gate_reads = reads['model.layers.0.mlp.gate_proj.weight']
  assert gate_reads == [gate[0].nbytes // ways] * ways


def test_a_mesh_that_does_not_divide_a_leaf_is_refused_at_once(model, reads):
  devices = jax.devices()[:3]
  mesh = meshes.make(data=1, tensor=3, devices=devices)
  with pytest.raises(ValueError, match='must split evenly over the devices'):
    weights.load(model, CONFIG,
                 sharding_of=lambda axes: meshes.sharding(mesh, axes))
  assert not reads


def test_no_more_than_one_leaf_is_on_the_host(tmp_path, monkeypatch):
  """Devices are away: what they are given is dropped."""
  config = transformer.TransformerConfig(
      vocab_size=256, hidden_size=128, num_hidden_layers=12,
      num_attention_heads=8, num_key_value_heads=8, head_dim=16,
      intermediate_size=512)
  shapes = jax.eval_shape(
      lambda key: transformer.init(config, key), jax.random.key(0))
  zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
  total = sum(x.nbytes for x in jax.tree.leaves(zeros))
  largest = max(x.nbytes for x in jax.tree.leaves(zeros))
  one_tensor = largest // config.num_hidden_layers

  def peak(run):
    tracemalloc.start()
    run()
    _, highest = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return highest

  def write():
    weights.save(tmp_path / 'model', zeros, config, tokenizer_from=tmp_path,
                 eos_id=0)

  write()  # imports and traces once
  assert peak(write) < 3 * one_tensor + 500_000

  def place(shape, sharding, read):
    for index in sharding.addressable_devices_indices_map(shape).values():
      assert read(index).nbytes <= largest / 4
    return np.zeros(0)

  monkeypatch.setattr(jax, 'make_array_from_callback', place)
  mesh = meshes.make(data=1, fsdp=2, tensor=4)
  load = lambda: weights.load(
      tmp_path / 'model', config,
      sharding_of=lambda axes: meshes.sharding(mesh, axes))
  load()
  assert peak(load) < 1.2 * largest + 500_000 < 0.45 * total


@pytest.mark.parametrize('place', [
    lambda tree: tree, jax.device_get,
    lambda tree: jax.device_put(tree, meshes.shardings(
        meshes.make(data=1, fsdp=2, tensor=4),
        transformer.logical_axes(CONFIG)))], ids=['device', 'host', 'mesh'])
def test_params_from_anywhere_are_written(place, params, tmp_path):
  save(tmp_path / 'model', place(params))
  jax.tree.map(np.testing.assert_array_equal,
               weights.load(tmp_path / 'model', CONFIG), params)


def test_shards_are_small_enough_and_the_index_is_right(model):
  files = sorted(model.glob('*.safetensors'))
  assert len(files) > 2
  assert [f.name for f in files] == [
      f'model-{i + 1:05d}-of-{len(files):05d}.safetensors'
      for i in range(len(files))]
  index = json.loads((model / tensors.INDEX).read_text())
  total = 0
  for file in files:
    held = safetensors.numpy.load_file(file)  # the library's reader
    assert sum(x.nbytes for x in held.values()) <= 100_000
    total += sum(x.nbytes for x in held.values())
    assert {index['weight_map'].pop(name) for name in held} == {file.name}
  assert not index['weight_map']
  assert index['metadata']['total_size'] == total


def test_a_dtype_that_cannot_be_written_is_refused(params, tmp_path):
  with pytest.raises(ValueError, match="float32'.*but is 'int8'"):
    save(tmp_path / 'model', params, dtype='int8')
  assert not (tmp_path / 'model').exists()


def test_an_export_replaces_an_earlier_one_and_keeps_other_files(
    model, params, tmp_path):
  folder = shutil.copytree(model, tmp_path / 'model')
  (folder / 'README.md').write_text('mine')
  (folder / 'tokenizer.json').write_text('{}')
  save(folder, params)
  assert sorted(f.name for f in folder.iterdir()) == [
      'README.md', 'config.json', 'model.safetensors', 'tokenizer.json']
  assert [f.name for f in tmp_path.iterdir()] == ['model']


def test_a_killed_export_leaves_the_earlier_one(model, params, tmp_path,
                                                monkeypatch):
  folder = shutil.copytree(model, tmp_path / 'model')
  before = {f.name: f.read_bytes() for f in folder.iterdir()}
  fetch, calls = tensors._fetch, []

  def fails(*args):
    calls.append(args)
    if len(calls) > 5:
      raise KeyboardInterrupt
    return fetch(*args)

  with monkeypatch.context() as patch:
    patch.setattr(tensors, '_fetch', fails)
    with pytest.raises(KeyboardInterrupt):
      save(folder, params)
  assert before == {f.name: f.read_bytes() for f in folder.iterdir()}
  folder.rename(tmp_path / '.model.old')  # killed between the two renames
  save(folder, params)
  assert [f.name for f in tmp_path.iterdir()] == ['model']
  jax.tree.map(np.testing.assert_array_equal,
               weights.load(folder, CONFIG), params)


def test_a_folder_that_holds_more_than_a_model_is_never_replaced(
    params, tmp_path):
  (tmp_path / 'home' / 'work').mkdir(parents=True)
  with pytest.raises(ValueError, match='but holds the folder work'):
    save(tmp_path / 'home', params)
  (tmp_path / 'file').write_text('')
  with pytest.raises(ValueError, match='but is a file'):
    save(tmp_path / 'file', params)
