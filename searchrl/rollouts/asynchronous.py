# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Asynchronous rollouts: a thread samples some steps ahead of the learner.

Step n trains on what the policy of step n - max_staleness sampled. Which policy
samples which step is fixed in advance, so two runs of one seed are equal;
trajectories carry the step of their policy, and ratios divide by its
log-probs. What is in flight is part of a checkpoint, so that a run that was
stopped ends with the bits of one that was not.
"""

from collections.abc import Callable
import collections
import concurrent.futures
import dataclasses
from typing import Any

from searchrl.rollouts.collect import Collected, Progress
from searchrl.rollouts.weight_sync import Synced

# (weights, progress of the sampling, policy step) -> groups and metrics
Collect = Callable[[Synced, Progress, int], Collected]


class AsyncRollouts:
  """Samples up to `max_staleness` steps before they are trained on.

  One thread samples, step by step; no lock is held while waiting, and `take`
  raises an error of the thread.

  Args:
    collect: called in the thread, with weights whose buffers no update reuses.
    snapshot: params -> such weights; called in the learner's thread.
    max_staleness: steps; above 0.
    last_step: of the run; nothing is sampled beyond it.
  """

  def __init__(self, collect: Collect, snapshot: Callable[[Any], Synced], *,
               max_staleness: int, last_step: int):
    self._collect, self._snapshot = collect, snapshot
    self._max_staleness, self._last_step = max_staleness, last_step
    self._pool = concurrent.futures.ThreadPoolExecutor(
        1, thread_name_prefix='rollouts')
    self._in_flight = collections.deque()
    self._sampled = None  # the thread's own progress

  def take(self, params: Any, progress: Progress) -> Collected:
    """Returns the data of progress.step, after waiting for it if need be.

    Args:
      params: the policy of progress.step; it samples the steps that follow.
      progress: of the training; that of the result has the data position,
        surplus and counts of the sampling.
    """
    if self._sampled is None:
      self._start(progress)
    synced = None
    while self._next <= min(progress.step + self._max_staleness,
                            self._last_step - 1):
      # Only the first step with these weights reports the cost of their sync.
      synced = Synced(synced.weights) if synced else self._snapshot(params)
      self._in_flight.append(self._pool.submit(
          self._sample, synced, self._next, progress.step))
      self._next += 1
    found = self._in_flight.popleft().result()
    return dataclasses.replace(found, progress=dataclasses.replace(
        found.progress, silent_steps=progress.silent_steps))

  def settled(self, progress: Progress) -> Progress:
    """The progress with what is in flight, after waiting for it."""
    return dataclasses.replace(progress, in_flight=tuple(
        sampling.result() for sampling in self._in_flight))

  def restart(self) -> None:
    """Waits for what is being sampled, and drops all that was not taken."""
    for sampling in self._in_flight:
      sampling.cancel()
    concurrent.futures.wait(self._in_flight)
    self._in_flight.clear()
    self._sampled = None

  def _start(self, progress: Progress) -> None:
    """Takes up what a checkpoint holds."""
    for found in progress.in_flight:
      self._in_flight.append(concurrent.futures.Future())
      self._in_flight[-1].set_result(found)
    self._next = progress.step + len(progress.in_flight)
    self._sampled = (progress.in_flight[-1].progress if progress.in_flight
                     else progress)

  def _sample(self, synced: Synced, step: int, policy_step: int) -> Collected:
    found = self._collect(
        synced, dataclasses.replace(self._sampled, step=step), policy_step)
    self._sampled = found.progress
    return found

  def close(self) -> None:
    """Waits for the step that is being sampled, and drops the rest."""
    self._pool.shutdown(wait=True, cancel_futures=True)
