# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Algorithms on trajectories with several contexts, each a row of the batch.

A context is the text that the policy reads at one time. A trajectory whose
context was full goes on in another one (`rollouts.context_rules`). It is one
episode for the advantages, and one row per context for the networks: context s
of trajectory e is row e * S + s of a batch with S contexts per trajectory. Rows
of contexts that were not needed are empty.
"""

import dataclasses
from typing import Any

import jax

from searchrl.rl.algorithm import Algorithm
from searchrl.trajectory import Batch


def over_contexts(algorithm: Algorithm, contexts: int) -> Algorithm:
  """Returns the algorithm for batches with S rows (contexts) per trajectory.

  To compute advantages, `algorithm` gets one long row per trajectory, in which
  its contexts follow each other. So a baseline counts a trajectory once, and
  GAE continues from one context to the next. The result is cut into contexts
  again. The loss is computed on these rows: a ratio or a mean over a sequence
  is over a single context.

  Args:
    algorithm: Any algorithm. Wrap it with `corrected` or `with_observations`
      afterwards, not before.
    contexts: Number S of rows per trajectory.
  """
  if contexts == 1:
    return algorithm

  def advantages(batch):
    return jax.tree.map(
        lambda x: x.reshape(len(batch.rewards), -1) if x.ndim > 1 else (
            x.repeat(contexts)),
        algorithm.advantages(episodes(batch, contexts)))

  return dataclasses.replace(algorithm, advantages=advantages)


def episodes(batch: Batch, contexts: int) -> Batch:
  """Returns a batch with one row per trajectory instead of one per context.

  In `batch`, each trajectory has S = `contexts` consecutive rows. An array
  [B T] becomes [B/S S*T]: the contexts of a trajectory follow each other in one
  row. An array [B] becomes [B/S] and keeps the entry of each first context.
  Only `in_loss` differs: it is True if it is True for any of the contexts.
  """
  def joined(x: Any) -> Any:
    if x.ndim > 1:
      return x.reshape(len(x) // contexts, -1)
    return x[::contexts]

  in_loss = batch.in_loss.reshape(-1, contexts).any(1)
  return dataclasses.replace(jax.tree.map(joined, batch), in_loss=in_loss)
