# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""mesh: sizes, rules and errors, on eight simulated devices."""

import importlib.util
import types

import jax
from jax.experimental import topologies
from jax.sharding import AxisType, PartitionSpec
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from searchrl.runtime import devices as devices_lib
from searchrl.runtime import mesh as mesh_lib

DEVICES = 8


def test_one_axis_takes_the_rest():
  mesh = mesh_lib.make(fsdp=2, tensor=2)
  assert dict(mesh.shape) == {'data': 2, 'fsdp': 2, 'tensor': 2}
  assert mesh.axis_types == (AxisType.Auto,) * 3
  mesh = mesh_lib.make(data=1, fsdp=-1)
  assert dict(mesh.shape) == {'data': 1, 'fsdp': 8, 'tensor': 1}
  mesh = mesh_lib.make(tensor=2, devices=jax.devices()[:2])
  assert dict(mesh.shape) == {'data': 1, 'fsdp': 1, 'tensor': 2}


@pytest.mark.parametrize('sizes, message', [
    (dict(data=3), 'multiply to the 8 devices, but data=3 x fsdp=1 x tensor=1'),
    (dict(tensor=3), 'the 8 devices, but fsdp=1 x tensor=3 makes 3'),
    (dict(fsdp=-1), 'at most one mesh axis may be -1, but data and fsdp are'),
    (dict(fsdp=0), 'mesh axis fsdp must be at least 1, .* but is 0'),
])
def test_sizes_that_do_not_fit_are_named(sizes, message):
  with pytest.raises(ValueError, match=message):
    mesh_lib.make(**sizes)


def test_processes_with_different_numbers_of_devices_are_refused():
  devices = lambda *processes: [
      types.SimpleNamespace(process_index=i, id=n)
      for n, i in enumerate(processes)]
  grouped = devices_lib.by_process(devices(1, 0, 1, 0))
  assert [x.id for x in grouped] == [1, 3, 0, 2]
  with pytest.raises(ValueError, match=r'1 \(process 0\), 2 \(process 1\)\.'):
    devices_lib.by_process(devices(0, 1, 1))


