# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The engine's device programs: pure functions from slots to slots.

  append       prefills tiles of prompts and observations into their slots
  copy         copies a prompt, or the page with its end, to other slots
  begin        starts a turn in slots
  decode       samples for every active slot until some have stopped
  release      stops slots in the middle of their turns
  routing      returns the experts of a slot's tokens, if they are recorded

A slot is a row of the KV cache that has the tokens of one trajectory. A tile is
a part of a text that is prefilled as one row. All programs take the `state` of
all slots. All but `routing` donate it and return the new state. Params are a
result of `engine_weights.Conversion`, and `config` is the decoder's shape. The
`layout` of the cache decides where keys and values are stored and how they are
read. In `append` and `copy`, slots are numbered from 0 on each device, and
elsewhere over all devices; a number out of range means no slot. On CPUs the
results of a row depend on this row alone: no product's shape depends on the
other rows, and a block that a row does not see adds exact zeros.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from searchrl.models import experts
from searchrl.models.inference import engine_weights
from searchrl.models.inference import sampling
from searchrl.models.inference.kv_cache import Layer, Layout, Tiles
from searchrl.models.inference.stops import StopTable
from searchrl.models import transformer
from searchrl.models.transformer import Params, TransformerConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
  """State of all slots.

  The cache holds every token of a slot except its last one.
  """

  cache: tuple[Layer, ...]  # one cache per layer
  last_token: Int[Array, 'B']  # last token of each slot, not yet in the cache
  position: Int[Array, 'B']  # number of tokens, the last one included
  active: Bool[Array, 'B']  # whether the slot is decoding
  stop_state: Int[Array, 'B']  # state of the stop automaton
  budget: Int[Array, 'B']  # number of tokens that the turn may still sample
  row_key: UInt32[Array, 'B 2']  # key from (seed, step, uid, sample, turn)
  # Experts of each token of the cache, as `experts.recorded`: the k of the
  # first layer, and so on. None: not recorded.
  routing: Int[Array, '*P X'] | None = None


_PER_SLOT = [field.name for field in dataclasses.fields(State)
             if field.name not in ('cache', 'routing')]


def empty(config: TransformerConfig, layout: Layout, copies: int, dtype: Any,
          records: bool = False) -> State:
  """Returns the state of empty slots on `copies` devices or device groups.

  With `records`, it has a table for each token's experts, if there are experts.
  """
  slots = copies * layout.slots
  cache = tuple(layout.empty(config, copies, dtype)
                for _ in range(config.num_hidden_layers))
  ints = lambda: jnp.zeros(slots, jnp.int32)
  table = None
  if records and config.experts:
    first, *others = layout.places
    width = config.num_hidden_layers * config.experts.num_experts_per_tok
    table = jnp.zeros((copies * first, *others, width),
                      experts.record_dtype(config.experts.num_experts))
  return State(
      routing=table, cache=cache, last_token=ints(), position=ints(),
      active=jnp.zeros(slots, bool), stop_state=ints(), budget=ints(),
      row_key=jnp.zeros((slots, 2), jnp.uint32))


def logical_axes(config: TransformerConfig, layout: Layout,
                 records: bool = False) -> State:
  """Returns the logical axes of every leaf, as a State like that of `empty`."""
  axes: dict[str, Any] = dict.fromkeys(_PER_SLOT, ('batch',))
  axes |= {'cache': (layout.axes,) * config.num_hidden_layers,
           'row_key': ('batch', None),
           'routing': ('batch',) if records and config.experts else None}
  return State(**axes)


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
  """Computes tokens and adds their keys and values to the caches of slots.

  The tokens are in n tiles. A tile is a range of positions of one slot. A slot
  may have several tiles in one call, because each layer writes all tiles before
  it reads any. The tokens before a tile in its slot must be in the same call,
  or must have been written earlier.

  Args:
    params: Weights of the decoder, from `engine_weights.Conversion`.
    state: State of all slots.
    slot: Slot of each tile, numbered from 0 on its device. `layout.slots` means
      no slot.
    tokens: Token ids of each tile, right-padded to c.
    start: Position of each tile's first token in its slot.
    length: Number of tokens of each tile. 0: nothing is written.
    pages: Pages of each tile's slot, if the layout has pages.
    config: Shape of the decoder.
    layout: Layout of the cache.
  """
  tokens, start = layout.split(tokens), layout.split(start)
  positions = start[:, None] + jnp.arange(tokens.shape[1])
  return _layers(params, tokens, positions, state,
                 Tiles(slot, start, length, pages), config, layout)[1]


