# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Collection with the dynamic filter: samples rounds until a batch is full.

The algorithm keeps some groups and rejects others, so questions are asked in
rounds. Surplus groups are checkpointed and open the next step's batch.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any

import numpy as np

from searchrl import trajectory as trajectory_lib
from searchrl.models.inference import sampling
from searchrl.rl import advantages
from searchrl.rl import algorithms
from searchrl.rollouts import scoring
from searchrl.rollouts import weight_sync
from searchrl.rollouts.sampler import Sampler
from searchrl.runtime import processes
from searchrl.search import call_metrics as calls_lib
from searchrl.search import engine_wrappers
from searchrl.trajectory import Question, Request, SearchFn, Trajectory

Group = list[Trajectory]  # samples of one question, by one policy
# (position, count) -> questions, the position after them
Draw = Callable[[Sequence[int], int], tuple[list[Question], tuple[int, ...]]]


@dataclasses.dataclass(frozen=True)
class Progress:
  """The state of a run besides the learner's; it is checkpointed."""

  step: int = 0  # updates of the policy
  rollouts: int = 0  # trajectories sampled so far
  groups: int = 0  # groups requested so far; also the number of the next one
  position: tuple[int, ...] = ()  # questions drawn from each pool of the data
  surplus: tuple[Group, ...] = ()
  silent_steps: int = 0  # latest steps in a row without any gradient
  in_flight: tuple[Collected, ...] = ()  # sampled ahead; not trained on yet
  rollbacks: int = 0  # times that the run went back to a checkpoint
  best: tuple[int, float] | None = None  # step and score of best validation
  collapsing: bool = False  # the last step raised an alert of a collapse
  before_collapse: int | None = None  # step of the last checkpoint before it

  def to_json(self) -> dict[str, Any]:
    """Returns the progress as a dict that JSON can hold."""
    surplus = [[trajectory_lib.to_json(t) for t in group]
               for group in self.surplus]
    return {**vars(self), 'surplus': surplus,
            'in_flight': [found.to_json() for found in self.in_flight]}

  @classmethod
  def from_json(cls, record: dict[str, Any]) -> Progress:
    """Returns the progress that `to_json` wrote."""
    surplus = tuple([trajectory_lib.from_json(t) for t in group]
                    for group in record['surplus'])
    if 'groups' not in record:  # written before groups had numbers
      surplus = tuple([dataclasses.replace(t, group=number) for t in group]
                      for number, group in enumerate(surplus))
      record = {**record, 'groups': len(surplus)}
    return cls(**{**record, 'position': tuple(record['position']),
                  'surplus': surplus, 'in_flight': tuple(map(
                      Collected.from_json, record.get('in_flight', ()))),
                  'best': tuple(record.get('best') or ()) or None})


@dataclasses.dataclass(frozen=True)
class Collected:
  """The data of a step, and its metrics.

  Attributes:
    groups: Groups to train on.
    trajectories: All trajectories that this step sampled.
    metrics: Metrics of this step's groups, searches and weight sync.
    progress: Progress after these rollouts, with the same step number.
  """

  groups: list[Group]
  trajectories: list[Trajectory]
  metrics: dict[str, float]
  progress: Progress

  def to_json(self) -> dict[str, Any]:
    """Returns a checkpoint's record, which has each trajectory only once."""
    numbers, written = {}, []

    def number(trajectory: Trajectory) -> int:
      if id(trajectory) not in numbers:
        numbers[id(trajectory)] = len(written)
        written.append(trajectory_lib.to_json(trajectory))
      return numbers[id(trajectory)]

    return {
        'groups': [[*map(number, group)] for group in self.groups],
        'sampled': [*map(number, self.trajectories)],
        'surplus': [[*map(number, group)] for group in self.progress.surplus],
        'metrics': {name: float(x) for name, x in self.metrics.items()},
        'progress': dataclasses.replace(self.progress, surplus=()).to_json(),
        'trajectories': written}

  @classmethod
  def from_json(cls, record: dict[str, Any]) -> Collected:
    """Returns the step that `to_json` wrote."""
    read = [trajectory_lib.from_json(t) for t in record['trajectories']]
    groups, surplus = ([[read[n] for n in group] for group in record[name]]
                       for name in ('groups', 'surplus'))
    return cls(groups, [read[n] for n in record['sampled']], record['metrics'],
               dataclasses.replace(Progress.from_json(record['progress']),
                                   surplus=tuple(surplus)))


@dataclasses.dataclass(frozen=True)
class Rounds:
  """Settings of the rounds in which questions are asked.

  Attributes:
    questions: Number of groups per batch.
    group_size: Number of samples per question.
    max_rounds: Maximum number of rounds per step.
    stop_when_full: True to drop unfinished trajectories once the batch is full.
    temperature: Sampling temperature.
    truncation: Rule for which tokens may be drawn.
  """

  questions: int
  group_size: int
  max_rounds: int = 1
  stop_when_full: bool = False
  temperature: float = 1.0
  truncation: sampling.Truncation = sampling.Truncation()


