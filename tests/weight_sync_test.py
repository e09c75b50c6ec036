# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""weight_sync: the same numbers, where and as the engine wants them."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from searchrl.models import experts
from searchrl.models import lora
from searchrl.models import transformer
from searchrl.models.inference import engine_weights
from searchrl.rollouts import weight_sync
from searchrl.runtime import mesh as meshes

DEVICES = 8

CONFIG = dataclasses.replace(
    tiny.CONFIG, num_attention_heads=8, num_key_value_heads=4)
EXPERTS = dataclasses.replace(
    CONFIG, architecture='Qwen3MoeForCausalLM', attention_bias=False,
    qk_norm=True, experts=experts.Experts(
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24,
        norm_topk_prob=True))
AXES = transformer.logical_axes(CONFIG)


def make(mesh, **options):
  return weight_sync.WeightSync(mesh, AXES, CONFIG.num_hidden_layers, **options)


@pytest.fixture(scope='module')
def params():
  return jax.device_get(tiny.params(CONFIG))


def on(mesh, params):
  return jax.tree.map(meshes.place, params, meshes.shardings(mesh, AXES))


def assert_layers_apart(given, params, dtype='float32'):
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(given),
               engine_weights.unstacked(params, dtype))


def test_metrics_say_what_a_sync_took(params):
  mesh = meshes.make(data=8)
  synced = make(mesh)(on(mesh, params))
  assert synced.metrics() == {
      'rollout/weight_sync_bytes': 8.0 * sum(
          x.nbytes for x in jax.tree.leaves(params)),
      'timing_s/weight_sync': synced.secs}
  assert synced.secs > 0


