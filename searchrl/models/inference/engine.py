# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The inference engine: samples tokens in slots that keep their KV cache.

A slot holds one trajectory. Its keys and values stay while it waits for a
search, and an observation is appended to them, so that history is never
prefilled again; a prompt that another slot holds is copied.

`Engine` is the host's side of the programs in `slots`: it pads what `contents`
plans to the few shapes compiled before the first rollout, and returns sampled
tokens with their log-probs.
"""

import collections
from collections.abc import Callable, Sequence
import dataclasses
import functools
import hashlib
from typing import Any

import jax
import numpy as np

from searchrl.models.inference import slot_state
from searchrl.models.inference import kv_cache
from searchrl.models.inference import layouts
from searchrl.models.inference import sampling
from searchrl.models.inference import slots as programs
from searchrl.models.inference.slot_state import Append
from searchrl.models.inference.stops import StopTable
from searchrl.models.transformer import Params, TransformerConfig

# From this many rows on, XLA's CPU matrix products all round in the same way.
_ONE_KIND = 64
# Shares of the slots, in eighths, that a decode may compute: most of them while
# some wait for searches, few at the end of a rollout.
_EIGHTHS = (1, 2, 4, 5, 6, 7, 8)
_NONE = 2**30  # the number of no slot and no page


@dataclasses.dataclass(frozen=True)
class Stopped:
  """A slot's finished turn."""

  slot: int
  tokens: tuple[int, ...]  # sampled, with the one that ended the turn
  logprobs: tuple[float, ...]  # nats, at the sampling temperature


def row_ids(step: int, uid: str, sample: int, turn: int) -> tuple[int, ...]:
  """The numbers that a row's random key is folded with, in this order.

  The uid enters as the two 32-bit halves of the first 8 bytes of its SHA-256.
  """
  digest = hashlib.sha256(uid.encode()).digest()
  halves = (int.from_bytes(digest[i:i + 4], 'big') for i in (0, 4))
  return (step, *halves, sample, turn)


