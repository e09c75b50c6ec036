# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The assignment of a cache's pages to slots, kept on the host.

A page is a block of the cache. A slot has as many pages as its tokens need. All
slots of a device share the pages. There may be fewer pages than all full slots
would need, because most conversations are far shorter than the longest. If
several slots begin with the same prompt, the pages that it fills are stored
once.

A slot must never wait for pages that only other waiting slots could free. Pages
are therefore granted only while all slots could still reach their full length
one after another: first the slot with the most pages, then, with the pages that
it frees, the next one. This is the banker's algorithm (Dijkstra 1965, EWD 123).
"""

from collections.abc import Sequence

import numpy as np


class Pages:
  """Table that says which pages of the KV cache each slot of a device has.

  Args:
    slots: Number of slots, B, which are numbered from 0.
    page: Number of tokens in a page.
    slot_pages: Number of pages that a slot of full length has, N.
    total: Number of pages that all slots share, P.

  Attributes:
    table: Pages of each slot in order, [B N] int32; unused entries are 0.

  Raises:
    ValueError: There are fewer pages than a slot of full length has.
  """

  def __init__(self, slots: int, page: int, slot_pages: int, total: int):
    if total < slot_pages:
      raise ValueError(
          f'a slot of full length takes {slot_pages} pages of {page} tokens, '
          f'but the cache of a device has {total}. Raise rollout.cache_tokens, '
          'or set it to 0.')
    self.page, self.slot_pages = page, slot_pages
    self.table = np.zeros((slots, slot_pages), np.int32)
    self._held = [0] * slots  # number of pages of each slot
    self._users = np.zeros(total, np.int32)  # number of slots of each page
    self._free = list(range(total))[::-1]

  @property
  def free(self) -> int:
    """Number of pages that no slot has."""
    return len(self._free)

  def needed(self, tokens: int) -> int:
    """Returns the number of pages that this many tokens need."""
    return -(-tokens // self.page)

  def admit(self, requests: Sequence[tuple[int, int]]) -> list[bool]:
    """Returns for each request whether its slot may now get its pages.

    A request is a pair (slot, number of tokens that the slot must hold). Each
    slot occurs at most once. A request is granted if all slots could still
    become full afterwards, one after another. Once a request has been refused,
    requests for empty slots are refused, too, so that trajectories that have
    begun come before new ones. A prompt that slots could share is counted in
    full for each of them. This function assigns no pages.
    """
    held, left = list(self._held), len(self._free)
    if len(self._users) >= self.slot_pages * len(held):
      return [True] * len(requests)
    shared = [[page for page in self.table[slot, :count].tolist()
               if self._users[page] > 1] for slot, count in enumerate(held)]
    granted: list[bool] = []
    for slot, tokens in requests:
      before = held[slot]
      more = max(self.needed(tokens) - before, 0)
      held[slot] += more
      granted.append((all(granted) or before > 0) and self._is_safe(
          held, shared, left - more))
      if granted[-1]:
        left -= more
      else:
        held[slot] = before
    return granted

  def _is_safe(self, held: Sequence[int], shared: Sequence[Sequence[int]],
               left: int) -> bool:
    """Returns whether all slots can be served to their ends, one after another.

    A slot takes pages until it is full, and then frees them for the next one,
    as in the banker's algorithm. A page that slots share becomes free with the
    last of them.

    Args:
      held: Number of pages of each slot.
      shared: Pages of each slot that it shares with others.
      left: Number of free pages.
    """
    order = sorted((slot for slot, count in enumerate(held) if count),
                   key=lambda slot: -held[slot])
    last = {page: slot for slot in order for page in shared[slot]}
    for slot in order:
      if self.slot_pages - held[slot] > left:
        return False
      left += held[slot] - sum(last[page] != slot for page in shared[slot])
    return left >= 0

  def take(self, slot: int, tokens: int) -> None:
    """Gives a slot the pages that it lacks for this many tokens.

    Raises:
      RuntimeError: No pages are left, because `admit` was not called.
    """
    while self._held[slot] < self.needed(tokens):
      if not self._free:
        raise RuntimeError(
            'the KV cache has no page left. Ask Engine.admit before append.')
      page = self._free.pop()
      self._users[page] = 1
      self.table[slot, self._held[slot]] = page
      self._held[slot] += 1

  def share(self, source: int, slot: int, tokens: int
           ) -> tuple[int, int] | None:
    """Gives an empty slot the first `tokens` tokens of the slot `source`.

    The slots share the pages that these tokens fill. If the last page is not
    full, `slot` gets a new page, into which the caller must copy it.

    Returns:
      The page to copy from and the page to copy to; None if the tokens end with
      a full page.
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
    """Frees the pages of a slot beyond those that this many tokens need."""
    count = self.needed(tokens)
    for page in self.table[slot, count:self._held[slot]].tolist():
      self._users[page] -= 1
      if not self._users[page]:
        self._free.append(page)
    self.table[slot, count:] = 0
    self._held[slot] = min(self._held[slot], count)

  def rows(self, slots: Sequence[int]) -> np.ndarray:
    """Returns the pages of each of n slots, [n N].

    N is the number of pages of a full slot. Entries for pages that a slot does
    not have are 0. If a slot's number is too large, its row is the row of the
    last slot.
    """
    return self.table[np.minimum(slots, len(self.table) - 1)]