def copy(
    state: State, source: Int[Array, 'n'], target: Int[Array, 'n'],
    blocks: Int[Array, ''], *, layout: Layout,
) -> State:
  """Copies the first `blocks` blocks of some slots' caches to other slots.

  If the layout has pages, it copies single pages instead: source and target are
  then pages of one device, and blocks is 1, or 0 to copy nothing. Targets out
  of range copy nothing and must come last.
  """
  cache, table = layout.copy(
      (state.cache, state.routing), source, target, blocks)
  return dataclasses.replace(state, cache=cache, routing=table)


def routing(state: State, index: Int[Array, 'n']) -> Int[Array, 'T X']:
  """Returns the experts that each token of a slot used, [T X].

  X is the number of layers times the experts per token. T is the number of
  tokens that the slot has room for.

  Args:
    state: State of all slots, with a record of experts.
    index: Number of the slot, or of its pages, over all devices together.
  """
  assert state.routing is not None
  return state.routing[index].reshape(-1, state.routing.shape[-1])


def begin(
    state: State,
    slot: Int[Array, 'n'],
    last: Int[Array, 'n'],
    position: Int[Array, 'n'],
    budget: Int[Array, 'n'],
    ids: UInt32[Array, 'n 5'],
    root: UInt32[Array, '2'],
) -> State:
  """Starts a turn in some slots: `decode` then samples tokens for them.

  Args:
    state: State of all slots.
    slot: Slots, numbered over all devices. Numbers out of range are left out.
    last: Last token of each slot, which is not yet in its cache.
    position: Number of tokens of each slot, the last one included.
    budget: Number of tokens that each slot may sample.
    ids: Numbers that are folded into the run's random key for each slot.
    root: Data of the run's random key.
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
  """Stops some slots, so that `decode` samples nothing for them."""
  return dataclasses.replace(
      state, active=state.active.at[slot].set(False, mode='drop'))


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
    params: Parameters of the decoder.
    state: State of all slots.
    stop: Automaton that ends turns.
    temperature: Temperature of all rows, or one per row; 0 is greedy.
    truncation: Rules for which tokens may be drawn; see `sampling.sample`.
    slot: Slots to compute. Default: all. No other slot may be active.
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
  slots = len(state.position)
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
    column = jnp.where(before.active, out['count'], steps)
    return state, dict(
        tokens=out['tokens'].at[row, column].set(token, mode='drop'),
        logprobs=out['logprobs'].at[row, column].set(logprob, mode='drop'),
        count=out['count'] + before.active, steps=out['steps'] + 1)

  out = dict(
      tokens=jnp.zeros((slots, steps), jnp.int32),
      logprobs=jnp.zeros((slots, steps)),
      count=jnp.zeros(slots, jnp.int32), steps=jnp.int32(0))
  state, out = jax.lax.while_loop(unfinished, step, (state, out))
  return _put_back(whole, state, slot), dict(out, active=state.active)


def _rows_of(state: State, slot) -> State:
  """Returns the state with only the entries of the given slots, in this order.

  The caches stay whole. A slot out of range is not active.
  """
  if slot is None:
    return state
  rows = {name: getattr(state, name).at[slot].get(mode='clip')
          for name in _PER_SLOT}
  rows['active'] &= slot < state.position.shape[0]
  return dataclasses.replace(state, **rows)


def _put_back(whole: State, state: State, slot) -> State:
  """Returns the whole state with changed entries of some slots written back.

  It is the inverse of `_rows_of`. The caches are those of `state`.
  """
  if slot is None:
    return state
  return dataclasses.replace(state, **{
      name: getattr(whole, name).at[slot].set(getattr(state, name), mode='drop')
      for name in _PER_SLOT})


def _decode_one(params, state: State, stop, temperature, truncation, slot,
                pages, config, layout):
  """Returns the state after one more token per row, the tokens and log-probs.

  Idle rows are computed but not changed.
  """
  cached = state.position - 1
  row = jnp.arange(len(cached)) % layout.slots if slot is None else slot
  tiles = Tiles(row, cached, state.active.astype(jnp.int32), pages)
  x, state = _layers(params, state.last_token[:, None], cached[:, None],
                     state, tiles, config, layout)
  params = engine_weights.upright(params)
  logits = transformer.logits(
      params, transformer.final_norm(params, x[:, 0], config),
      config.unused_ids, config.matmul_dtype)
  token, logprob = sampling.sample(
      logits, state.row_key, state.position, temperature, truncation)
  token = jnp.where(state.active, token, state.last_token)
  budget = state.budget - 1
  ended = stop.hit[state.stop_state, token] | (budget <= 0)
  keep = lambda new, old: jnp.where(state.active, new, old)
  return dataclasses.replace(
      state, last_token=token,
      position=keep(state.position + 1, state.position),
      active=state.active & ~ended,
      stop_state=keep(stop.next_state[state.stop_state, token].astype(
          jnp.int32), state.stop_state),
      budget=keep(budget, state.budget)), token, logprob


def _layers(params, tokens, positions, state: State, tiles: Tiles, config,
            layout):
  """Returns the last layer's output and the new state. Layers are unrolled."""
  x = params['embed']['embedding'][tokens]
  new, chosen = [], []
  for weights, layer in zip(params['layers'], state.cache, strict=True):
    weights = engine_weights.upright(weights)
    (x, layer), sown = _layer(weights, layer, x, positions, tiles, config,
                              layout, state.routing is not None)
    new.append(layer)
    chosen += [routes.ids for routes in sown.get('chosen', ())]
  table = state.routing
  if table is not None:
    ids = experts.recorded(jnp.stack(chosen, 1), config.experts.num_experts)
    table = layout.record(table, ids.reshape(*tokens.shape, -1), tiles)
  return x, dataclasses.replace(state, cache=tuple(new), routing=table)