def test_hosts_of_gpus_have_whole_rows(monkeypatch):
  """jax.make_mesh refuses devices with several slice indices."""
  gpus = [types.SimpleNamespace(
      platform='gpu', process_index=n // 4, id=n, slice_index=n // 4)
          for n in range(8)]
  monkeypatch.setattr(jax, 'devices', lambda: gpus[::-1])
  monkeypatch.setattr(mesh_lib, 'Mesh', lambda devices, *_, **__: devices)
  made = mesh_lib.make(fsdp=2, tensor=2)
  assert made.shape == (2, 2, 2)
  assert [device.id for device in made.flat] == list(range(8))


@pytest.mark.long
@pytest.mark.skipif(
    not importlib.util.find_spec('libtpu'),
    reason="no libtpu: pip install 'jax[tpu]' to compile for TPUs")
def test_slices_of_tpus_have_whole_models(monkeypatch):
  for name, value in devices_lib._QUIET.items():
    monkeypatch.setenv(name, value)
  devices = topologies.get_topology_desc(
      platform='tpu', topology_name='v5e:4x4', num_slices=2).devices
  slices = np.vectorize(lambda device: device.slice_index)
  for sizes in (dict(fsdp=16), dict(fsdp=4, tensor=4), dict(data=1, fsdp=32)):
    found = slices(mesh_lib.make(**sizes, devices=devices).devices)
    assert (found.reshape(2, 16) == [[0], [1]]).all()
  with pytest.raises(ValueError, match='a multiple of the 2 slices .* tensor='
                     '32. Give tensor at most the chips of a slice, 16'):
    mesh_lib.make(tensor=32, devices=devices)
  some = devices[:16:2]  # chips of one slice, with others between them
  found = mesh_lib.make(fsdp=8, devices=some).devices
  assert [*found.flat] == some
  one = topologies.get_topology_desc(
      platform='tpu', topology_name='v6e:16x16').devices
  mesh = mesh_lib.make(fsdp=64, tensor=4, devices=one)  # axes of 16 are split
  assert dict(mesh_lib.torus(mesh).shape) == {
      'data': 1, 'fsdp0': 4, 'fsdp1': 16, 'tensor': 4}


def test_spec_follows_the_table():
  mesh = mesh_lib.make()
  spec = mesh_lib.spec(mesh, ('batch', 'length', None, 'vocab'))
  assert spec == PartitionSpec(('data', 'fsdp'), None, None, 'tensor')
  spec = mesh_lib.spec(mesh, ('layers', 'embed', 'mlp'))
  assert spec == PartitionSpec(None, 'fsdp', 'tensor')
  axes = 'layers', 'experts', 'embed', 'mlp'
  assert mesh_lib.spec(mesh, axes) == PartitionSpec(
      None, None, 'fsdp', 'tensor')
  mesh = mesh_lib.make(expert=2)
  assert dict(mesh.shape) == {'data': 4, 'fsdp': 1, 'expert': 2, 'tensor': 1}
  assert mesh_lib.spec(mesh, axes) == PartitionSpec(
      None, 'expert', 'fsdp', 'tensor')
  assert mesh_lib.spec(mesh, ('batch',)) == PartitionSpec(
      ('data', 'fsdp', 'expert'))
  with pytest.raises(ValueError, match="one of .*'batch'.* but is 'widht'"):
    mesh_lib.spec(mesh, ('widht',))


def test_every_mesh_axis_of_the_table_exists():
  targets = [t if isinstance(t, tuple) else (t,)
             for t in mesh_lib.RULES.values() if t is not None]
  assert {axis for target in targets for axis in target} == {
      *mesh_lib.AXES, 'sequence', 'expert'}


def test_shardings_keep_the_tree_even_with_optimizer_states():
  mesh = mesh_lib.make(fsdp=2, tensor=2)
  axes = {'wq': ('layers', 'embed', 'heads'), 'scale': ('embed',)}
  state = optax.ScaleByAdamState(count=(), mu=axes, nu=axes)
  tree = {'params': axes, 'optimizer': (optax.EmptyState(), state)}
  got = mesh_lib.shardings(mesh, tree)
  assert got['params']['wq'].spec == PartitionSpec(None, 'fsdp', 'tensor')
  assert got['optimizer'][1].count.is_fully_replicated
  assert got['optimizer'][1].nu['scale'].spec == PartitionSpec('fsdp')
  assert got['optimizer'][0] == optax.EmptyState()


def test_a_sharded_matmul_equals_the_whole_one():
  mesh = mesh_lib.make(data=2, fsdp=2, tensor=2)
  x = np.arange(8 * 4, dtype=np.float32).reshape(8, 4)
  w = np.arange(4 * 6, dtype=np.float32).reshape(4, 6)
  rows = mesh_lib.shard_batch(mesh, x)
  weights = jax.device_put(w, mesh_lib.sharding(mesh, ('embed', 'mlp')))
  out = jax.jit(jnp.matmul, out_shardings=mesh_lib.sharding(
      mesh, ('batch', 'mlp')))(rows, weights)
  np.testing.assert_array_equal(out, x @ w)  # integers: exact in any order
  assert out.addressable_shards[0].data.shape == (2, 3)


def test_check_divisible_names_dimension_axis_and_legal_sizes():
  mesh = mesh_lib.make(data=2, tensor=4)
  mesh_lib.check_divisible(mesh, (3, 8, 64), (None, 'heads', 'embed'), 'wq')
  with pytest.raises(ValueError, match=(
      r'layers/wk must split evenly, but its dimension 1 \(kv_heads\) is 2 and '
      r'the mesh has tensor=4. Make the mesh with tensor one of \[1, 2\]')):
    mesh_lib.check_divisible(
        mesh, (3, 2, 64), (None, 'kv_heads', 'embed'), 'layers/wk')
  with pytest.raises(ValueError, match='data x fsdp=2'):
    mesh_lib.check_divisible(mesh, (7,), ('batch',), 'rewards')
  with pytest.raises(ValueError, match='one logical axis for each dimension'):
    mesh_lib.check_divisible(mesh, (7, 8), ('batch',), 'tokens')


def test_shard_batch_splits_rows_and_keeps_the_rest():
  mesh = mesh_lib.make(fsdp=2, tensor=2)
  batch = {'tokens': np.arange(24, dtype=np.int32).reshape(8, 3),
           'rewards': np.ones(8, np.float32), 'values': None}
  got = mesh_lib.shard_batch(mesh, batch)
  assert got['values'] is None
  assert got['tokens'].sharding.spec == PartitionSpec(('data', 'fsdp'), None)
  assert got['tokens'].addressable_shards[0].data.shape == (2, 3)
  np.testing.assert_array_equal(got['tokens'], batch['tokens'])


@pytest.mark.parametrize('rows, message', [
    (np.zeros((6, 3)), r"batch\['x'\].* multiple of data x fsdp=4, but its "
                       r'shape is \(6, 3\). Pad it with empty rows to 8'),
    (np.float32(1), r'shape is \(\)'),
])
def test_rows_that_do_not_split_are_named(rows, message):
  with pytest.raises(ValueError, match=message):
    mesh_lib.shard_batch(mesh_lib.make(fsdp=2, tensor=2), {'x': rows})


def test_place_puts_a_host_array_where_it_belongs():
  mesh = mesh_lib.make(data=2, fsdp=2, tensor=2)
  x = np.arange(24, dtype=np.int32).reshape(4, 6)
  where = mesh_lib.sharding(mesh, ('embed', 'mlp'))
  got = mesh_lib.place(x, where)
  assert got.sharding == where and got.dtype == x.dtype
  np.testing.assert_array_equal(got, x)
  scalar = mesh_lib.place(np.int32(7), mesh_lib.sharding(mesh, ()))
  assert scalar.is_fully_replicated and int(scalar) == 7


@pytest.mark.parametrize('source', [
    'host', 'one device', 'the same mesh', 'another mesh'])
def test_a_copy_outlives_what_it_was_made_of(source):
  x = np.arange(24, dtype=np.float32).reshape(4, 6)
  mesh = mesh_lib.make(fsdp=2, tensor=4)
  where = mesh_lib.sharding(mesh, ('embed', None))
  there = {
      'host': lambda: x.copy(),
      'one device': lambda: jnp.asarray(x),
      'the same mesh': lambda: jax.device_put(x, where),
      'another mesh': lambda: jax.device_put(x, mesh_lib.sharding(
          mesh_lib.make(tensor=2), (None, 'mlp'))),
  }[source]()
  got = mesh_lib.copied(there, where)
  if source == 'host':
    there[:] = 0
  else:
    np.testing.assert_array_equal(there, x)  # kept, and not given away
    there.delete()
  assert got.sharding == where
  np.testing.assert_array_equal(got, x)


def test_a_resharded_array_and_its_gradient_are_split_as_named():
  mesh = mesh_lib.make(data=1, fsdp=4, tensor=2)
  x = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)
  old, new = ('embed', 'vocab'), (None, 'scored')
  moved = lambda x: mesh_lib.resharded(mesh, x, old, new)
  given = mesh_lib.place(x, mesh_lib.sharding(mesh, old))
  y = jax.jit(moved)(given)
  assert y.sharding == mesh_lib.sharding(mesh, new)
  assert y.addressable_shards[0].data.shape == (8, 2)
  np.testing.assert_array_equal(y, x)
  gradient = jax.jit(jax.grad(lambda x: (moved(x) ** 2).sum()))(given)
  assert gradient.sharding == given.sharding
  np.testing.assert_array_equal(gradient, 2 * x)


