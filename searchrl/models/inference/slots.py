# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The engine's device programs: pure functions from slots to slots.

  append       prefills tiles of prompts and observations into their slots
  copy_prefix  copies a prompt from one slot to others
  begin        starts a turn in slots
  decode       samples for every active slot until some have stopped
  release      stops slots in the middle of their turns

The state is donated from call to call. Keys and values lie in blocks of W
tokens, and attention loops over the blocks of the longest slot, a number on
which no shape depends. A row's numbers depend on that row alone: no product's
shape depends on the other rows, and a block that a row does not see adds exact
zeros.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from searchrl.models import attention
from searchrl.models.inference import sampling
from searchrl.models.inference.stops import StopTable
from searchrl.models import transformer
from searchrl.models.transformer import Params, TransformerConfig

Cache = tuple[Float[Array, 'B N K W d'], ...]  # one per layer; N blocks a slot


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
  """All slots. The cache holds every token of a slot except its last one."""

  keys: Cache
  values: Cache
  last_token: Int[Array, 'B']  # not yet in the cache
  position: Int[Array, 'B']  # number of tokens, the last one included
  active: Bool[Array, 'B']  # decoding
  stop_state: Int[Array, 'B']  # of the stop automaton
  budget: Int[Array, 'B']  # tokens that the turn may still sample
  row_key: UInt32[Array, 'B 2']  # from (seed, step, uid, sample, turn)


