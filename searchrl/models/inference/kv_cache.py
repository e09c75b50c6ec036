# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The KV cache of slots, as a device wants it: what all layouts have in common.

A layout is four functions of one layer's cache. `attend` writes the keys and
values of some tokens and attends to their slots in one go, so that what writes
and what reads agree on where a position lies. `kv_blocks` and `kv_pages` make
layouts, `layouts` chooses one.

Where slots are split over devices, each device has some slots and all of their
tokens, and no token crosses devices: `sharded`.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from searchrl.models.transformer import TransformerConfig

Layer = Any  # one layer's cache: a tree of arrays


class Tiles(NamedTuple):
  """Where rows of tokens stand: tile i is in one slot, at start ... + length.

  Tiles of one slot may stand in one call: all are written before any is read.
  """

  slot: Int[Array, 'n']  # of its device; Layout.slots: none
  start: Int[Array, 'n']  # the position of its first token
  length: Int[Array, 'n']  # of its tokens; 0: nothing is written
  pages: Int[Array, 'n N'] | None = None  # of its slot, where slots have pages


@dataclasses.dataclass(frozen=True)
class Layout:
  """How one layer's cache lies in memory, and attention over it.

  empty(config, copies, dtype) -> Layer
    The room of the slots of so many devices.
  attend(layer, q [n T H d], k [n T K d], v, tiles) -> ([n T H d], Layer)
    Causal attention of tiles to their slots. Beyond a tile's length the result
    is finite and means nothing; at length 0 of a single token it is 0.
  copy(layer, source [n], target [n], blocks) -> Layer
    Copies the first blocks of some slots into others; or pages, one by one.
  split(x) -> x
    Splits the rows of an array over the devices as slots are.
  """

  slots: int  # of a device
  block: int  # tokens
  has_pages: bool  # that the host gives to slots; else each has its own room
  any_rows: bool  # `attend` takes single tokens of some slots, in any order
  axes: Layer  # logical axes of the arrays of a layer
  empty: Callable[[TransformerConfig, int, Any], Layer]
  attend: Callable[..., tuple[Float[Array, 'n T H d'], Layer]]
  copy: Callable[..., Layer]
  split: Callable[[Array], Array] = lambda x: x


def sharded(layout: Layout, shardings: Callable[[Any], Any]) -> Layout:
  """A layout of slots that are split over devices.

  Slots are numbered on each device from 0; rows i n/s ... of s devices' n rows
  are tiles of device i's slots.

  Args:
    layout: of the slots of one device.
    shardings: a tree of logical axes -> one of NamedSharding.
  """
  rows = ('batch',)
  spec = lambda axes: jax.tree.map(lambda sharding: sharding.spec,
                                   shardings(axes))
  heads = spec(('batch', None, 'heads', None))
  kv_heads = spec(('batch', None, 'kv_heads', None))
  layer, row = spec(layout.axes), spec(rows)
  pages = spec(('batch', None)) if layout.has_pages else None
  split = functools.partial(jax.shard_map, mesh=shardings(rows).mesh,
                            check_vma=False)  # a kernel says nothing of it
  return dataclasses.replace(
      layout,
      attend=split(
          layout.attend, out_specs=(heads, layer),
          in_specs=(layer, heads, kv_heads, kv_heads,
                    Tiles(row, row, row, pages))),
      copy=split(
          layout.copy, out_specs=layer,
          in_specs=(layer, row, row, PartitionSpec())),
      split=lambda x: jax.lax.with_sharding_constraint(x, shardings(rows)))