def collect(
    sampler: Sampler,
    synced: weight_sync.Synced,
    progress: Progress,
    policy_step: int,
    *,
    draw: Draw,
    keep: Callable[[np.ndarray, np.ndarray], np.ndarray],
    search: SearchFn,
    scorer: scoring.Scorer,
    rounds: Rounds,
) -> Collected:
  """Samples rounds of questions until `keep` has accepted a full batch.

  Args:
    sampler: Sampler that rolls the questions out.
    synced: The policy's weights in the form that the engine takes.
    progress: Progress of the run. Its surplus groups are used first.
    policy_step: Number of updates that this policy has had.
    draw: Function that returns the next questions and the position after them.
    keep: The algorithm's filter, which accepts or rejects each group.
    search: The search engine.
    scorer: Scorer of each round's trajectories; it runs before `keep`.
    rounds: Settings of the rounds.
  """
  check(rounds, scorer)
  score = scoring.once(scorer) if rounds.stop_when_full else scorer
  groups, carried = list(progress.surplus), len(progress.surplus)
  position, number = progress.position, progress.groups
  sampled, asked, calls = [], [], []
  times_asked = collections.Counter()
  for _ in range(rounds.max_rounds):
    missing = rounds.questions - len(groups)
    if missing <= 0:
      break
    questions, position = draw(
        position, _wanted(rounds, missing, len(groups) - carried, len(asked)))
    enough = lambda finished, missing=missing: len(_kept(
        _whole(score(finished), rounds.group_size), keep)) >= missing
    found = sampler.rollout(
        synced.weights,
        _requests(questions, rounds.group_size, times_asked, number),
        search=search, temperature=rounds.temperature,
        truncation=rounds.truncation, step=progress.step,
        policy_step=policy_step,
        **(dict(enough=enough) if rounds.stop_when_full else {}))
    number += len(questions)
    trajectories = score(found.trajectories)
    whole = _whole(trajectories, rounds.group_size)
    groups += _kept(whole, keep)
    sampled += trajectories
    asked += whole
    calls += found.calls
  surplus = tuple(groups[rounds.questions:])
  groups = groups[:rounds.questions]
  metrics = _group_counts(asked, groups, carried, len(surplus))
  metrics |= (calls_lib.describe(calls) | engine_wrappers.pop(search) |
              synced.metrics())
  return Collected(groups, sampled, metrics, dataclasses.replace(
      progress, rollouts=progress.rollouts + len(sampled), groups=number,
      position=position, surplus=surplus))


def check(rounds: Rounds, scorer: scoring.Scorer) -> None:
  """Raises a ValueError if `stop_when_full` cannot be used with this setup."""
  if not rounds.stop_when_full:
    return
  if processes.count() > 1:
    raise ValueError(
        'rollout.stop_when_full is for one process, because each sees only its '
        f'share of a group, but there are {processes.count()}. Turn it off.')
  if not scorer.judge.one_by_one:
    raise ValueError(
        'rollout.stop_when_full is for rewards of one trajectory, because a '
        f'judge waits for the whole round, but reward is {scorer.name}. Turn '
        'it off.')


def _wanted(rounds: Rounds, missing: int, kept: int, asked: int) -> int:
  """Returns how many questions should fill the batch, given the kept share."""
  share = kept / asked if asked else 1.0
  return min(rounds.questions,
             math.ceil(missing / max(share, 1 / rounds.questions)))


def _requests(questions: Sequence[Question], size: int,
              times_asked: collections.Counter, number: int) -> list[Request]:
  """Returns the requests; a repeated question gets new sample numbers."""
  requests = []
  for group, question in enumerate(questions, start=number):
    first = times_asked[question.uid] * size
    times_asked[question.uid] += 1
    requests += [Request(question, first + i, group) for i in range(size)]
  return requests


def _whole(trajectories: Sequence[Trajectory], size: int) -> list[Group]:
  """Returns the groups whose samples are all finished, in order."""
  groups = collections.defaultdict(list)
  for trajectory in trajectories:
    groups[trajectory.group].append(trajectory)
  return [group for group in groups.values() if len(group) == size]


def _kept(groups: list[Group], keep) -> list[Group]:
  """Returns the groups that the algorithm accepts."""
  if not groups:
    return []
  scores = np.array([np.nan if t.outcome_reward is None else t.outcome_reward
                     for group in groups for t in group])
  ids = np.repeat(np.arange(len(groups)), len(groups[0]))
  kept = keep(scores, ids).reshape(len(groups), -1).all(1)
  return [group for group, keep_it in zip(groups, kept) if keep_it]


def collate(groups: Sequence[Group], algorithm: algorithms.Algorithm,
            policy_step: int, rounds: Rounds, *, length: int,
            mask_truncated: bool) -> trajectory_lib.Batch:
  """Returns a batch of all groups, filled up with empty rows.

  Args:
    groups: Groups to train on.
    algorithm: The algorithm. Its `group_of` decides which rows share a
      baseline.
    policy_step: Step of the policy that is trained, counted from 0.
    rounds: Settings that give the number of rows: questions times samples.
    length: Tokens of a row, T.
    mask_truncated: Whether rows that hit a limit are left out of the loss.
  """
  trajectories = [t for group in groups for t in group]
  group_of = algorithm.group_of
  return trajectory_lib.collate(
      trajectories, policy_step=policy_step, length=length,
      group_ids=[t.group if group_of is None else group_of(t.question)
                 for t in trajectories],
      rows=rounds.questions * rounds.group_size, mask_truncated=mask_truncated)


def _group_counts(asked, groups, carried: int, surplus: int
                 ) -> dict[str, float]:
  """Returns metrics of the groups; sizes count only samples with a score."""
  scores = [[t.outcome_reward for t in group if t.outcome_reward is not None]
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
      'data/groups_carried_out': surplus,
      'data/tries_per_kept_group': len(asked) / max(
          len(groups) - carried + surplus, 1),
  }


def _kind(scores: list[float]) -> str:
  """Returns the kind of a group by its outcomes; each group has one kind."""
  if not scores:
    return 'failed'
  best, tolerance = max(scores), advantages.MIN_SPREAD  # as `keep` uses
  if best - min(scores) > tolerance:
    return 'mixed'
  if abs(best) <= tolerance:
    return 'all_zero'
  return 'all_one' if abs(best - 1) <= tolerance else 'constant'
