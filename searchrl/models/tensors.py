# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Safetensors: loads params leaf by leaf onto devices, and writes them.

`sources` names the tensors of each leaf. All headers are checked first, so that
an incomplete folder raises an error before any value is loaded. Then each
device gets its slice of each leaf, and only this slice is read. Pickle is never
read.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import json
import math
import pathlib
import re
from typing import Any

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np
import safetensors

from searchrl.models.transformer import Axes, Params

ShardingOf = Callable[[Axes], jax.sharding.Sharding]

INDEX = 'model.safetensors.index.json'
_READABLE = ('F64', 'F32', 'F16', 'BF16')
# Last part of a tensor's name, for each kind of leaf.
_ENDS = {'kernel': 'weight', 'scale': 'weight', 'embedding': 'weight',
         'bias': 'bias'}
_WRITABLE = {'float32': 'F32', 'bfloat16': 'BF16'}


@dataclasses.dataclass(frozen=True)
class Source:
  """Names of the tensors in the files that make up one leaf of the params.

  A leaf is one array of the params. The files have one tensor for it, or one
  per layer, or one per layer and expert, which are stacked on its first axes.
  """

  name: str  # name of a tensor, with {} for the layer and for the expert
  counts: tuple[int, ...] = ()  # (), (layers,) or (layers, experts)
  transposed: bool = False  # True if the file holds our matrix's transpose

  @property
  def parts(self) -> tuple[str, ...]:
    """Names of the leaf's tensors in the files, by layer and then by expert."""
    return tuple(self.name.format(*index) for index in np.ndindex(self.counts))

  def flip(self, items: Sequence[Any]) -> tuple[Any, ...]:
    """Returns items, one per axis, reversed if the file has the transpose."""
    return tuple(items)[::-1] if self.transposed else tuple(items)


