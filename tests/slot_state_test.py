# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The host's record of slots: the number of tiles of each prefill."""

import pytest

from searchrl.models.inference import slot_state


def calls(left: int, on_cpu: bool) -> list[int]:
  """Returns the sizes of the calls that prefill so many tiles."""
  sizes = []
  while left > 0:
    sizes.append(slot_state.tiles_of_call(left, (4, 16, 64), on_cpu))
    left -= sizes[-1]
  return sizes


@pytest.mark.parametrize('left, on_cpu, sizes', [
    (1, True, [4]),  # the smallest program there is
    (9, True, [4, 4, 4]),
    (11, True, [4, 4, 4]),  # 5 of 16 would be padding
    (12, True, [16]),  # 4 of 16
    (47, True, [16, 16, 16]),  # 17 of 64 would be padding
    (48, True, [64]),
    (70, True, [64, 4, 4]),
    (7, False, [4, 4]),  # 9 of 16 would be padding
    (8, False, [16]),
    (31, False, [16, 16]),
    (32, False, [64])])
def test_padding_is_at_most_a_quarter_on_a_cpu_and_half_elsewhere(
    left, on_cpu, sizes):
  assert calls(left, on_cpu) == sizes
