# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A store of vectors on disk, in shards: the rows of every dense index.

A folder has recipe.json (the origin of the rows, written first), rows/ and, for
int8, scales/ (zarr 3, a file per shard), done/ (a note per finished shard) and
manifest.json, without which the store is incomplete. A killed writer leaves
finished shards, and the next one writes the rest. Reading gives float32 for
every stored type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import dataclasses
import functools
import hashlib
import json
import math
import pathlib
from typing import Any

from jaxtyping import Float, Int8
import ml_dtypes
import numpy as np
import tensorstore

from searchrl.runtime import atomic_files
from searchrl.search.index import manifests


DTYPES = {'float32': np.float32, 'float16': np.float16,
          'bfloat16': ml_dtypes.bfloat16, 'int8': np.int8}
_FORMAT = 1
_CHUNK = 4096  # maximum rows per chunk, the smallest unit of a read
_REBUILD = 'Build the index again; finished shards are kept.'


def check_dtype(name: str, dtype: str) -> None:
  """Raises a ValueError unless DTYPES has `dtype`; errors call it `name`."""
  if dtype not in DTYPES:
    raise ValueError(
        f'{name} must be one of {", ".join(DTYPES)}, but is {dtype!r}.')


class InMemory:
  """A `Source` of rows in memory.

  Attributes:
    rows: The rows, float32.
    count, dim, exact_dtype: As in `Store`.

  Raises:
    ValueError: There is no row, or a value is not finite.
  """

  exact_dtype = 'float32'

  def __init__(self, rows: Float[Any, 'N D']):
    self.rows = checked(rows)
    self.count, self.dim = self.rows.shape

  @functools.cached_property
  def mean(self) -> Float[np.ndarray, 'D']:
    """Mean of all rows, float32."""
    return self.rows.mean(0, dtype=np.float64).astype(np.float32)

  def read(self, start: int, stop: int) -> Float[np.ndarray, 'N D']:
    """Returns the rows [start, stop) as float32."""
    return self.rows[start:stop]

  def parts(self, start: int, stop: int) -> tuple[np.ndarray, ...]:
    """Returns the stored arrays of the rows [start, stop)."""
    return (self.rows[start:stop],)


def checked(rows: Any, first: int = 0) -> Float[np.ndarray, 'N D']:
  """Returns vectors as float32 rows, after a check of their shape and values.

  Args:
    rows: Array of any type, [N, D].
    first: Number of its first row, for the error.

  Raises:
    ValueError: The shape is not [N, D] with N and D from 1, or a row has a
      value that is not finite. The message names the first such row.
  """
  rows = np.asarray(rows, np.float32)
  if rows.ndim != 2 or not rows.size:
    raise ValueError('vectors must be rows [N, D] with N and D from 1, but '
                     f'their shape is {rows.shape}. Give one row a passage.')
  finite = np.isfinite(rows).all(1)
  if not finite.all():
    raise ValueError(
        'vectors must be finite, but that of passage '
        f'{first + int(np.argmin(finite))}, counted from 0, is not. Check the '
        'encoder and its weights.')
  return rows


def stored(rows: Float[np.ndarray, 'N D'], dtype: str
          ) -> tuple[np.ndarray, ...]:
  """Returns rows converted to a type, as a tuple of the arrays to store.

  The tuple has the converted rows. For int8 it also has one float32 factor per
  row, by which the row's int8 values are to be multiplied.

  Args:
    rows: The rows, float32.
    dtype: Name of the type: float32, float16, bfloat16 or int8.

  Raises:
    ValueError: The type is float16 and a value is too large for it.
  """
  if dtype == 'int8':
    return quantize(rows)
  with np.errstate(over='ignore'):
    cast = rows.astype(DTYPES[dtype])
  if dtype == 'float16' and not np.isfinite(cast).all():
    raise ValueError('vectors kept as float16 must lie below 65,504, but one '
                     f'has {np.abs(rows).max():g}. '
                     "Take 'bfloat16' or 'float32'.")
  return (cast,)


