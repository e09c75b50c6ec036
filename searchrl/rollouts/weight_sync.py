# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Weight sync: converts the learner's weights to the rollout engine's layout.

A learner splits parameters over all devices and stacks its layers. An engine
needs them whole, or split over a few devices, in its own dtype and layer by
layer. One program does all of this, so that each byte is read and written once.
On TPUs a matrix is gathered in pieces that a chip holds beside its cores, and
the pieces are written where the engine reads them. (A matrix that is gathered
whole would be placed in main memory and be copied from there.) GPUs write to
main memory in any case. Their pieces are large, so that there are few of them.

All processes take part in a sync. Afterwards each samples on its own devices at
its own pace. If a model is too large for the devices of one process, all
processes sample in lockstep instead.

If other devices sample than train, the program runs on those that train. Each
process then copies its results from device to device.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from searchrl.models import lora
from searchrl.models.inference import engine_weights
from searchrl.runtime import dispatch
from searchrl.runtime import mesh as meshes
from searchrl.runtime import processes
from searchrl.runtime import progress

_PIECE = 8e6  # bytes per device: a matrix's gathered pieces are at most this
_LARGE = 256e6  # the same limit on GPUs
_SMALL = 1e6  # bytes per device: matrices up to this size are gathered whole
_ALIGNED = 128  # unit of a piece's length, so that it is whole tiles of a TPU


def spans_processes(mesh: Mesh, tensor: int, experts: int | None = None
                   ) -> bool:
  """Returns whether one copy of the weights is on devices of several processes.

  These processes then have to sample in lockstep.

  Args:
    mesh: Mesh of all processes.
    tensor: Number of devices that share one copy of the weights.
    experts: Number of such copies that share the experts of mixture-of-experts
      layers. None: as many as `runtime.mesh.expert_ways` says.

  Raises:
    ValueError: The size of the mesh is not a multiple of `tensor`.
  """
  copies(mesh.size, tensor)  # raises
  experts = experts or meshes.expert_ways(mesh, tensor)
  return any(len({device.process_index for device in sharing}) > 1
             for sharing in mesh.devices.reshape(-1, experts * tensor))


def copies(devices: int, tensor: int) -> int:
  """Returns the number of copies of the weights that `devices` devices have.

  Raises:
    ValueError: The number of devices is not a multiple of `tensor`, the number
      of devices that share a copy.
  """
  if devices % tensor:
    raise ValueError(
        f'rollout.tensor must divide the {devices} devices, but is {tensor}.')
  return devices // tensor


def check_slots(slots: int, copies: int) -> None:
  """Raises a ValueError unless the slots can be divided among the copies."""
  if slots % copies:
    raise ValueError(
        f'rollout.max_num_seqs must be a multiple of the {copies} copies '
        f'of the weights, but is {slots}.')


@dataclasses.dataclass(frozen=True)
class Synced:
  """Weights in the form that an engine takes, and the cost of the sync."""

  weights: Any  # parameters with the layers in a tuple
  bytes: int = 0  # bytes written on all devices
  secs: float = 0.0

  def metrics(self) -> dict[str, float]:
    """Returns the bytes and seconds of this sync as metrics."""
    return {'rollout/weight_sync_bytes': float(self.bytes),
            'timing_s/weight_sync': self.secs}