class Engine:
  """Slots on the local devices.

  Args:
    config: the decoder's shape.
    slots: B, trajectories side by side.
    length: tokens that a slot can hold.
    stop_table: ends turns, if `load` gets no other; see `stops.compile_table`.
    seed: of all sampling.
    tile: tokens that are prefilled as one row, each of which reads its whole
      context. Default: 32 on CPUs, where padding costs most, else 128.
    tiles: the numbers of rows that one prefill can have, for each copy of the
      weights, ascending. A row's last bits are the same with all of them; on
      CPUs this needs tile * tiles of 64 tokens or more, so that the matrix
      products are of one kind.
    steps: tokens that one decode samples at most, per slot.
    patience: a decode ends early when 1 / patience of its slots have stopped.
    block: tokens of the cache that are read at a time; a slot of at most two
      blocks is read whole.
    parts: groups of slots of similar length whose attention is computed apart,
      by 'xla'; 1 if a slot is one block.
    attention: one of `layouts.IMPLEMENTATIONS`; see `layouts.resolve`.
    cache_tokens: that all slots can hold together, where the cache has pages;
      then ask `admit` before `append`. 0: all slots can be full at once.
    dtype: of weights, activations and cache.
    shardings: a tree of logical axes -> one of shardings of the slots. Default:
      the first device. Slots are split evenly over copies of the weights. With
      devices of several processes, each process must make the same calls in the
      same order.

  Raises:
    ValueError: no slot, a length that cannot hold one turn, or a cache that
      cannot be, or not hold, what cache_tokens says.
  """

  def __init__(
      self,
      config: TransformerConfig,
      *,
      slots: int,
      length: int,
      stop_table: StopTable,
      seed: int = 0,
      tile: int | None = None,
      tiles: Sequence[int] = (4, 16, 64),
      steps: int = 16,
      patience: int = 4,
      block: int = 128,
      parts: int = 3,
      attention: str = 'xla',
      cache_tokens: int = 0,
      dtype: Any = 'float32',
      shardings: Callable[[Any], Any] | None = None,
  ):
    if slots < 1 or length < 2:
      raise ValueError(
          'rollout.slots must be at least 1 and rollout.length at least 2, but '
          f'they are {slots} and {length}.')
    self.slots, self.length, self.attention = slots, length, attention
    self._cache_tokens = cache_tokens
    read = shardings and shardings(())
    platform = read.mesh.devices.flat[0].platform if shardings else (
        jax.default_backend())
    self._tile = tile or (32 if platform == 'cpu' else 128)
    self._tiles = tuple(sorted(tiles))
    # Two blocks are cheaper to read whole.
    block = block if length > 2 * block else length
    self._root = np.asarray(jax.random.key_data(jax.random.key(seed)))
    # Programs return slots with the sharding of their input, and samples so
    # that every process can read them.
    self._copies = copies = _copies(shardings)
    self._layout = layout = layouts.make(
        attention, config, slots=slots // copies, length=length, block=block,
        parts=min(parts, slots // copies) if block < length else 1,
        pages=cache_tokens // copies // block, platform=platform)
    if cache_tokens and not layout.has_pages:
      raise ValueError(
          'rollout.cache_tokens is of a cache with pages, which attention '
          f"'ragged' on TPUs reads, but it is {attention!r}. Set it to 0.")
    if shardings:
      self._layout = layout = kv_cache.sharded(layout, shardings)
    kept = shardings and shardings(programs.logical_axes(config, layout))
    self._state = jax.jit(
        functools.partial(programs.empty, config, layout, copies, dtype),
        out_shardings=kept)()
    # A decode may compute fewer rows, if the products stay of one kind.
    self._rows = [slots * n // 8 for n in _EIGHTHS
                  if slots * n // 8 >= _ONE_KIND and layout.any_rows
                  and copies == 1] or [slots]
    self._forget()
    self._params, self._waiting = None, None
    self._compiled = set()  # modes; see `_modes`
    self._draws = None  # one per slot, or None: the same for all
    self.prefilled_tokens = 0  # by append, over the engine's life
    self.copied_tokens = 0  # of prompts that another slot held
    self.decoded_tokens = 0  # sampled
    self.slot_steps = 0  # sum over decode steps of the rows computed
    self._place = jax.jit(lambda table: table, out_shardings=read)
    self._own_stops = self._stops = self.placed(stop_table)
    jit = lambda function, out=kept, **options: jax.jit(  # of this engine alone
        functools.partial(function, **options), donate_argnames='state',
        out_shardings=out)
    self._programs = dict(
        unstacked=jax.jit(functools.partial(programs.unstacked, dtype=dtype)),
        append=jit(programs.append, config=config, layout=layout),
        copy=jit(programs.copy, layout=layout),
        begin=jit(programs.begin), release=jit(programs.release),
        decode=jit(programs.decode, shardings and (kept, read), config=config,
                   layout=layout, steps=steps, patience=patience))

  def _forget(self) -> None:
    """Empties all slots."""
    self._contents = slot_state.Contents(
        self._layout, self._copies, self.length, self._cache_tokens)
    self._partial = [([], []) for _ in range(self.slots)]
    self._in_flight = collections.deque()  # decodes that are not read
    self._decoding = set()  # slots, by the decodes that are read

  def placed(self, stop_table: StopTable) -> StopTable:
    """A copy on the engine's devices, made once and loaded many times."""
    return self._place(stop_table)

  def load(
      self,
      params: Params,
      temperature: float | None,
      truncation: sampling.Truncation = sampling.Truncation(),
      stop_table: StopTable | None = None,
  ) -> None:
    """Takes the policy's weights; slots must be idle.

    The weights are converted, and all programs compiled, at the next append.

    Args:
      params: of the decoder; layers stacked, or `slots.unstacked` in the
        engine's dtype already.
      temperature: of sampling; 0 is greedy, with log-probs at 1; None: that of
        each `Append`.
      truncation: which tokens may be drawn.
      stop_table: ends turns; from `placed`. Default: the engine's own.
    """
    truncation.check()
    self._forget()
    self._stops = self._own_stops if stop_table is None else stop_table
    self._waiting = params
    self._draws = None if temperature is not None else (
        [sampling.Draw()] * self.slots)
    self._temperature = np.float32(temperature or 0)
    self._truncation = None if truncation.is_off else sampling.Truncation(
        np.int32(truncation.top_k), np.float32(truncation.top_p),
        np.float32(truncation.min_p))

  def unload(self) -> None:
    """Frees the weights' memory for an update."""
    self._params = self._waiting = None

  def compile(self) -> int:
    """Compiles all programs of the next rollouts, and returns their number.

    Each is run twice, on padding: without shardings, the layout of its results
    may differ from that of its first arguments.
    """
    if self._waiting is not None:
      is_ready = isinstance(self._waiting['layers'], tuple)
      self._params = self._waiting if is_ready else (
          self._programs['unstacked'](self._waiting))
      self._waiting = None
    for mode in self._modes():
      if mode not in self._compiled:
        self._compiled.add(mode)
        for _ in range(2):
          self._run_all(mode)
    # pylint: disable-next=protected-access
    return sum(p._cache_size() for p in self._programs.values())

  def _modes(self) -> list[tuple[bool, bool, int]]:
    """The possible modes of `decode`: (draws by row, truncated, states)."""
    states = len(self._stops.hit)
    if self._draws is not None:
      return [(True, False, states), (True, True, states)]
    return [(False, self._truncation is not None, states)]

  def _run_all(self, mode: tuple[bool, bool, int]) -> None:
    by_row, truncated, _ = mode
    for count in self._tiles:
      self._append_tiles([], count)
    self._copy([], 0)
    self._begin([])
    self._release([])
    if by_row:
      self._draws[0] = sampling.Draw(
          1.0, sampling.Truncation(top_k=int(truncated)))
    for rows in self._rows:
      self._run_decode(rows)
    if by_row:
      self._draws[0] = sampling.Draw()

  def admit(self, appends: Sequence[Append]) -> list[bool]:
    """Which of some appends there is room for now, granted in their order.

    Only where slots share fewer pages than all of them could fill: what may not
    go on now may when others have been released, and one of all always may.
    """
    return self._contents.admit(appends)

  def append(self, appends: Sequence[Append]) -> None:
    """Adds tokens to slots, which then decode; a ValueError if one is full."""
    self._contents.check(appends)
    self.compile()
    work = self._contents.place(appends, self._tile)
    for a in appends:
      self._partial[a.slot] = ([], [])
      if self._draws is not None:
        self._draws[a.slot] = a.draw
    self._prefill(work.tiles)
    if any(work.moves):
      self._copy(work.moves, work.blocks)
    self.copied_tokens += work.copied_tokens
    self._begin(work.turns)
    self._decoding.update(a.slot for a in appends)

  def _prefill(self, queues) -> None:
    """Prefills tiles, earliest first, in as few calls as the shapes allow."""
    while left := max(map(len, queues)):
      below = [n for n in self._tiles if n <= left]
      above = [n for n in self._tiles if n >= left]
      count = (above[0] if above and (not below or 2 * left >= above[0])
               else below[-1])
      self._append_tiles([queue[:count] for queue in queues], count)
      queues = [queue[count:] for queue in queues]

  def _append_tiles(self, queues, count: int) -> None:
    """Prefills at most `count` tiles of each copy: (start, slot, tokens)."""
    shape = self._copies, count
    slot = np.full(shape, self._layout.slots, np.int32)  # out of range: dropped
    tokens = np.zeros((*shape, self._tile), np.int32)
    start, length = np.zeros((2, *shape), np.int32)
    for copy, tiles in enumerate(queues):
      for row, (first, own, ids) in enumerate(tiles):
        at = copy, row
        slot[at], start[at], length[at] = own, first, len(ids)
        tokens[copy, row, :len(ids)] = ids
    self.prefilled_tokens += int(length.sum())
    self._state = self._programs['append'](
        self._params, state=self._state, slot=slot.ravel(),
        tokens=tokens.reshape(-1, self._tile), start=start.ravel(),
        length=length.ravel(), pages=self._contents.table(slot))

  def _copy(self, moves, blocks: int) -> None:
    """Copies blocks between slots of a copy, or pages: (from, to) by copy."""
    source, target = np.full(
        (2, self._copies, self._layout.slots), _NONE, np.int32)
    for copy, pairs in enumerate(moves):
      for row, pair in enumerate(pairs):
        source[copy, row], target[copy, row] = pair
    self._state = self._programs['copy'](
        state=self._state, source=source.ravel(), target=target.ravel(),
        blocks=np.int32(blocks))

  def _begin(self, turns) -> None:
    """Starts turns: (slot, last token, tokens held, budget, row ids)."""
    slot = np.full(self.slots, self.slots, np.int32)
    last, position, budget = np.zeros((3, self.slots), np.int32)
    ids = np.zeros((self.slots, 5), np.uint32)
    for row, turn in enumerate(turns):
      slot[row], last[row], position[row], budget[row], ids[row] = turn
    self._state = self._programs['begin'](
        state=self._state, slot=slot, last=last, position=position,
        budget=budget, ids=ids, root=self._root)

  def _release(self, which: Sequence[int]) -> None:
    slot = np.full(self.slots, self.slots, np.int32)
    slot[:len(which)] = which
    self._state = self._programs['release'](state=self._state, slot=slot)

  def _run_decode(self, rows: int):
    """Decodes `rows` rows; all slots that may be decoding are among them."""
    slot = None
    if rows < self.slots:
      slot = np.full(rows, self.slots, np.int32)  # out of range: dropped
      slot[:len(self._decoding)] = sorted(self._decoding)
    temperature, truncation = self._temperature, self._truncation
    if self._draws is not None:
      temperature, truncation = sampling.by_row(
          self._draws if slot is None else
          [self._draws[min(i, self.slots - 1)] for i in slot])
    own = np.arange(self.slots) % self._layout.slots if slot is None else slot
    self._state, sampled = self._programs['decode'](
        self._params, state=self._state, stop=self._stops,
        temperature=temperature, truncation=truncation, slot=slot,
        pages=self._contents.table(own.reshape(self._copies, -1)))
    return range(self.slots) if slot is None else slot.tolist(), sampled

  def dispatch(self) -> None:
    """Starts a decode on the devices, without waiting for it."""
    self._in_flight.append(self._run_decode(min(
        rows for rows in self._rows if rows >= len(self._decoding))))

  def read(self) -> list[Stopped]:
    """Waits for the earliest unread decode; returns its stopped slots."""
    slots, sampled = self._in_flight.popleft()
    sampled = jax.device_get(sampled)
    self.slot_steps += int(sampled['steps']) * len(slots)
    stopped = []
    for row in np.flatnonzero(sampled['count']).tolist():
      slot, count = slots[row], int(sampled['count'][row])
      tokens, logprobs = self._partial[slot]
      new = sampled['tokens'][row, :count].tolist()
      tokens += new
      logprobs += sampled['logprobs'][row, :count].tolist()
      self._contents.sampled(slot, new)
      self.decoded_tokens += count
      if not sampled['active'][row]:
        self._decoding.remove(slot)
        self._contents.stopped(slot)
        stopped.append(Stopped(slot, tuple(tokens), tuple(logprobs)))
    return stopped

  def decode(self) -> list[Stopped]:
    """Runs one decode and returns its stopped slots, in their order."""
    self.dispatch()
    return self.read()

  def partial(self, slot: int) -> tuple[Sequence[int], Sequence[float]]:
    """Tokens and log-probs of a slot's unfinished turn, by the decodes read."""
    return self._partial[slot]

  def cut(self, which: Sequence[int]) -> None:
    """Stops slots in the middle of their turns; all decodes must be read."""
    self._release(which)
    self._decoding.difference_update(which)
    for slot in which:
      self.release(slot)

  def used(self, slot: int) -> int:
    """Tokens that a slot holds."""
    return self._contents.used(slot)

  def release(self, slot: int) -> None:
    """Frees a stopped slot for the next trajectory."""
    self._contents.release(slot)
    if self._draws is not None:
      self._draws[slot] = sampling.Draw()  # its truncation is free

  def abandon(self) -> None:
    """Stops all slots at once; the results of unread decodes are lost."""
    while self._in_flight:
      self.read()
    self._release(range(self.slots))
    for slot in range(self.slots):
      self.release(slot)
    self._decoding.clear()


def _copies(shardings: Callable[[Any], Any] | None) -> int:
  """How many ways the slots are split."""
  if shardings is None:
    return 1
  sharding = shardings(('batch',))
  devices = sharding.num_devices
  return devices // sharding.shard_shape((devices,))[0]