def blocks(source: Source, size: int) -> Iterator[tuple[int, np.ndarray]]:
  """Yields (number of the first row, rows) in order, `size` rows at a time."""
  for start in range(0, source.count, size):
    yield start, source.read(start, min(start + size, source.count))


def quantize(rows: Float[Any, 'N D']
            ) -> tuple[Int8[Any, 'N D'], Float[Any, 'N']]:
  """Returns int8 rows and one scale per row: row = scale * int8, rounded.

  The results are arrays of numpy or jax, like the rows.
  """
  xp = rows.__array_namespace__()
  scales = xp.max(xp.abs(rows), axis=1) / 127
  whole = xp.round(rows / xp.where(scales > 0, scales, 1)[:, None])
  return whole.astype(np.int8), scales.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Recipe:
  """The origin of a store's rows, and the format of their storage."""

  corpus: str  # digest of the corpus
  encoder: Mapping[str, Any]  # facts about the encoder; 'digest' identifies it
  count: int  # N
  dim: int  # D
  dtype: str = 'float32'  # type on disk
  shard_rows: int = 65_536  # rows per shard

  def __post_init__(self):
    check_dtype('store.dtype', self.dtype)
    for name in ('count', 'dim', 'shard_rows'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name} of a store must be at least 1, but is '
                         f'{getattr(self, name)}.')

  @property
  def shards(self) -> int:
    """Number of shards."""
    return -(-self.count // self.shard_rows)

  def span(self, shard: int) -> tuple[int, int]:
    """Returns the range [start, stop) of rows of a shard."""
    start = shard * self.shard_rows
    return start, min(start + self.shard_rows, self.count)

  @property
  def exact_dtype(self) -> str:
    """Float type that holds every stored value exactly: float16 or float32.

    It is float16 only if the rows are stored as float16.
    """
    return 'float16' if self.dtype == 'float16' else 'float32'

  @property
  def disk_bytes(self) -> int:
    """Number of bytes that the rows take on disk."""
    scale = 4 if self.dtype == 'int8' else 0
    size = np.dtype(DTYPES[self.dtype]).itemsize
    return self.count * (self.dim * size + scale)


class Writer:
  """A writer of a store's shards. Several processes may write different shards.

  Raises:
    ValueError: The folder has a store of another recipe.
  """

  def __init__(self, folder: str | pathlib.Path, recipe: Recipe):
    self._folder, self.recipe = pathlib.Path(folder), recipe
    (self._folder / 'done').mkdir(parents=True, exist_ok=True)
    file = self._folder / 'recipe.json'
    facts = {'format': _FORMAT, **dataclasses.asdict(recipe)}
    if file.exists():
      _check_same(self._folder, json.loads(file.read_text()), facts)
    else:
      atomic_files.write_json(file, facts)
    self._arrays = _open_arrays(self._folder, recipe, create=True)

  def missing(self) -> list[int]:
    """Returns the numbers of the shards that are not finished."""
    return [i for i in range(self.recipe.shards) if self._note(i) is None]

  def _note(self, shard: int) -> dict[str, Any] | None:
    return _read_marker(self._folder, self.recipe, shard)

  def write(self, shard: int, rows: Float[np.ndarray, 'N D']) -> None:
    """Writes a shard, which is complete on disk when this function returns.

    Args:
      shard: Number of the shard.
      rows: All rows of the shard, in order.

    Raises:
      ValueError: The shape is not that of the shard, a value is not finite, or
        it is too large for float16 on disk.
    """
    start, stop = self.recipe.span(shard)
    rows = checked(rows, start)
    if rows.shape != (stop - start, self.recipe.dim):
      raise ValueError(
          f'shard {shard} must have shape {(stop - start, self.recipe.dim)}, '
          f'but the encoder gave {rows.shape}. Check the encoder.')
    parts = stored(rows, self.recipe.dtype)
    sha = hashlib.sha256()
    for array, part in zip(self._arrays, parts, strict=True):
      array[start:stop].write(part).result()
      sha.update(np.ascontiguousarray(part).view(np.uint8).data)
    atomic_files.write_json(_marker(self._folder, shard), {
        'sha256': sha.hexdigest(),
        'files': _sizes(self._folder, len(parts), shard),
        'sum': rows.sum(0, dtype=np.float64).tolist()})

  def finish(self) -> Store:
    """Writes the manifest and opens the store, once all shards are written.

    Raises:
      ValueError: A shard is not finished.
    """
    missing = self.missing()
    if missing:
      raise ValueError(f'all {self.recipe.shards} shards must be written, but '
                       f'{len(missing)} are not, shard {missing[0]} first.')
    total, sha = np.zeros(self.recipe.dim), hashlib.sha256()
    sha.update(json.dumps(_identity(dataclasses.asdict(self.recipe)),
                          sort_keys=True).encode())
    for note in filter(None, map(self._note, range(self.recipe.shards))):
      total += note['sum']
      sha.update(note['sha256'].encode())
    manifest = {
        'format': _FORMAT, **dataclasses.asdict(self.recipe),
        'fingerprint': sha.hexdigest(),
        'mean': (total / self.recipe.count).tolist()}
    atomic_files.write_json(self._folder / 'manifest.json', {
        **manifest, 'seal': manifests.seal(manifest)})
    return open_(self._folder)


class Store:
  """A finished folder of vectors, which is a `Source`.

  Attributes:
    recipe: Origin and format of the rows.
    fingerprint: SHA-256, in hex, of the recipe and of all rows.
    count: Number of rows, N.
    dim: Dimension D of the rows.
    mean: Mean of all rows, float32.
    exact_dtype: 'float16' if it holds every value exactly, else 'float32'.
  """

  def __init__(self, folder: pathlib.Path, recipe: Recipe, fingerprint: str,
               mean: Float[np.ndarray, 'D']):
    self.folder, self.recipe, self.fingerprint = folder, recipe, fingerprint
    self.count, self.dim, self.mean = recipe.count, recipe.dim, mean
    self.exact_dtype = recipe.exact_dtype
    self._arrays = _open_arrays(folder, recipe, create=False)

  def read(self, start: int, stop: int) -> Float[np.ndarray, 'N D']:
    """Returns rows [start, stop) as float32; raises as `parts` does."""
    rows, *scales = self.parts(start, stop)
    rows = rows.astype(np.float32)
    return rows * scales[0][:, None] if scales else rows

  def parts(self, start: int, stop: int) -> tuple[np.ndarray, ...]:
    """Returns rows [start, stop) as stored, and for int8 also their scales.

    Raises:
      ValueError: The files are damaged.
    """
    try:
      reads = [array[start:stop].read() for array in self._arrays]
      return tuple(read.result() for read in reads)
    except ValueError as error:
      raise ValueError(f'rows {start} to {stop} of {self.folder} must be '
                       f'readable, but: {error}. Delete '
                       f'{self.folder}/done, then: {_REBUILD}') from error


# N rows of vectors that are read in blocks, from which an index is built.
Source = InMemory | Store


def open_(folder: str | pathlib.Path) -> Store:
  """Opens a finished store; no row is read.

  Raises:
    FileNotFoundError: There is no manifest.
    ValueError: The manifest is damaged, or a shard's file is missing or
      truncated.
  """
  folder = pathlib.Path(folder)
  if not (folder / 'manifest.json').is_file():
    raise FileNotFoundError(
        f'an index must hold manifest.json, but {folder} does not. Build it, '
        'or finish building it, with configs/build_index.py.')
  try:
    raw = json.loads((folder / 'manifest.json').read_text())
    fields = {f.name: raw[f.name] for f in dataclasses.fields(Recipe)}
    recipe, fingerprint = Recipe(**fields), raw['fingerprint']
    mean = np.array(raw['mean'], np.float32)
    fits = raw['format'] == _FORMAT and mean.shape == (recipe.dim,)
    seal = raw.pop('seal', None)  # older stores have none
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f'{folder}/manifest.json must be whole, but: '
                     f'{type(error).__name__} {error}. {_REBUILD}') from error
  if not fits:
    raise ValueError(f'{folder}/manifest.json must be of format {_FORMAT}, but '
                     f'is of {raw["format"]}. Build the index again.')
  if seal not in (None, manifests.seal(raw)):
    raise ValueError(f'{folder}/manifest.json must be as it was written, but '
                     f'is damaged. {_REBUILD}')
  for shard in range(recipe.shards):
    if _read_marker(folder, recipe, shard) is None:
      raise ValueError(
          f'shard {shard} of {folder} must be whole, but its file, or the note '
          f'of it in done/, is missing or cut. {_REBUILD}')
  return Store(folder, recipe, fingerprint, mean)


