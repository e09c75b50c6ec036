# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Attention to a KV cache in blocks, for GPUs: a Pallas kernel (Triton).

One kernel computes the flash attention (Dao et al. 2022, arXiv:2205.14135) of
single tokens, or of tiles of tokens, to slots of different lengths. Each
program computes a few queries for one KV head. It reads only the keys and
values that these queries see, and reads them in place in the slot. cuDNN has no
such call for tiles that start at any position, and no such call for float32.
"""

import functools
import math
from typing import Any

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from searchrl.models.inference.kv_cache import Tiles

_QUERIES = 64  # largest number of queries in a program
_LEAST = 16  # smallest number of rows in a matrix that Triton multiplies
_BYTES = 16_384  # largest size of the keys that a program reads at a time
_MASKED = -1e30
_MOVED = 4096  # largest number of elements that a program moves at a time


def attend(
    q: Float[Array, 'n T H d'],
    keys: Float[Array, 'B N W K d'],
    values: Float[Array, 'B N W K d'],
    tiles: Tiles,
    sliding_window: int | None = None,
) -> Float[Array, 'n T H d']:
  """Returns the causal attention of some tokens to the cache of their slots.

  Args:
    q: Queries of n tiles of T consecutive tokens, with H heads of size d, a
      power of two.
    keys: Keys of B slots in N blocks of W tokens, with K heads. W is a multiple
      of 16. The cache already has the keys of the tiles.
    values: Values, like the keys.
    tiles: Slot, start and length of each tile.
    sliding_window: Number of keys that a query sees, including the key at its
      own position. Default: all keys up to this position.

  Returns:
    The outputs, [n T H d]; 0 for a query beyond its tile's length.
  """
  from jax.experimental.pallas import triton  # slow to import
  rows, width, heads, size = q.shape
  block, kv_heads = keys.shape[2:4]
  groups = heads // kv_heads
  folded = q.reshape(rows, width, kv_heads, groups, size).swapaxes(1, 2)
  folded = folded.reshape(rows, kv_heads, width * groups, size)
  queries = min(max(_LEAST, pl.next_power_of_2(width * groups)), _QUERIES)
  spare = -(width * groups) % queries
  folded = jnp.pad(folded, ((0, 0), (0, 0), (0, spare), (0, 0)))
  chunk = math.gcd(block, _BYTES // (size * keys.dtype.itemsize))
  query_spec = pl.BlockSpec((None, None, queries, size),
                            lambda row, head, part: (row, head, part, 0))
  whole = pl.BlockSpec(memory_space=pl.ANY)
  output = pl.pallas_call(
      functools.partial(_kernel, groups=groups, chunk=chunk,
                        sliding_window=sliding_window),
      grid=(rows, kv_heads, folded.shape[2] // queries),
      in_specs=[whole, whole, whole, query_spec, whole, whole],
      out_specs=query_spec,
      out_shape=jax.ShapeDtypeStruct(folded.shape, q.dtype),
      compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
      name='slot_attention',
  )(tiles.slot, tiles.start, tiles.length, folded, keys, values)
  output = output[:, :, :width * groups].reshape(
      rows, kv_heads, width, groups, size)
  return output.swapaxes(1, 2).reshape(q.shape)


def _kernel(slot_ref, start_ref, length_ref, q_ref, k_ref, v_ref, out_ref, *,
            groups: int, chunk: int, sliding_window: int | None):
  """Computes the attention of one GPU program: some queries of one KV head.

  The queries are of one tile and read the cache of the tile's slot. Query j
  belongs to token j // groups of the tile.
  """
  row, head = pl.program_id(0), pl.program_id(1)
  slot, start, length = slot_ref[row], start_ref[row], length_ref[row]
  queries, size = q_ref.shape
  chunks = k_ref.shape[2] // chunk  # chunks per block
  earliest = pl.program_id(2) * queries
  token = (earliest + jnp.arange(queries)) // groups
  position = jnp.where(token < length, start + token, -1)
  end = jnp.where(earliest // groups < length, start + jnp.minimum(
      length, (earliest + queries - 1) // groups + 1), 0)
  first = 0 if sliding_window is None else jnp.maximum(
      start + earliest // groups - sliding_window + 1, 0) // chunk
  q = q_ref[...]
  precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
  product = functools.partial(jnp.dot, preferred_element_type=jnp.float32,
                              precision=precision)

  def add(i, carry):
    largest, total, output = carry
    place = (slot, jax.lax.div(i, chunks),
             pl.ds(jax.lax.rem(i, chunks) * chunk, chunk), head, slice(None))
    scores = product(q, k_ref[place].T) * size ** -0.5
    distance = position[:, None] - (i * chunk + jnp.arange(chunk))[None]
    is_visible = distance >= 0
    if sliding_window is not None:
      is_visible &= distance < sliding_window
    scores = jnp.where(is_visible, scores, _MASKED)
    larger = jnp.maximum(largest, scores.max(1))
    weights = jnp.where(is_visible, jnp.exp(scores - larger[:, None]), 0)
    shrink = jnp.exp(largest - larger)
    output = output * shrink[:, None]
    return larger, total * shrink + weights.sum(1), (
        output + product(weights.astype(q.dtype), v_ref[place]))

  zeros = jnp.zeros(queries, jnp.float32)
  _, total, output = jax.lax.fori_loop(
      first, pl.cdiv(end, chunk), add,
      (zeros + _MASKED, zeros, jnp.zeros((queries, size), jnp.float32)))
  output = output / jnp.where(total == 0, 1, total)[:, None]
  out_ref[...] = output.astype(out_ref.dtype)


def copied(cache: Any, source: Int[Array, 'n'], target: Int[Array, 'n'],
           blocks: Int[Array, '']) -> Any:
  """Returns a cache after the first blocks of some slots are copied to others.

  A kernel copies them in place. Each of its programs copies one block of one
  slot, or nothing. A loop would make the host wait for each of its iterations.

  Args:
    cache: Tree of arrays, [B N ...]: slots, blocks per slot.
    source: Slots to copy from.
    target: Slots to copy to; those out of range are left out.
    blocks: Number of blocks of each slot to copy.
  """
  from jax.experimental.pallas import triton  # slow to import

  def moved(x):
    flat = x.reshape(*x.shape[:2], -1)  # [B N W*K*d]
    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        _move, grid=(len(source), x.shape[1]), in_specs=[whole] * 4,
        out_specs=whole, out_shape=jax.ShapeDtypeStruct(flat.shape, x.dtype),
        input_output_aliases={3: 0}, name='slot_copy',
        compiler_params=triton.CompilerParams(num_warps=4),
    )(source, target, blocks[None], flat).reshape(x.shape)

  return jax.tree.map(moved, cache)


def _move(source_ref, target_ref, blocks_ref, from_ref, to_ref):
  row, block = pl.program_id(0), pl.program_id(1)
  slots, _, size = from_ref.shape
  chunk = math.gcd(size, _MOVED)

  @pl.when((block < blocks_ref[0]) & (target_ref[row] < slots))
  def _():
    source, target = source_ref[row], target_ref[row]

    @pl.loop(0, size // chunk)
    def _(i):
      part = pl.ds(i * chunk, chunk)
      to_ref[target, block, part] = from_ref[source, block, part]
