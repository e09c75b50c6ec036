# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Device meshes and shardings: from logical axes to axes of a mesh.

A logical axis names a dimension by its meaning, such as 'batch' or 'heads'.
`RULES` alone says which mesh axes split it; other code names only logical axes.
A mesh has the axes 'data', 'fsdp' and 'tensor'. It has 'sequence' only if it
splits the positions of rows, and 'expert' only if it splits experts. All are
`Auto`: the compiler propagates shardings from the arguments. A mesh is passed
as an argument or set with `jax.set_mesh`, not used in a `with` statement.
"""

from collections.abc import Container, Sequence
import functools
import math
from typing import Any

import jax
from jax.experimental import mesh_utils
import jax.numpy as jnp
from jax.sharding import (AbstractMesh, AxisType, Mesh, NamedSharding,
                          PartitionSpec)
import numpy as np

from searchrl.runtime import devices as devices_lib
from searchrl.runtime import dispatch

AXES = ('data', 'fsdp', 'tensor')

RULES = {
    # Rows. Devices along 'fsdp' and 'expert' have different rows, too.
    'batch': ('data', 'fsdp', 'expert'),
    'length': 'sequence',  # positions of a row
    'layers': None,  # the stack of layers, axis 0 of their parameters
    # Residual width, along which FSDP splits weights.
    'embed': ('fsdp', 'sequence'),
    'heads': 'tensor',  # query heads
    'kv_heads': 'tensor',
    'attended': ('tensor', 'sequence'),  # heads, in attention over whole rows
    'head_dim': None,
    'mlp': 'tensor',  # hidden width of the feed-forward layer
    'experts': 'expert',
    'vocab': 'tensor',
    # Vocabulary, where logits are computed.
    'scored': ('tensor', 'fsdp', 'sequence'),
}

Axes = tuple[str | None, ...]  # for each dimension, its logical axis or None


def all_devices() -> list[Any]:
  """Returns the devices of all processes, grouped by process."""
  return devices_lib.by_process(jax.devices())


def make(
    *,
    data: int = -1, fsdp: int = 1, tensor: int = 1, expert: int = 1,
    sequence: int = 1,
    devices: Sequence[Any] | None = None) -> Mesh:
  """Makes a mesh of devices. One size may be -1, for all remaining devices.

  Args:
    data: Size of the axis that splits rows. Parameters are replicated along it.
    fsdp: Size of the axis that splits rows and parameters.
    tensor: Size of the axis that splits heads, feed-forward and vocabulary.
    expert: Size of the axis that splits rows and experts.
    sequence: Size of the axis that splits a row's positions, and parameters.
    devices: Devices of the mesh. None: all devices, grouped by process.

  Raises:
    ValueError: The sizes do not multiply to the number of devices, or 'tensor',
      'expert' or 'sequence' would cross the slow network between TPU slices.
  """
  devices = all_devices() if devices is None else devices
  sizes = _fill(_sizes(data=data, fsdp=fsdp, sequence=sequence, expert=expert,
                       tensor=tensor), len(devices))
  data, fsdp, *others = sizes.values()
  arranged = _arranged(devices, data, fsdp, math.prod(others))
  return in_order(arranged, **sizes)


def divided(rollout_devices: int, copy: int, **sizes: Any
           ) -> tuple[Mesh, Mesh]:
  """Returns two meshes: one that trains, and one on which this process samples.

  Args:
    rollout_devices: Number of devices of each process, its last ones, that only
      sample. 0: both meshes are the same mesh of all devices.
    copy: Number of sampling devices over which each copy of weights is split.
    **sizes: Sizes of the axes of the mesh that trains; arguments of `make`.

  Raises:
    ValueError: The rest of the devices cannot train; see `trains`.
  """
  if not rollout_devices:
    mesh = make(**sizes)
    return mesh, mesh
  devices = all_devices()
  mine = [x for x in devices if x.process_index == jax.process_index()]
  count = trains(len(mine), rollout_devices, copy)
  training = [x for i, x in enumerate(devices) if i % len(mine) < count]
  return make(**sizes, devices=training), make(
      tensor=copy, devices=mine[count:])


def trains(count: int, rollout_devices: int, copy: int) -> int:
  """Returns how many of a process's devices train: `count` - `rollout_devices`.

  Raises:
    ValueError: `rollout_devices` is not 0, and the rest is below 1 or not a
      multiple of `copy`, the number of sampling devices per copy of weights.
  """
  rest = count - rollout_devices
  if rollout_devices and (rest < 1 or rest % copy):
    raise ValueError(
        f"train.rollout_devices must leave for training, of a process's {count}"
        f' devices, at least 1 and a multiple of rollout.tensor={copy}, but is '
        f'{rollout_devices}. Choose another number, or 0, so that all devices '
        'do both.')
  return rest


def in_order(devices: Any, **sizes: int) -> Mesh:
  """Returns a mesh of devices in the given order; `sizes` are as in `make`."""
  sizes = _sizes(**sizes)
  return Mesh(np.asarray(devices).reshape(*sizes.values()), tuple(sizes),
              axis_types=(AxisType.Auto,) * len(sizes))


def abstract(count: int, **sizes: int) -> AbstractMesh:
  """Makes a mesh like `make`, without real devices, to compute shapes."""
  sizes = _fill(_sizes(**sizes), count)
  return AbstractMesh(tuple(sizes.values()), tuple(sizes),
                      axis_types=(AxisType.Auto,) * len(sizes))


def spec(mesh: Mesh, logical_axes: Axes) -> PartitionSpec:
  """Returns the PartitionSpec of an array with these logical axes."""
  return PartitionSpec(*(_mesh_axes(mesh.shape, axis) for axis in logical_axes))


def sharding(mesh: Mesh, logical_axes: Axes) -> NamedSharding:
  """Returns the sharding of an array by its logical axes; `()`: replicated."""
  return NamedSharding(mesh, spec(mesh, logical_axes))


def ways(mesh: Mesh | AbstractMesh, axis: str) -> int:
  """Returns the number of parts into which a logical axis is split."""
  return _ways(mesh, axis)[1]


def shardings(mesh: Mesh, tree_of_logical_axes: Any) -> Any:
  """Returns the tree with a sharding instead of each tuple of logical axes."""
  return jax.tree.map(
      lambda axes: sharding(mesh, axes), tree_of_logical_axes, is_leaf=_is_axes)


def check_divisible(mesh: Mesh, shape: Sequence[int], logical_axes: Axes,
                    name: str) -> None:
  """Raises a ValueError unless the mesh splits every dimension evenly.

  `name` is what the message calls the array, such as 'layers/wq'.
  """
  if len(shape) != len(logical_axes):
    raise ValueError(
        f'{name} needs one logical axis for each dimension, but its shape is '
        f'{tuple(shape)} and its axes are {logical_axes}. Use None for a '
        'dimension that stays whole.')
  for i, (dimension, axis) in enumerate(zip(shape, logical_axes)):
    names, ways = _ways(mesh, axis)
    if dimension % ways:
      legal = [n for n in range(1, mesh.size + 1) if dimension % n == 0]
      raise ValueError(
          f'{name} must split evenly, but its dimension {i} ({axis}) is '
          f'{dimension} and the mesh has {names}={ways}. Make the mesh with '
          f'{names} one of {legal}.')


def shard_batch(mesh: Mesh, tree: Any, axis: int = 0) -> Any:
  """Returns host arrays put onto the mesh, with rows split over its devices.

  Every process passes the same arrays, which have all rows, and keeps its own
  rows. Dimension `axis` has the B rows: 0 for arrays [B, ...], 1 for arrays
  [M, B, ...] that stack M batches.

  Raises:
    ValueError: B is not a multiple of the number of batch shards.
  """
  names, ways = _ways(mesh, 'batch')

  def put(path, x):
    x = np.asarray(x)
    if x.ndim <= axis or x.shape[axis] % ways:
      rows = x.shape[axis] if x.ndim > axis else 0
      raise ValueError(
          f'batch{jax.tree_util.keystr(path)} must have a dimension {axis} '
          f'that is a multiple of {names}={ways}, but its shape is {x.shape}. '
          f'Pad it with empty rows to {-(-max(rows, 1) // ways) * ways}.')
    axes = [None] * x.ndim
    axes[axis] = 'batch'
    return place(x, sharding(mesh, tuple(axes)))

  return jax.tree_util.tree_map_with_path(put, tree)


def place(x: Any, sharding: jax.sharding.Sharding) -> jax.Array:
  """Returns a host array on devices. It must be equal on all processes."""
  x = np.asarray(x)
  if sharding.is_fully_addressable:
    return jax.device_put(x, sharding)
  return jax.make_array_from_callback(
      x.shape, sharding, lambda index: x[index])


def copied(x: Any, sharding: NamedSharding, dtype: Any = None) -> jax.Array:
  """Returns a copy, with a given sharding, of an array on a host or any mesh.

  The copy does not pass through the host if x is on the sharding's devices. If
  no dtype is given, the copy has the dtype of x.
  """
  if isinstance(x, jax.Array) and (
      x.sharding.device_set == sharding.device_set):
    return dispatch.Ordered(jax.jit(lambda x: jnp.array(x, dtype, copy=True),
                                    out_shardings=sharding), sharding.mesh)(x)
  return place(np.array(x, dtype), sharding)


def resharded(mesh: Mesh, x: jax.Array, old: Axes, new: Axes) -> jax.Array:
  """Returns x split by the logical axes `new`, for use in a jitted function.

  `old` has the logical axes by which x is split so far. Without `old`, the
  compiler might split x by `new` at an earlier point. The gradient is resharded
  from `new` to `old`. If `new` splits x unevenly, over several mesh axes, the
  compiler may gather all of x first.
  """
  for axes in (old, new):
    x = jax.lax.with_sharding_constraint(x, sharding(mesh, axes))
  return x


def bytes_of(tree: Any) -> float:
  """Returns the bytes per device of arrays with shardings."""
  return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
             for x in jax.tree.leaves(tree))


def expert_ways(mesh: Mesh | AbstractMesh, tensor: int) -> int:
  """Returns the number of parts into which samplers on a mesh split experts.

  It is the greatest common divisor of the size of the mesh's axis 'expert' and
  the number of weight copies, each of which is split over `tensor` devices.
  """
  return math.gcd(mesh.shape.get('expert', 1), mesh.size // tensor)


def torus(mesh: Mesh, more_than: int = 32) -> Mesh | None:
  """Returns the mesh with 'fsdp' divided into the axes of a torus of chips.

  Its axes are 'data', 'fsdp0', 'fsdp1', ..., 'tensor'. The devices and their
  order stay the same. Returns None if the devices have no coordinates, or if
  the mesh splits experts or positions. It also returns None if 'fsdp' does not
  run along the torus's axes, runs along only one of them, spans several slices,
  or has at most `more_than` devices. Up to the default of 32 devices, a TPU's
  compiler uses one ring.
  """
  if mesh.devices.ndim > len(AXES):
    return None
  data, fsdp, tensor = mesh.devices.shape
  chips = list(mesh.devices[0, :, 0])
  sizes = grid([getattr(chip, 'coords', ()) for chip in chips])
  if len(sizes) < 2 or fsdp <= more_than or _slices(chips) > 1:
    return None
  names = 'data', *(f'fsdp{i}' for i in range(len(sizes))), 'tensor'
  return Mesh(mesh.devices.reshape(data, *sizes, tensor), names,
              axis_types=(AxisType.Auto,) * len(names))


def grid(places: Sequence[Sequence[int]]) -> tuple[int, ...]:
  """Returns the shape of the grid that coordinates form; () if they form none.

  They must be in row-major order: [(0, 0), (0, 1), (1, 0), (1, 1)] -> (2, 2).
  A single point also gives ().
  """
  if len(places) == 1:
    return ()
  straight = lambda line: sum(len(set(x)) > 1 for x in zip(*line)) == 1
  for length in range(len(places), 1, -1):
    if len(places) % length == 0 and all(
        straight(places[i:i + length]) for i in range(0, len(places), length)):
      shape = *grid(places[::length]), length
      return shape if math.prod(shape) == len(places) else ()
  return ()


def summed_by_axis(torus: Mesh, tree: Any, axes: Any) -> Any:
  """Returns the same arrays, with gradients that are summed axis by axis.

  It is for use in a jitted function. A device that has a part of an array needs
  only this part of the summed gradient. Over a torus of many chips, the
  compiler would sum the full gradient on every device, which sends twice as
  much. Sums along one axis after the other send only parts.

  Args:
    torus: Mesh made by `torus`.
    tree: Tree of arrays, split by `axes`.
    axes: Tree with a tuple of logical axes for each array.
  """
  names = [name for name in torus.axis_names if name.startswith('fsdp')]

  @jax.custom_vjp
  def same(tree):
    return tree

  def step(gradient, logical, count):
    split = lambda axis: tuple(names[:count]) if axis == 'fsdp' else axis
    return jax.lax.with_sharding_constraint(gradient, NamedSharding(
        torus, PartitionSpec(*(
            split(_mesh_axes(AXES, axis)) for axis in logical))))

  def backward(_, gradients):
    for count in range(1, len(names) + 1):
      gradients = jax.tree.map(functools.partial(step, count=count),
                               gradients, axes)
    return gradients,

  same.defvjp(lambda tree: (tree, None), backward)
  return same(tree)


def local(mesh: Mesh) -> Mesh:
  """Returns the part of a mesh that has this process's devices.

  Raises:
    ValueError: This part is not a block of the mesh.
  """
  mine = np.vectorize(
      lambda device: device.process_index == jax.process_index())(mesh.devices)
  if mine.all():
    return mesh
  indices = [np.unique(along) for along in np.nonzero(mine)]
  block = mesh.devices[np.ix_(*indices)]
  if block.size != mine.sum():
    raise ValueError(
        "a process's devices must form a block of the mesh "
        f'{dict(mesh.shape)}, but those of process {jax.process_index()} do '
        'not. Make tensor, or fsdp * tensor, the devices of a process or a '
        'divisor of them.')
  return in_order(block, **dict(zip(mesh.shape, block.shape)))


def _arranged(devices: Sequence[Any], data: int, fsdp: int, tensor: int
              ) -> np.ndarray:
  """Arranges devices as [data, fsdp, tensor]; later axes get faster links.

  jax.make_mesh is not used, because it refuses the GPUs of several hosts and
  does not split a torus axis of a TPU among several mesh axes.
  """
  slices = _slices(devices)
  if devices[0].platform != 'tpu' or slices == 1 and _have_holes(devices):
    return np.reshape(devices, (data, fsdp, tensor))
  if slices == 1:
    return mesh_utils.create_device_mesh(
        (data, fsdp, tensor), devices, allow_split_physical_axes=True)
  outer = math.gcd(data, slices), slices // math.gcd(data, slices), 1
  if fsdp % outer[1]:
    raise ValueError(
        f'data * fsdp must be a multiple of the {slices} slices of TPUs, so '
        f'that each slice has whole models, but data={data}, fsdp={fsdp} and '
        f'tensor={tensor}. Give tensor at most the chips of a slice, '
        f'{len(devices) // slices}, or start a run on each slice.')
  return mesh_utils.create_hybrid_device_mesh(
      (data // outer[0], fsdp // outer[1], tensor), outer, devices,
      allow_split_physical_axes=True)


def _have_holes(devices: Sequence[Any]) -> bool:
  """Returns whether TPU chips leave places free in the box around them."""
  places = np.array([(*chip.coords, chip.core_on_chip) for chip in devices])
  return math.prod(np.ptp(places, axis=0) + 1) != len(devices)


def _slices(devices: Sequence[Any]) -> int:
  """Returns the number of device groups that a slow network separates."""
  return len({getattr(device, 'slice_index', 0) for device in devices})


def _fill(sizes: dict[str, int], count: int) -> dict[str, int]:
  """Returns the axis sizes with -1 replaced, so that their product is `count`.

  Raises:
    ValueError: The sizes do not multiply to `count` devices.
  """
  for axis, size in sizes.items():
    if size < 1 and size != -1:
      raise ValueError(
          f'mesh axis {axis} must be at least 1, or -1 for the rest of the '
          f'devices, but is {size}.')
  free = [axis for axis, size in sizes.items() if size == -1]
  if len(free) > 1:
    raise ValueError(
        f'at most one mesh axis may be -1, but {" and ".join(free)} are. Give '
        f'all but one a size; there are {count} devices.')
  product = math.prod(size for size in sizes.values() if size != -1)
  if count % product or not free and product != count:
    shown = ' x '.join(f'{a}={n}' for a, n in sizes.items() if n != -1)
    raise ValueError(
        f'mesh axes must multiply to the {count} devices, but {shown} makes '
        f'{product}. Set one of them to -1, which takes the rest, and the '
        'others to divisors of the number of devices.')
  return {a: count // product if n == -1 else n for a, n in sizes.items()}


def _sizes(data: int = 1, fsdp: int = 1, sequence: int = 1, expert: int = 1,
           tensor: int = 1) -> dict[str, int]:
  """Returns the sizes of the axes that a mesh has, in their order."""
  optional = {'sequence': sequence, 'expert': expert}
  optional = {axis: size for axis, size in optional.items() if size != 1}
  return {'data': data, 'fsdp': fsdp, **optional, 'tensor': tensor}


def _mesh_axes(present: Container[str], axis: str | None
              ) -> str | tuple[str, ...] | None:
  """Returns the present mesh axes that split a logical axis."""
  if axis is None:
    return None
  if axis not in RULES:
    raise ValueError(
        f'a logical axis must be None or one of {sorted(RULES)}, but is '
        f'{axis!r}. Add a line to mesh.RULES for a new one.')
  names = RULES[axis]
  if isinstance(names, tuple):
    some = tuple(name for name in names if name in present)
    return some[0] if len(some) == 1 else some
  return names if names in present else None


def _ways(mesh: Mesh | AbstractMesh, axis: str | None) -> tuple[str, int]:
  """Returns a logical axis's mesh axes as 'data x fsdp', and their product."""
  axes = _mesh_axes(mesh.shape, axis) or ()
  axes = (axes,) if isinstance(axes, str) else axes
  return ' x '.join(axes), math.prod(mesh.shape[a] for a in axes)


def _is_axes(node: Any) -> bool:
  """Returns whether a node is a plain tuple of names, and not a NamedTuple."""
  return type(node) is tuple and all(
      axis is None or isinstance(axis, str) for axis in node)
