# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The engine's device programs: pure functions from slots to slots.

  append       prefills tiles of prompts and observations into their slots
  copy         copies a prompt, or the page with its end, to other slots
  begin        starts a turn in slots
  decode       samples for every active slot until some have stopped
  release      stops slots in the middle of their turns

The state is donated from call to call. Where keys and values lie, and how they
are read, is the business of a `kv_cache.Layout`. On CPUs a row's numbers depend
on that row alone: no product's shape depends on the other rows, and a block
that a row does not see adds exact zeros.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from searchrl.models.inference import sampling
from searchrl.models.inference.kv_cache import Layer, Layout, Tiles
from searchrl.models.inference.stops import StopTable
from searchrl.models import transformer
from searchrl.models.transformer import Params, TransformerConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
  """All slots. The cache holds every token of a slot except its last one."""

  cache: tuple[Layer, ...]  # of each layer
  last_token: Int[Array, 'B']  # not yet in the cache
  position: Int[Array, 'B']  # number of tokens, the last one included
  active: Bool[Array, 'B']  # decoding
  stop_state: Int[Array, 'B']  # of the stop automaton
  budget: Int[Array, 'B']  # tokens that the turn may still sample
  row_key: UInt32[Array, 'B 2']  # from (seed, step, uid, sample, turn)


def empty(config: TransformerConfig, layout: Layout, copies: int, dtype: Any
         ) -> State:
  """Idle slots, of so many devices or groups of devices."""
  slots = copies * layout.slots
  cache = tuple(layout.empty(config, copies, dtype)
                for _ in range(config.num_hidden_layers))
  ints = lambda: jnp.zeros(slots, jnp.int32)
  return State(
      cache=cache, last_token=ints(), position=ints(),
      active=jnp.zeros(slots, bool), stop_state=ints(), budget=ints(),
      row_key=jnp.zeros((slots, 2), jnp.uint32))


def logical_axes(config: TransformerConfig, layout: Layout) -> State:
  """A State like `empty`'s whose leaves are tuples of logical axis names."""
  rows = ('batch',)
  return State(cache=(layout.axes,) * config.num_hidden_layers,
               last_token=rows, position=rows, active=rows, stop_state=rows,
               budget=rows, row_key=('batch', None))


def unstacked(params: Params, dtype: Any) -> Params:
  """Params with a tuple of layers instead of stacked ones, in `dtype`."""
  cast = lambda tree: jax.tree.map(lambda leaf: leaf.astype(dtype), tree)
  count = jax.tree.leaves(params['layers'])[0].shape[0]
  layers = tuple(
      cast(jax.tree.map(lambda leaf, i=i: leaf[i], params['layers']))
      for i in range(count))
  return {**cast({k: v for k, v in params.items() if k != 'layers'}),
          'layers': layers}


def unstacked_axes(axes: dict[str, Any], layers: int) -> dict[str, Any]:
  """The logical axes of `unstacked` params, from those of stacked ones."""
  return {**axes, 'layers': (transformer.layer_axes(axes),) * layers}


def append(
    params: Params,
    state: State,
    slot: Int[Array, 'n'],
    tokens: Int[Array, 'n c'],
    start: Int[Array, 'n'],
    length: Int[Array, 'n'],
    pages: Int[Array, 'n N'] | None = None,
    *,
    config: TransformerConfig,
    layout: Layout,
) -> State:
  """Writes tiles of tokens into their slots' caches.

  A slot may have several tiles in one call: each layer writes all of them
  before any is read. The tokens before a tile must be in the same call, or
  written earlier.

  Args:
    params: of the decoder, `unstacked`.
    state: donated.
    slot: of each tile, numbered on its device; Layout.slots for padding.
    tokens: right-padded.
    start: the position of each tile's first token.
    length: tokens of each tile.
    pages: of each tile's slot, if the layout has pages.
    config: the decoder's shape.
    layout: of the cache.
  """
  tokens, start = layout.split(tokens), layout.split(start)
  positions = start[:, None] + jnp.arange(tokens.shape[1])
  _, cache = _layers(params, tokens, positions, state.cache,
                     Tiles(slot, start, length, pages), config, layout)
  return dataclasses.replace(state, cache=cache)


def copy(
    state: State, source: Int[Array, 'n'], target: Int[Array, 'n'],
    blocks: Int[Array, ''], *, layout: Layout,
) -> State:
  """Copies the first blocks of the caches of slots, or single pages.

  Args:
    state: donated.
    source: slots, or pages if the layout has them, numbered on their device.
    target: of the same device; out of range for none.
    blocks: to copy, of each slot; of pages 1, or 0 for none at all.
    layout: of the cache.
  """
  return dataclasses.replace(state, cache=tuple(
      layout.copy(layer, source, target, blocks) for layer in state.cache))


def begin(
    state: State,
    slot: Int[Array, 'n'],
    last: Int[Array, 'n'],
    position: Int[Array, 'n'],
    budget: Int[Array, 'n'],
    ids: UInt32[Array, 'n 5'],
    root: UInt32[Array, '2'],
) -> State:
  """Starts a turn in some slots, which become active.

  Args:
    state: donated.
    slot: of each turn; B for none.
    last: the slot's last token, not yet in the cache.
    position: tokens of the slot, the last one included.
    budget: tokens that the turn may sample.
    ids: what the turn's random key is folded with.
    root: data of the run's root key.
  """
  put = lambda old, new: old.at[slot].set(new, mode='drop')
  key = jax.random.wrap_key_data(root)
  folded = jax.vmap(lambda row: functools.reduce(
      jax.random.fold_in, row, key))(ids)
  return dataclasses.replace(
      state, last_token=put(state.last_token, last),
      position=put(state.position, position),
      active=put(state.active, True), stop_state=put(state.stop_state, 0),
      budget=put(state.budget, budget),
      row_key=put(state.row_key, jax.random.key_data(folded)))


