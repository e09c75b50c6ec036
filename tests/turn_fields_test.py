# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""turn_fields: turns, their rewards and the states that they begin in."""

import dataclasses

import numpy as np
import pytest
from trajectory_test import ANSWER, SEARCH, collate, made

from searchrl.rl import turn_fields
from searchrl.trajectory import Action, Turn

READ = Turn((6,), (-0.5,), Action('search', ('y',)), (7, 8, 9))  # as SEARCH
OTHER = Turn((6,), (-0.5,), Action('search', ('y',)), (7,))


def test_turns_are_numbered_and_states_are_what_was_read():
  trajectories = [
      made(turns=(SEARCH, ANSWER)), made(sample=1, turns=(READ, OTHER, ANSWER)),
      made(sample=2, turns=(OTHER, ANSWER)), made('r', turns=(SEARCH,)),
      made(turns=(SEARCH,), stop_reason='search_error', reward=None),
      made(sample=3, turns=(), stop_reason='length_limit')]
  trajectories = [dataclasses.replace(t, turn_rewards=rewards) for t, rewards in
           zip(trajectories, [(2.0, None), (0.0, 3.0, 4.0), None, (5.0,), None,
                       ()])]
  batch = turn_fields.with_turns(
      collate(trajectories, length=13, rows=7), trajectories)
  assert batch.turn_ids[:4].tolist() == [
      [0, 0, 0, 1, 1, 0, 0, 0, 2, 0, 0, 0, 0],
      [0, 0, 0, 1, 0, 0, 0, 2, 0, 3, 0, 0, 0],
      [0, 0, 0, 1, 0, 2, 0, 0, 0, 0, 0, 0, 0],
      [0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]]
  assert not batch.turn_ids[4:].any()
  states = batch.state_ids[:4][batch.turn_ids[:4] > 0].tolist()
  first, after, later, other, alone = states[0], *(states[n] for n in (
      2, 5, 7, 8))
  assert states == [first, first, after, first, after, later, first, other,
                    alone, alone]
  assert len({first, after, later, other, alone}) == 5
  assert max(states) < batch.state_ids.size
  ends = ~np.isnan(batch.turn_rewards)
  assert np.argwhere(ends).tolist() == [[0, 4], [1, 3], [1, 7], [1, 9], [3, 4]]
  assert batch.turn_rewards[ends].tolist() == [2, 0, 3, 4, 5]


def test_turns_of_rows_out_of_the_loss_stay():
  cut = made(turns=(SEARCH,), stop_reason='turn_limit')
  batch = turn_fields.with_turns(collate([cut], mask_truncated=True), [cut])
  assert not batch.loss_mask.any() and batch.turn_ids.sum() == 2


def test_rewards_that_are_not_one_per_turn_are_named():
  short = dataclasses.replace(made(turns=(SEARCH, ANSWER)), turn_rewards=(1.0,))
  with pytest.raises(ValueError, match='^turn_rewards must have one entry per '
                     "turn, 2, but that of question 'q', sample 0, is shorter, 1"):
    turn_fields.with_turns(collate([short]), [short])