class Folder:
  """The safetensors files of a folder. `read` reads slices of their tensors.

  Only the headers are read when a Folder is made.

  Args:
    path: Path of the folder.
    rename: Function from a tensor's name in a file to our name, or to None if
      the tensor is ignored.

  Attributes:
    path: Path of the folder.
    shapes: Shape of each tensor, by our name.

  Raises:
    FileNotFoundError: The folder has no safetensors, or lacks a file that its
      index names.
    ValueError: A file or the index is damaged, or a tensor is in two files.
  """

  def __init__(self, path: pathlib.Path,
               rename: Callable[[str], str | None] = lambda name: name):
    self.path = path
    self.shapes: dict[str, tuple[int, ...]] = {}
    self._tensors: dict[str, tuple[pathlib.Path, Any]] = {}
    for file in _files(path):
      try:
        opened = safetensors.safe_open(file, 'np')
        slices = {name: opened.get_slice(name) for name in opened.keys()}
      except Exception as error:  # safetensors raises its own, of many kinds
        raise ValueError(
            f'{file} cannot be read: {error}. Fetch it again.') from error
      for stored in sorted(slices):
        name = rename(stored)
        if name in self._tensors:
          raise ValueError(
              f'{path} must hold each tensor once, but {name} is in '
              f'{self._tensors[name][0].name} and in {file.name}. Remove one '
              'of the files.')
        if name is not None:
          self._tensors[name] = file, slices[stored]
          self.shapes[name] = tuple(slices[stored].get_shape())

  def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raises a ValueError unless the folder has exactly the expected tensors.

    `expected` maps our names to shapes. Tensors must be of a float type.
    """
    problems = [f'{name} is missing' for name in expected
                if name not in self.shapes]
    for name, shape in self.shapes.items():
      dtype = self._tensors[name][1].get_dtype()
      if name not in expected:
        problems.append(f'{name} is not expected')
      elif shape != expected[name]:
        problems.append(f'{name} is {shape}, not {expected[name]}')
      elif dtype not in _READABLE:
        problems.append(f'{name} is of type {dtype}, not one of {_READABLE}')
    if problems:
      raise ValueError(
          f'the tensors of {self.path} must fit its config.json, but '
          f'{"; ".join(problems[:4])} ({len(problems)} in all). Fetch both '
          'from the same model again.')

  def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """Returns one slice of a tensor, in the data type of the file.

    Only this slice is read.

    Args:
      name: Our name of the tensor.
      index: Range of entries on each axis.

    Raises:
      ValueError: The file cannot be read.
    """
    file, tensor = self._tensors[name]
    try:
      return tensor[index]
    except Exception as error:  # safetensors raises its own, of many kinds
      raise ValueError(f'{name} in {file} cannot be read: {error}. Fetch it '
                       'again.') from error


def _files(path: pathlib.Path) -> list[pathlib.Path]:
  """Returns model.safetensors, else the files of the index, else all files."""
  if (path / 'model.safetensors').is_file():
    return [path / 'model.safetensors']
  if not (path / INDEX).is_file():
    files = sorted(path.glob('*.safetensors'))
    if not files:
      raise FileNotFoundError(
          f'a model folder must hold *.safetensors, but {path} has none. '
          'Convert older .bin files with transformers first; pickle is never '
          'read.')
    return files
  try:
    index = json.loads((path / INDEX).read_text())['weight_map']
    names = sorted(set(index.values()))
    outside = [name for name in names if not re.fullmatch(
        r'[\w-][\w.-]*\.safetensors', name)]
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError(
        f'{path / INDEX} must hold a weight_map, but: {type(error).__name__} '
        f'{error}. Fetch it again.') from error
  if outside:
    raise ValueError(
        f'{path / INDEX} must name safetensors of its own folder, but names '
        f'{outside[0]!r}. Do not trust this checkpoint.')
  for name in names:
    if not (path / name).is_file():
      raise FileNotFoundError(
          f'{name} must be in {path} according to {INDEX}, but is not. Fetch '
          'it.')
  return [path / name for name in names]


def sources(leaves: Params, names: Mapping[str, str]) -> Params:
  """Returns a tree like `leaves` that says which tensors each leaf consists of.

  The entries are `Source`s. `leaves` is a tree of arrays or of their shapes.
  `names` maps each key of the tree to a part of a tensor's name.

  A tensor's name consists of the parts for the leaf's keys, and a suffix. If
  `names` maps layers to 'model.layers.{}' and q to 'self_attn.q_proj', the name
  for layers/q/kernel is 'model.layers.{}.self_attn.q_proj.weight'. The first {}
  stands for the number of the layer, and a second {} for the number of the
  expert. A key whose part is empty is left out.
  """
  def source(path, leaf):
    keys = [key.key for key in path]
    kind = keys.pop() if keys[-1] in _ENDS else 'embedding'
    parts = [names[key] for key in keys if names[key]]
    name = '.'.join([*parts, _ENDS[kind]])
    return Source(name, leaf.shape[:name.count('{}')], kind == 'kernel')

  return jax.tree_util.tree_map_with_path(source, leaves)


def shapes(leaves: Params, names: Mapping[str, str]
          ) -> dict[str, tuple[int, ...]]:
  """Returns the shape that each tensor of the files must have, by its name.

  Nothing is read. The arguments are those of `sources`.
  """
  return {name: source.flip(leaf.shape[len(source.counts):])
          for source, leaf in zip(jax.tree.leaves(sources(leaves, names)),
                                  jax.tree.leaves(leaves), strict=True)
          for name in source.parts}


def load(
    folder: Folder,
    names: Mapping[str, str],
    leaves: Params,
    axes: Params,
    *,
    sharding_of: ShardingOf | None = None,
    dtype: Any = jnp.float32,
) -> Params:
  """Loads params from a folder. At most one leaf at a time is on the host.

  Args:
    folder: Folder with exactly the tensors that `sources` names, in the leaves'
      shapes.
    names: Part of a tensor's name for each key of the params; see `sources`.
    leaves: Shapes of the params, as a tree.
    axes: Names of the axes of each leaf, as a tree.
    sharding_of: Function from a leaf's names of axes to its sharding over
      devices. Only the slices of local devices are read. Default: the default
      device.
    dtype: Data type of all params, whatever type the files hold.

  Raises:
    ValueError: A tensor is missing, unexpected or has a wrong shape or type; a
      leaf does not split evenly, or a file cannot be read.
  """
  folder.check(shapes(leaves, names))

  def plan(source: Source, leaf: Any, axes: Axes) -> Callable[[], jax.Array]:
    sharding = sharding_of and sharding_of(axes)
    try:
      sharding and sharding.shard_shape(leaf.shape)
    except ValueError as error:
      raise ValueError(
          f'{source.parts[0]} must split evenly over the devices, but its '
          f'shape {leaf.shape} does not: {error}. Choose other sizes in '
          'config.mesh.') from error
    return lambda: _leaf(folder, source, leaf.shape, sharding, jnp.dtype(dtype))

  plans = jax.tree.map(plan, sources(leaves, names), leaves, axes)
  return jax.tree.map(lambda make: make(), plans)


def _leaf(folder: Folder, source: Source, shape: tuple[int, ...], sharding,
          dtype) -> jax.Array:
  @functools.cache  # devices with the same slice share one read
  def read(key):
    return _read(folder, source, key, dtype)

  index_key = lambda index: tuple(
      s.indices(n) for s, n in zip(index, shape))
  if sharding is None:
    return jnp.asarray(read(index_key((slice(None),) * len(shape))))
  return jax.make_array_from_callback(
      shape, sharding, lambda index: read(index_key(index)))


def _read(folder: Folder, source: Source, key, dtype) -> np.ndarray:
  """Reads a part of a leaf from its tensors, as one array of type `dtype`.

  `key` has (start, stop, 1) for each dimension of the leaf.
  """
  result = np.empty([stop - start for start, stop, _ in key], dtype)
  stacked = len(source.counts)
  numbers = [range(*k) for k in key[:stacked]]
  index = source.flip([slice(*k) for k in key[stacked:]])
  for place in np.ndindex(*map(len, numbers)):
    part = folder.read(source.name.format(
        *(n[i] for n, i in zip(numbers, place))), index)
    result[place] = part.T if source.transposed else part
  return result


def save(path: pathlib.Path, params: Params, names: Mapping[str, str], *,
         dtype: str, shard_bytes: int) -> None:
  """Writes params as model.safetensors, or as shards with an index.

  One tensor is on the host at a time. With several processes, all must call
  this function; the first one writes.

  Args:
    path: Path of an empty folder.
    params: Params on the host or on any devices.
    names: Part of a tensor's name for each key of the params; see `sources`.
    dtype: Data type in the files, 'float32' or 'bfloat16'.
    shard_bytes: Largest size of one file in bytes. Larger weights become
      several files with an index.

  Raises:
    ValueError: The dtype is neither 'float32' nor 'bfloat16'.
  """
  if dtype not in _WRITABLE:
    raise ValueError(
        f'dtype must be one of {sorted(_WRITABLE)}, but is {dtype!r}.')
  import huggingface_hub  # slow to import
  itemsize = jnp.dtype(dtype).itemsize
  sizes = dict(sorted(shapes(params, names).items()))
  fetches = {
      source.name.format(*place): functools.partial(_fetch, leaf, place, source)
      for source, leaf in zip(jax.tree.leaves(sources(params, names)),
                              jax.tree.leaves(params))
      for place in np.ndindex(source.counts)}
  split = huggingface_hub.split_state_dict_into_shards_factory(
      sizes, get_storage_size=lambda shape: math.prod(shape) * itemsize,
      filename_pattern='model{suffix}.safetensors', max_shard_size=shard_bytes)
  for file, tensors in split.filename_to_tensors.items():
    _write(path / file, {name: sizes[name] for name in tensors}, dtype, fetches)
  if split.is_sharded and jax.process_index() == 0:
    (path / INDEX).write_text(json.dumps(
        {'metadata': split.metadata, 'weight_map': split.tensor_to_filename},
        indent=2) + '\n')


def _fetch(leaf: Any, place: tuple[int, ...], source: Source) -> np.ndarray:
  """Returns one whole tensor of a leaf on the host, in the file's layout.

  `place` is the index of the tensor on the leaf's stacked axes: (), (layer,) or
  (layer, expert).
  """
  x = leaf[place] if place else leaf
  if isinstance(x, jax.Array) and not (
      x.is_fully_addressable or x.is_fully_replicated):
    x = multihost_utils.process_allgather(x, tiled=True)
  return np.asarray(x).T if source.transposed else np.asarray(x)


def _write(file: pathlib.Path, sizes: Mapping[str, tuple[int, ...]], dtype: str,
           fetches: Mapping[str, Callable[[], np.ndarray]]) -> None:
  """Writes a safetensors file: the header's length, the header, the values.

  `sizes` has the shape of each tensor, and `fetches` a function that returns
  its values. Only the first process writes, but all must make the call.
  """
  header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
  offset = 0
  for name, shape in sizes.items():
    end = offset + math.prod(shape) * jnp.dtype(dtype).itemsize
    header[name] = {'dtype': _WRITABLE[dtype], 'shape': list(shape),
                    'data_offsets': [offset, end]}
    offset = end
  head = json.dumps(header, separators=(',', ':')).encode()
  head += b' ' * (-len(head) % 8)
  if jax.process_index() != 0:
    for name in sizes:  # a fetch may need all processes
      fetches[name]()
    return
  with open(file, 'wb') as out:
    out.write(len(head).to_bytes(8, 'little') + head)
    for name in sizes:
      value = np.ascontiguousarray(fetches[name](), jnp.dtype(dtype))
      out.write(value.reshape(-1).view(np.uint8).data)
