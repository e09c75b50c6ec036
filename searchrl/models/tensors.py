# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Safetensors: loads params leaf by leaf onto devices, and writes them.

A tree of `Source`s names the tensors of each leaf. All headers are checked
against this tree first, so that nothing is ever half loaded. Then each device
gets its slice of each leaf, and only this slice is read. Pickle is never read.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
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

Params = Any  # a nested dict of arrays
Axes = tuple[str | None, ...]  # logical axes of one leaf
ShardingOf = Callable[[Axes], jax.sharding.Sharding]

INDEX = 'model.safetensors.index.json'
_READABLE = ('F64', 'F32', 'F16', 'BF16')
_WRITABLE = {'float32': 'F32', 'bfloat16': 'BF16'}


@dataclasses.dataclass(frozen=True)
class Source:
  """The tensors of one leaf: one, or one per layer, stacked on axis 0."""

  names: str | tuple[str, ...]
  transposed: bool = False  # True if the file holds our matrix's transpose

  @property
  def stacked(self) -> bool:
    """True if the leaf has one tensor per layer."""
    return not isinstance(self.names, str)

  @property
  def parts(self) -> tuple[str, ...]:
    """Names of the tensors, also if there is only one."""
    return self.names if self.stacked else (self.names,)

  def flip(self, items: Sequence[Any]) -> tuple[Any, ...]:
    """Converts a tensor's dimensions from the file's order to ours or back."""
    return tuple(items)[::-1] if self.transposed else tuple(items)