def _identity(raw: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a recipe without fields that may change, such as encoder paths."""
  encoder = {name: raw['encoder'].get(name) for name in ('digest', 'imported')}
  return json.loads(json.dumps({**raw, 'encoder': encoder}))


def _check_same(folder: pathlib.Path, past: Mapping[str, Any],
                new: Mapping[str, Any]) -> None:
  """Raises a ValueError that names the differences of two recipes."""
  past, new = _identity(past), _identity(new)
  changed = [f'{name}: {past.get(name)!r} -> {new.get(name)!r}'
             for name in sorted({*past, *new})
             if past.get(name) != new.get(name)]
  if changed:
    raise ValueError(
        f"{folder} must hold vectors of this command's corpus and encoder, but "
        f'was begun with others: {"; ".join(changed)}. Use another --workdir, '
        'or delete that folder.')


def _marker(folder: pathlib.Path, shard: int) -> pathlib.Path:
  return folder / 'done' / f'{shard:06d}.json'


def _read_marker(folder: pathlib.Path, recipe: Recipe, shard: int
                ) -> dict[str, Any] | None:
  """Returns the note that says that a shard is finished.

  It is None if there is no such note, or the sizes of the shard's files are not
  those in the note.
  """
  try:
    note = json.loads(_marker(folder, shard).read_text())
    parts = 2 if recipe.dtype == 'int8' else 1
    return note if note['files'] == _sizes(folder, parts, shard) else None
  except (OSError, ValueError, KeyError, TypeError):
    return None


def _sizes(folder: pathlib.Path, parts: int, shard: int) -> list[int]:
  files = (folder / 'rows' / 'c' / str(shard) / '0',
           folder / 'scales' / 'c' / str(shard))
  return [file.stat().st_size for file in files[:parts]]


def _open_arrays(folder: pathlib.Path, recipe: Recipe, *, create: bool):
  """Opens the zarr array of rows and, for int8, that of scales."""
  rows = _open_array(folder / 'rows', recipe, recipe.dtype, create, recipe.dim)
  if recipe.dtype != 'int8':
    return [rows]
  return [rows, _open_array(folder / 'scales', recipe, 'float32', create)]


def _open_array(path: pathlib.Path, recipe: Recipe, dtype: str, create: bool,
                *rest: int):
  """Opens a zarr array with a file per shard, and a checksum per chunk."""
  encoding: dict[str, Any] = {'name': 'bytes'}
  if dtype != 'int8':  # bytes have no byte order
    encoding['configuration'] = {'endian': 'little'}
  inner = math.gcd(recipe.shard_rows, _CHUNK)
  return tensorstore.open({
      'driver': 'zarr3',
      'store_data_equal_to_fill_value': True,  # so that each shard has a file
      'kvstore': {'driver': 'file', 'path': str(path.resolve())},
      'metadata': {
          'shape': [recipe.count, *rest], 'data_type': dtype,
          'chunk_grid': {'name': 'regular', 'configuration': {
              'chunk_shape': [recipe.shard_rows, *rest]}},
          'codecs': [{'name': 'sharding_indexed', 'configuration': {
              'chunk_shape': [inner, *rest],
              'codecs': [encoding, {'name': 'crc32c'}]}}]}},
      open=True, create=create).result()