LINE = [(0, 0), (0, 1), (0, 2), (0, 3)]
PLANE = [(x, y) for x in range(2) for y in range(4)]
CUBE = [(x, y, z) for x in range(2) for y in range(3) for z in range(2)]
RING = [(0, 0), (0, 1), (1, 1), (1, 0)]


@pytest.mark.parametrize('places, shape', [
    (LINE, (4,)), (PLANE, (2, 4)), (CUBE, (2, 3, 2)), (RING, ()),
    ([(x, y, 0) for y in range(4) for x in range(2)], (4, 2)),
    (PLANE[::-1] + [(3, 3)] * 8, ()), ([*LINE, *RING], ()),
    ([(0, 0)], ()), ([()] * 4, ())])
def test_a_grid_has_straight_lines(places, shape):
  assert mesh_lib.grid(places) == shape


def test_the_last_devices_of_each_process_sample(monkeypatch):
  devices = [types.SimpleNamespace(platform='gpu', process_index=n // 4, id=n)
             for n in range(12)]
  monkeypatch.setattr(mesh_lib, 'all_devices', lambda: devices)
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  monkeypatch.setattr(mesh_lib, 'Mesh', lambda devices, *_, **__: devices)
  ids = lambda mesh: np.vectorize(lambda device: device.id)(mesh).tolist()
  trains, samples = mesh_lib.divided(2, 2, fsdp=2)
  assert ids(trains) == [[[0], [1]], [[4], [5]], [[8], [9]]]
  assert ids(samples) == [[[6, 7]]]
  with pytest.raises(ValueError, match="of a process's 4 devices, .* but is 3"):
    mesh_lib.divided(3, 2)


def chips(places, axis=1, beside=1):
  """A mesh's devices along an axis, `beside` of them at each place."""
  devices = [[types.SimpleNamespace(coords=place) for _ in range(beside)]
             for place in places]
  return types.SimpleNamespace(devices=np.array(devices).reshape(
      [1, len(places), beside] if axis == 1 else [len(places), 1, beside]))


def test_a_torus_has_an_axis_for_each_of_the_chips(monkeypatch):
  here = mesh_lib.make(fsdp=8)
  monkeypatch.setattr(mesh_lib, 'Mesh', lambda devices, names, **_: (
      devices.shape, names))
  names = 'data', 'fsdp0', 'fsdp1', 'tensor'
  of = mesh_lib.torus
  assert of(chips(PLANE, beside=2), 4) == ((1, 2, 4, 2), names)
  assert of(chips(PLANE), 8) is None  # no more than 8
  assert of(chips(RING * 10)) is None  # of 40, but they are no grid
  assert of(chips([(x, y) for x in range(8) for y in range(8)])) == (
      (1, 8, 8, 1), names)
  assert of(chips(LINE), 2) is None and of(chips(PLANE, axis=0), 0) is None
  assert of(here, 0) is None  # no coordinates


def test_gradients_summed_by_axis_are_the_same():
  mesh = mesh_lib.make(fsdp=4, tensor=2)
  torus = mesh_lib.Mesh(mesh.devices.reshape(1, 2, 2, 2), (
      'data', 'fsdp0', 'fsdp1', 'tensor'), axis_types=(AxisType.Auto,) * 4)
  axes = {'up': ('embed', 'mlp'), 'down': ('mlp', 'embed'), 'norm': ('embed',)}
  rng = np.random.default_rng(0)
  shapes = {'up': (8, 16), 'down': (16, 8), 'norm': (8,)}
  shardings = mesh_lib.shardings(mesh, axes)
  params = {name: mesh_lib.place(rng.integers(-3, 4, shape).astype(np.float32),
                                 shardings[name])
            for name, shape in shapes.items()}  # whole: sums have no rounding
  x = mesh_lib.shard_batch(mesh, rng.integers(-3, 4, (8, 8)).astype(np.float32))

  def loss(params, used=lambda tree: tree):
    params = used(params)
    return (x * params['norm'] @ params['up'] @ params['down']).sum()

  split = jax.jit(jax.grad(lambda params: loss(
      params, lambda tree: mesh_lib.summed_by_axis(torus, tree, axes))))
  gradient, expected = split(params), jax.jit(jax.grad(loss))(params)
  jax.tree.map(np.testing.assert_array_equal, gradient, expected)
  assert jax.tree.map(lambda x, where: x.sharding.is_equivalent_to(
      where, x.ndim), gradient, shardings) == dict.fromkeys(axes, True)


def test_a_process_alone_has_the_whole_mesh():
  mesh = mesh_lib.make(fsdp=2, tensor=2)
  assert mesh_lib.local(mesh) is mesh


@pytest.mark.parametrize('owners, fits', [
    ([[0, 0, 1, 1]], True), ([[0, 0], [1, 1]], True),
    ([[0, 1], [0, 1]], True), ([[0, 1, 0, 1]], True),
    ([[0, 1], [1, 0]], False), ([[0, 0], [0, 1]], False)])
def test_devices_of_a_process_must_be_a_block(monkeypatch, owners, fits):
  devices = np.array([[[types.SimpleNamespace(process_index=i)]
                       for i in row] for row in owners])
  mesh = types.SimpleNamespace(
      devices=devices, shape=dict(zip(mesh_lib.AXES, devices.shape)))
  monkeypatch.setattr(mesh_lib, 'Mesh', lambda block, *_, **__: block)
  if fits:
    block = mesh_lib.local(mesh)
    assert {device.process_index for device in block.flat} == {0}
    assert block.size == np.sum(np.array(owners) == 0)
  else:
    with pytest.raises(ValueError, match=(
        'form a block of the mesh .* of process 0 do not. Make tensor')):
      mesh_lib.local(mesh)
