# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of vectors in, an exact Index on the devices of this process out.

Rows are split over the devices, and travel to each in small pieces, as they are
stored, the next one being read meanwhile. A device scans blocks of its rows and
keeps the best k; the devices then tell each other theirs. Scores are float32
whatever is stored: where an accelerator multiplies bfloat16 fastest, a query is
the sum of three bfloat16 vectors, whose products with such rows are exact.
"""

from __future__ import annotations

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

from searchrl.search.index import exact_host
from searchrl.search.index import vector_store

_AXIS = 'rows'
_FEW, _MANY = 4, 16  # batches: above the first, the second go in one call
_PIECE = 8192  # rows that travel at a time: tensorstore reads such fastest
_HIGHEST = jax.lax.Precision.HIGHEST


def build(
    source: vector_store.Source,
    *,
    dtype: str = 'float32',
    batch: int = 64,
    block_rows: int = 65_536,
    devices: Sequence[jax.Device] | None = None,
    split: bool | None = None,
) -> exact_host.Index:
  """Puts rows onto devices; the search compares with every one.

  Below float32, rows are kept without their mean, which costs fewer digits and
  is added to the score again.

  Args:
    source: the rows.
    dtype: as they are kept: float32, float16, bfloat16, or int8 with a scale
      each.
    batch: queries a device call; fewer are filled up, so that one program is
      compiled for each k. Where many wait, a second one takes 16 times as many:
      each call reads all rows, which is what it costs.
    block_rows: that are compared at a time.
    devices: of this process. Default: all, but none for less than one block.
    split: queries into three bfloat16 vectors, for rows of bfloat16 or int8.
      Default: on all but CPUs.

  Raises:
    ValueError: an option is out of range, or a value too large for the dtype.
  """
  if dtype not in vector_store.DTYPES:
    raise ValueError(f'dtype must be one of {", ".join(vector_store.DTYPES)}, but '
                     f'is {dtype!r}.')
  for name, value in (('batch', batch), ('block_rows', block_rows)):
    if value < 1:
      raise ValueError(f'{name} must be at least 1, but is {value}. Give the '
                       'number to compare at a time.')
  if devices is None:
    devices = jax.local_devices()[:-(-source.count // block_rows)]
  mesh = Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))
  mean = source.mean if dtype != 'float32' else np.zeros(source.dim, np.float32)
  rows, scales = _place(source, mean, dtype, block_rows, mesh)
  if split is None:
    split = devices[0].platform != 'cpu'
  split = split and dtype in ('bfloat16', 'int8')

  def find(vectors, k):
    parts, start = [], 0
    while start < len(vectors):
      size = batch if len(vectors) - start <= _FEW * batch else _MANY * batch
      parts.append(_call(vectors[start:start + size], k, size))
      start += size
    return tuple(np.concatenate(part) for part in zip(*parts))

  def _call(vectors, k, size):
    padded = np.zeros((size, source.dim), np.float32)
    padded[:len(vectors)] = vectors
    scores, ids = jax.device_get(_nearest(
        rows, scales, jax.device_put(parts_of(padded, split), _on(mesh)), k=k,
        count=source.count, mesh=mesh))
    offset = vectors @ mean
    return scores[:len(vectors)] + offset[:, None], ids[:len(vectors)]

  return exact_host.Index('mesh', source.count, source.dim, find)


def parts_of(vectors: Float[np.ndarray, 'B D'], split: bool
            ) -> Num[np.ndarray, 'P B D']:
  """Arrays whose sum the vectors are: three in bfloat16, or themselves."""
  if not split:
    return vectors[None]
  parts, left = [], vectors
  for _ in range(3):  # 8 bits each, of float32's 24
    parts.append(left.astype(ml_dtypes.bfloat16))
    left = left - parts[-1].astype(np.float32)
  return np.stack(parts)


def free_bytes() -> int | None:
  """Of the accelerators of this process together; None where there is none."""
  stats = [device.memory_stats() for device in jax.local_devices()
           if device.platform != 'cpu']
  if not stats or not all(stats):
    return None
  return sum(s['bytes_limit'] - s['bytes_in_use'] for s in stats)


def _on(mesh: Mesh, *axes: str) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec(*axes))


def _place(source, mean, dtype: str, block_rows: int, mesh: Mesh):
  """Rows [blocks, block, D] and scales [blocks, block], split by blocks."""
  a_device = -(-source.count // mesh.size)
  blocks = -(-a_device // block_rows)
  block = -(-a_device // blocks)
  shapes = ((blocks, block, source.dim), (blocks, block))
  dtypes = (vector_store.DTYPES[dtype], np.float32)
  buffers = []
  for number, device in enumerate(mesh.devices.flat):
    held = tuple(jnp.zeros(shape, of, device=device)
                 for shape, of in zip(shapes, dtypes))
    first = number * blocks * block
    last = min(first + blocks * block, source.count)
    for start, parts in _pieces(source, first, last, block):
      held, finite = _fill(held, jax.device_put((parts, mean), device),
                           divmod(start - first, block), dtype=dtype)
      if not finite:  # and until it is known, no more rows wait on the host
        raise ValueError(
            f'vectors kept as {dtype} must lie within its range, but one of '
            f"rows {start} to {start + len(parts[0])} does not. Take 'bfloat16' "
            "or 'float32'.")
    buffers.append(held)
  return tuple(
      jax.make_array_from_single_device_arrays(
          (mesh.size * blocks, *shape[1:]), _on(mesh, _AXIS), list(of_all))
      for shape, of_all in zip(shapes, zip(*buffers)))


def _pieces(source, first: int, last: int, block: int):
  """(start, parts) of rows [first, last), no piece in two blocks."""
  spans = [(start, min(start + _PIECE, of_block + block, last))
           for of_block in range(first, last, block)
           for start in range(of_block, min(of_block + block, last), _PIECE)]
  with futures.ThreadPoolExecutor(1) as thread:
    ahead = collections.deque()
    for span in spans:
      ahead.append((span[0], thread.submit(source.parts, *span)))
      if len(ahead) == 2:
        start, parts = ahead.popleft()
        yield start, parts.result()
    for start, parts in ahead:
      yield start, parts.result()


@functools.partial(jax.jit, donate_argnums=0, static_argnames='dtype')
def _fill(held, sent, at: tuple[int, int], *, dtype: str):
  """Buffers with a piece more, less the mean; and whether it is finite."""
  (rows, *scales), mean = sent
  rows = rows.astype(jnp.float32)
  rows = (rows * scales[0][:, None] if scales else rows) - mean
  if dtype == 'int8':
    kept = vector_store.quantize(rows)
  else:
    kept = rows.astype(dtype), jnp.ones(len(rows), jnp.float32)
  held = tuple(_written(*pair, at) for pair in zip(held, kept))
  return held, jnp.isfinite(kept[0]).all() & jnp.isfinite(kept[1]).all()


def _written(buffer: Array, part: Array, at: tuple[int, int]) -> Array:
  """A buffer [blocks, block, ...] with a part of a block."""
  bits = {2: jnp.uint16}.get(part.dtype.itemsize, part.dtype)
  buffer_bits, part_bits = (  # else a CPU widens the whole buffer of bfloat16
      jax.lax.bitcast_convert_type(x, bits) for x in (buffer, part[None]))
  return jax.lax.bitcast_convert_type(jax.lax.dynamic_update_slice(
      buffer_bits, part_bits, (*at, 0)[:buffer.ndim]), buffer.dtype)


@functools.partial(jax.jit, static_argnames=('k', 'count', 'mesh'))
def _nearest(
    rows: Num[Array, 'S N D'], scales: Float[Array, 'S N'],
    parts: Num[Array, 'P B D'], *, k: int, count: int, mesh: Mesh,
) -> tuple[Float[Array, 'B K'], Int[Array, 'B K']]:
  """The k highest dot products with sums of parts, ties to the lower row."""
  split, whole = PartitionSpec(_AXIS), PartitionSpec()

  @functools.partial(jax.shard_map, mesh=mesh, in_specs=(split, split, whole),
                     out_specs=(whole, whole), check_vma=False)
  def search(rows, scales, parts):
    blocks, block, _ = rows.shape
    first = jax.lax.axis_index(_AXIS) * blocks * block
    queries = parts.shape[1]
    best = (jnp.full((queries, k), -jnp.inf),
            jnp.zeros((queries, k), jnp.int32))

    def step(best, part):
      i, of_block, its_scales = part
      ids = first + i * block + jnp.arange(block)
      scores = its_scales * jnp.sum(jnp.einsum(
          'pbd,nd->pbn', parts, of_block.astype(parts.dtype),
          precision=_HIGHEST, preferred_element_type=jnp.float32), 0)
      scores = jnp.where(ids < count, scores, -jnp.inf)
      top, at = jax.lax.top_k(scores, min(k, block))
      return _keep(best, (top, ids[at]), k), None

    best, _ = jax.lax.scan(step, best, (jnp.arange(blocks), rows, scales))
    scores, ids = (jax.lax.all_gather(x, _AXIS, axis=1, tiled=True)
                   for x in best)
    top, at = jax.lax.top_k(scores, k)
    return top, jnp.take_along_axis(ids, at, 1)

  return search(rows, scales, parts)


def _keep(best, new, k: int):
  """The k best of both; of equals the earlier, for top_k is stable."""
  scores, ids = (jnp.concatenate(pair, 1) for pair in zip(best, new))
  top, at = jax.lax.top_k(scores, k)
  return top, jnp.take_along_axis(ids, at, 1)
