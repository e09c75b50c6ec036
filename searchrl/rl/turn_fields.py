# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Fields of a Batch that say what belongs to which turn, made on the host."""

from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from searchrl.trajectory import Batch, Trajectory


def with_turns(batch: Batch, trajectories: Sequence[Trajectory]) -> Batch:
  """Returns a batch with `turn_ids`, `turn_rewards` and `state_ids`.

  Rows that are not in the baseline have no turns.

  Args:
    batch: Batch of numpy arrays, from `trajectory.collate`.
    trajectories: Trajectories of its first rows, in order.
  """
  turn_ids, state_ids = np.zeros((2, *batch.tokens.shape), np.int32)
  turn_rewards = np.full(batch.tokens.shape, np.nan, np.float32)
  states: dict[Any, int] = {}
  for row, trajectory in enumerate(trajectories):
    if not batch.in_baseline[row]:
      continue
    rewards = trajectory.turn_rewards or (None,) * len(trajectory.turns)
    end = len(trajectory.prompt_tokens)
    # A state is a group and a prompt, or an earlier state and what was read.
    state: Any = int(batch.group_ids[row]), trajectory.prompt_tokens
    for number, (turn, reward) in enumerate(
        zip(trajectory.turns, rewards, strict=True), start=1):
      start, end = end, end + len(turn.action_tokens)
      state = states.setdefault(state, len(states))
      if start < end:
        turn_ids[row, start:end] = number
        state_ids[row, start:end] = state
        turn_rewards[row, end - 1] = np.nan if reward is None else reward
      end += len(turn.observation_tokens)
      state = state, turn.observation_tokens
  fields: dict[str, Any] = dict(  # numpy, like all of a Batch on the host
      turn_ids=turn_ids, turn_rewards=turn_rewards, state_ids=state_ids)
  return dataclasses.replace(batch, **fields)
