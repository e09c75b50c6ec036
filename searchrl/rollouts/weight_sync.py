# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Weight sync: the learner's weights in, the rollout engine's out.

A learner splits parameters over all devices and stacks its layers; an engine
wants them whole, or split over a few devices, in its own dtype and layer by
layer. One program does it all, so that each byte is read and written once.
Processes meet here, and then each samples on its own devices at its own pace;
unless a model is too large for the devices of one process: then all sample in
lockstep.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from searchrl.models.inference import slots
from searchrl.runtime import mesh as meshes


def spans_processes(mesh: Mesh, tensor: int) -> bool:
  """Whether the devices that share a copy belong to several processes.

  Args:
    mesh: of all processes.
    tensor: devices that share one copy of the weights.

  Raises:
    ValueError: the size of the mesh is no multiple of `tensor`.
  """
  if mesh.size % tensor:
    raise ValueError(
        f'rollout.tensor must divide the {mesh.size} devices, but is {tensor}.')
  return any(len({device.process_index for device in sharing}) > 1
             for sharing in mesh.devices.reshape(-1, tensor))


@dataclasses.dataclass(frozen=True)
class Synced:
  """Weights as an engine takes them, and what the sync cost."""

  weights: Any  # layers in a tuple
  bytes: int = 0  # written on all devices
  secs: float = 0.0

  def metrics(self) -> dict[str, float]:
    return {'rollout/weight_sync_bytes': float(self.bytes),
            'timing_s/weight_sync': self.secs}


class WeightSync:
  """params on all processes' mesh -> the same for this process's engine.

  They are copies, so that an update may reuse the memory of the params.

  Args:
    mesh: of all processes.
    axes: the params' logical axes; layers stacked.
    layers: how many.
    tensor: devices that share one copy of the weights.
    dtype: of the copy.

  Attributes:
    together: whether a copy spans processes, so that they are one engine.
    mesh: of the engine's devices: this process's, or all if `together`.

  Raises:
    ValueError: the copies do not divide the devices.
  """

  def __init__(self, mesh: Mesh, axes: Any, layers: int, *, tensor: int = 1,
               dtype: str = 'float32'):
    self.together = spans_processes(mesh, tensor)
    # In the learner's order, so that one program can have both meshes.
    whole = meshes.in_order(mesh.devices.reshape(-1, 1, tensor))
    self.mesh = whole if self.together else meshes.local(whole)
    self._shardings = meshes.shardings(whole, axes)
    self._move = jax.jit(
        functools.partial(slots.unstacked, dtype=dtype),
        out_shardings=meshes.shardings(
            whole, slots.unstacked_axes(axes, layers)))
    self._is_whole = self.mesh is whole

  def __call__(self, params: Any) -> Synced:
    start = time.perf_counter()
    weights = jax.block_until_ready(self._move(
        jax.tree.map(_on_devices_of, params, self._shardings)))
    secs = time.perf_counter() - start
    written = sum(map(_bytes_of, jax.tree.leaves(weights)))
    if not self._is_whole:
      weights = jax.tree.map(self._mine, weights)
    return Synced(weights, written, secs)

  def _mine(self, leaf: jax.Array) -> jax.Array:
    """The same buffers, as an array of this process's devices alone."""
    return jax.make_array_from_single_device_arrays(
        leaf.shape, NamedSharding(self.mesh, leaf.sharding.spec),
        [shard.data for shard in leaf.addressable_shards])


def _bytes_of(leaf: jax.Array) -> int:
  """Of its parts and copies, on all devices."""
  part = math.prod(leaf.sharding.shard_shape(leaf.shape))
  return part * leaf.dtype.itemsize * len(leaf.sharding.device_set)


def _on_devices_of(leaf, sharding) -> jax.Array:
  """The leaf itself, or a copy if it is on a host or on other devices."""
  if isinstance(leaf, jax.Array) and (
      leaf.sharding.device_set == sharding.device_set):
    return leaf
  return meshes.place(leaf, sharding)
