# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Asynchronous rollouts: a thread samples some steps ahead of the learner.

Step n trains on samples from the policy of step n - max_staleness; the first
steps train on samples from the run's first policy. Timing does not decide which
policy samples a step, so two runs with the same seed are equal. Each trajectory
has the step of its policy, and importance ratios divide by that policy's
log-probs. A checkpoint includes the samples in flight, so a resumed run ends
with the same bits as an uninterrupted run.

With several processes, the threads of all of them sample the same steps in the
same order, and exchange the results. They start no programs that span
processes; only the learner's threads do.
"""

from collections.abc import Callable
import collections
import concurrent.futures
import dataclasses
from typing import Any

from searchrl.rollouts.collect import Collected, Progress
from searchrl.rollouts.weight_sync import Synced
from searchrl.runtime import processes

# (weights, progress of the sampling, policy step) -> groups and metrics
Collect = Callable[[Synced, Progress, int], Collected]
# Fields of the progress that the sampling changes; others are the learner's.
_SAMPLED = ('rollouts', 'groups', 'position', 'surplus')


class AsyncRollouts:
  """A sampler that runs up to `max_staleness` steps ahead of training.

  One thread samples, one step after the other. No lock is held while waiting.
  `take` raises the errors of the thread.

  Args:
    collect: Function that samples the trajectories of a step, given weights,
      progress and the policy's step. It is called in the thread.
    snapshot: Function that copies the policy's params into weights for
      `collect`, so that later updates do not overwrite them. It is called in
      the learner's thread.
    max_staleness: Number of steps that sampling may be ahead; above 0.
    last_step: Number of steps of the run; nothing is sampled beyond it.
  """

  def __init__(self, collect: Collect, snapshot: Callable[[Any], Synced], *,
               max_staleness: int, last_step: int):
    self._collect, self._snapshot = collect, snapshot
    self._max_staleness, self._last_step = max_staleness, last_step
    self._pool = concurrent.futures.ThreadPoolExecutor(
        1, thread_name_prefix='rollouts', initializer=processes.channel,
        initargs=('rollouts',))
    self._in_flight: collections.deque[concurrent.futures.Future[Collected]] = (
        collections.deque())
    # The sampling thread's progress; None: it has not begun.
    self._sampled: Progress | None = None

  def take(self, params: Any, progress: Progress) -> Collected:
    """Returns the trajectories to train on at progress.step, with metrics.

    First it lets the thread begin the steps that may now be sampled. Then it
    waits until the data of progress.step are complete.

    Args:
      params: Parameters of the policy at progress.step. They sample the steps
        that the thread now begins.
      progress: Progress of the training. In the result, the data position, the
        surplus and the counts of trajectories and groups are the sampling's.
    """
    if self._sampled is None:
      self._start(progress)
    synced = None
    first = progress.step + len(self._in_flight)
    last = min(progress.step + self._max_staleness, self._last_step - 1)
    for step in range(first, last + 1):
      # Only the first step with these weights reports the cost of their sync.
      synced = Synced(synced.weights) if synced else self._snapshot(params)
      self._in_flight.append(self._pool.submit(
          self._sample, synced, step, progress.step))
    collected = self._in_flight.popleft().result()
    return dataclasses.replace(collected, progress=dataclasses.replace(
        progress, in_flight=(), **{name: getattr(collected.progress, name)
                                   for name in _SAMPLED}))

  def settled(self, progress: Progress) -> Progress:
    """Returns the progress with the data of all steps that are sampled ahead.

    It waits until they are sampled. A checkpoint saves this progress.
    """
    return dataclasses.replace(progress, in_flight=tuple(
        sampling.result() for sampling in self._in_flight))

  def restart(self) -> None:
    """Waits for all steps that are being sampled ahead, and drops them.

    No step is cancelled, because another process may have begun to sample it.
    """
    concurrent.futures.wait(self._in_flight)
    self._in_flight.clear()
    self._sampled = None

  def _start(self, progress: Progress) -> None:
    """Queues the data of steps that were sampled before the checkpoint."""
    self._sampled = progress
    for collected in progress.in_flight:
      self._in_flight.append(concurrent.futures.Future())
      self._in_flight[-1].set_result(collected)
      self._sampled = collected.progress

  def _sample(self, synced: Synced, step: int, policy_step: int) -> Collected:
    assert self._sampled is not None  # `take` has set it
    collected = self._collect(
        synced, dataclasses.replace(self._sampled, step=step), policy_step)
    self._sampled = collected.progress
    return collected

  def close(self) -> None:
    """Waits for the step that is being sampled and cancels the others."""
    self._pool.shutdown(wait=True, cancel_futures=True)
