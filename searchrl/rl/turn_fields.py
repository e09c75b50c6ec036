# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Fields of a Batch that say what belongs to which turn, made on the host."""

from collections.abc import Sequence
import dataclasses
import itertools
from typing import Any

import numpy as np

from searchrl.trajectory import Batch, Trajectory


def with_turns(batch: Batch, trajectories: Sequence[Trajectory],
               contexts: int = 1) -> Batch:
  """Returns a batch with the fields `turn_ids`, `turn_rewards` and `state_ids`.

  Each field has one entry per token, [B, T]. `turn_ids` has the number of the
  token's turn, from 1, or 0 if the policy did not sample the token.
  `turn_rewards` has a turn's reward at the last token of the turn, and NaN
  elsewhere. `state_ids` numbers the states in which turns begin. Two turns of a
  group begin in the same state if the policy had read the same prompt and the
  same observations before both. Trajectories that are not in the baseline have
  no turns.

  Args:
    batch: Batch of numpy arrays, from `trajectory.collate`.
    trajectories: Trajectories of the batch's first rows, in order.
    contexts: Number of rows per trajectory, one for each of its contexts: a
      trajectory whose context was full goes on in another row.

  Raises:
    ValueError: A trajectory has another number of turn_rewards than of turns.
  """
  turn_ids, state_ids = np.zeros((2, *batch.tokens.shape), np.int32)
  turn_rewards = np.full(batch.tokens.shape, np.nan, np.float32)
  states: dict[Any, int] = {}
  for first, trajectory in zip(itertools.count(0, contexts), trajectories):
    if not batch.in_baseline[first]:
      continue
    numbered = enumerate(_turn_rewards(trajectory), start=1)
    for row, context in enumerate(trajectory.contexts, start=first):
      end = len(context.prompt_tokens)
      # A state is a group and a prompt, or an earlier state and what was read.
      state: Any = int(batch.group_ids[row]), context.prompt_tokens
      for turn, (number, reward) in zip(context.turns, numbered):
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


def _turn_rewards(trajectory: Trajectory) -> Sequence[float | None]:
  """Returns the reward of each turn, or raises `with_turns`'s ValueError."""
  turns = len(trajectory.turns)
  rewards = trajectory.turn_rewards or (None,) * turns
  if len(rewards) != turns:
    raise ValueError(
        f'turn_rewards must have one entry per turn, {turns}, but that of '
        f'question {trajectory.question.uid!r}, sample {trajectory.sample}, is '
        f'{"longer" if len(rewards) > turns else "shorter"}, {len(rewards)}. '
        'Give None for a turn without a reward.')
  return rewards
