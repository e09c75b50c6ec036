# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Demonstrations: which trajectories a model is tuned on, and how they read."""

from collections.abc import Callable, Sequence
import collections
from typing import Any

from searchrl.trajectory import Trajectory


def right(trajectories: Sequence[Trajectory],
          reward: Callable[[Trajectory], float], *, most: int, balance: float
         ) -> list[Trajectory]:
  """Rejection sampling: the right answers, not too many of a kind.

  Args:
    trajectories: several of a question.
    reward: a trajectory is right where it is 1.
    most: that are kept of a question, the first ones.
    balance: a hop count keeps at most so many times what the rarest has; 0:
      all.

  Source: Yuan et al. 2023, arXiv:2308.01825; the baseline of Search-R1.
  """
  kept, by_question = [], collections.Counter()
  for one in trajectories:
    if reward(one) == 1 and by_question[one.question.uid] < most:
      by_question[one.question.uid] += 1
      kept.append(one)
  counts = collections.Counter(one.question.hops for one in kept)
  room = int(balance * min(counts.values(), default=0)) if balance else len(kept)
  taken, chosen = collections.Counter(), []
  for one in kept:
    if taken[one.question.hops] < room:
      taken[one.question.hops] += 1
      chosen.append(one)
  return chosen


def segments(trajectory: Trajectory) -> dict[str, Any]:
  """A line of the data of fine-tuning; what the policy wrote is trained on."""
  pieces = [{'text': trajectory.prompt, 'trained': False}]
  for turn in trajectory.turns:
    pieces.append({'text': turn.text, 'trained': True})
    if turn.observation:
      pieces.append({'text': turn.observation, 'trained': False})
  return {'segments': pieces}
