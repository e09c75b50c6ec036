# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The inference engine: samples tokens in slots that keep their KV cache.

A slot holds one trajectory. Its keys and values stay while it waits for a
search, and an observation is appended to them, so that history is never
prefilled again; a prompt that another slot holds is copied.

`Engine` is the host's side of the programs in `slots`. It cuts appended tokens
into tiles, pads them to the few shapes compiled before the first rollout, keeps
each slot's last token, which is not in the cache yet, and returns sampled
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

from searchrl.models.inference import sampling
from searchrl.models.inference import slots as programs
from searchrl.models.inference.stops import StopTable
from searchrl.models.transformer import Params, TransformerConfig

# From this many rows on, XLA's CPU matrix products all round in the same way.
_ONE_KIND = 64
# Shares of the slots, in eighths, that a decode may compute: most of them while
# some wait for searches, few at the end of a rollout.
_EIGHTHS = (1, 2, 4, 5, 6, 7, 8)


@dataclasses.dataclass(frozen=True)
class Append:
  """Tokens for one slot, which then decodes."""

  slot: int
  tokens: Sequence[int]  # at least one
  budget: int  # tokens that may then be sampled
  row_ids: Sequence[int]  # step, uid halves, sample, turn
  fresh: bool  # a new trajectory: discard the slot's tokens first
  draw: sampling.Draw = sampling.Draw()  # if `load` got no temperature


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
    tile: tokens that are prefilled as one row.
    tiles: the numbers of rows that one prefill can have, ascending. A row's
      last bits are the same with all of them; on CPUs this needs tile * tiles
      of 64 tokens or more, so that the matrix products are of one kind.
    steps: tokens that one decode samples at most, per slot.
    patience: a decode ends early when 1 / patience of its slots have stopped.
    block: tokens of the cache that are read at a time; a slot of at most two
      blocks is read whole.
    parts: groups of slots of similar length whose attention is computed apart;
      1 on several devices, because groups would cross them, and 1 if a slot is
      one block.
    dtype: of weights, activations and cache.
    shardings: a tree of logical axes -> one of shardings of the slots. Default:
      the first device. With devices of several processes, each process must
      make the same calls in the same order.

  Raises:
    ValueError: no slot, or a length that cannot hold one turn.
  """

  def __init__(
      self,
      config: TransformerConfig,
      *,
      slots: int,
      length: int,
      stop_table: StopTable,
      seed: int = 0,
      tile: int = 32,
      tiles: Sequence[int] = (4, 16, 64),
      steps: int = 16,
      patience: int = 4,
      block: int = 128,
      parts: int = 3,
      dtype: Any = 'float32',
      shardings: Callable[[Any], Any] | None = None,
  ):
    if slots < 1 or length < 2:
      raise ValueError(
          'rollout.slots must be at least 1 and rollout.length at least 2, but '
          f'they are {slots} and {length}.')
    self.slots, self.length = slots, length
    self._tile, self._tiles = tile, tuple(sorted(tiles))
    # Two blocks are cheaper to read whole.
    self._block = block = block if length > 2 * block else length
    self._root = np.asarray(jax.random.key_data(jax.random.key(seed)))
    # Programs return slots with the sharding of their input, and samples so
    # that every process can read them.
    kept = shardings and shardings(programs.logical_axes(config))
    read = shardings and (kept, shardings(()))
    self._state = jax.jit(
        functools.partial(programs.empty, config, slots, length, block, dtype),
        out_shardings=kept)()
    devices = len(self._state.position.sharding.device_set)
    # A decode may compute fewer rows, if the products stay of one kind.
    self._rows = [slots * n // 8 for n in _EIGHTHS
                  if slots * n // 8 >= _ONE_KIND and parts > 1
                  and devices == 1] or [slots]
    self._forget()
    self._params, self._waiting = None, None
    self._compiled = set()  # modes; see `_modes`
    self._draws = None  # one per slot, or None: the same for all
    self.prefilled_tokens = 0  # by append, over the engine's life
    self.copied_tokens = 0  # of prompts that another slot held
    self.decoded_tokens = 0  # sampled
    self.slot_steps = 0  # sum over decode steps of the rows computed
    self._place = jax.jit(lambda table: table, out_shardings=read and read[1])
    self._own_stops = self._stops = self.placed(stop_table)
    jit = lambda function, out=kept, **options: jax.jit(  # of this engine alone
        functools.partial(function, **options), donate_argnames='state',
        out_shardings=out)
    self._programs = dict(
        unstacked=jax.jit(functools.partial(programs.unstacked, dtype=dtype)),
        append=jit(programs.append, config=config),
        copy_prefix=jit(programs.copy_prefix), begin=jit(programs.begin),
        release=jit(programs.release),
        decode=jit(programs.decode, read, config=config, steps=steps,
                   patience=patience,
                   parts=min(parts, slots) if devices == 1 and block < length
                   else 1))

  def _forget(self) -> None:
    """Empties all slots."""
    self._last = [0] * self.slots  # each slot's last token, not in the cache
    self._used = [0] * self.slots  # tokens of each slot
    self._prompts = [()] * self.slots  # the first tokens of each slot's cache
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
      params: of the decoder; layers stacked.
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
      self._params = self._programs['unstacked'](self._waiting)
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
    self._copy([])
    self._begin([])
    self._release([])
    if by_row:
      self._draws[0] = sampling.Draw(
          1.0, sampling.Truncation(top_k=int(truncated)))
    for rows in self._rows:
      self._run_decode(rows)
    if by_row:
      self._draws[0] = sampling.Draw()

  def append(self, appends: Sequence[Append]) -> None:
    """Adds tokens to slots, which then decode; a ValueError if one is full."""
    self._check(appends)
    self.compile()
    for a in appends:
      if self._draws is not None:
        self._draws[a.slot] = a.draw
      if a.fresh:
        self._used[a.slot], self._prompts[a.slot] = 0, ()
    copies, tiles, turns = [], [], []
    for a in appends:
      held = self._used[a.slot]
      start = max(held - 1, 0)
      tokens = [*([self._last[a.slot]] if held else []), *a.tokens]
      self._last[a.slot] = int(tokens[-1])
      self._used[a.slot] = start + len(tokens)
      self._partial[a.slot] = ([], [])
      turns.append((a.slot, tokens[-1], start + len(tokens), a.budget,
                    a.row_ids))
      if a.fresh and len(tokens) > 1:
        prompt = tuple(tokens)
        if prompt in self._prompts:
          copies.append((self._prompts.index(prompt), a.slot, prompt))
          continue
        self._prompts[a.slot] = prompt
      cached = tokens[:-1]
      tiles += [(start + i, a.slot, cached[i:i + self._tile])
                for i in range(0, len(cached), self._tile)]
    self._prefill(sorted(tiles))
    if copies:
      self._copy(copies)
    for _, slot, prompt in copies:  # only now do these slots hold the prompt
      self._prompts[slot] = prompt
    self._begin(turns)
    self._decoding.update(a.slot for a in appends)

  def _check(self, appends: Sequence[Append]) -> None:
    for a in appends:
      held = 0 if a.fresh else self._used[a.slot]
      need = held + len(a.tokens)
      if need + a.budget > self.length or a.budget < 1 or not a.tokens:
        raise ValueError(
            f'a slot holds {self.length} tokens, but slot {a.slot} would need '
            f'{need} and a budget of {a.budget} >= 1. Raise '
            'rollout.length, or shorten prompts and passages.')

  def _prefill(self, tiles) -> None:
    """Prefills tiles, earliest first, in as few calls as the shapes allow."""
    while tiles:
      left = len(tiles)
      below = [n for n in self._tiles if n <= left]
      above = [n for n in self._tiles if n >= left]
      count = (above[0] if above and (not below or 2 * left >= above[0])
               else below[-1])
      self._append_tiles(tiles[:count], count)
      tiles = tiles[count:]

  def _append_tiles(self, tiles, count: int) -> None:
    slot = np.full(count, self.slots, np.int32)  # out of range: dropped
    tokens = np.zeros((count, self._tile), np.int32)
    start, length = np.zeros(count, np.int32), np.zeros(count, np.int32)
    for row, (first, tile_slot, ids) in enumerate(tiles):
      slot[row], start[row], length[row] = tile_slot, first, len(ids)
      tokens[row, :len(ids)] = ids
    self.prefilled_tokens += int(length.sum())
    self._state = self._programs['append'](
        self._params, state=self._state, slot=slot, tokens=tokens, start=start,
        length=length)

  def _copy(self, copies) -> None:
    """Copies prompts between slots: (source, slot, prompt)."""
    source, slot = np.full((2, self.slots), self.slots, np.int32)
    for row, (holder, copier, prompt) in enumerate(copies):
      source[row], slot[row] = holder, copier
      self.copied_tokens += len(prompt) - 1
    longest = max((len(prompt) - 1 for *_, prompt in copies), default=0)
    self._state = self._programs['copy_prefix'](
        state=self._state, source=source, slot=slot,
        blocks=np.int32(-(-longest // self._block)))

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
    self._state, sampled = self._programs['decode'](
        self._params, state=self._state, stop=self._stops,
        temperature=temperature, truncation=truncation, slot=slot)
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
      tokens += sampled['tokens'][row, :count].tolist()
      logprobs += sampled['logprobs'][row, :count].tolist()
      self._last[slot] = tokens[-1]
      self._used[slot] += count
      self.decoded_tokens += count
      if not sampled['active'][row]:
        self._decoding.remove(slot)
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
    return self._used[slot]

  def release(self, slot: int) -> None:
    """Frees a stopped slot for the next trajectory."""
    self._used[slot] = 0
    if self._draws is not None:
      self._draws[slot] = sampling.Draw()  # its truncation is free

  def abandon(self) -> None:
    """Stops all slots at once; the results of unread decodes are lost."""
    while self._in_flight:
      self.read()
    self._release(range(self.slots))
    self._used = [0] * self.slots
    self._decoding.clear()
