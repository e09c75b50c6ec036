# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Token ids in, sampled ids with their log-probs out: slots that keep their KV cache.

A slot plays one conversation. Its keys and values stay while it searches; what
the environment inserts is appended to them, so history is never prefilled
again. Two pure programs over one donated state do all the work:

  append   feeds prompts and observations to some slots
  decode   samples for every decoding slot until some have stopped

`Engine` is the host's side of it: it pads to a few shapes, remembers each
slot's pending token, and hands out what was sampled.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32
import numpy as np

from searchrl.models import transformer
from searchrl.models.stops import StopTable
from searchrl.models.transformer import Params, TransformerConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
  """All slots. The cache holds every token of a slot but its last one."""

  keys: tuple[Float[Array, 'B K S d'], ...]  # one a layer
  values: tuple[Float[Array, 'B K S d'], ...]
  last_token: Int[Array, 'B']  # not yet in the cache
  position: Int[Array, 'B']  # tokens so far, the last one included
  active: Bool[Array, 'B']  # decoding
  stop_state: Int[Array, 'B']  # of the stop automaton
  budget: Int[Array, 'B']  # tokens that the turn may still sample
  row_key: UInt32[Array, 'B 2']  # of (seed, step, uid, sample, turn)


@dataclasses.dataclass(frozen=True)
class Append:
  """What one slot is fed before it decodes."""

  slot: int
  tokens: Sequence[int]  # at least one
  budget: int  # tokens that may then be sampled
  row_ids: Sequence[int]  # step, uid halves, sample, turn
  fresh: bool  # forget what the slot held before


@dataclasses.dataclass(frozen=True)
class Stopped:
  """A slot's finished turn."""

  slot: int
  tokens: tuple[int, ...]  # sampled, the stopping one included
  logprobs: tuple[float, ...]  # nats, at the sampling temperature


def row_ids(step: int, uid: str, sample: int, turn: int) -> tuple[int, ...]:
  """What a row's randomness is folded from, in this order.

  The uid enters as the two 32-bit halves of the first 8 bytes of its SHA-256.
  """
  half = hashlib.sha256(uid.encode()).digest()[:8]
  return (step, int.from_bytes(half[:4], 'big'), int.from_bytes(half[4:], 'big'),
          sample, turn)


