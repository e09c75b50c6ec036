# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""weight_sync: the same numbers, where and as the engine wants them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from searchrl.models import transformer
from searchrl.rollouts import weight_sync
from searchrl.runtime import mesh as meshes

CONFIG = dataclasses.replace(
    tiny.CONFIG, num_attention_heads=8, num_key_value_heads=4)
AXES = transformer.logical_axes(CONFIG)


@pytest.fixture(scope='module')
def params():
  return jax.device_get(tiny.params(CONFIG))


def on(mesh, params):
  return jax.tree.map(meshes.place, params, meshes.shardings(mesh, AXES))


def pointers(tree):
  return [shard.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)
          for shard in leaf.addressable_shards]


def test_where_nothing_is_to_be_done_no_byte_moves(params):
  mesh = meshes.make(data=8)
  held = on(mesh, params)
  sync = weight_sync.WeightSync(mesh, AXES)
  synced = sync(held)
  assert pointers(synced.weights) == pointers(held)
  assert synced.metrics() == {
      'rollout/weight_sync_bytes': 0.0, 'timing_s/weight_sync': synced.secs}
  assert synced.secs > 0


@pytest.mark.parametrize('layout', [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4)])
@pytest.mark.parametrize('tensor', [1, 4])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_any_layout_becomes_the_engines(layout, tensor, dtype, params):
  mesh = meshes.make(**dict(zip(meshes.AXES, layout)))
  sync = weight_sync.WeightSync(mesh, AXES, tensor=tensor, dtype=dtype)
  assert dict(sync.mesh.shape) == dict(data=8 // tensor, fsdp=1, tensor=tensor)
  synced = sync(on(mesh, params))
  given = synced.weights
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(
      x, y.astype(jnp.dtype(dtype))), jax.device_get(given), params)
  kernel = given['layers']['gate']['kernel']
  assert kernel.sharding.shard_shape(kernel.shape) == (2, 32, 48 // tensor)
  size = sum(x.size for x in jax.tree.leaves(params)) * kernel.dtype.itemsize
  if (dtype, layout[1:], tensor) == ('float32', (1, 1), 1):
    assert synced.bytes == 0
  else:  # 8 / tensor copies; biases and norms are held whole by each device
    assert (size * 8 / tensor <= synced.bytes
            <= size * 8 / tensor * (1 + 0.1 * tensor))


def test_weights_from_a_host_are_taken_too(params):
  mesh = meshes.make(data=2, fsdp=4)
  given = weight_sync.WeightSync(mesh, AXES, tensor=2)(params).weights
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(given), params)


def test_the_donated_original_may_go(params):
  """A copy that was cast outlives the update that takes its original."""
  mesh = meshes.make(data=8)
  held = on(mesh, params)
  given = weight_sync.WeightSync(mesh, AXES, dtype='bfloat16')(held).weights
  jax.tree.map(lambda x: x.delete(), held)
  assert all(np.isfinite(x.astype(np.float32)).all()
             for x in jax.tree.leaves(jax.device_get(given)))


def test_copies_that_do_not_divide_the_devices_are_refused():
  with pytest.raises(ValueError, match='rollout.tensor must divide the 8'):
    weight_sync.WeightSync(meshes.make(), AXES, tensor=3)
