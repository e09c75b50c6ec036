# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A policy in, a step's groups out: played in the step, or some steps ahead.

Ahead, a thread plays while the learner trains: step n trains on what the policy
of step n - max_staleness sampled. Which policy plays which step is settled
beforehand, so that two runs of one seed are equal; trajectories carry the step
of their policy, and ratios divide by what it said. A run that was stopped plays
again what was in flight, with the policy it stopped at: unlike runs that play
in the step, it does not end with the bits of one that was not.
"""

from collections.abc import Callable
import collections
import concurrent.futures
import dataclasses
from typing import Any

from searchrl.rollouts.collect import Progress

# (params, progress of the play, policy step) -> groups, trajectories, counts
Collect = Callable[[Any, Progress, int], tuple[Any, Any, Any]]


class InStep:
  """Plays a step's questions when the step has come."""

  def __init__(self, collect: Collect):
    self._collect = collect

  def take(self, params: Any, progress: Progress):
    """The groups of progress.step; see `collect.collect`."""
    return self._collect(params, progress, progress.step)

  def close(self) -> None:
    pass


class AsyncRollouts:
  """Plays up to `max_staleness` steps before they are trained on.

  One thread plays, step by step; nobody holds a lock while waiting, and what
  goes wrong in it is raised by `take`.

  Args:
    collect: what the thread calls, with weights that no update takes away.
    snapshot: params -> such weights; called in the learner's thread.
    max_staleness: steps; above 0.
    last_step: of the run; nothing is played beyond it.
  """

  def __init__(self, collect: Collect, snapshot: Callable[[Any], Any], *,
               max_staleness: int, last_step: int):
    self._collect, self._snapshot = collect, snapshot
    self._max_staleness, self._last_step = max_staleness, last_step
    self._pool = concurrent.futures.ThreadPoolExecutor(
        1, thread_name_prefix='rollouts')
    self._in_flight = collections.deque()
    self._playing = None  # the thread's own progress

  def take(self, params: Any, progress: Progress):
    """The groups of progress.step, perhaps after waiting for them.

    Args:
      params: the policy of progress.step; plays what comes next.
      progress: its data position, surplus and count become those of the play.
    """
    if self._playing is None:
      self._playing = dataclasses.replace(progress)
      self._next = progress.step
    weights = None
    while self._next <= min(progress.step + self._max_staleness,
                            self._last_step - 1):
      weights = weights or self._snapshot(params)
      self._in_flight.append(self._pool.submit(
          self._play, weights, self._next, progress.step))
      self._next += 1
    found, after = self._in_flight.popleft().result()
    progress.rollouts, progress.surplus, progress.position = after
    return found

  def _play(self, weights, step: int, policy_step: int):
    playing = self._playing
    playing.step = step
    found = self._collect(weights, playing, policy_step)
    return found, (playing.rollouts, list(playing.surplus),
                   list(playing.position))

  def close(self) -> None:
    """Waits for the step that is being played, and drops the rest."""
    self._pool.shutdown(wait=True, cancel_futures=True)
