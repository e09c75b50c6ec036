# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""pages: nothing is lost or given twice, and nobody waits for ever."""

import collections

import numpy as np
import pytest

from searchrl.models.inference import pages as pages_lib

PAGE, MOST = 4, 6  # a slot has 24 tokens at most


def build(slots=3, total=9):
  return pages_lib.Pages(slots, PAGE, MOST, total)


def users(pages, tokens_of):
  """page -> the slots that have it, by the table."""
  found = collections.defaultdict(set)
  for slot, tokens in tokens_of.items():
    for page in pages.table[slot, :-(-tokens // PAGE)].tolist():
      found[page].add(slot)
  return found


def test_a_slot_has_as_many_pages_as_its_tokens_need():
  pages = build()
  pages.take(1, 9)
  assert pages.free == 6 and len(set(pages.table[1, :3])) == 3
  pages.take(1, 12)
  assert pages.free == 6  # 12 tokens are three pages, too
  before = pages.table[1, :3].tolist()
  pages.take(1, 13)
  assert pages.free == 5 and pages.table[1, :3].tolist() == before
  pages.trim(1, 5)
  assert pages.free == 7 and pages.table[1].tolist() == [*before[:2], 0, 0, 0, 0]
  pages.trim(1, 0)
  assert pages.free == 9 and not pages.table.any()


def test_a_shared_prompt_has_its_whole_pages_once():
  pages = build()
  pages.take(0, 10)
  source = pages.table[0].copy()
  assert pages.share(0, 2, 10) == (source[2], pages.table[2, 2])
  np.testing.assert_array_equal(pages.table[2, :2], source[:2])
  assert pages.table[2, 2] != source[2] and pages.free == 9 - 4
  assert pages.share(0, 1, 8) is None and pages.free == 5
  pages.trim(0, 0)
  assert pages.free == 6  # its end alone
  pages.trim(1, 0)
  assert pages.free == 6
  pages.trim(2, 0)
  assert pages.free == 9


def test_rows_of_slots_out_of_range_are_the_last_ones():
  pages = build()
  pages.take(2, 4)
  np.testing.assert_array_equal(pages.rows([0, 3, 2]), pages.table[[0, 2, 2]])


def test_pages_are_granted_while_all_could_become_full():
  pages = build()  # nine; a full slot takes six
  assert pages.admit([(0, 24)]) == [True]
  pages.take(0, 12)  # three of six: three more, of six that are left
  assert pages.admit([(1, 12), (0, 20)]) == [True, True]
  pages.take(1, 12)
  # Three are left: slot 0 needs them all to become full, and so does slot 1.
  assert pages.admit([(2, 4)]) == [False]
  assert pages.admit([(0, 16), (1, 16)]) == [True, False]  # after slot 0
  assert pages.admit([(1, 16), (0, 16)]) == [True, False]
  pages.take(0, 24)
  assert pages.admit([(1, 13)]) == [False] and pages.free == 0
  pages.trim(0, 0)
  assert pages.admit([(1, 13), (2, 12)]) == [True, True]


def test_what_is_new_waits_for_what_has_begun():
  pages = build(slots=4, total=8)
  pages.take(0, 16)
  pages.take(1, 8)
  assert pages.admit([(1, 16), (2, 1), (0, 24)]) == [False, False, True]
  assert pages.admit([(2, 1), (0, 24)]) == [False, True]


def test_where_all_can_be_full_everything_is_granted():
  pages = build(slots=2, total=12)
  pages.take(0, 24)
  assert pages.admit([(1, 24), (0, 24)]) == [True, True]
  pages.take(1, 24)
  assert not pages.free


def test_what_cannot_be_is_refused():
  with pytest.raises(ValueError, match='full length takes 6 pages of 4 tokens, '
                                       'but the cache of a device has 5. Raise '
                                       'rollout.cache_tokens'):
    build(total=5)
  pages = build(total=6)
  with pytest.raises(RuntimeError, match='no page left. Ask Engine.admit'):
    pages.take(0, 24)
    pages.take(1, 1)


def test_a_shared_page_counts_as_free_once_all_of_its_slots_have_ended():
  pages = build(slots=3, total=8)
  pages.take(0, 12)
  pages.share(0, 1, 12)  # all three of slot 0
  pages.take(1, 16)
  assert pages.free == 4
  # Slot 1 becomes full and frees its own three; slot 0 too, and frees all six;
  # without the three of both, slot 2 could not become full.
  assert pages.admit([(2, 4)]) == [True]


@pytest.mark.parametrize('seed', range(40))
def test_all_trajectories_end_and_no_page_is_lost(seed):
  """Slots grow turn by turn, some from a shared prompt, and end at random."""
  rng = np.random.default_rng(seed)
  slots, total = int(rng.integers(2, 9)), int(rng.integers(MOST, 20))
  pages, tokens, ended, waited = build(slots, total), {}, 0, 0
  prompt = int(rng.integers(1, 20))
  for _ in range(2000):
    if ended >= 60:
      break
    wanted = [(slot, min(24, tokens.get(slot, 0) + int(rng.integers(1, 9))))
              for slot in rng.permutation(slots).tolist()
              if tokens.get(slot, 0) < 24]
    wanted.sort(key=lambda one: tokens.get(one[0], 0) == 0)
    granted = pages.admit(wanted)
    waited += granted.count(False)
    moved = False
    for (slot, needed), may in zip(wanted, granted):
      if not may:
        continue
      moved = True
      holder = next((s for s in tokens if tokens[s] >= prompt), None)
      if slot not in tokens and needed >= prompt and holder is not None:
        pages.share(holder, slot, prompt)
      pages.take(slot, needed)
      tokens[slot] = int(rng.integers(max(tokens.get(slot, 0), 1), needed + 1))
      pages.trim(slot, tokens[slot])
    full = [slot for slot in tokens if tokens[slot] == 24]
    assert moved or full  # else all would wait for ever
    for slot in full + [s for s in tokens if rng.random() < seed % 3 / 20]:
      if slot in tokens:
        del tokens[slot]
        pages.trim(slot, 0)
        ended += 1
    assert pages.free == total - len(users(pages, tokens))
  assert ended >= 60 and (waited or total >= slots * MOST)
  for slot in tokens:
    pages.trim(slot, 0)
  assert pages.free == total
