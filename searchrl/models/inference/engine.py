# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The inference engine: samples tokens in slots that keep their KV cache.

A slot is a row of the KV cache that holds one trajectory. Its keys and values
stay while the trajectory waits for a search, and an observation is appended to
them. History is therefore never prefilled again. A prompt that another slot
already holds is copied from that slot. A tile is a part of a prompt or an
observation that is prefilled as one row.

`Engine` is the host's side of the programs in `slots`. It takes the plan of
`slot_state.Contents`, pads it to the few shapes that are compiled before the
first rollout, and returns sampled tokens with their log-probs.
"""

import collections
from collections.abc import Callable, Sequence
import contextlib
import functools
from typing import Any

import jax
import numpy as np

from searchrl.models.inference import compilation
from searchrl.models.inference import engine_weights
from searchrl.models.inference import slot_state
from searchrl.models.inference import kv_cache
from searchrl.models.inference import layouts
from searchrl.models.inference import sampling
from searchrl.models.inference import slots as programs
from searchrl.models.inference.slot_state import (
    Append, Stopped, row_ids)  # noqa: F401
from searchrl.models.inference.stops import StopTable
from searchrl.models.transformer import Params, TransformerConfig

# From this number of rows on, all of XLA's matrix products on CPUs round alike.
ONE_KIND = 64
# On CPUs, an engine with more slots than this has programs for fewer rows.
FEW_SLOTS = 16
_FEWEST = 12  # fewest rows of these programs
# Shares of the slots, in eighths, that a decode may compute. It computes most
# slots while some wait for searches, and few at the end of a rollout.
_EIGHTHS = (1, 2, 4, 6, 8)
_NONE = 2**30  # out-of-range number for "no slot" and "no page"


class Engine:
  """Slots on the local devices, in which trajectories are sampled.

  Args:
    config: Shape of the decoder.
    slots: Number of trajectories at the same time, B.
    length: Number of tokens that a slot can hold.
    stop_table: Table that ends turns unless `load` gets another; see
      `stops.compile_table`.
    seed: Seed of all sampling.
    tile: Number of tokens prefilled as one row, which reads its whole context.
      Default: 16 on CPUs, where padding costs most, else 128.
    tiles: Numbers of rows that one prefill can have, for each copy of the
      weights. Every bit of a row is the same with all of them. On CPUs this
      needs tile * tiles >= 64 tokens, so that all matrix products round alike.
      Numbers above 4 * slots are not used, except for the smallest.
    steps: Largest number of tokens that one decode samples, per slot.
    patience: Divisor for early ends: a decode ends when 1 / patience of its
      active slots have stopped.
    block: Number of tokens of the cache that are read at a time. A slot of at
      most two blocks is read whole.
    parts: Number of groups of slots of similar length whose attention 'xla'
      computes separately. It is 1 if a slot is one block.
    attention: Name of one of `layouts.IMPLEMENTATIONS`; see `layouts.resolve`.
    few_rows: Smaller numbers of rows, which round differently, for `dispatch`
      without `alike`. If there are any, most programs compile when needed.
    phase: Function from a title to a context manager for a late compilation.
    cache_tokens: Number of tokens that all slots can hold together, if the
      cache has pages. Then call `admit` before `append`. 0: all slots can be
      full at once.
    records: Flag that records the experts of all tokens, for `routing`.
    dtype: Data type of weights, activations and cache.
    ordered: Function that wraps each jitted program; see `runtime.dispatch`.
    shardings: Function from a tree of logical axes to a tree of shardings of
      the slots. Default: the first device. Slots are split evenly over copies
      of the weights. If devices belong to several processes, each process must
      make the same calls in the same order.

  Raises:
    ValueError: There is no slot, the length cannot hold one turn, cache_tokens
      is set for a cache without pages, or the pages cannot hold one full slot.
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
      few_rows: Sequence[int] = (),
      phase: Callable[[str], Any] = contextlib.nullcontext,
      cache_tokens: int = 0,
      records: bool = False,
      dtype: Any = 'float32',
      ordered: Callable[[Any], Any] = lambda program: program,
      shardings: Callable[[Any], Any] | None = None,
  ):
    if slots < 1 or length < 2:
      raise ValueError(
          'rollout.max_num_seqs must be at least 1 and rollout.max_length at '
          f'least 2, but they are {slots} and {length}.')
    self.slots, self.length, self.attention = slots, length, attention
    self._cache_tokens, self._phase = cache_tokens, phase
    self._layout = layout = layouts.over_devices(
        attention, config, slots=slots, length=length, block=block, parts=parts,
        cache_tokens=cache_tokens, shardings=shardings)
    self._on_cpu = layouts.platform_of(shardings) == 'cpu'
    self._tile = tile or (16 if self._on_cpu else 128)
    self._tiles = tuple(sorted(
        n for n in tiles if n <= max(4 * slots, min(tiles))))
    self._root = np.asarray(jax.random.key_data(jax.random.key(seed)))
    self._copies = copies = kv_cache.copies(shardings)
    self._empty, self._programs = programs.jitted(
        config, layout, copies, dtype, steps=steps, patience=patience,
        records=records, ordered=ordered, shardings=shardings)
    # On CPUs, `load` makes the slots.
    self._state: programs.State | None = None if self._on_cpu else self._empty()
    self.records = bool(records and config.experts)
    any_rows = layout.any_rows and copies == 1
    # A decode may compute fewer rows if the products still round alike, which
    # `compile` tries on CPUs.
    self._is_tried = not self._on_cpu or bool(few_rows)
    fewest = ONE_KIND if self._is_tried else (
        _FEWEST if slots > FEW_SLOTS else slots)
    self._rows = [slots * n // 8 for n in _EIGHTHS
                  if slots * n // 8 >= fewest and any_rows] or [slots]
    self._convert = engine_weights.Conversion(
        dtype, config.matmul_dtype, ordered,
        is_transposed=not self._is_tried and len(self._rows) > 1)
    self._few_rows = [n for n in few_rows if n < self._rows[0] and any_rows]
    self._needed: set[tuple[Any, ...]] = set()  # shapes needed so far
    self._forget()
    self._params: Params = None
    self._waiting: Params = None  # params that `compile` will convert
    # Modes of `decode`: whether each slot has a Draw, whether tokens are left
    # out, and the number of stop states.
    self._compiled: set[tuple[bool, bool, int]] = set()
    self._shapes: set[Any] | None = set() if shardings else None
    # One Draw per slot; None if all slots draw alike.
    self._draws: list[sampling.Draw] | None = None
    self.prefilled_tokens = 0  # tokens prefilled by append, in all calls
    self.copied_tokens = 0  # prompt tokens copied from another slot
    self.decoded_tokens = 0  # sampled tokens
    self.slot_steps = 0  # rows computed, summed over decode steps
    self._place = ordered(jax.jit(
        lambda table: table, out_shardings=shardings and shardings(())))
    self._own_stops = self._stops = self.placed(stop_table)

  def _forget(self) -> None:
    """Empties all slots."""
    self._contents = slot_state.Contents(
        self._layout, self._copies, self.length, self._cache_tokens)
    # Tokens and log-probs of each slot's turn, as far as they have been read.
    self._partial: list[tuple[list[int], list[float]]] = [
        ([], []) for _ in range(self.slots)]
    # Slots and results of decodes that have not been read.
    self._in_flight: collections.deque[tuple[Sequence[int], Any]] = (
        collections.deque())
    self._decoding: set[int] = set()  # slots, as of the last decode read

  def placed(self, stop_table: StopTable) -> StopTable:
    """Returns a copy of a stop table on the engine's devices, for `load`."""
    return self._place(stop_table)

  def load(
      self,
      params: Params,
      temperature: float | None,
      truncation: sampling.Truncation = sampling.Truncation(),
      stop_table: StopTable | None = None,
  ) -> None:
    """Sets the weights and sampling options. All slots must be idle.

    The next `append` converts the weights and compiles; see `compile`.

    Args:
      params: Parameters of the decoder, with layers stacked, or already the
        result of `engine_weights.unstacked` in the engine's dtype.
      temperature: Sampling temperature. 0 is greedy, with log-probs at
        temperature 1. None: each `Append` has its own.
      truncation: Rules for which tokens may be drawn.
      stop_table: Table that ends turns, from `placed`. Default: the engine's.
    """
    truncation.check()
    self._forget()
    self._stops = self._own_stops if stop_table is None else stop_table
    self._waiting = params
    self._state = self._state or self._empty()
    self._draws = None if temperature is not None else (
        [sampling.Draw()] * self.slots)
    self._temperature = np.float32(temperature or 0)
    self._truncation = None if truncation.is_off else truncation.as_arrays()

  def unload(self) -> None:
    """Frees the memory of the weights, and on CPUs also that of the cache."""
    self._params = self._waiting = None
    # Elsewhere, an update could split the room that the cache needs next.
    self._state = None if self._on_cpu else self._state

  def compile(self) -> int:
    """Compiles programs for the next rollouts. Returns their number so far.

    With `few_rows`, only the programs of the smallest shapes are compiled here.
    """
    if self._waiting is not None:
      self._params, self._waiting = self._convert(self._waiting), None
    by_row = self._draws is not None
    for truncated in (False, True) if by_row and not self._few_rows else (
        self._truncation is not None,):
      mode = by_row, truncated, len(self._stops.hit)
      if mode not in self._compiled:
        self._compiled.add(mode)
        run = functools.partial(self._run_all, truncated)
        if self._shapes is None:  # the layouts of results may differ
          run(self._programs), run(self._programs)
        else:
          self._shapes |= compilation.compile_together(self._programs, run)
    if not self._is_tried:
      self._is_tried = True
      self._rows = compilation.rounding_alike(self._trial, self._rows)
    return compilation.count(self._programs) if self._shapes is None else (
        len(self._shapes))

  def _run_all(self, truncated: bool, programs: compilation.Programs) -> None:
    """Runs `programs` on padding, in each shape, which compiles them."""
    own, self._programs = self._programs, programs
    if self._draws is not None:
      self._draws[0] = sampling.Draw(
          1.0, sampling.Truncation(top_k=int(truncated)))
    for rows in self._few_rows[:1] or self._rows:  # takes longest to compile
      self._run_decode(rows)
    if self._draws is not None:
      self._draws[0] = sampling.Draw()
    for count in self._tiles[:1] if self._few_rows else self._tiles:
      self._append_tiles([], count)
    if self.slots > self._copies:  # a slot alone has no other one to copy from
      self._copy([], 0)
    if self.records:
      self._programs['routing'](
          state=self._state, index=self._contents.index(0))
    self._begin([])
    self._release([])
    self._programs = own

  def _trial(self, rows: int) -> Any:
    """Returns the tokens of a decode of the first `rows` slots, all empty."""
    self._begin([(i, i % len(self._stops.hit[0]), 1, 2, (i, 0, 0, 0, 0))
                 for i in range(rows)])
    self._decoding = set(range(rows))
    sampled = jax.device_get(self._run_decode(rows)[1])
    self._release(range(rows))
    self._decoding.clear()
    return {name: sampled[name] for name in ('tokens', 'logprobs', 'count')}

  def admit(self, appends: Sequence[Append]) -> list[bool]:
    """Returns for each append, in order, whether the cache has room for it now.

    The result can be False only if the cache has fewer pages than all slots
    together need when they are full. An append that is refused may be granted
    after other slots have been released. At least one slot can always continue.
    """
    return self._contents.admit(appends)

  def append(self, appends: Sequence[Append]) -> None:
    """Prefills tokens in slots and starts a turn of the policy in each.

    Raises:
      ValueError: A slot lacks room, or an append has no tokens or no budget.
    """
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
    """Prefills tiles, earliest first, in few calls of the compiled shapes."""
    while left := max(map(len, queues)):
      count = slot_state.tiles_of_call(left, self._tiles, self._on_cpu)
      self._append_tiles([queue[:count] for queue in queues], count)
      queues = [queue[count:] for queue in queues]

  def _append_tiles(self, queues, count: int) -> None:
    """Prefills at most `count` tiles on each copy of the weights.

    A tile is a tuple (start, slot, tokens).
    """
    shape = self._copies, count
    slot = np.full(shape, self._layout.slots, np.int32)  # out of range: dropped
    tokens = np.zeros((*shape, self._tile), np.int32)
    start, length = np.zeros((2, *shape), np.int32)
    for copy, tiles in enumerate(queues):
      for row, (first, local, ids) in enumerate(tiles):
        index = copy, row
        slot[index], start[index], length[index] = local, first, len(ids)
        tokens[copy, row, :len(ids)] = ids
    self.prefilled_tokens += int(length.sum())
    with self._said(f'{count * self._tile} tokens of prompts'):
      self._state = self._programs['append'](
          self._params, state=self._state, slot=slot.ravel(),
          tokens=tokens.reshape(-1, self._tile), start=start.ravel(),
          length=length.ravel(), pages=self._contents.table(slot))

  def _said(self, what: str, *mode: Any) -> contextlib.AbstractContextManager:
    """Returns a context that reports progress if its body will compile."""
    is_new = bool(self._few_rows) and (what, *mode) not in self._needed
    self._needed.add((what, *mode))
    return self._phase(f'Compiling for {what}') if is_new else (
        contextlib.nullcontext())

  def _copy(self, moves, blocks: int) -> None:
    """Copies blocks from slot to slot, or pages if the cache has pages.

    `moves` has a list of pairs (from, to) for each copy of the weights.
    """
    source, target = np.full(
        (2, self._copies, self._layout.slots), _NONE, np.int32)
    for copy, pairs in enumerate(moves):
      for row, pair in enumerate(pairs):
        source[copy, row], target[copy, row] = pair
    self._state = self._programs['copy'](
        state=self._state, source=source.ravel(), target=target.ravel(),
        blocks=np.int32(blocks))

  def _begin(self, turns) -> None:
    """Starts turns: tuples (slot, last token, tokens held, budget, row ids)."""
    self._state = self._programs['begin'](
        state=self._state, root=self._root,
        **slot_state.padded_turns(turns, self.slots))

  def _release(self, which: Sequence[int]) -> None:
    slot = np.full(self.slots, self.slots, np.int32)
    slot[:len(which)] = which
    self._state = self._programs['release'](state=self._state, slot=slot)

  def _run_decode(self, rows: int) -> tuple[Sequence[int], Any]:
    """Decodes active slots in `rows` rows. Returns their slots, and results."""
    slot = None
    if rows < self.slots:
      slot = np.full(rows, self.slots, np.int32)  # out of range: dropped
      slot[:len(self._decoding)] = sorted(self._decoding)
    temperature: Any = self._temperature
    truncation = self._truncation
    if self._draws is not None:
      temperature, truncation = sampling.by_row(
          self._draws if slot is None else
          [self._draws[min(i, self.slots - 1)] for i in slot.tolist()])
    local = np.arange(self.slots) % self._layout.slots if slot is None else slot
    with self._said(f'{rows} of {self.slots} slots', truncation is None):
      self._state, sampled = self._programs['decode'](
          self._params, state=self._state, stop=self._stops,
          temperature=temperature, truncation=truncation, slot=slot,
          pages=self._contents.table(local.reshape(self._copies, -1)))
    return range(self.slots) if slot is None else slot.tolist(), sampled

  def dispatch(self, *, alike: bool = True) -> None:
    """Starts to sample up to `steps` tokens per active slot, without waiting.

    `alike=False` allows `few_rows`, which are cheaper but round differently.
    """
    self._in_flight.append(self._run_decode(min(
        rows for rows in self._rows + ([] if alike else self._few_rows)
        if rows >= len(self._decoding))))

  def read(self) -> list[Stopped]:
    """Waits for the earliest unread decode and returns the turns it ended."""
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

  def decode(self, *, alike: bool = True) -> list[Stopped]:
    """Runs one decode as `dispatch` does, and returns the turns it ended."""
    self.dispatch(alike=alike)
    return self.read()

  def partial(self, slot: int) -> tuple[Sequence[int], Sequence[float]]:
    """Returns the tokens and log-probs so far of a slot's unfinished turn."""
    return self._partial[slot]

  def cut(self, which: Sequence[int]) -> None:
    """Ends turns early and frees the slots. All decodes must have been read."""
    self._release(which)
    self._decoding.difference_update(which)
    for slot in which:
      self.release(slot)

  def used(self, slot: int) -> int:
    """Returns the number of tokens that a slot holds."""
    return self._contents.used[slot]

  def routing(self, slot: int) -> Callable[[], np.ndarray]:
    """Returns a function that returns the experts of a stopped slot's tokens.

    The result, [T L*k], has for each token the k experts of each of L layers,
    numbered from 1. The last token is left out: no layer has read it.
    """
    tokens = self._contents.used[slot] - 1
    table = self._programs['routing'](
        state=self._state, index=self._contents.index(slot))
    return lambda: jax.device_get(table)[:tokens]

  def release(self, slot: int) -> None:
    """Frees a stopped slot for the next trajectory."""
    self._contents.release(slot)
    if self._draws is not None:
      self._draws[slot] = sampling.Draw()  # the default costs nothing

  def abandon(self) -> None:
    """Stops all slots at once. The results of unread decodes are lost."""
    while self._in_flight:
      self.read()
    self.cut(range(self.slots))