class Engine:
  """Slots on the local devices.

  Args:
    config: the decoder's shape.
    slots: conversations side by side; B.
    length: tokens that a slot can hold; S.
    stop_table: ends turns; see `stops.compile_table`.
    eos_ids: end turns, too.
    seed: of all sampling.
    chunks: lengths to which appended tokens are padded, ascending.
    steps: tokens that one decode samples at most, per slot.
    place: puts a tree of [B, ...] arrays onto the devices.

  Raises:
    ValueError: a length or budget that cannot hold one turn.
  """

  def __init__(
      self,
      config: TransformerConfig,
      *,
      slots: int,
      length: int,
      stop_table: StopTable,
      eos_ids: Sequence[int],
      seed: int = 0,
      chunks: Sequence[int] = (32, 96),
      steps: int = 16,
      place: Callable[[Any], Any] = lambda tree: tree,
  ):
    if slots < 1 or length < 2:
      raise ValueError(
          'rollout.slots must be at least 1 and rollout.length at least 2, but '
          f'they are {slots} and {length}.')
    self.slots, self.length = slots, length
    self._chunks = tuple(c for c in sorted(chunks) if c <= length) or (length,)
    self._rows = tuple(sorted({-(-slots // 3), slots}))
    self._root = np.asarray(jax.random.key_data(jax.random.key(seed)))
    self._state = place(_empty(config, slots, length))
    self._last = [0] * slots  # the token of each slot that is not cached
    self._used = [0] * slots  # tokens of each slot
    self._partial = [([], []) for _ in range(slots)]
    self._params = None
    self.prefilled_tokens = 0  # fed by append, over the engine's life
    self.decoded_tokens = 0  # sampled
    self.slot_steps = 0  # decode steps times slots
    stop = jax.tree.map(jnp.asarray, stop_table)
    eos = jnp.zeros(config.vocab_size, bool).at[np.array(eos_ids, int)].set(True)
    self._append = jax.jit(
        functools.partial(append, config=config), donate_argnames='state',
        static_argnames='limit')
    self._decode = jax.jit(
        functools.partial(decode, config=config, stop=stop, eos=eos,
                          steps=steps),
        donate_argnames='state', static_argnames='limit')

  def load(self, params: Params, temperature: float) -> None:
    """Takes the policy's weights; slots must be idle.

    Args:
      params: of the decoder; layers stacked.
      temperature: of sampling; 0 is greedy, with log-probs at 1.
    """
    self._params, self._temperature = params, np.float32(temperature)

  def append(self, appends: Sequence[Append]) -> None:
    """Feeds slots, and lets them decode."""
    feeds = []
    for a in appends:
      if a.fresh:
        self._used[a.slot] = 0
      start = max(self._used[a.slot] - 1, 0)
      tokens = [*([] if a.fresh else [self._last[a.slot]]), *a.tokens]
      if start + len(tokens) + a.budget > self.length or a.budget < 1:
        raise ValueError(
            f'a slot holds {self.length} tokens, but slot {a.slot} would need '
            f'{start + len(tokens)} and a budget of {a.budget} >= 1. Raise '
            'rollout.length, or shorten prompts and passages.')
      feeds.append((a, start, tokens))
      self._last[a.slot] = int(tokens[-1])
      self._used[a.slot] = start + len(tokens)
      self._partial[a.slot] = ([], [])
      self.prefilled_tokens += len(tokens) - 1
    longest = max((len(tokens) for _, _, tokens in feeds), default=0)
    for offset in range(0, max(longest - 1, 1), self._chunks[-1]):
      rest = [f for f in feeds if len(f[2]) - 1 > offset or offset == 0]
      for first in range(0, len(rest), self.slots):
        self._append_rows(rest[first:first + self.slots], offset)

  def _append_rows(self, feeds, offset: int) -> None:
    """One chunk of some slots, padded to a shape that exists."""
    if not feeds:
      return
    widest = max(min(len(tokens) - 1 - offset, self._chunks[-1])
                 for _, _, tokens in feeds)
    width = next(c for c in self._chunks if c >= widest)
    count = next(n for n in self._rows if n >= len(feeds))
    rows = dict(
        slot=np.full(count, self.slots, np.int32),  # out of range: dropped
        tokens=np.zeros((count, width), np.int32),
        start=np.zeros(count, np.int32), length=np.zeros(count, np.int32),
        last=np.zeros(count, np.int32), position=np.zeros(count, np.int32),
        budget=np.zeros(count, np.int32), ids=np.zeros((count, 5), np.uint32))
    for row, (a, start, tokens) in enumerate(feeds):
      part = tokens[:-1][offset:offset + width]
      rows['slot'][row], rows['length'][row] = a.slot, len(part)
      rows['tokens'][row, :len(part)] = part
      rows['start'][row] = start + offset
      rows['last'][row] = tokens[-1]
      rows['position'][row] = start + len(tokens)
      rows['budget'][row] = a.budget
      rows['ids'][row] = a.row_ids
    reach = int((rows['start'] + rows['length']).max())
    self._state = self._append(
        self._params, state=self._state, rows=rows, root=self._root,
        limit=self._limit(reach))

  def decode(self) -> list[Stopped]:
    """Samples until some slots have stopped; those, in the order of slots."""
    reach = max(self._used)
    self._state, sampled = self._decode(
        self._params, state=self._state, temperature=self._temperature,
        limit=self._limit(reach + self._steps_ahead))
    sampled = jax.device_get(sampled)
    self.slot_steps += int(sampled['steps']) * self.slots
    stopped = []
    for slot in np.flatnonzero(sampled['count']):
      count = int(sampled['count'][slot])
      tokens, logprobs = self._partial[slot]
      tokens += sampled['tokens'][slot, :count].tolist()
      logprobs += sampled['logprobs'][slot, :count].tolist()
      self._last[slot] = tokens[-1]
      self._used[slot] += count
      self.decoded_tokens += count
      if not sampled['active'][slot]:
        stopped.append(Stopped(int(slot), tuple(tokens), tuple(logprobs)))
    return stopped

  def used(self, slot: int) -> int:
    """Tokens that a slot holds."""
    return self._used[slot]

  def release(self, slot: int) -> None:
    """Lets a finished slot no longer count in the reach of attention."""
    self._used[slot] = 0

  @property
  def _steps_ahead(self) -> int:
    return self._decode.__wrapped__.keywords['steps']

  def _limit(self, reach: int) -> int:
    """Half of the length if that holds `reach`, else all of it."""
    half = -(-self.length // 2)
    return half if reach <= half else self.length


def _empty(config: TransformerConfig, slots: int, length: int) -> State:
  shape = (slots, config.num_key_value_heads, length, config.head_dim)
  cache = lambda: tuple(
      jnp.zeros(shape) for _ in range(config.num_hidden_layers))
  ints = lambda: jnp.zeros(slots, jnp.int32)
  return State(
      keys=cache(), values=cache(), last_token=ints(), position=ints(),
      active=jnp.zeros(slots, bool), stop_state=ints(), budget=ints(),
      row_key=jnp.zeros((slots, 2), jnp.uint32))


def append(
    params: Params,
    state: State,
    rows: dict[str, Array],
    root: UInt32[Array, '2'],
    *,
    config: TransformerConfig,
    limit: int,
) -> State:
  """Feeds n slots c tokens each, right-padded, and lets them decode.

  Args:
    params: of the decoder.
    state: donated.
    rows: slot [n] (B: a row that only pads), tokens [n c] with their start
      and length [n]; the slot's new last token and position [n]; its turn's
      budget [n] and row ids [n 5].
    root: data of the run's root key.
    config: the decoder's shape.
    limit: tokens of the cache that attention reads; all that are filled.

  Returns:
    The new state.
  """
  width = rows['tokens'].shape[1]
  column = jnp.arange(width)
  positions = rows['start'][:, None] + column
  write = jnp.where(column < rows['length'][:, None], positions,
                    state.keys[0].shape[2])  # out of range: dropped
  visible = transformer.visible(
      positions, jnp.arange(limit), config.sliding_window)
  slot = rows['slot'][:, None]

  def attend_in(keys, values):
    def attend(q, k, v):
      new_keys = keys.at[slot, :, write].set(k, mode='drop')
      new_values = values.at[slot, :, write].set(v, mode='drop')
      mine = lambda cache: cache[:, :, :limit].at[rows['slot']].get(mode='clip')
      seen = transformer.attention(q, mine(new_keys), mine(new_values), visible)
      return seen, (new_keys, new_values)
    return attend

  x = params['embed']['embedding'][rows['tokens']]
  _, caches = _layers(params, x, positions, state, attend_in, config)

  def put(old, new):
    return old.at[rows['slot']].set(new, mode='drop')

  key = jax.random.wrap_key_data(root)
  folded = jax.vmap(lambda ids: functools.reduce(jax.random.fold_in, ids, key))
  return dataclasses.replace(
      state, keys=caches[0], values=caches[1],
      last_token=put(state.last_token, rows['last']),
      position=put(state.position, rows['position']),
      active=put(state.active, True),
      stop_state=put(state.stop_state, 0),
      budget=put(state.budget, rows['budget']),
      row_key=put(state.row_key, jax.random.key_data(folded(rows['ids']))))


def decode(
    params: Params,
    state: State,
    temperature: Float[Array, ''],
    *,
    config: TransformerConfig,
    stop: StopTable,
    eos: Bool[Array, 'V'],
    steps: int,
    limit: int,
) -> tuple[State, dict[str, Array]]:
  """Samples at most `steps` tokens for every active slot.

  Leaves early when a quarter of the slots that began has stopped.

  Args:
    params: of the decoder.
    state: donated.
    temperature: of sampling; 0 is greedy.
    config: the decoder's shape.
    stop: the stop automaton.
    eos: True for ids that end a turn.
    steps: N.
    limit: tokens of the cache that attention reads; all that will be filled.

  Returns:
    The new state; tokens and logprobs [B N], how many of them each slot
    sampled (count [B]), which go on (active [B]) and the steps taken.
  """
  slots = state.position.shape[0]
  enough = (jnp.sum(state.active) + 3) // 4
  began = jnp.sum(state.active)

  def unfinished(carry):
    state, out = carry
    stopped = began - jnp.sum(state.active)
    return (out['steps'] < steps) & state.active.any() & (stopped < enough)

  def step(carry):
    state, out = carry
    state, token, logprob = _decode_one(
        params, state, temperature, config, stop, eos, limit)
    was_active = carry[0].active
    row = jnp.arange(slots)
    at = jnp.where(was_active, out['count'], steps)
    out = dict(
        tokens=out['tokens'].at[row, at].set(token, mode='drop'),
        logprobs=out['logprobs'].at[row, at].set(logprob, mode='drop'),
        count=out['count'] + was_active, steps=out['steps'] + 1)
    return state, out

  out = dict(
      tokens=jnp.zeros((slots, steps), jnp.int32),
      logprobs=jnp.zeros((slots, steps)),
      count=jnp.zeros(slots, jnp.int32), steps=jnp.int32(0))
  state, out = jax.lax.while_loop(unfinished, step, (state, out))
  return state, dict(out, active=state.active)


def _decode_one(params, state: State, temperature, config, stop, eos, limit):
  """One token for every slot; idle slots compute and change nothing."""
  capacity = state.keys[0].shape[2]
  cached = state.position - 1
  row = jnp.arange(cached.shape[0])
  write = jnp.where(state.active, cached, capacity)
  visible = transformer.visible(
      cached[:, None], jnp.arange(limit), config.sliding_window)

  def attend_in(keys, values):
    def attend(q, k, v):
      new_keys = keys.at[row, :, write].set(k[:, 0], mode='drop')
      new_values = values.at[row, :, write].set(v[:, 0], mode='drop')
      seen = transformer.attention(
          q, new_keys[:, :, :limit], new_values[:, :, :limit], visible)
      return seen, (new_keys, new_values)
    return attend

  x = params['embed']['embedding'][state.last_token][:, None]
  x, caches = _layers(params, x, cached[:, None], state, attend_in, config)
  logits = transformer.logits(
      params, transformer.final_norm(params, x[:, 0], config))
  token, logprob = sample(logits, state.row_key, state.position, temperature)
  token = jnp.where(state.active, token, state.last_token)
  budget = state.budget - 1
  over = stop.hit[state.stop_state, token] | eos[token] | (budget <= 0)
  keep = functools.partial(jnp.where, state.active)
  return dataclasses.replace(
      state, keys=caches[0], values=caches[1], last_token=token,
      position=keep(state.position + 1, state.position),
      active=state.active & ~over,
      stop_state=keep(stop.next_state[state.stop_state, token].astype(
          jnp.int32), state.stop_state),
      budget=keep(budget, state.budget)), token, logprob


def _layers(params, x, positions, state: State, attend_in, config):
  """All layers, unrolled, each with its own cache."""
  keys, values = [], []
  for i in range(config.num_hidden_layers):
    layer = jax.tree.map(lambda leaf: leaf[i], params['layers'])
    x, (k, v) = transformer.Block(config).apply(
        {'params': layer}, x, positions,
        attend_in(state.keys[i], state.values[i]))
    keys.append(k)
    values.append(v)
  return x, (tuple(keys), tuple(values))


def sample(
    logits: Float[Array, 'B V'],
    row_key: UInt32[Array, 'B 2'],
    position: Int[Array, 'B'],
    temperature: Float[Array, ''],
) -> tuple[Int[Array, 'B'], Float[Array, 'B']]:
  """Draws one token a row by inverting the CDF, one uniform a row.

  Args:
    logits: unscaled.
    row_key: data of the row's key; the position is folded in last.
    position: of the token that is drawn.
    temperature: 0 takes the likeliest token.

  Returns:
    Tokens, and their log-probs in nats at the temperature (at 1 if greedy).
  """
  greedy = temperature == 0
  logprobs = jax.nn.log_softmax(logits / jnp.where(greedy, 1.0, temperature))
  uniform = jax.vmap(lambda data, at: jax.random.uniform(
      jax.random.fold_in(jax.random.wrap_key_data(data), at)))(
          row_key, position)
  cumulative = jnp.cumsum(jnp.exp(logprobs), -1)
  below = cumulative <= (uniform * cumulative[:, -1])[:, None]
  drawn = jnp.minimum(jnp.sum(below, -1), logits.shape[-1] - 1)
  token = jnp.where(greedy, jnp.argmax(logits, -1), drawn).astype(jnp.int32)
  return token, jnp.take_along_axis(logprobs, token[:, None], -1)[:, 0]
