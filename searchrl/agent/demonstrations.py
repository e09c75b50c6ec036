# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Demonstrations: selects and writes trajectories for fine-tuning."""

from collections.abc import Callable, Hashable, Iterable, Sequence
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
  correct = _first(most, (t for t in trajectories if reward(t) == 1),
                   lambda trajectory: trajectory.question.uid)
  if not balance:
    return correct
  counts = collections.Counter(t.question.hops for t in correct)
  return _first(int(balance * min(counts.values(), default=0)), correct,
                lambda trajectory: trajectory.question.hops)


def _first(limit: int, trajectories: Iterable[Trajectory],
           kind: Callable[[Trajectory], Hashable]) -> list[Trajectory]:
  """Returns the first `limit` trajectories of each kind, in their order."""
  counts: collections.Counter[Hashable] = collections.Counter()
  selected = []
  for trajectory in trajectories:
    counts[kind(trajectory)] += 1
    if counts[kind(trajectory)] <= limit:
      selected.append(trajectory)
  return selected


def segments(trajectory: Trajectory, tokenizer) -> dict[str, Any]:
  """Returns a line of fine-tuning data that trains on the policy's text alone.

  The texts have the special tokens of the chat template, and those with which
  the policy ended its turns. Text after a stop string is left out.
  """
  pieces = [{'text': tokenizer.write(trajectory.prompt_tokens, first=True),
             'trained': False}]
  for turn in trajectory.turns:
    unread = tokenizer.decode(turn.action_tokens).removeprefix(turn.text)
    written = tokenizer.write(turn.action_tokens).removesuffix(unread)
    pieces.append({'text': written, 'trained': True})
    if turn.observation_tokens:
      pieces.append({'text': tokenizer.write(turn.observation_tokens),
                     'trained': False})
  return {'segments': pieces}
