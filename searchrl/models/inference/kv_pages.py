# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A KV cache in pages, in the format of ragged paged attention on TPUs.

A layer is one array [P W 2K d]: pages, tokens per page, KV heads with keys and
values interleaved, width of a head. The kernel that ships with jax reads this
array in place, page by page, to the end of each row's context. The kernel does
not write to it. Tokens are written by a scatter of contiguous rows [2K d], so
that nothing copies the cache. The cache is pinned to main memory (HBM).
Otherwise, if a layer's cache fitted into the on-chip memory, the compiler would
move all of it there and back for each token.

The kernel has three traps:
- While the kernel computes a row, it starts to fetch the first page of the next
  row. If the next row has no context, the kernel never waits for this fetch.
  Every row therefore has at least one token, and the results of idle rows are
  set to 0 afterwards.
- The kernel would choose block sizes by the kind of the default device, which
  is the host in ahead-of-time compilation. This file therefore sets the sizes.
- Beyond a row's context, the kernel fetches the row's first page again. A
  context therefore costs as much as one that is rounded up to a whole block of
  pages.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from searchrl.models.inference import kv_cache
from searchrl.models.inference.kv_cache import Layer, Layout, Tiles

_FETCHED = 256  # tokens of the cache that the kernel fetches at a time
_QUERIES = 128  # largest number of queries that the kernel computes at a time


def layout(*, slots: int, pages: int, page: int,
           sliding_window: int | None = None) -> Layout:
  """Returns the layout of a cache of `pages` pages of `page` tokens.

  All slots share the pages, which `pages.Pages` assigns to slots. A query sees
  `sliding_window` keys, including the key at its own position. None: all keys.
  """
  def empty(config, copies, dtype):
    shape = (copies * pages, page, 2 * config.num_key_value_heads,
             config.head_dim)
    return jnp.zeros(shape, dtype)

  places = functools.partial(_places, pages=pages, page=page)

  return Layout(
      slots=slots, block=page, has_pages=True, any_rows=True,
      axes=('batch', None, 'kv_heads', None), empty=empty,
      attend=functools.partial(_attend, sliding_window=sliding_window),
      record=functools.partial(kv_cache.recorded, places=places),
      places=(pages, page),
      copy=functools.partial(kv_cache.copied, axes=1))


def _attend(pages: Layer, q: Float[Array, 'n T H d'],
            k: Float[Array, 'n T K d'], v: Float[Array, 'n T K d'],
            tiles: Tiles, *, sliding_window: int | None):
  """Writes tokens to the cache and returns their attention, and the cache.

  The tokens are in n tiles of T consecutive tokens of a slot. They attend to
  all tokens of their slots up to themselves. The result of a tile of length 0
  is 0.
  """
  rows, width, heads, size = q.shape
  pages = _written(pages, k, v, tiles)
  # A tile's padding also attends, so that all tiles have one width. Its results
  # are dropped later, and it comes after every token that is kept.
  starts = jnp.where(tiles.length > 0, tiles.start, 0)
  output = _ragged(
      q.reshape(rows * width, heads, size), pages, starts + width, tiles.pages,
      jnp.arange(rows + 1, dtype=jnp.int32) * width,
      sliding_window=sliding_window)
  idle = (tiles.length == 0)[:, None, None, None]
  return jnp.where(idle, 0, output.reshape(q.shape)), pages


def _written(pages: Layer, k, v, tiles: Tiles) -> Layer:
  """Returns the pages after the keys and values of some tiles are written."""
  rows, width, heads, size = k.shape
  both = jnp.stack([k, v], 3).reshape(rows, width, 2 * heads, size)
  return pages.at[_places(tiles, width, *pages.shape[:2])].set(
      both.astype(pages.dtype), mode='drop')


def _places(tiles: Tiles, width: int, pages: int, page: int):
  """Returns the page of each token and the token's index there, [n width] each.

  The tokens are those of n tiles. Padding gets a page number that is out of
  range.
  """
  column = jnp.arange(width)
  positions = tiles.start[:, None] + column
  number = jnp.take_along_axis(
      tiles.pages, positions // page, 1, mode='clip')
  return jnp.where(
      column < tiles.length[:, None], number, pages), positions % page


def _ragged(q: Float[Array, 'T H d'], pages: Layer, lengths: Int[Array, 'n'],
            table: Int[Array, 'n N'], starts: Int[Array, 'm'], *,
            sliding_window: int | None) -> Float[Array, 'T H d']:
  """Returns the attention of queries to contexts in pages, by jax's TPU kernel.

  Args:
    q: Queries of n rows, one row after the other. The queries of a row are at
      the end of its context.
    pages: Cache of one layer.
    lengths: Number of tokens of each row's context, its queries included.
    table: Pages of each row's context, in order.
    starts: Index of each row's first query in q, and the end of q.
    sliding_window: Number of keys that a query sees, as in `layout`.
  """
  # Slow to import.
  from jax.experimental.pallas import tpu
  from jax.experimental.pallas.ops.tpu import ragged_paged_attention as kernels
  pages = tpu.with_memory_space_constraint(pages, tpu.HBM)
  fetched = min(max(_FETCHED // pages.shape[1], 1), table.shape[1])
  return kernels.ragged_paged_attention(
      q, pages, lengths, table, starts, jnp.array([len(lengths)], jnp.int32),
      sm_scale=q.shape[-1] ** -0.5, sliding_window=sliding_window,
      num_kv_pages_per_block=fetched,
      num_queries_per_block=min(_QUERIES, len(q)))
