# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The engine's device programs: pure functions from slots to slots.

  append       prefills tiles of prompts and observations into their slots
  copy         copies a prompt, or the page with its end, to other slots
  begin        starts a turn in slots
  decode       samples for every active slot until some have stopped
  release      stops slots in the middle of their turns

The state is donated from call to call. A `kv_cache.Layout` decides where keys
and values are stored and how they are read. On CPUs the numbers of a row depend
on this row alone: no product's shape depends on the other rows, and a block
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

  cache: tuple[Layer, ...]  # one cache per layer
  last_token: Int[Array, 'B']  # last token of each slot, not yet in the cache
  position: Int[Array, 'B']  # number of tokens, the last one included
  active: Bool[Array, 'B']  # whether the slot is decoding
  stop_state: Int[Array, 'B']  # state of the stop automaton
  budget: Int[Array, 'B']  # number of tokens that the turn may still sample
  row_key: UInt32[Array, 'B 2']  # key from (seed, step, uid, sample, turn)


def empty(config: TransformerConfig, layout: Layout, copies: int, dtype: Any
         ) -> State:
  """Returns idle slots for `copies` devices or groups of devices."""
  slots = copies * layout.slots
  cache = tuple(layout.empty(config, copies, dtype)
                for _ in range(config.num_hidden_layers))
  ints = lambda: jnp.zeros(slots, jnp.int32)
  return State(
      cache=cache, last_token=ints(), position=ints(),
      active=jnp.zeros(slots, bool), stop_state=ints(), budget=ints(),
      row_key=jnp.zeros((slots, 2), jnp.uint32))


def logical_axes(config: TransformerConfig, layout: Layout) -> State:
  """Returns the logical axes of every leaf, as a State like that of `empty`."""
  rows = ('batch',)
  return State(cache=(layout.axes,) * config.num_hidden_layers,
               last_token=rows, position=rows, active=rows, stop_state=rows,
               budget=rows, row_key=('batch', None))


def unstacked(params: Params, dtype: Any) -> Params:
  """Returns params in `dtype`, with a tuple of layers, not stacked ones."""
  cast = lambda tree: jax.tree.map(lambda leaf: leaf.astype(dtype), tree)
  count = jax.tree.leaves(params['layers'])[0].shape[0]
  layers = tuple(
      cast(jax.tree.map(lambda leaf, i=i: leaf[i], params['layers']))
      for i in range(count))
  return {**cast({k: v for k, v in params.items() if k != 'layers'}),
          'layers': layers}


def unstacked_axes(axes: dict[str, Any], layers: int) -> dict[str, Any]:
  """Returns the logical axes of `unstacked` params, given stacked ones."""
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
    params: Parameters of the decoder, `unstacked`.
    state: State of all slots, donated.
    slot: Slot of each tile, numbered on its device; Layout.slots for padding.
    tokens: Tiles of token ids, right-padded.
    start: Position of each tile's first token.
    length: Number of tokens in each tile.
    pages: Pages of each tile's slot, if the layout has pages.
    config: Shape of the decoder.
    layout: Layout of the cache.
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
    state: State of all slots, donated.
    source: Slots, or pages if the layout has them, numbered on their device.
    target: Slots or pages of the same device; out of range for none.
    blocks: Number of blocks to copy of each slot. For pages it is 1, or 0 to
      copy nothing.
    layout: Layout of the cache.
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
    state: State of all slots, donated.
    slot: Slot of each turn; B for none.
    last: Last token of the slot, not yet in the cache.
    position: Number of tokens in the slot, the last one included.
    budget: Number of tokens that the turn may sample.
    ids: Numbers that are folded into the turn's random key.
    root: Data of the run's root key.
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
    params: Parameters of the decoder, `unstacked`.
    state: State of all slots, donated.
    stop: Automaton that ends turns.
    temperature: Temperature of all rows, or one per row; 0 is greedy.
    truncation: Rules for which tokens may be drawn; see `sampling.sample`.
    slot: Slots to compute, B for none. Default: all. No other slot may be
      active.
    pages: Pages of each row's slot, if the layout has pages.
    config: Shape of the decoder.
    layout: Layout of the cache.
    steps: Largest number of tokens per slot, N.
    patience: Divisor for early ends: the loop ends when 1 / patience of the
      active slots have stopped.

  Returns:
    The new state, and a dict: `tokens` and `logprobs` [n N], the number that
    each slot sampled (`count` [n]), which slots go on (`active` [n]), and the
    number of steps that were run (`steps`).
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
  """Returns the state with the given slots as rows; caches stay whole."""
  if slot is None:
    return state
  rows = {name: getattr(state, name).at[slot].get(mode='clip')
          for name in _OF_ROWS}
  rows['active'] &= slot < state.position.shape[0]
  return dataclasses.replace(state, **rows)


def _put_back(whole: State, state: State, slot) -> State:
  """Returns the whole state with changed rows; the inverse of `_rows_of`."""
  if slot is None:
    return state
  return dataclasses.replace(state, **{
      name: getattr(whole, name).at[slot].set(getattr(state, name), mode='drop')
      for name in _OF_ROWS})


def _decode_one(params, state: State, stop, temperature, truncation, slot,
                pages, config, layout):
  """Samples one token for every row. Idle rows are computed but not changed."""
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
