# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A KV cache in which each slot has blocks of W tokens, read block by block.

Keys are arrays [B N K d W], and values [B N K W d]: slots, blocks per slot, KV
heads, width, tokens per block. CPUs compute products fastest in this order.
They would take four times as long for keys [B N K W d]. If `heads_outside` is
False, keys and values are both [B N W K d]. Writing a token then touches one
row of memory, and attention kernels can read the cache without a copy.

Attention is computed by a loop or by a kernel. The loop runs over as many
blocks as the longest slot has. No array's shape depends on this number. The
kernel gets the length of each slot.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from searchrl.models import attention
from searchrl.models.inference import kv_blocks_gpu
from searchrl.models.inference import kv_cache
from searchrl.models.inference.kv_cache import Layer, Layout, Tiles


def layout(*, slots: int, length: int, block: int, parts: int,
           sliding_window: int | None = None, heads_outside: bool = True,
           token_kernel: str = '', tile_kernel: str = '') -> Layout:
  """Returns the memory layout of a KV cache in blocks, and its functions.

  Args:
    slots: Number of slots on a device, B.
    length: Number of tokens that a slot must be able to hold.
    block: Number of tokens in a block, W.
    parts: Number of groups into which rows of one token are sorted by length;
      the attention of each group is computed separately. With more than 1, the
      rows may be any slots. With 1, they are all slots, in order.
    sliding_window: Number of keys that a query sees; see `attention.visible`.
    heads_outside: Order of the axes: True for [B N K d W] and [B N K W d],
      False for [B N W K d].
    token_kernel: Name of the attention when each row is one token: '' for
      loops, 'triton' for the kernel of `kv_blocks_gpu`, or an implementation of
      `jax.nn.dot_product_attention`, such as 'cudnn'. Kernels need
      heads_outside to be False and parts to be 1.
    tile_kernel: Name of the attention when rows are tiles: '' or 'triton'.
  """
  # Indices or sizes of the axes of heads, widths and positions, in their order.
  of_keys = lambda heads, width, positions: (
      (heads, width, positions) if heads_outside else (positions, heads, width))
  of_values = lambda heads, width, positions: (
      (heads, positions, width) if heads_outside else (positions, heads, width))
  axes = tuple(('batch', None, *order('kv_heads', None, None))
               for order in (of_keys, of_values))
  heads_first = lambda keys, values: (  # [n K W d]
      (keys.swapaxes(2, 3), values) if heads_outside else
      (keys.swapaxes(1, 2), values.swapaxes(1, 2)))
  shape = slots, -(-length // block), block
  filled = lambda ends: (jnp.max(ends) + block - 1) // block
  places = functools.partial(_places, block, shape[1])

  def empty(config, copies, dtype):
    return tuple(
        jnp.zeros((copies * slots, shape[1], *order(
            config.num_key_value_heads, config.head_dim, block)), dtype)
        for order in (of_keys, of_values))

  def attend(layer: Layer, q: Float[Array, 'n T H d'],
             k: Float[Array, 'n T K d'], v: Float[Array, 'n T K d'],
             tiles: Tiles):
    keys, values = layer
    positions = tiles.start[:, None] + jnp.arange(q.shape[1])
    slot, place, token = places(tiles, q.shape[1])
    all_of = slice(None)
    keys, values = (
        x.at[slot, place, *order(all_of, all_of, token)].set(new, mode='drop')
        for x, order, new in ((keys, of_keys, k), (values, of_values, v)))
    read = lambda slot, i: heads_first(
        *(x.at[slot, i].get(mode='clip') for x in (keys, values)))

    if 'triton' == (tile_kernel if q.shape[1] > 1 else token_kernel):
      output = kv_blocks_gpu.attend(q, keys, values, tiles, sliding_window)
    elif q.shape[1] > 1:
      output = attention.blockwise(
          q, functools.partial(read, tiles.slot), positions,
          filled(tiles.start + tiles.length), block, sliding_window)
    elif token_kernel:
      output = _fused(q, keys, values, tiles, token_kernel)
    elif parts == 1:  # rows are slots
      last = jnp.where(tiles.length > 0, tiles.start, -1)
      output = attention.blockwise(
          q, lambda i: heads_first(keys[:, i], values[:, i]),
          last[:, None], filled(last + 1), block, sliding_window)
    else:
      output = _by_parts(q, read, tiles, filled, block, parts, sliding_window)
    return output, (keys, values)

  return Layout(slots=slots, block=block, has_pages=False, axes=axes,
                any_rows=parts > 1 or token_kernel == 'triton', empty=empty,
                attend=attend, places=shape,
                record=functools.partial(kv_cache.recorded, places=places),
                copy=kv_blocks_gpu.copied if tile_kernel == 'triton' else
                functools.partial(kv_cache.copied, axes=2))


def _places(block: int, blocks: int, tiles: Tiles, width: int
           ) -> tuple[Array, Array, Array]:
  """Returns where each token of some tiles is: slot, block, index in the block.

  Beyond a tile's end, the block is out of range, so that writes are dropped.
  """
  column = jnp.arange(width)
  positions = tiles.start[:, None] + column
  return tiles.slot[:, None], jnp.where(
      column < tiles.length[:, None], positions // block, blocks
  ), positions % block


def _fused(q, keys, values, tiles: Tiles, implementation: Any) -> Array:
  """Returns the attention of one new token per slot to the slot's cache.

  The result of a slot without a new token is 0.

  The queries of a KV head are folded into the length axis, so that each key is
  read once. No mask is needed, because all these queries see the whole context.
  An idle slot reads one token, as a length of 0 is not allowed.
  """
  slots, _, heads, size = q.shape
  rows = lambda x: x.reshape(slots, -1, *x.shape[3:])  # [B S K d]
  folded = q.reshape(slots, keys.shape[3], -1, size).swapaxes(1, 2)
  output = jax.nn.dot_product_attention(
      folded, rows(keys), rows(values), implementation=implementation,
      key_value_seq_lengths=jnp.where(tiles.length > 0, tiles.start, 0) + 1)
  output = output.swapaxes(1, 2).reshape(slots, 1, heads, size)
  return jnp.where((tiles.length > 0)[:, None, None, None], output, 0)


def _by_parts(q, read, tiles: Tiles, filled, block, parts: int, window):
  """Returns the attention of one new token per row to the row's slot.

  Rows are sorted by the length of their slots and cut into `parts` groups. Each
  group reads only as many blocks as its longest slot has.
  """
  rows = len(tiles.slot)
  parts = min(parts, rows)  # else the other parts read for nobody
  positions = jnp.where(tiles.length > 0, tiles.start, -1)
  size = -(-rows // parts)
  order = jnp.argsort(-positions)
  # The last part is filled up with rows that read nothing and are dropped.
  order = jnp.pad(order, (0, parts * size - rows), constant_values=rows)
  positions = jnp.pad(positions, (0, 1), constant_values=-1)
  slot = jnp.pad(tiles.slot, (0, 1))
  outputs = []
  for part in order.reshape(parts, size):
    last = positions[part]
    outputs.append(attention.blockwise(
        q.at[part].get(mode='clip'), functools.partial(read, slot[part]),
        last[:, None], filled(last + 1), block, window))
  return jnp.zeros_like(q).at[order].set(jnp.concatenate(outputs), mode='drop')