# It is traced once for all layers, and leaves no call in the programs.
@functools.partial(jax.jit, static_argnums=(5, 6, 7), inline=True)
def _layer(weights, layer, x, positions, tiles, config, layout, records):
  """Runs one layer on some tokens, which are written to the layer's cache.

  Returns:
    The layer's output with its new cache; and a dict with the choice of
    experts, which is empty if not `records`.
  """
  result = transformer.Block(config, layout.mixed).apply(
      {'params': weights}, x, positions,
      lambda q, k, v: layout.attend(layer, q, k, v, tiles),
      mutable=('routing',) if records else False)
  return (result[0], dict(result[1]['routing'])) if records else (result, {})


def jitted(
    config: TransformerConfig, layout: Layout, copies: int, dtype: Any, *,
    steps: int, patience: int, records: bool, ordered: Callable[[Any], Any],
    shardings: Callable[[Any], Any] | None,
) -> tuple[Callable[[], State], dict[str, Callable[..., Any]]]:
  """Returns the jitted programs of an engine.

  The first result is a function without arguments that makes the state of empty
  slots. The second has the other programs by name. They return states with the
  sharding of their input, and samples in a sharding that every process can
  read. The arguments have the meaning that they have in `Engine`; `copies` is
  the number of copies of the weights.
  """
  read = shardings and shardings(())
  held = shardings and shardings(logical_axes(config, layout, records))
  make = ordered(jax.jit(
      functools.partial(empty, config, layout, copies, dtype, records),
      out_shardings=held))

  def jit(program, shardings=held, **options):
    return ordered(jax.jit(
        functools.partial(program, **options), donate_argnames='state',
        out_shardings=shardings))

  model = dict(config=config, layout=layout)
  return make, dict(
      append=jit(append, **model), copy=jit(copy, layout=layout),
      begin=jit(begin), release=jit(release),
      routing=ordered(jax.jit(routing, out_shardings=read)),
      decode=jit(decode, shardings and (held, read), **model, steps=steps,
                 patience=patience))
