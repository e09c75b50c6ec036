# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The host's record of the contents of every slot of an engine.

A slot is a row of the KV cache that has the tokens of one trajectory. The host
decides which tokens are prefilled, which are copied from another slot, and
which pages (blocks of the cache) a slot has; `engine` then runs exactly this on
the devices. A copy is a device, or a group of devices, with one copy of the
weights. Slots are split over the copies and numbered from 0 on each copy. Lists
for the devices are therefore grouped by copy.
"""

from collections.abc import Sequence
import dataclasses
import hashlib

import numpy as np

from searchrl.models.inference import pages as pages_lib
from searchrl.models.inference import sampling
from searchrl.models.inference.kv_cache import Layout


def row_ids(step: int, uid: str, sample: int, turn: int) -> tuple[int, ...]:
  """Returns the five numbers that decide the randomness of one turn.

  They are folded into the run's random key, in order. The uid is represented by
  the two 32-bit halves of the first 8 bytes of its SHA-256.

  Args:
    step: Step of the run.
    uid: Unique id of the question.
    sample: Index of the sample among the samples of the question.
    turn: Index of the turn in the trajectory.
  """
  digest = hashlib.sha256(uid.encode()).digest()
  halves = (int.from_bytes(digest[i:i + 4], 'big') for i in (0, 4))
  return (step, *halves, sample, turn)


@dataclasses.dataclass(frozen=True)
class Append:
  """Tokens for one slot. After reading them, the policy writes a turn there."""

  slot: int
  tokens: Sequence[int]  # at least one token
  budget: int  # number of tokens that may then be sampled
  row_ids: Sequence[int]  # step, uid halves, sample, turn; see `row_ids`
  fresh: bool  # True for a new trajectory: discard the slot's tokens first
  # Used only if `Engine.load` got None as the temperature.
  draw: sampling.Draw = sampling.Draw()


@dataclasses.dataclass(frozen=True)
class Stopped:
  """A turn of the policy that a slot has sampled to its end."""

  slot: int
  tokens: tuple[int, ...]  # sampled, with the token that ended the turn
  logprobs: tuple[float, ...]  # log-probs in nats; see `sampling.sample`


@dataclasses.dataclass(frozen=True)
class Work:
  """Work for the devices, which adds tokens to slots and starts their turns.

  First, tiles are prefilled: parts of new texts, each computed as one row.
  Second, prompts are copied from slots that have them to others with the same
  prompt. Third, the turns of the policy are started.
  """

  tiles: list[list[tuple]]  # per copy: (start, slot, tokens), earliest first
  moves: list[list[tuple[int, int]]]  # per copy: (from, to), slots or pages
  blocks: int  # number of blocks that each move copies
  turns: list[tuple]  # (global slot, last token, tokens held, budget, row ids)
  copied_tokens: int  # number of tokens of the copied prompts


def tiles_of_call(left: int, counts: Sequence[int], on_cpu: bool) -> int:
  """Returns the number of tiles that the next call has room for.

  It is the smallest of `counts` that is at least `left`. If too much of that
  call would be padding, or no count is that large, it is the largest count that
  is at most `left`, so that the call is full.

  Args:
    left: Number of tiles that are left, at least 1.
    counts: Numbers of tiles for which there is a program, in increasing order.
    on_cpu: Whether a CPU computes, where padding takes as long as tokens do. At
      most a quarter of a call is then padding, and otherwise at most half. A
      call of the smallest count may have more padding.
  """
  padding = 4 if on_cpu else 2
  below = [n for n in counts if n <= left]
  above = [n for n in counts if n >= left]
  fits = above and padding * (above[0] - left) <= above[0]
  return above[0] if fits or (above and not below) else below[-1]


def padded_turns(turns: Sequence[tuple], slots: int) -> dict[str, np.ndarray]:
  """Returns the arguments of `slots.begin` by name, padded to `slots` rows.

  Args:
    turns: Turns to start, as in `Work`.
    slots: Number of slots. As the slot of a padding row, this number is out of
      range and means no slot.
  """
  slot = np.full(slots, slots, np.int32)
  last, position, budget = np.zeros((3, slots), np.int32)
  ids = np.zeros((slots, 5), np.uint32)
  for row, turn in enumerate(turns):
    slot[row], last[row], position[row], budget[row], ids[row] = turn
  return dict(slot=slot, last=last, position=position, budget=budget, ids=ids)


class Contents:
  """The host's table of what each slot has: length, prompt and pages.

  Args:
    layout: Memory layout of the KV cache.
    copies: Number of copies of the weights, over which slots are split.
    length: Number of tokens that a slot can hold.
    cache_tokens: Number of tokens that all slots can hold together, if the
      cache has pages. 0: all slots can be full at once.

  Attributes:
    used: Number of tokens of each slot.
  """

  def __init__(self, layout: Layout, copies: int, length: int,
               cache_tokens: int):
    self._each, self._length = layout.slots, length
    self._block = layout.block
    slots = copies * layout.slots
    self._last = [0] * slots  # last token of each slot, not in the cache
    self.used = [0] * slots
    # Prompt that each slot's cache begins with.
    self._prompts: list[tuple[int, ...]] = [()] * slots
    slot_pages = -(-length // layout.block)
    total = cache_tokens // copies // layout.block or layout.slots * slot_pages
    self._total = total  # pages of a copy
    self._pages = [
        pages_lib.Pages(layout.slots, layout.block, slot_pages, total)
        for _ in range(copies)] if layout.has_pages else []
    self._copies = copies

  def admit(self, appends: Sequence[Append]) -> list[bool]:
    """Returns for each append whether the cache has room for it now.

    Without pages, this is always True. At most one append per slot is given.
    """
    if not self._pages:
      return [True] * len(appends)
    granted: dict[int, bool] = {}
    for copy, pages in enumerate(self._pages):
      local = [a for a in appends if a.slot // self._each == copy]
      granted |= zip((a.slot for a in local), pages.admit(
          [(a.slot % self._each, self._needed(a)) for a in local]))
    return [granted[a.slot] for a in appends]

  def check(self, appends: Sequence[Append]) -> None:
    """Raises a ValueError if a slot cannot hold its append's tokens and turn.

    A budget below 1 and an append without tokens are also errors.
    """
    for a in appends:
      if self._needed(a) > self._length or a.budget < 1 or not a.tokens:
        raise ValueError(
            f'a slot holds {self._length} tokens, but slot {a.slot} would need '
            f'{self._needed(a) - a.budget} and a budget of {a.budget} >= 1. '
            'Raise rollout.max_length, or shorten prompts and passages.')

  def _needed(self, a: Append) -> int:
    """Returns the maximum number of tokens in a slot at the end of its turn."""
    return (0 if a.fresh else self.used[a.slot]) + len(a.tokens) + a.budget

  def place(self, appends: Sequence[Append], tile: int) -> Work:
    """Records appends as done, and returns the work that the devices must do.

    The appends must have passed `check` and `admit`. If another slot on the
    same copy of the weights already has the prompt of a new trajectory, the
    prompt is copied from that slot. All other tokens are prefilled in parts of
    at most `tile` tokens, except for each append's last token.
    """
    for a in appends:
      if a.fresh:
        self.empty(a.slot)
    tiles: list[list[tuple]] = [[] for _ in range(self._copies)]
    moves: list[list[tuple[int, int]]] = [[] for _ in range(self._copies)]
    copied: dict[int, tuple[int, ...]] = {}  # prompts of slots that get copies
    turns = []
    for a in appends:
      copy, slot = divmod(a.slot, self._each)
      held, needed = self.used[a.slot], self._needed(a)
      start = max(held - 1, 0)
      tokens = [*([self._last[a.slot]] if held else []), *a.tokens]
      self._last[a.slot] = int(tokens[-1])
      self.used[a.slot] = start + len(tokens)
      turns.append((a.slot, tokens[-1], start + len(tokens), a.budget,
                    a.row_ids))
      prompt = tuple(tokens) if a.fresh and len(tokens) > 1 else ()
      holder = self._holder(prompt, copy)
      if holder is not None:
        copied[a.slot] = prompt
        moves[copy] += self._moves(holder, copy, slot, len(prompt) - 1)
      else:
        self._prompts[a.slot] = prompt or self._prompts[a.slot]
        cached = tokens[:-1]
        tiles[copy] += [(start + i, slot, cached[i:i + tile])
                        for i in range(0, len(cached), tile)]
      if self._pages:
        self._pages[copy].take(slot, needed)
    for slot, prompt in copied.items():  # true only after the moves
      self._prompts[slot] = prompt
    longest = max((len(prompt) - 1 for prompt in copied.values()), default=0)
    return Work(
        tiles=[sorted(copy_tiles) for copy_tiles in tiles], moves=moves,
        blocks=1 if self._pages else -(-longest // self._block), turns=turns,
        copied_tokens=sum(len(prompt) - 1 for prompt in copied.values()))

  def _holder(self, prompt: tuple[int, ...], copy: int) -> int | None:
    """Returns a slot of this copy whose cache begins with this prompt, or None.

    The slot is numbered from 0 on its copy of the weights.
    """
    beside = self._prompts[copy * self._each:(copy + 1) * self._each]
    return beside.index(prompt) if prompt and prompt in beside else None

  def _moves(self, holder: int, copy: int, slot: int, tokens: int
            ) -> list[tuple[int, int]]:
    """Returns what to copy to begin `slot` with the first tokens of `holder`.

    Without pages, the result is the slots [(holder, slot)]. With pages, both
    slots share the full pages. If the tokens end within a page, the result is
    [(this page, a new page)], and otherwise []. `copy` is the number of the
    copy of the weights to which both slots belong.
    """
    if not self._pages:
      return [(holder, slot)]
    end = self._pages[copy].share(holder, slot, tokens)
    return [end] if end else []

  def sampled(self, slot: int, tokens: Sequence[int]) -> None:
    """Records that a slot has sampled these tokens."""
    self._last[slot] = tokens[-1]
    self.used[slot] += len(tokens)

  def stopped(self, slot: int) -> None:
    """Frees the pages that a finished turn reserved but did not use."""
    if self._pages:
      copy, local = divmod(slot, self._each)
      self._pages[copy].trim(local, self.used[slot])

  def release(self, slot: int) -> None:
    """Frees a slot.

    If the cache has no pages, the prompt stays in the slot until the slot is
    used again, and other slots can copy it until then.
    """
    self.used[slot] = 0
    if self._pages:
      self.empty(slot)

  def empty(self, slot: int) -> None:
    """Discards the contents of a slot."""
    self.used[slot], self._prompts[slot] = 0, ()
    self.stopped(slot)

  def table(self, slots: np.ndarray) -> np.ndarray | None:
    """Returns the pages of some slots; None if the cache has no pages.

    Args:
      slots: Numbers of n slots on each copy of the weights, [copies n].

    Returns:
      The pages of each slot in order, [copies * n, N], where N is the number of
      pages of a full slot. Like the slots, the pages of each copy are numbered
      from 0.
    """
    if not self._pages:
      return None
    return np.concatenate(list(map(pages_lib.Pages.rows, self._pages, slots)))

  def index(self, slot: int) -> np.ndarray:
    """Returns where a slot's tokens are in arrays of all devices together.

    It is an array with the number of the slot, or with the numbers of its pages
    if the cache has pages. The slots and pages of all copies of the weights are
    numbered one copy after the other.
    """
    if not self._pages:
      return np.array([slot], np.int32)
    copy, local = divmod(slot, self._each)
    return self._pages[copy].table[local] + np.int32(copy * self._total)
