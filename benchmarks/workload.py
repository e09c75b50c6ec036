# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Synthetic trajectories, with lengths as search agents have them.

A seed goes in, lengths or a Batch come out.
"""

import numpy as np

from searchrl import trajectory


def lengths(count: int, longest: int, seed: int) -> np.ndarray:
  """Tokens of trajectories of one to four turns; 4096 hold nearly all.

  A prompt of 150 to 250 tokens, some 110 sampled a turn, and 480 of passages
  between two turns; all scaled by longest / 4096.
  """
  rng, result = np.random.default_rng(seed), []
  for _ in range(count):
    turns = 1 + rng.choice(4, p=[0.15, 0.35, 0.3, 0.2])
    sampled = np.minimum(rng.lognormal(np.log(110), 0.6, turns), 500).sum()
    found = rng.normal(480, 60, turns - 1).sum()
    result.append(rng.uniform(150, 250) + sampled + found)
  return np.clip(np.array(result) * longest / 4096, 1, longest).astype(int)


def batch(count: int, longest: int, vocabulary: int, seed: int,
          group: int = 4) -> trajectory.Batch:
  """Random trajectories in groups; a third of their tokens are sampled."""
  rng = np.random.default_rng(seed)
  column = np.arange(longest)
  ends = lengths(count, longest, seed)[:, None]
  mask = (column < ends) & (column >= ends // 8) & (
      (column // max(longest // 64, 1)) % 3 == 0)
  mask[np.arange(count), ends[:, 0] - 1] = True  # the answer ends it
  rewards = rng.integers(0, 2, count).astype(np.float32)
  return trajectory.Batch(
      tokens=rng.integers(0, vocabulary, mask.shape, np.int32),
      loss_mask=mask,
      behavior_logprobs=np.zeros(mask.shape, np.float32),
      rewards=rewards, outcome_rewards=rewards,
      question_ids=np.arange(count) // group,
      group_ids=np.arange(count) // group,
      in_baseline=np.ones(count, bool), in_loss=np.ones(count, bool),
      on_policy=np.ones(count, bool))
