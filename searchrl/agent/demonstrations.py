# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Demonstrations: selects and writes trajectories for fine-tuning."""

from collections.abc import Callable, Sequence
import collections
from typing import Any

from searchrl.trajectory import Trajectory


def right(trajectories: Sequence[Trajectory],
          reward: Callable[[Trajectory], float], *, most: int, balance: float
         ) -> list[Trajectory]:
  """Returns the right trajectories, not too many of a kind: rejection sampling.

  Args:
    trajectories: Trajectories, several per question.
    reward: Reward function; a trajectory is right if its reward is 1.
    most: Maximum number that is kept per question; the first ones are kept.
    balance: Maximum size of a hop count, as a multiple of the rarest one's; 0:
      no limit.

  Source: Yuan et al. 2023, arXiv:2308.01825; the baseline of Search-R1.
  """
  kept: list[Trajectory] = []
  by_question: collections.Counter[str] = collections.Counter()
  for one in trajectories:
    if reward(one) == 1 and by_question[one.question.uid] < most:
      by_question[one.question.uid] += 1
      kept.append(one)
  counts = collections.Counter(one.question.hops for one in kept)
  room = (int(balance * min(counts.values(), default=0)) if balance
          else len(kept))
  taken: collections.Counter[int] = collections.Counter()
  chosen = []
  for one in kept:
    if taken[one.question.hops] < room:
      taken[one.question.hops] += 1
      chosen.append(one)
  return chosen


def segments(trajectory: Trajectory) -> dict[str, Any]:
  """Returns a line of fine-tuning data; only the policy's text is trained on.
  """
  pieces = [{'text': trajectory.prompt, 'trained': False}]
  for turn in trajectory.turns:
    pieces.append({'text': turn.text, 'trained': True})
    if turn.observation:
      pieces.append({'text': turn.observation, 'trained': False})
  return {'segments': pieces}
