# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rounds of questions in, a step's groups of trajectories out: the dynamic filter.

A recipe keeps some groups and refuses others; rounds go on until a batch is
full. What is left over opens the next step, and is checkpointed until then.
"""

import collections
import dataclasses
import math
from typing import Any

import numpy as np

from searchrl.models.inference import sampling
from searchrl.rl import advantages
from searchrl.runtime import processes
from searchrl import trajectory as trajectory_lib
from searchrl.trajectory import Trajectory

Group = list[Trajectory]  # samples of one question, by one policy


@dataclasses.dataclass
class Progress:
  """What a run must remember besides the learner's state; checkpointed."""

  step: int = 0  # updates of the policy
  rollouts: int = 0  # trajectories sampled so far
  position: list[int] = dataclasses.field(default_factory=list)  # of the data
  surplus: list[Group] = dataclasses.field(default_factory=list)
  silent_steps: int = 0  # in a row, without a group to learn from

  def to_json(self) -> dict[str, Any]:
    surplus = [[trajectory_lib.to_json(g) for g in group] for group in self.surplus]
    return {**vars(self), 'surplus': surplus}

  @classmethod
  def from_json(cls, record: dict[str, Any]) -> 'Progress':
    surplus = [[trajectory_lib.from_json(g) for g in group]
               for group in record['surplus']]
    return cls(**{**record, 'surplus': surplus})


def collect(sampler, params, stream, progress: Progress, algorithm, search,
            reward, outcome, options, policy_step: int):
  """Plays rounds of questions until `keep` has accepted a full batch.

  Args:
    player, params: the policy.
    stream: deals questions; its position moves on.
    progress: its surplus is used first, and takes what is left over; its
      position becomes the stream's.
    algorithm: `keep` decides group by group.
    search, reward, outcome: as in `Player.play`.
    options: config.rollout.
    policy_step: updates that this policy has seen.

  Returns:
    The groups to train on, at most options.questions; all trajectories played
    now; and counts as metrics.
  """
  if options.end_when_full and processes.count() > 1:
    raise ValueError(
        'rollout.end_when_full is for one process, because each sees only its '
        f'share of a group, but there are {processes.count()}. Turn it off.')
  groups, progress.surplus = progress.surplus, []
  carried = len(groups)
  played, asked = [], []
  times_asked = {}
  for _ in range(options.max_rounds):
    missing = options.questions - len(groups)
    if missing <= 0:
      break
    # Ask for as many as should fill the batch, judging by this step so far.
    share = (len(groups) - carried) / len(asked) if asked else 1.0
    wanted = min(options.questions,
                 math.ceil(missing / max(share, 1 / options.questions)))
    questions = stream.draw(wanted)
    requests = []
    for question in questions:
      again = times_asked.get(question.uid, 0)
      times_asked[question.uid] = again + 1
      requests += [(question, again * options.group_size + i)
                   for i in range(options.group_size)]
    early = {} if not options.end_when_full else dict(
        enough=lambda trajectories, missing=missing: len(_kept(
            _whole(trajectories, options.group_size), algorithm)) >= missing)
    trajectories = sampler.play(
        params, requests, search=search, reward=reward, outcome=outcome,
        temperature=options.temperature, truncation=truncation(options),
        step=progress.step, policy_step=policy_step, **early)
    progress.rollouts += len(trajectories)
    fresh = _whole(trajectories, options.group_size)
    groups += _kept(fresh, algorithm)
    played += trajectories
    asked += fresh
  progress.surplus = groups[options.questions:]
  groups = groups[:options.questions]
  progress.position = list(stream.position)
  return groups, played, _group_counts(asked, groups, carried, progress)


def truncation(options) -> sampling.Truncation:
  """Which tokens may be drawn, from config.rollout."""
  return sampling.Truncation(options.top_k, options.top_p, options.min_p)


def _whole(trajectories: list[Trajectory], size: int) -> list[Group]:
  """The groups all of whose samples are there, in order."""
  groups = collections.defaultdict(list)
  for trajectory in trajectories:
    groups[trajectory.question.uid, trajectory.sample // size].append(trajectory)
  return [group for group in groups.values() if len(group) == size]


def _kept(groups: list[Group], algorithm) -> list[Group]:
  """The groups that the algorithm learns from."""
  if not groups:
    return []
  scores = np.array([np.nan if g.outcome_reward is None else g.outcome_reward
                     for group in groups for g in group])
  ids = np.repeat(np.arange(len(groups)), len(groups[0]))
  kept = algorithm.keep(scores, ids).reshape(len(groups), -1).all(1)
  return [group for group, keep in zip(groups, kept) if keep]


def _group_counts(asked, groups, carried, progress) -> dict[str, float]:
  """Metrics of the groups asked; sizes count the samples that have a score."""
  scores = [[g.outcome_reward for g in group if g.outcome_reward is not None]
            for group in asked]
  kinds = collections.Counter(map(_kind, scores))
  sizes = [len(s) for s in scores] or [0]
  return {
      f'data/frac_group_{kind}': kinds[kind] / max(len(asked), 1)
      for kind in ('mixed', 'all_zero', 'all_one', 'failed')
  } | {
      'data/group_size/mean': float(np.mean(sizes)),
      'data/group_size/min': min(sizes),
      'data/groups_asked': len(asked),
      'data/groups_trained': len(groups),
      'data/groups_carried_in': carried,
      'data/groups_carried_out': len(progress.surplus),
      'data/tries_per_kept_group': len(asked) / max(
          len(groups) - carried + len(progress.surplus), 1),
  }


def _kind(scores: list[float]) -> str:
  """What the outcomes of a group teach; every group is of one kind."""
  if not scores:
    return 'failed'
  best, tolerance = max(scores), advantages.MIN_SPREAD  # as `keep` has it
  if best - min(scores) > tolerance:
    return 'mixed'
  if abs(best) <= tolerance:
    return 'all_zero'
  return 'all_one' if abs(best - 1) <= tolerance else 'constant'