def release(state: State, slot: Int[Array, 'n']) -> State:
  """Stops decoding in some slots."""
  return dataclasses.replace(
      state, active=state.active.at[slot].set(False, mode='drop'))


_OF_ROWS = ('last_token', 'position', 'active', 'stop_state', 'budget',
            'row_key')


def decode(
    params: Params,
    state: State,
    stop: StopTable,
    temperature: Float[Array, ''] | Float[Array, 'n'],
    truncation: sampling.Truncation | None,
    slot: Int[Array, 'n'] | None = None,
    pages: Int[Array, 'n N'] | None = None,
    *,
    config: TransformerConfig,
    layout: Layout,
    steps: int,
    patience: int,
) -> tuple[State, dict[str, Array]]:
  """Samples at most `steps` tokens for every active slot.

  Args:
    params: of the decoder, `unstacked`.
    state: donated.
    stop: the automaton that ends turns.
    temperature: one for all rows, or one per row; 0 is greedy.
    truncation: which tokens may be drawn; see `sampling.sample`.
    slot: the slots to compute, B for none; default: all. No other may be
      active.
    pages: of each row's slot, if the layout has pages.
    config: the decoder's shape.
    layout: of the cache.
    steps: N.
    patience: ends early when 1 / patience of the active slots have stopped.

  Returns:
    The new state; and tokens and logprobs [n N], how many of them each slot
    sampled (count [n]), which go on (active [n]) and the steps run.
  """
  whole, state = state, _rows_of(state, slot)
  slots = state.position.shape[0]
  began = jnp.sum(state.active)
  enough = (began + patience - 1) // patience

  def unfinished(carry):
    state, out = carry
    stopped = began - jnp.sum(state.active)
    return (out['steps'] < steps) & state.active.any() & (stopped < enough)

  def step(carry):
    before, out = carry
    state, token, logprob = _decode_one(
        params, before, stop, temperature, truncation, slot, pages, config,
        layout)
    row = jnp.arange(slots)
    at = jnp.where(before.active, out['count'], steps)
    out = dict(
        tokens=out['tokens'].at[row, at].set(token, mode='drop'),
        logprobs=out['logprobs'].at[row, at].set(logprob, mode='drop'),
        count=out['count'] + before.active, steps=out['steps'] + 1)
    return state, out

  out = dict(
      tokens=jnp.zeros((slots, steps), jnp.int32),
      logprobs=jnp.zeros((slots, steps)),
      count=jnp.zeros(slots, jnp.int32), steps=jnp.int32(0))
  state, out = jax.lax.while_loop(unfinished, step, (state, out))
  return _put_back(whole, state, slot), dict(out, active=state.active)


def _rows_of(state: State, slot) -> State:
  """The state with the given slots as its rows; caches stay whole."""
  if slot is None:
    return state
  rows = {name: getattr(state, name).at[slot].get(mode='clip')
          for name in _OF_ROWS}
  rows['active'] &= slot < state.position.shape[0]
  return dataclasses.replace(state, **rows)


def _put_back(whole: State, state: State, slot) -> State:
  """The inverse of `_rows_of`, after its rows have changed."""
  if slot is None:
    return state
  return dataclasses.replace(state, **{
      name: getattr(whole, name).at[slot].set(getattr(state, name), mode='drop')
      for name in _OF_ROWS})


def _decode_one(params, state: State, stop, temperature, truncation, slot,
                pages, config, layout):
  """One token for every row; idle ones compute and change nothing."""
  cached = state.position - 1
  row = jnp.arange(len(cached)) % layout.slots if slot is None else slot
  tiles = Tiles(row, cached, state.active.astype(jnp.int32), pages)
  x, cache = _layers(params, state.last_token[:, None], cached[:, None],
                     state.cache, tiles, config, layout)
  logits = transformer.logits(
      params, transformer.final_norm(params, x[:, 0], config))
  token, logprob = sampling.sample(
      logits, state.row_key, state.position, temperature, truncation)
  token = jnp.where(state.active, token, state.last_token)
  budget = state.budget - 1
  ended = stop.hit[state.stop_state, token] | (budget <= 0)
  keep = functools.partial(jnp.where, state.active)
  return dataclasses.replace(
      state, cache=cache, last_token=token,
      position=keep(state.position + 1, state.position),
      active=state.active & ~ended,
      stop_state=keep(stop.next_state[state.stop_state, token].astype(
          jnp.int32), state.stop_state),
      budget=keep(budget, state.budget)), token, logprob


def _layers(params, tokens, positions, cache, tiles: Tiles, config, layout):
  """Runs all layers, unrolled, each with its own cache."""
  x = params['embed']['embedding'][tokens]
  new = []
  for weights, layer in zip(params['layers'], cache, strict=True):
    x, layer = transformer.Block(config).apply(
        {'params': weights}, x, positions,
        lambda q, k, v, layer=layer: layout.attend(layer, q, k, v, tiles))
    new.append(layer)
  return x, tuple(new)
