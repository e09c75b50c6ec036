# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Exact search on the devices of one or all processes: makes an Index.

Rows are the vectors of passages. They are split over the devices. Each process
sends rows to its own devices in small pieces, in their stored type, while the
next piece is read. A device scans its rows in blocks and keeps the best k; the
devices then gather these. Scores are float32 for every stored type. On
accelerators that multiply bfloat16 fastest, a query is split into three
bfloat16 vectors, whose products with bfloat16 rows are exact.
"""

import collections
from collections.abc import Sequence
from concurrent import futures
import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Num
import ml_dtypes
import numpy as np

from searchrl.runtime import dispatch
from searchrl.runtime import mesh as meshes
from searchrl.search.index import exact_host
from searchrl.search.index import joint_search
from searchrl.search.index import vector_store

_AXIS = 'rows'
_FEW, _MANY = 4, 16  # more than _FEW batches are joined into calls of _MANY
_GROUP = 128  # columns per group in `best_columns`
_PIECE = 8192  # rows that are sent at once: tensorstore reads these fastest
_BLOCK = 65_536  # rows that are compared at once
_MOST_BLOCKS = 64  # blocks that a GPU has at most
_HIGHEST = jax.lax.Precision.HIGHEST


def build(
    source: vector_store.Source,
    *,
    dtype: str = 'float32',
    batch: int = 64,
    block_rows: int = 0,
    devices: Sequence[jax.Device] | None = None,
    together: bool = False,
    split: bool | None = None,
    separate: bool | None = None,
) -> exact_host.Index:
  """Copies rows to devices; returns an index that scores every row for a query.

  If the type is smaller than float32, the mean of the rows is subtracted before
  they are stored, so that fewer digits are lost. The product of a query with
  the mean is added to the query's scores in float32.

  Args:
    source: The rows.
    dtype: Type of rows on the devices: float32, float16, bfloat16, or int8 with
      a scale per row.
    batch: Number of queries per device call. Smaller calls are padded, so that
      one program is compiled for each k. For many queries, a second program
      takes 16 times as many per call, because each call reads all rows.
    block_rows: Number of rows that a device compares at once. 0: a default that
      depends on the number of rows and the kind of device; see
      `rows_per_block`.
    devices: Devices of this process. Default: all of them, but no more than
      there are blocks of rows.
    together: True: one index is split over the devices of all processes. Every
      process must then take part in each search.
    split: True: each query is split into a sum of three bfloat16 vectors, if
      the rows are bfloat16 or int8. Default: True except on CPUs.
    separate: True: each block of rows is an array of its own. Default: True on
      GPUs, which would first copy a block out of a larger array.

  Raises:
    ValueError: An option is out of range, or a value is too large for the
      dtype.
  """
  vector_store.check_dtype('dtype', dtype)
  if batch < 1:
    raise ValueError(f'batch must be at least 1, but is {batch}. Give the '
                     'number of queries to compare at a time.')
  if together:
    devices = meshes.all_devices()
  elif devices is None:
    devices = jax.local_devices()[:-(-source.count // (block_rows or _BLOCK))]
  block_rows = block_rows or rows_per_block(source.count, devices)
  mesh = Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))
  mean = source.mean if dtype != 'float32' else np.zeros(source.dim, np.float32)
  if separate is None:
    separate = devices[0].platform == 'gpu'
  rows, scales = _place(source, mean, dtype, block_rows, mesh, separate)
  if split is None:
    split = devices[0].platform != 'cpu'
  split = split and dtype in ('bfloat16', 'int8')
  holders = list(dict.fromkeys(device.process_index for device in devices))
  of_holder = NamedSharding(  # each process has queries of its own
      Mesh(np.reshape(devices, (len(holders), -1)), ('holders', 'devices')),
      PartitionSpec(None, 'holders'))

  def call(vectors, k, size):
    padded = np.zeros((size, source.dim), np.float32)
    padded[:len(vectors)] = vectors
    scores, ids = jax.device_get(top_k(
        rows, scales, jax.make_array_from_process_local_data(
            of_holder, parts_of(padded, split)), k=k, count=source.count,
        mesh=mesh))
    first = holders.index(jax.process_index()) * size
    scores, ids = (x[first:first + len(vectors)] for x in (scores, ids))
    return scores + (vectors @ mean)[:, None], ids

  find = functools.partial(_in_batches, call, batch)
  return exact_host.Index('mesh', source.count, source.dim, *(
      (find,) if len(holders) == 1 else joint_search.make(find, source.dim)))


def rows_per_block(count: int, devices: Sequence[jax.Device]) -> int:
  """Returns the number of rows that a device compares at once.

  On GPUs each block is a separate array, which takes time to compile. A GPU
  therefore has at most 64 blocks, of more rows each.
  """
  if devices[0].platform != 'gpu':
    return _BLOCK
  return max(_BLOCK, -(-count // (_MOST_BLOCKS * len(devices))))


def _in_batches(call, batch: int, vectors: Float[np.ndarray, 'B D'], k: int):
  """Returns all results of `call`, called in batches of one of two sizes."""
  parts, start = [], 0
  while start < len(vectors):
    size = batch if len(vectors) - start <= _FEW * batch else _MANY * batch
    parts.append(call(vectors[start:start + size], k, size))
    start += size
  return tuple(np.concatenate(part) for part in zip(*parts))


def parts_of(vectors: Float[np.ndarray, 'B D'], split: bool
            ) -> Num[np.ndarray, 'P B D']:
  """Returns each query vector as a sum of P vectors, [P, B, D].

  If `split`, P is 3 and the parts are bfloat16, so that products with bfloat16
  rows are fast and lose no digits. Otherwise P is 1.

  Args:
    vectors: B queries of dimension D, float32.
    split: True: the queries are split.
  """
  if not split:
    return vectors[None]
  parts, rest = [], vectors
  for _ in range(3):  # 8 bits in each part, of float32's 24
    parts.append(rest.astype(ml_dtypes.bfloat16))
    rest = rest - parts[-1].astype(np.float32)
  return np.stack(parts)


def free_bytes() -> int | None:
  """Returns the free bytes of all accelerators of this process together.

  It is None if there are none, or if they do not report their memory.
  """
  stats = [device.memory_stats() for device in jax.local_devices()
           if device.platform != 'cpu']
  if not stats or not all(stats):
    return None
  return sum(s['bytes_limit'] - s['bytes_in_use'] for s in stats)


def on(mesh: Mesh, *axes: str) -> NamedSharding:
  """Returns the sharding that splits dimension i over the mesh axis axes[i]."""
  return NamedSharding(mesh, PartitionSpec(*axes))


def _place(source, mean, dtype: str, block_rows: int, mesh: Mesh,
           separate: bool = False):
  """Subtracts a mean from a source's rows, and copies them to a mesh's devices.

  Args:
    source: The rows.
    mean: Vector that is subtracted from each row.
    dtype: Type of the rows on the devices.
    block_rows: Maximum number of rows in a block.
    mesh: Mesh of the devices, over which the rows are split.
    separate: True: each block of a device is a separate array.

  Returns:
    Two tuples of arrays. The first has the rows, [blocks, rows of a block, D].
    The second has a factor for each row, [blocks, rows of a block], which is 1
    unless the type is int8.

  Raises:
    ValueError: A value is too large for the type.
  """
  per_device = -(-source.count // mesh.size)
  blocks = -(-per_device // block_rows)
  block = -(-per_device // blocks)
  each = 1 if separate else blocks  # blocks of a device in an array
  shapes = ((each, block, source.dim), (each, block))
  dtypes = (vector_store.DTYPES[dtype], np.float32)
  buffers = []  # by device, array, and rows or scales
  for number, device in enumerate(mesh.devices.flat):
    if device.process_index != jax.process_index():
      continue
    arrays = [tuple(jnp.zeros(shape, type_, device=device)
                    for shape, type_ in zip(shapes, dtypes))
              for _ in range(blocks // each)]
    first = number * blocks * block
    last = min(first + blocks * block, source.count)
    for start, parts in _pieces(source, first, last, block):
      index, row = divmod(start - first, block)
      array, index = divmod(index, each)
      arrays[array], finite = _fill(
          arrays[array], jax.device_put((parts, mean), device), (index, row),
          dtype=dtype)
      if not finite:  # this waits, so that rows do not pile up on the host
        raise ValueError(
            f'vectors kept as {dtype} must lie within its range, but one of '
            f'rows {start} to {start + len(parts[0])} does not. Take '
            "'bfloat16' or 'float32'.")
    buffers.append(arrays)
  return tuple(
      tuple(jax.make_array_from_single_device_arrays(
          (mesh.size * each, *shape[1:]), on(mesh, _AXIS),
          [pair[kind] for pair in pairs]) for pairs in zip(*buffers))
      for kind, shape in enumerate(shapes))


def _pieces(source, first: int, last: int, block: int):
  """Yields (number of the first row, stored arrays) for pieces of rows.

  The pieces are those of the rows [first, last), in order. Each piece is in one
  block. While a piece is used, a thread reads the next.
  """
  spans = [(start, min(start + _PIECE, edge + block, last))
           for edge in range(first, last, block)
           for start in range(edge, min(edge + block, last), _PIECE)]
  with futures.ThreadPoolExecutor(1) as thread:
    in_flight: collections.deque[tuple[int, futures.Future]] = (
        collections.deque())
    for span in spans:
      in_flight.append((span[0], thread.submit(source.parts, *span)))
      if len(in_flight) == 2:
        start, parts = in_flight.popleft()
        yield start, parts.result()
    for start, parts in in_flight:
      yield start, parts.result()


@functools.partial(jax.jit, donate_argnums=0, static_argnames='dtype')
def _fill(buffers, piece, place: tuple[int, int], *, dtype: str):
  """Writes a piece of the vectors, less the mean of all, to buffers.

  Args:
    buffers: Rows and scales of a part of the index. Their memory is reused.
    piece: Rows, perhaps with scales, and the mean of all vectors.
    place: Block, and the first row in it.
    dtype: Dtype of the rows in the buffers.

  Returns:
    The new buffers, and True if all values of the piece are finite.
  """
  (rows, *scales), mean = piece
  rows = rows.astype(jnp.float32)
  rows = (rows * scales[0][:, None] if scales else rows) - mean
  if dtype == 'int8':
    parts = vector_store.quantize(rows)
  else:
    parts = rows.astype(dtype), jnp.ones(len(rows), jnp.float32)
  buffers = tuple(_written(*pair, place) for pair in zip(buffers, parts))
  return buffers, jnp.isfinite(parts[0]).all() & jnp.isfinite(parts[1]).all()


def _written(buffer: Array, part: Array, place: tuple[int, int]) -> Array:
  """Returns a buffer [blocks, block, ...] with a part of a block written."""
  bits = {2: jnp.uint16}.get(part.dtype.itemsize, part.dtype)
  buffer_bits, part_bits = (  # a CPU would widen the whole bfloat16 buffer
      jax.lax.bitcast_convert_type(x, bits) for x in (buffer, part[None]))
  return jax.lax.bitcast_convert_type(jax.lax.dynamic_update_slice(
      buffer_bits, part_bits, (*place, 0)[:buffer.ndim]), buffer.dtype)


@dispatch.Ordered
@functools.partial(jax.jit, static_argnames=('k', 'count', 'mesh'))
def top_k(
    rows: Sequence[Num[Array, 'S N D']], scales: Sequence[Float[Array, 'S N']],
    parts: Num[Array, 'P B D'], *, k: int, count: int, mesh: Mesh,
) -> tuple[Float[Array, 'B K'], Int[Array, 'B K']]:
  """Returns the k highest dot products of each query, and their row numbers.

  Args:
    rows: Arrays of S blocks of N rows of dimension D. The blocks of each array
      are split over the mesh. The rows of one device are numbered in order
      through its blocks in the first array, then in the second array, and so
      on.
    scales: Factor for each row, by which all products with the row are
      multiplied.
    parts: B queries. Each query is the sum of P vectors.
    k: Number of rows per query. Among equal scores, the lower row number wins.
    count: Number of rows without padding. The rows after them are padding and
      are never found.
    mesh: Mesh of the devices that hold the rows.

  Returns:
    Scores and row numbers, [B, k], from the highest score down.
  """
  split, whole = PartitionSpec(_AXIS), PartitionSpec()

  @functools.partial(jax.shard_map, mesh=mesh, in_specs=(split, split, whole),
                     out_specs=(whole, whole), check_vma=False)
  def search(rows, scales, parts):
    blocks, block = sum(map(len, rows)), rows[0].shape[1]
    first = jax.lax.axis_index(_AXIS) * blocks * block
    queries = parts.shape[1]
    best = (jnp.full((queries, k), -jnp.inf),
            jnp.zeros((queries, k), jnp.int32))

    def step(best, rows_of_block):
      i, block_rows, block_scales = rows_of_block
      ids = first + i * block + jnp.arange(block)
      scores = block_scales * jnp.sum(jnp.einsum(
          'pbd,nd->pbn', parts, block_rows.astype(parts.dtype),
          precision=_HIGHEST, preferred_element_type=jnp.float32), 0)
      scores = jnp.where(ids < count, scores, -jnp.inf)
      top, places = best_columns(scores, min(k, block))
      both = (jnp.concatenate(pair, 1)
              for pair in zip(best, (top, ids[places])))
      return _best(*both, k), None

    numbers = jnp.arange(blocks)
    for arrays in zip(rows, scales):
      count_here = len(arrays[0])
      if len(rows) > 1:  # all scores at once would fill the memory
        best, arrays = jax.lax.optimization_barrier((best, arrays))
      best, _ = jax.lax.scan(step, best, (numbers[:count_here], *arrays))
      numbers = numbers[count_here:]
    return _best(*(jax.lax.all_gather(x, _AXIS, axis=1, tiled=True)
                   for x in best), k)

  return search(rows, scales, parts)


def best_columns(scores: Float[Array, 'B N'], k: int):
  """Returns the k highest scores of each row, and their columns.

  The results are those of `jax.lax.top_k`, also for equal scores, but less
  memory is read. The columns are divided into groups. Only the k groups with
  the highest maxima are searched, because no score of another group is above
  these k maxima.
  """
  count = -(-scores.shape[1] // _GROUP)
  if count <= 2 * k:
    return jax.lax.top_k(scores, k)
  groups = jnp.pad(scores, ((0, 0), (0, -scores.shape[1] % _GROUP)),
                   constant_values=-jnp.inf).reshape(-1, count, _GROUP)
  _, best = jax.lax.top_k(groups.max(2), k)
  best = jnp.sort(best, 1)  # ties go to the lower column
  top, places = jax.lax.top_k(jnp.take_along_axis(
      groups, best[:, :, None], 1).reshape(-1, k * _GROUP), k)
  first = jnp.take_along_axis(best, places // _GROUP, 1) * _GROUP
  return top, first + places % _GROUP


def _best(scores: Float[Array, 'B M'], ids: Int[Array, 'B M'], k: int):
  """Returns the k best scores of each row, and their ids.

  Ties go to the earlier column.
  """
  top, places = jax.lax.top_k(scores, k)
  return top, jnp.take_along_axis(ids, places, 1)
