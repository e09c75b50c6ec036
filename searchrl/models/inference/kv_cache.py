# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The interface of KV caches: what all memory layouts have in common.

A slot is the part of the cache that has one sequence. A tile is some
consecutive tokens of a slot that are computed as one row. A layout says how one
layer's cache is stored, and has the functions that use the cache. `attend` both
writes the keys and values of some tokens and attends to their slots, so that
writing and reading agree on where a position is stored. `kv_blocks` and
`kv_pages` make layouts, and `layouts` chooses one.

`sharded` splits slots over devices. Each device then has some slots and all of
their tokens, and no token crosses devices.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from searchrl.models import experts
from searchrl.models.transformer import TransformerConfig

Layer = Any  # one layer's cache: a tree of arrays


class Tiles(NamedTuple):
  """Positions of rows of tokens: the slot of each tile, and its range there.

  Tile i has the positions from start[i] up to, but not including, start[i] +
  length[i]. One call may have several tiles of a slot: all are written before
  any is read.
  """

  slot: Int[Array, 'n']  # slot of each tile, on its device; Layout.slots: none
  start: Int[Array, 'n']  # position of each tile's first token
  length: Int[Array, 'n']  # tokens of each tile; 0: nothing is written
  pages: Any = None  # pages of each tile's slot, [n N], if the layout has some


@dataclasses.dataclass(frozen=True)
class Layout:
  """Memory layout of one layer's cache, and the functions that use it.

  empty(config, copies, dtype) -> Layer
    Returns an empty cache for the slots of `copies` devices.
  attend(layer, q [n T H d], k [n T K d], v, tiles) -> ([n T H d], Layer)
    Writes the keys and values of tiles, and returns the tiles' causal attention
    to their slots, and the new cache. Beyond a tile's length the attention is
    finite but meaningless. For a tile with T = 1 and length 0 it is 0.
  copy(cache, source [n], target [n], blocks) -> cache
    Copies the first `blocks` blocks of some slots into other slots. If the
    layout has pages, it copies single pages instead. `cache` is a pair: the
    caches of all layers, and a table or None. Targets that are out of range
    must come last.
  record(table, values [n T X], tiles) -> table
    Writes the values of the tiles' tokens into a table [..., X]. The table has
    an entry for each token of the cache. On a device its first axes are
    `places`.
  split(x) -> x
    Splits the rows of an array over the devices in the same way as slots.
  mixed
    Function `experts.mixed`, or the result of `experts.sharded` for the same
    devices.
  """

  slots: int  # number of slots on a device
  block: int  # tokens per block or page
  has_pages: bool  # whether the host assigns pages; else each slot has its room
  any_rows: bool  # whether `attend` takes single tokens of slots in any order
  axes: Layer  # logical axes of a layer's arrays
  empty: Callable[[TransformerConfig, int, Any], Layer]
  attend: Callable[..., tuple[Float[Array, 'n T H d'], Layer]]
  copy: Callable[..., Any]
  record: Callable[..., Array]
  places: tuple[int, ...]  # first axes of a device's table; see `record`
  split: Callable[[Array], Array] = lambda x: x
  mixed: Callable[..., Array] = experts.mixed


def copied(cache: Any, source: Int[Array, 'n'], target: Int[Array, 'n'],
           blocks: Int[Array, ''], *, axes: int) -> Any:
  """Returns a cache after the first blocks of some slots are copied to others.

  Blocks are copied one after the other, so that a jitted program whose cache is
  donated works in place. A gather and a scatter of all blocks would change the
  layout of the whole cache on TPUs, and also read blocks for slots that are
  left out.

  Args:
    cache: Tree of arrays. Their first axes number the blocks.
    source: Slots, or pages, to copy from.
    target: Slots, or pages, to copy to. Those out of range come last and are
      left out.
    blocks: Number of blocks of each slot; 1 for pages.
    axes: Number of axes that number the blocks: 2 for slot and block, 1 for
      page.
  """
  size = len(jax.tree.leaves(cache)[0])

  def move(i, cache):
    row, block = jax.lax.div(i, blocks), jax.lax.rem(i, blocks)

    def moved(x):
      start = lambda slot: (slot, block)[:axes] + (0,) * (x.ndim - axes)
      one = jax.lax.dynamic_slice(
          x, start(source[row]), (1,) * axes + x.shape[axes:])
      return jax.lax.dynamic_update_slice(x, one, start(target[row]))

    return jax.tree.map(moved, cache)

  return jax.lax.fori_loop(0, blocks * jnp.sum(target < size), move, cache)


def recorded(table: Array, values: Array, tiles: Tiles, *,
             places: Callable[[Tiles, int], tuple[Array, ...]]) -> Array:
  """Returns a table with values of some tokens written to it.

  Args:
    table: Array with an entry for each token that the cache has room for.
    values: Values of the tokens of n tiles of width T, [n T X].
    tiles: Positions of the tokens. Padding writes nothing.
    places: Function from tiles and their width T to the indices of the tokens'
      entries in the table.
  """
  return table.at[places(tiles, values.shape[1])].set(values, mode='drop')


def sharded(layout: Layout, shardings: Callable[[Any], Any]) -> Layout:
  """Returns a copy of a layout whose slots are split over devices.

  Each device numbers its own slots from 0. The rows of a call are split, too:
  of n rows on s devices, device i gets the rows from i * n / s up to (i + 1) *
  n / s. These rows are tiles of slots of the same device. `shardings` is a
  function from a tree of tuples of axis names to a tree of NamedShardings.
  """
  rows = ('batch',)
  spec = lambda axes: jax.tree.map(lambda sharding: sharding.spec,
                                   shardings(axes))
  heads = spec(('batch', None, 'heads', None))
  kv_heads = spec(('batch', None, 'kv_heads', None))
  layer, row = spec(layout.axes), spec(rows)
  pages = spec(('batch', None)) if layout.has_pages else None
  split = functools.partial(jax.shard_map, mesh=shardings(rows).mesh,
                            check_vma=False)  # kernels do not declare theirs

  tiles = Tiles(row, row, row, pages)

  def copy(cache, *moves):
    layers, table = cache
    specs = (layer,) * len(layers), None if table is None else row
    return split(layout.copy, out_specs=specs, in_specs=(
        specs, row, row, PartitionSpec()))(cache, *moves)

  return dataclasses.replace(
      layout, copy=copy,
      attend=split(
          layout.attend, out_specs=(heads, layer),
          in_specs=(layer, heads, kv_heads, kv_heads, tiles)),
      record=split(layout.record, out_specs=row, in_specs=(row, row, tiles)),
      split=lambda x: jax.lax.with_sharding_constraint(x, shardings(rows)),
      mixed=experts.sharded(shardings))


def copies(shardings: Callable[[Any], Any] | None) -> int:
  """Returns the number of copies of the weights; each has a part of the slots.

  A copy is on one device, or split over a group of devices. `shardings` is the
  argument of `sharded`. If it is None, there is one copy.
  """
  if shardings is None:
    return 1
  sharding = shardings(('batch',))
  devices = sharding.num_devices
  return devices // sharding.shard_shape((devices,))[0]