@pytest.mark.parametrize('layout', [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4)])
@pytest.mark.parametrize('tensor', [1, 4])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_any_layout_becomes_the_engines(layout, tensor, dtype, params):
  mesh = meshes.make(**dict(zip(meshes.AXES, layout)))
  sync = make(mesh, tensor=tensor, dtype=dtype)
  assert dict(sync.mesh.shape) == dict(data=8 // tensor, fsdp=1, tensor=tensor)
  synced = sync(on(mesh, params))
  assert_layers_apart(synced.weights, params, dtype)
  kernel = synced.weights['layers'][1]['gate']['kernel']
  assert kernel.sharding.shard_shape(kernel.shape) == (32, 48 // tensor)
  size = sum(x.size for x in jax.tree.leaves(params)) * kernel.dtype.itemsize
  # 8 / tensor copies; biases and norms are held whole by each device
  assert (size * 8 / tensor <= synced.bytes
          <= size * 8 / tensor * (1 + 0.1 * tensor))


@pytest.mark.parametrize('layout', [(1, 1, 1), (1, 8, 1), (2, 2, 2)])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('shape', [CONFIG, EXPERTS], ids=['dense', 'experts'])
def test_adapters_are_merged_into_the_copies(shape, dtype, layout):
  mesh = meshes.make(**dict(zip(meshes.AXES, layout)),
                     devices=jax.devices()[:np.prod(layout)])
  settings = lora.Lora(rank=3, alpha=5.0, targets=('q', 'down'))
  params, axes = tiny.params(shape), transformer.logical_axes(shape)
  adapters = jax.tree.map(
      lambda x: np.random.default_rng(0).normal(size=x.shape).astype('float32'),
      lora.init(settings, shape, jax.random.key(0)))
  place = lambda tree, names: jax.tree.map(
      meshes.place, jax.device_get(tree), meshes.shardings(mesh, names))
  beside = lora.attach(
      place(params, axes),
      place(adapters, lora.logical_axes(settings, shape)), settings)
  synced = weight_sync.WeightSync(
      mesh, axes, shape.num_hidden_layers, tensor=int(mesh.size > 1) + 1,
      dtype=dtype)(beside)
  expected = engine_weights.unstacked(
      lora.merge(params, adapters, settings), dtype)
  assert not np.array_equal(
      expected['layers'][0]['q']['kernel'], params['layers']['q']['kernel'][0])
  jax.tree.map(lambda x, y: np.testing.assert_allclose(
      x.astype('float32'), y.astype('float32'), rtol=dict(
          float32=1e-5, bfloat16=1e-2)[dtype], atol=1e-6),
               jax.device_get(synced.weights), jax.device_get(expected))


@pytest.mark.parametrize('layout', [(4, 1, 1), (1, 4, 1), (1, 2, 2), (6, 1, 1),
                                    (1, 1, 1)])
@pytest.mark.parametrize('tensor', [1, 2])
def test_weights_go_to_other_devices(layout, tensor, params):
  devices, count = jax.devices(), np.prod(layout)
  tensor = np.gcd(tensor, count).item()
  mesh = meshes.make(**dict(zip(meshes.AXES, layout)), devices=devices[:count])
  onto = meshes.make(tensor=tensor, devices=devices[count:][:4])
  sync = make(mesh, tensor=tensor, onto=onto)
  given = on(mesh, params)
  synced = sync(given)
  assert_layers_apart(synced.weights, params)
  assert {*sync.mesh.devices.flat} == {*onto.devices.flat}
  for leaf in jax.tree.leaves(synced.weights):
    assert leaf.sharding.device_set == {*onto.devices.flat}
  assert synced.bytes == sum(
      shard.data.nbytes for leaf in jax.tree.leaves(synced.weights)
      for shard in leaf.addressable_shards)
  jax.tree.map(lambda x: x.delete(), given)  # as an update may
  assert_layers_apart(synced.weights, params)


@pytest.mark.parametrize('layout', [(1, 8, 1), (2, 2, 2), (1, 2, 4)])
@pytest.mark.parametrize('tensor', [1, 2, 4])
@pytest.mark.parametrize('platform', ['tpu', 'gpu'])
def test_large_matrices_go_piece_by_piece(
    platform, layout, tensor, params, monkeypatch):
  """Pieces of a few rows or columns, the last ones shorter."""
  sizes = dict(_SMALL=256, _PIECE=700, _LARGE=2000, _ALIGNED=4)
  for name, value in sizes.items():
    monkeypatch.setattr(weight_sync, name, value)
  pieces = weight_sync._pieces_on(platform)
  assert [pieces(size) for size in (600, 2100)] == dict(
      tpu=[2, 3], gpu=[1, 2])[platform]
  monkeypatch.setattr(weight_sync, '_pieces_on', lambda _: pieces)
  mesh = meshes.make(**dict(zip(meshes.AXES, layout)))
  sync, given = make(mesh, tensor=tensor, dtype='bfloat16'), on(mesh, params)
  assert str(jax.make_jaxpr(sync._move)(given)).count('= empty[') > 7
  assert_layers_apart(sync(given).weights, params, 'bfloat16')


def test_what_does_not_move_is_not_cut(params, monkeypatch):
  monkeypatch.setattr(weight_sync, '_SMALL', 0)
  mesh = meshes.make(data=4, tensor=2)
  sync = make(mesh, tensor=2)
  assert '= empty[' not in str(jax.make_jaxpr(sync._move)(on(mesh, params)))


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_weights_of_one_device_are_copies(params, dtype):
  mesh = meshes.make(devices=jax.devices()[:1])
  given = on(mesh, params)
  weights = make(mesh, dtype=dtype)(given).weights
  assert_layers_apart(weights, params, dtype)
  place = lambda x: x.addressable_shards[0].data.unsafe_buffer_pointer()
  assert not {*map(place, jax.tree.leaves(given))} & {
      *map(place, jax.tree.leaves(weights))}


def test_weights_from_a_host_are_taken_too(params):
  mesh = meshes.make(data=2, fsdp=4)
  assert_layers_apart(make(mesh, tensor=2)(params).weights, params)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_the_donated_original_may_go(dtype, params):
  """Weights outlive the update that takes what they were made from."""
  mesh = meshes.make(data=8)
  held = on(mesh, params)
  given = make(mesh, dtype=dtype)(held).weights
  jax.tree.map(lambda x: x.delete(), held)
  assert all(np.isfinite(x.astype(np.float32)).all()
             for x in jax.tree.leaves(jax.device_get(given)))


def test_copies_that_do_not_divide_the_devices_are_refused():
  with pytest.raises(ValueError, match='rollout.tensor must divide the 8'):
    make(meshes.make(), tensor=3)