def empty(config: TransformerConfig, slots: int, length: int, block: int,
          dtype: Any) -> State:
  """Idle slots of at least `length` tokens each, in blocks of `block`."""
  shape = (slots, -(-length // block), config.num_key_value_heads, block,
           config.head_dim)
  cache = lambda: tuple(
      jnp.zeros(shape, dtype) for _ in range(config.num_hidden_layers))
  ints = lambda: jnp.zeros(slots, jnp.int32)
  return State(
      keys=cache(), values=cache(), last_token=ints(), position=ints(),
      active=jnp.zeros(slots, bool), stop_state=ints(), budget=ints(),
      row_key=jnp.zeros((slots, 2), jnp.uint32))


def logical_axes(config: TransformerConfig) -> State:
  """A State like `empty`'s whose leaves are tuples of logical axis names."""
  cache = (('batch', None, 'kv_heads', None, None),) * config.num_hidden_layers
  rows = ('batch',)
  return State(keys=cache, values=cache, last_token=rows, position=rows,
               active=rows, stop_state=rows, budget=rows,
               row_key=('batch', None))


def unstacked(params: Params, dtype: Any) -> Params:
  """Params with a tuple of layers instead of stacked ones, in `dtype`."""
  cast = lambda tree: jax.tree.map(lambda leaf: leaf.astype(dtype), tree)
  count = jax.tree.leaves(params['layers'])[0].shape[0]
  layers = tuple(
      cast(jax.tree.map(lambda leaf, i=i: leaf[i], params['layers']))
      for i in range(count))
  return {**cast({k: v for k, v in params.items() if k != 'layers'}),
          'layers': layers}


def append(
    params: Params,
    state: State,
    slot: Int[Array, 'n'],
    tokens: Int[Array, 'n c'],
    start: Int[Array, 'n'],
    length: Int[Array, 'n'],
    *,
    config: TransformerConfig,
) -> State:
  """Writes tiles of tokens into their slots' caches.

  A slot may have several tiles in one call: each layer writes all of them
  before any is read. The tokens before a tile must be in the same call, or
  written earlier.

  Args:
    params: of the decoder, `unstacked`.
    state: donated.
    slot: of each tile; B for padding.
    tokens: right-padded.
    start: the position of each tile's first token.
    length: tokens of each tile.
    config: the decoder's shape.
  """
  width = tokens.shape[1]
  blocks, block = state.keys[0].shape[1], state.keys[0].shape[3]
  column = jnp.arange(width)
  positions = start[:, None] + column
  place = jnp.where(column < length[:, None], positions // block, blocks)
  rows = slot[:, None]
  filled = (jnp.max(start + length) + block - 1) // block

  def attend_in(keys, values):
    def attend(q, k, v):
      at = rows, place, slice(None), positions % block
      new_keys = keys.at[at].set(k, mode='drop')  # out of range: dropped
      new_values = values.at[at].set(v, mode='drop')
      seen = attention.blockwise(
          q, lambda i: (new_keys.at[slot, i].get(mode='clip'),
                        new_values.at[slot, i].get(mode='clip')),
          positions, filled, block, config.sliding_window)
      return seen, (new_keys, new_values)
    return attend

  _, caches = _layers(params, tokens, positions, state, attend_in, config)
  return dataclasses.replace(state, keys=caches[0], values=caches[1])


def copy_prefix(
    state: State, source: Int[Array, 'n'], slot: Int[Array, 'n'],
    blocks: Int[Array, ''],
) -> State:
  """Copies the first blocks of the caches of `source` into `slot`."""
  def copied(cache):
    return jax.lax.fori_loop(0, blocks, lambda i, cache: cache.at[slot, i].set(
        cache.at[source, i].get(mode='clip'), mode='drop'), cache)

  return dataclasses.replace(
      state, keys=tuple(map(copied, state.keys)),
      values=tuple(map(copied, state.values)))


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
    *,
    config: TransformerConfig,
    steps: int,
    parts: int,
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
    config: the decoder's shape.
    steps: N.
    parts: groups of slots of similar length whose attention is computed apart,
      so that short and idle slots read less than the longest.
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
        params, before, stop, temperature, truncation, slot, config, parts)
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
                config, parts):
  """One token for every row; idle ones compute and change nothing."""
  blocks, block = state.keys[0].shape[1], state.keys[0].shape[3]
  cached = state.position - 1
  row = jnp.arange(len(cached)) if slot is None else slot
  place = jnp.where(state.active, cached // block, blocks)

  def attend_in(keys, values):
    def attend(q, k, v):
      at = row, place, slice(None), cached % block
      new_keys = keys.at[at].set(k[:, 0], mode='drop')
      new_values = values.at[at].set(v[:, 0], mode='drop')
      seen = _attend_by_parts(
          q, new_keys, new_values, jnp.where(state.active, cached, -1), row,
          parts, config.sliding_window)
      return seen, (new_keys, new_values)
    return attend

  x, caches = _layers(params, state.last_token[:, None], cached[:, None],
                      state, attend_in, config)
  logits = transformer.logits(
      params, transformer.final_norm(params, x[:, 0], config))
  token, logprob = sampling.sample(
      logits, state.row_key, state.position, temperature, truncation)
  token = jnp.where(state.active, token, state.last_token)
  budget = state.budget - 1
  ended = stop.hit[state.stop_state, token] | (budget <= 0)
  keep = functools.partial(jnp.where, state.active)
  return dataclasses.replace(
      state, keys=caches[0], values=caches[1], last_token=token,
      position=keep(state.position + 1, state.position),
      active=state.active & ~ended,
      stop_state=keep(stop.next_state[state.stop_state, token].astype(
          jnp.int32), state.stop_state),
      budget=keep(budget, state.budget)), token, logprob


def _attend_by_parts(q, keys, values, positions, slot, parts: int, window):
  """Attention of one query a row to its slot's cache; none at position -1."""
  rows, block = len(positions), keys.shape[3]
  if parts == 1:  # rows are slots
    filled = (jnp.max(positions) + block) // block
    return attention.blockwise(
        q, lambda i: (keys[:, i], values[:, i]), positions[:, None], filled,
        block, window)
  size = -(-rows // parts)
  order = jnp.argsort(-positions)
  # The last part is filled with rows that read nothing and are dropped.
  order = jnp.pad(order, (0, parts * size - rows), constant_values=rows)
  positions = jnp.pad(positions, (0, 1), constant_values=-1)
  slot = jnp.pad(slot, (0, 1))
  seen = []
  for part in order.reshape(parts, size):
    at, rows_of = positions[part], slot[part]
    seen.append(attention.blockwise(
        q.at[part].get(mode='clip'),
        lambda i, rows_of=rows_of: (keys.at[rows_of, i].get(mode='clip'),
                                    values.at[rows_of, i].get(mode='clip')),
        at[:, None], (jnp.max(at) + block) // block, block, window))
  return jnp.zeros_like(q).at[order].set(jnp.concatenate(seen), mode='drop')


def _layers(params, tokens, positions, state: State, attend_in, config):
  """Runs all layers, unrolled, each with its own cache."""
  x = params['embed']['embedding'][tokens]
  keys, values = [], []
  for i, layer in enumerate(params['layers']):
    x, (k, v) = transformer.Block(config).apply(
        {'params': layer}, x, positions,
        attend_in(state.keys[i], state.values[i]))
    keys.append(k)
    values.append(v)
  return x, (tuple(keys), tuple(values))
