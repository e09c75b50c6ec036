# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Which pages of a cache belong to which slot, on the host.

A slot has as many pages as its tokens need, of those that all slots of a device
share, so that there may be fewer than all slots could fill: conversations are
far shorter than the longest. A prompt that several slots begin with has its
whole pages once.

No slot may ever wait for pages that only slots waiting like itself could free.
So pages are granted only while all slots could still reach their full length
one after another: the slot with the most pages, then, with those that it
frees, the next. (The banker's algorithm; Dijkstra 1965, EWD 123.)
"""

from collections.abc import Sequence

import numpy as np


class Pages:
  """The pages of the slots of one device.

  Args:
    slots: B, numbered from 0.
    page: tokens of a page.
    most: N, pages of a slot of full length.
    total: P, pages of all slots.

  Attributes:
    table: [B N] int32, the pages of each slot in order; 0 where it has none.

  Raises:
    ValueError: there are fewer pages than one slot may need.
  """

  def __init__(self, slots: int, page: int, most: int, total: int):
    if total < most:
      raise ValueError(
          f'a slot of full length takes {most} pages of {page} tokens, but the '
          f'cache of a device has {total}. Raise rollout.cache_tokens, or set it '
          'to 0.')
    self.page, self.most = page, most
    self.table = np.zeros((slots, most), np.int32)
    self._held = [0] * slots  # pages of each slot
    self._users = np.zeros(total, np.int32)  # slots of each page
    self._free = list(range(total))[::-1]

  @property
  def free(self) -> int:
    """Pages that no slot has."""
    return len(self._free)

  def needed(self, tokens: int) -> int:
    """Pages of so many tokens."""
    return -(-tokens // self.page)

  def admit(self, wanted: Sequence[tuple[int, int]]) -> list[bool]:
    """Which slots may have room for so many tokens now, granted in order.

    After one that may not, none that holds nothing yet may: what has begun comes
    before what is new. A prompt that would be shared counts in full.

    Args:
      wanted: (slot, tokens), a slot at most once.
    """
    held, left = list(self._held), len(self._free)
    if len(self._users) >= self.most * len(held):
      return [True] * len(wanted)
    shared = [[page for page in self.table[slot, :count].tolist()
               if self._users[page] > 1] for slot, count in enumerate(held)]
    granted = []
    for slot, tokens in wanted:
      before = held[slot]
      more = max(self.needed(tokens) - before, 0)
      held[slot] += more
      may = (all(granted) or before > 0) and self._is_safe(
          held, shared, left - more)
      if may:
        left -= more
      else:
        held[slot] = before
      granted.append(may)
    return granted

  def _is_safe(self, held: Sequence[int], shared: Sequence[Sequence[int]],
               left: int) -> bool:
    """Whether all slots could still become full, one after another.

    Args:
      held: pages of each slot.
      shared: those of each slot that others have, too: the last one frees them.
      left: pages that no slot has.
    """
    order = sorted((slot for slot, count in enumerate(held) if count),
                   key=lambda slot: -held[slot])
    last = {page: slot for slot in order for page in shared[slot]}
    for slot in order:
      if self.most - held[slot] > left:
        return False
      left += held[slot] - sum(last[page] != slot for page in shared[slot])
    return left >= 0

  def take(self, slot: int, tokens: int) -> None:
    """Gives a slot the pages that so many tokens need beyond its own.

    Raises:
      RuntimeError: there are none left; `admit` was not asked.
    """
    while self._held[slot] < self.needed(tokens):
      if not self._free:
        raise RuntimeError(
            'the KV cache has no page left. Ask Engine.admit before append.')
      page = self._free.pop()
      self._users[page] = 1
      self.table[slot, self._held[slot]] = page
      self._held[slot] += 1

  def share(self, source: int, slot: int, tokens: int) -> tuple[int, int] | None:
    """Begins a slot without pages as another one, for so many tokens.

    Returns:
      The page that has to be copied, and into which; None if tokens end a page.
    """
    whole, rest = divmod(tokens, self.page)
    self.table[slot, :whole] = shared = self.table[source, :whole]
    self._users[shared] += 1
    self._held[slot] = whole
    if not rest:
      return None
    self.take(slot, tokens)
    return int(self.table[source, whole]), int(self.table[slot, whole])

  def trim(self, slot: int, tokens: int) -> None:
    """Frees the pages of a slot beyond those of so many tokens."""
    kept = self.needed(tokens)
    for page in self.table[slot, kept:self._held[slot]].tolist():
      self._users[page] -= 1
      if not self._users[page]:
        self._free.append(page)
    self.table[slot, kept:] = 0
    self._held[slot] = min(self._held[slot], kept)

  def rows(self, slots: Sequence[int]) -> np.ndarray:
    """The table's rows of some slots; of those out of range, the last one's."""
    return self.table[np.minimum(slots, len(self.table) - 1)]