class Folder:
  """The safetensors of a folder. Reads headers now, and values by the slice.

  Args:
    path: Path of the folder.
    rename: Function from a tensor's name in a file to our name, or to None if
      the tensor is ignored.

  Attributes:
    shapes: Shape of each tensor, by our name.

  Raises:
    FileNotFoundError: The folder has no safetensors, or lacks a file that its
      index names.
    ValueError: A file or the index is damaged, or a tensor is in two files.
  """

  def __init__(self, path: pathlib.Path,
               rename: Callable[[str], str | None] = lambda name: name):
    self._path, self._where = path, {}
    self.shapes: dict[str, tuple[int, ...]] = {}
    self._dtypes = {}
    files, index = _files(path)
    for file in files:
      try:
        opened = safetensors.safe_open(file, 'np')
        names = sorted(opened.keys())
        headers = {name: opened.get_slice(name) for name in names}
      except Exception as error:  # safetensors raises its own, of many kinds
        raise ValueError(
            f'{file} cannot be read: {error}. Fetch it again.') from error
      for stored, header in headers.items():
        if index is not None and index.pop(stored, None) != file.name:
          raise ValueError(
              f'{path / INDEX} must name the file of each tensor, but does not '
              f'name {file.name} for {stored}. Fetch both again.')
        name = rename(stored)
        if name is None:
          continue
        if name in self._where:
          raise ValueError(
              f'{path} must hold each tensor once, but {name} is in '
              f'{self._where[name][0].name} and in {file.name}. Remove one of '
              'the files.')
        self._where[name] = file, opened, stored
        self.shapes[name] = tuple(header.get_shape())
        self._dtypes[name] = header.get_dtype()
    if index:
      name, file = sorted(index.items())[0]
      raise ValueError(f'{path / file} must hold {name} according to {INDEX}, '
                       'but does not. Fetch both again.')

  def check(self, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raises a ValueError unless these tensors and no others are readable."""
    problems = [f'{n} is missing' for n in wanted if n not in self.shapes]
    problems += [f'{n} is not expected' for n in self.shapes if n not in wanted]
    for n in (n for n in wanted if n in self.shapes):
      if self.shapes[n] != tuple(wanted[n]):
        problems.append(f'{n} is {self.shapes[n]}, not {tuple(wanted[n])}')
      if self._dtypes[n] not in _READABLE:
        problems.append(f'{n} is of type {self._dtypes[n]}, not one of '
                        f'{_READABLE}')
    if problems:
      raise ValueError(
          f'the tensors of {self._path} must fit its config.json, but '
          f'{"; ".join(problems[:4])} ({len(problems)} in all).')

  def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """Reads only one slice of a tensor, in the data type of the file."""
    file, opened, stored = self._where[name]
    try:
      return opened.get_slice(stored)[index]
    except Exception as error:  # safetensors raises its own, of many kinds
      raise ValueError(f'{name} in {file} cannot be read: {error}. Fetch it '
                       'again.') from error


def _files(path: pathlib.Path
          ) -> tuple[list[pathlib.Path], dict[str, str] | None]:
  """Returns a model's files, and its index (tensor -> file name) if any."""
  if (path / 'model.safetensors').is_file():
    return [path / 'model.safetensors'], None
  if not (path / INDEX).is_file():
    files = sorted(path.glob('*.safetensors'))
    if not files:
      raise FileNotFoundError(
          f'a model folder must hold *.safetensors, but {path} has none. '
          'Convert older .bin files with transformers first; pickle is never '
          'read.')
    return files, None
  try:
    index = dict(json.loads((path / INDEX).read_text())['weight_map'])
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(
        f'{path / INDEX} must hold a weight_map, but: {type(error).__name__} '
        f'{error}. Fetch it again.') from error
  for name, file in index.items():
    if not isinstance(file, str) or not re.fullmatch(
        r'[\w-][\w.-]*\.safetensors', file):
      raise ValueError(
          f'{path / INDEX} must name safetensors of its own folder, but has '
          f'{file!r} for {name}. Do not trust this checkpoint.')
  files = [path / file for file in sorted(set(index.values()))]
  for file in files:
    if not file.is_file():
      raise FileNotFoundError(
          f'{file.name} must be in {path} according to {INDEX}, but is not. '
          'Fetch it.')
  return files, index


def layer_sources(layers: Params, theirs: Mapping[str, str], prefix: str
                 ) -> Params:
  """Returns sources of stacked layers {part: {kernel | bias | scale: leaf}}.

  Args:
    layers: Leaves of the layers, or their shapes.
    theirs: Hugging Face's name of each part of a layer.
    prefix: Prefix of the tensors' names, before the number of the layer.
  """
  def source(part, leaf, count):
    end = 'bias' if leaf == 'bias' else 'weight'
    return Source(tuple(f'{prefix}.{i}.{theirs[part]}.{end}'
                        for i in range(count)), transposed=leaf == 'kernel')

  return {part: {leaf: source(part, leaf, value.shape[0])
                 for leaf, value in leaves.items()}
          for part, leaves in layers.items()}


def shapes(sources: Params, leaves: Params) -> dict[str, tuple[int, ...]]:
  """Returns each tensor's shape in a file, for leaves of these shapes."""
  found = {}
  for source, leaf in zip(jax.tree.leaves(sources), jax.tree.leaves(leaves),
                          strict=True):
    shape = leaf.shape[1:] if source.stacked else leaf.shape
    found |= {name: source.flip(shape) for name in source.parts}
  return found


def load(
    folder: Folder,
    sources: Params,
    axes: Params,
    *,
    sharding_of: ShardingOf | None = None,
    dtype: Any = jnp.float32,
) -> Params:
  """Loads params from a checked folder. At most one leaf is on the host.

  Args:
    folder: Folder with the tensors of the sources.
    sources: Tree of `Source`s.
    axes: Tree of the same structure, with the logical axes of each leaf.
    sharding_of: Function from logical axes to a sharding. Default: whole leaves
      on the default device.
    dtype: Data type of all params.

  Raises:
    ValueError: A leaf does not split evenly, or a file cannot be read.
  """
  flat, tree = jax.tree.flatten(sources)
  shardings = [None] * len(flat)
  if sharding_of is not None:
    shardings = [sharding_of(a) for a in tree.flatten_up_to(axes)]
  shapes_ = [_shape(folder, source) for source in flat]
  for source, shape, sharding in zip(flat, shapes_, shardings):
    try:
      sharding and sharding.shard_shape(shape)
    except ValueError as error:
      raise ValueError(
          f'{source.parts[0]} must split evenly over the devices, but as '
          f'{shape}: {error}. Choose another mesh.') from error
  return tree.unflatten(
      _leaf(folder, *of_leaf, jnp.dtype(dtype))
      for of_leaf in zip(flat, shapes_, shardings))


def _shape(folder: Folder, source: Source) -> tuple[int, ...]:
  shape = source.flip(folder.shapes[source.parts[0]])
  return (len(source.parts), *shape) if source.stacked else shape


def _leaf(folder, source, shape, sharding, dtype) -> jax.Array:
  slices = {}  # slices of this leaf: devices with the same slice share one read

  def read(index):
    key = tuple(s.indices(n) for s, n in zip(index, shape))
    if key not in slices:
      slices[key] = _read(folder, source, key, dtype)
    return slices[key]

  if sharding is None:
    return jnp.asarray(read((slice(None),) * len(shape)))
  return jax.make_array_from_callback(shape, sharding, read)


def _read(folder: Folder, source: Source, key, dtype) -> np.ndarray:
  """Reads a part of a leaf. The key has (start, stop, 1) for each dimension."""
  result = np.empty([stop - start for start, stop, _ in key], dtype)
  within = source.flip(
      [slice(*k) for k in (key[1:] if source.stacked else key)])
  if not source.stacked:
    part = folder.read(source.names, within)
    result[...] = part.T if source.transposed else part
    return result
  for row, name in enumerate(source.names[slice(*key[0])]):
    part = folder.read(name, within)
    result[row] = part.T if source.transposed else part
  return result


def save(path: pathlib.Path, params: Params, sources: Params, *, dtype: str,
         shard_bytes: int) -> None:
  """Writes params as model.safetensors, or as shards with an index.

  One tensor is on the host at a time. With several processes, all must call
  this function; the first one writes.

  Args:
    path: Path of an empty folder.
    params: Params on the host or on any devices.
    sources: Tree of the same structure, with the tensors of each leaf.
    dtype: Data type in the files, 'float32' or 'bfloat16'.
    shard_bytes: Largest size of one file in bytes, unless one tensor is larger.

  Raises:
    ValueError: The dtype is another one.
  """
  if dtype not in _WRITABLE:
    raise ValueError(
        f'dtype must be one of {sorted(_WRITABLE)}, but is {dtype!r}.')
  size = jnp.dtype(dtype).itemsize
  wanted = shapes(sources, params)
  takes = {}
  for source, leaf in zip(jax.tree.leaves(sources), jax.tree.leaves(params),
                          strict=True):
    for layer, name in enumerate(source.parts):
      takes[name] = (leaf, layer, source)
  files = [[]]
  for name in sorted(wanted):
    total = sum(math.prod(wanted[n]) for n in [*files[-1], name]) * size
    files += [[]] if files[-1] and total > shard_bytes else []
    files[-1].append(name)
  weight_map = {}
  for number, names in enumerate(files, 1):
    file = 'model.safetensors' if len(files) == 1 else (
        f'model-{number:05d}-of-{len(files):05d}.safetensors')
    weight_map |= {name: file for name in names}
    _write(path / file, {n: wanted[n] for n in names}, dtype,
           lambda name: _fetch(*takes[name]))
  if len(files) > 1 and jax.process_index() == 0:
    total = sum(math.prod(shape) for shape in wanted.values()) * size
    (path / INDEX).write_text(json.dumps(
        {'metadata': {'total_size': total}, 'weight_map': weight_map},
        indent=2) + '\n')


def _fetch(leaf: Any, layer: int, source: Source) -> np.ndarray:
  """Copies one whole tensor of a leaf to the host, in the file's layout."""
  x = leaf[layer] if source.stacked else leaf
  if isinstance(x, jax.Array) and not (
      x.is_fully_addressable or x.is_fully_replicated):
    x = multihost_utils.process_allgather(x, tiled=True)
  return np.asarray(x).T if source.transposed else np.asarray(x)


def _write(file: pathlib.Path, wanted, dtype: str, fetch) -> None:
  """Writes a safetensors file: the header's length, the header, the values."""
  header, offset = {'__metadata__': {'format': 'pt'}}, 0
  for name, shape in wanted.items():
    end = offset + math.prod(shape) * jnp.dtype(dtype).itemsize
    header[name] = {'dtype': _WRITABLE[dtype], 'shape': list(shape),
                    'data_offsets': [offset, end]}
    offset = end
  head = json.dumps(header, separators=(',', ':')).encode()
  head += b' ' * (-len(head) % 8)
  if jax.process_index() != 0:
    for name in wanted:  # a fetch may need all processes
      fetch(name)
    return
  with open(file, 'wb') as out:
    out.write(len(head).to_bytes(8, 'little') + head)
    for name in wanted:
      value = np.ascontiguousarray(fetch(name), jnp.dtype(dtype))
      out.write(value.reshape(-1).view(np.uint8))