class WeightSync:
  """A function that copies the learner's params into the engine's weights.

  The params are on the mesh of all processes, with stacked layers. The weights
  are on the engine's devices, with a tuple of layers. Because they are copies,
  an update may reuse the memory of the params. Adapters beside the matrices
  (`lora.attach`) are merged into the copies, one layer after the other.

  Args:
    mesh: Mesh of all processes. It determines in how many ways engines split
      experts; see `runtime.mesh.expert_ways`.
    axes: Logical axes of the params, with stacked layers.
    layers: Number of layers.
    tensor: Number of devices that share one copy of the weights.
    dtype: Dtype of the copy.
    onto: Mesh of this process's devices that sample. None: those of `mesh`.

  Attributes:
    together: True if a copy spans processes, so that they are one engine.
    mesh: Mesh of the engine's devices: this process's, or all if `together`.

  Raises:
    ValueError: The number of devices is not a multiple of `tensor`, or a copy
      would span processes although other devices sample than train.
  """

  def __init__(self, mesh: Mesh, axes: Any, layers: int, *, tensor: int = 1,
               dtype: str = 'float32', onto: Mesh | None = None):
    # In the learner's order, so that one program can have both meshes.
    experts = meshes.expert_ways(mesh, tensor)
    if onto is not None:
      experts = math.gcd(experts, onto.size // tensor,
                         len(mesh.local_devices) // tensor)
    self.together = spans_processes(mesh, tensor, experts)
    if onto is not None and self.together:
      raise ValueError(
          'train.rollout_devices must be 0 where devices of several processes '
          f'share a copy of the weights, as by rollout.tensor={tensor}. Set it '
          'to 0, or lower rollout.tensor.')
    arranged = functools.partial(
        meshes.in_order, data=-1, expert=experts, tensor=tensor)
    whole = arranged(mesh.devices)
    self._source = whole if self.together else meshes.local(whole)
    self._shardings = meshes.shardings(whole, axes)
    self._replicated = meshes.sharding(whole, ())
    layered = engine_weights.unstacked_axes(axes, layers)
    target = meshes.shardings(whole, layered)
    self._move = dispatch.Ordered(
        _copier(dtype, self._replicated) if mesh.size == 1 else
        jax.jit(functools.partial(
            _moved, source=meshes.shardings(mesh, layered), target=target,
            dtype=dtype, pieces=_pieces_on(mesh.devices.flat[0].platform)),
                out_shardings=target), mesh)
    self.mesh = self._source if onto is None else arranged(onto.devices)
    self._is_whole = self._source is whole
    self._onto = onto and meshes.shardings(self.mesh, layered)

  def __call__(self, params: Any) -> Synced:
    """Returns the engine's weights, after waiting until they are copied."""
    start = time.perf_counter()
    with progress.phase('Copying the weights to the sampler'):
      weights = self._move(self._placed(params))
      written = sum(map(_bytes_of, jax.tree.leaves(weights)))
      if not self._is_whole:
        weights = jax.tree.map(self._mine, weights)
      if self._onto:
        weights = jax.device_put(weights, self._onto)
        written = processes.count() * sum(
            map(_bytes_of, jax.tree.leaves(weights)))
      jax.block_until_ready(weights)
    return Synced(weights, written, time.perf_counter() - start)

  def _placed(self, params: Any) -> Any:
    """Returns the params on the mesh's devices; copies what is elsewhere."""
    shardings = dict(jax.tree.leaves_with_path(self._shardings))
    return jax.tree.map_with_path(lambda path, leaf: _on_devices_of(
        leaf, shardings.get(path, self._replicated)), params)

  def _mine(self, leaf: Any) -> jax.Array:
    """Returns an array of this process's shards of `leaf`, without a copy."""
    return jax.make_array_from_single_device_arrays(
        leaf.shape, NamedSharding(self._source, leaf.sharding.spec),
        [shard.data for shard in leaf.addressable_shards])


def _pieces_on(platform: str) -> Callable[[float], int]:
  """Returns a function from a matrix's size in bytes to its number of pieces.

  A matrix is moved between devices piece by piece. Except on GPUs, it has at
  least 2 pieces, because a TPU would place the whole matrix in main memory if
  it were moved as a single piece.
  """
  if platform == 'gpu':
    return lambda size: math.ceil(size / _LARGE)
  return lambda size: max(2, math.ceil(size / _PIECE))


def _copier(dtype: str, sharding: NamedSharding) -> Callable[[Any], Any]:
  """Returns a function that copies params to the engine's form on one device.

  It casts them to `dtype`, and turns stacked layers into a tuple. It runs a
  small program for each module, because one program for all layers would
  compile for seconds.
  """
  copy = jax.jit(lambda x: jnp.array(x, dtype), out_shardings=sharding)

  @functools.partial(jax.jit, out_shardings=sharding)
  def take(leaves, i):
    leaves = lora.merged_matrix(jax.tree.map(lambda x: x[i], leaves), dtype)
    return jax.tree.map(lambda x: x.astype(dtype), leaves)

  def move(params):
    stacked = params['layers']
    layers = tuple(
        {name: take(leaves, np.int32(i)) for name, leaves in stacked.items()}
        for i in range(len(jax.tree.leaves(stacked)[0])))
    return jax.tree.map(copy, params | {'layers': ()}) | {'layers': layers}

  return move


def _moved(params: Any, *, source: Any, target: Any, dtype: str,
           pieces: Callable[[float], int]) -> Any:
  """Returns params in the form of the engine, with the engine's shardings.

  The layers are moved one after the other. All params are cast to `dtype`, and
  the stacked layers become a tuple of layers.

  Args:
    params: Parameters with stacked layers.
    source: Shardings of the params, with an entry for each layer.
    target: Shardings of the result, in the structure of `source`.
    dtype: Dtype of the result.
    pieces: Function from the bytes of a matrix to the number of pieces in which
      the matrix is moved.
  """
  move = functools.partial(_gathered, dtype=dtype, pieces=pieces)
  stacked = params['layers']
  layers: list[Any] = []
  for i, (here, there) in enumerate(zip(source['layers'], target['layers'])):
    if layers:  # starts after the previous one, else all are converted at once
      stacked, _ = jax.lax.optimization_barrier((stacked, layers[-1]))
    layer = jax.tree.map(lambda leaf, i=i: leaf[i], stacked)
    layer = {name: lora.merged_matrix(leaves, dtype)
             for name, leaves in layer.items()}
    layers.append(jax.tree.map(move, layer, here, there))
  return {name: jax.tree.map(move, tree, source[name], target[name])
          for name, tree in params.items() if name != 'layers'} | {
              'layers': tuple(layers)}


def _gathered(leaf: jax.Array, source: NamedSharding, target: NamedSharding, *,
              dtype: str, pieces: Callable[[float], int]) -> jax.Array:
  """Returns the leaf with another dtype and sharding.

  If this needs an exchange between devices, the leaf is cut along the axis that
  is split into the fewest parts, and is moved piece by piece.
  """
  before, after = _parts(source, leaf.shape), _parts(target, leaf.shape)
  written = math.prod(target.shard_shape(leaf.shape)) * np.dtype(dtype).itemsize
  if np.array_equal(before, after) or written <= _SMALL:
    return leaf.astype(dtype)
  parts = np.lcm(before, after)
  axis = int(np.argmin(parts))
  # Length of a device's part; all parts are cut alike.
  length = leaf.shape[axis] // parts[axis]
  step = math.ceil(length / pieces(written) / _ALIGNED) * _ALIGNED
  apart = leaf.reshape(*leaf.shape[:axis], parts[axis], length,
                       *leaf.shape[axis + 1:])
  whole = _put(jax.lax.empty(apart.shape, dtype), target, axis)
  for start in range(0, length, step):
    piece = jax.lax.slice_in_dim(
        apart, start, min(start + step, length), axis=axis + 1)
    piece, whole = jax.lax.optimization_barrier(  # after the previous piece
        (_put(piece, source, axis), whole))
    piece = piece.astype(dtype)
    for sharding in _route(before, after, target):
      piece = _put(piece, sharding, axis)
    whole = jax.lax.dynamic_update_slice_in_dim(whole, piece, start, axis + 1)
  return whole.reshape(leaf.shape)


def _route(before: np.ndarray, after: np.ndarray, target: NamedSharding
          ) -> list[NamedSharding]:
  """Returns the shardings that a matrix is given one after another.

  The last of them is `target`. `before` and `after` are the numbers of parts
  along each axis, before the first and after the last step. If `target` splits
  an axis into more parts than before, the devices that share a copy may
  exchange their parts first, and the copies exchange afterwards. In a single
  step, the compiler would gather the whole matrix on every device.
  """
  axis, copies = int(np.argmax(before)), target.mesh.shape['data']
  if (after <= before).all() or after[axis] > 1 or before[axis] % copies:
    return [target]
  spec = _full(target, before.size)
  spec[axis] = 'data'
  return [NamedSharding(target.mesh, PartitionSpec(*spec)), target]


def _put(piece: jax.Array, sharding: NamedSharding, axis: int) -> jax.Array:
  """Returns a piece of an array, split as `sharding` splits the array.

  The array's axis `axis` is two axes in the piece: a part's number, and the
  position in the part, which is not split.
  """
  spec = _full(sharding, piece.ndim - 1)
  spec.insert(axis + 1, None)
  return jax.lax.with_sharding_constraint(
      piece, NamedSharding(sharding.mesh, PartitionSpec(*spec)))


def _full(sharding: NamedSharding, axes: int) -> list[Any]:
  """Returns a sharding's partition spec, filled up with None to `axes` axes."""
  return [*sharding.spec, *[None] * (axes - len(sharding.spec))]


def _parts(sharding: NamedSharding, shape: tuple[int, ...]) -> np.ndarray:
  """Returns the number of parts into which a sharding splits each axis."""
  return np.floor_divide(shape, sharding.shard_shape(shape))


def _bytes_of(leaf: jax.Array) -> int:
  """Returns the bytes that an array takes on all devices together."""
  part = math.prod(leaf.sharding.shard_shape(leaf.shape))
  return part * leaf.dtype.itemsize * len(leaf.sharding.device_set)


def _on_devices_of(leaf, sharding) -> jax.Array:
  """Returns the leaf on the devices of a sharding; copies it only if needed."""
  if isinstance(leaf, jax.Array) and (
      leaf.sharding.device_set == sharding.device_set):
    return leaf
  return meshes.place(leaf, sharding)
