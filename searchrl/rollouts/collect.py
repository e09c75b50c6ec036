# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Collection of a batch: samples rounds of questions until it is full.

A group is all samples of one question. The algorithm has a filter that keeps
some groups and rejects others, so one round may not fill a batch. Groups that
are too many for a batch (the surplus) are checkpointed and begin the next
batch.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
import dataclasses
import itertools
import math
from typing import Any

import numpy as np

from searchrl import trajectory as trajectory_lib
from searchrl.models.inference import sampling
from searchrl.rl import advantages
from searchrl.rl import algorithms
from searchrl.rl import turn_fields
from searchrl.rollouts import records
from searchrl.rollouts import routing
from searchrl.rollouts import scoring
from searchrl.rollouts import weight_sync
from searchrl.rollouts.sampler import Sampler
from searchrl.runtime import processes
from searchrl.search import call_metrics
from searchrl.search import engine_wrappers
from searchrl.trajectory import Question, Request, SearchFn, Trajectory

Group = list[Trajectory]  # samples of one question, by one policy
# (position, count, step) -> questions, the position after them
Draw = Callable[[Sequence[int], int, int],
                tuple[list[Question], tuple[int, ...]]]
Keep = Callable[[np.ndarray, np.ndarray], np.ndarray]  # see rl.Algorithm


@dataclasses.dataclass(frozen=True)
class Progress:
  """Counters and pending data of a run, which each checkpoint contains.

  The learner's parameters and optimizer state are not part of it.
  """

  step: int = 0  # updates of the policy
  rollouts: int = 0  # trajectories sampled so far
  groups: int = 0  # groups requested so far; also the number of the next one
  position: tuple[int, ...] = ()  # questions drawn; see questions.Stream
  surplus: tuple[Group, ...] = ()  # groups left over for the next batch
  silent_steps: int = 0  # number of latest steps in a row without a gradient
  in_flight: tuple[Collected, ...] = ()  # sampled ahead; not trained on yet
  rollbacks: int = 0  # times that the run went back to a checkpoint
  best: tuple[int, float] | None = None  # step and score of the best validation
  # evaluate.limit and num_sets_during of these scores; (): not recorded.
  best_of: tuple[int, ...] = ()
  collapsing: bool = False  # the last step raised an alert of a collapse
  before_collapse: int | None = None  # step of the last checkpoint before it

  def to_json(self) -> dict[str, Any]:
    """Returns the progress as a dict that JSON can hold."""
    return vars(self) | {
        'surplus': [[records.to_json(t) for t in group]
                    for group in self.surplus],
        'in_flight': [collected.to_json() for collected in self.in_flight]}

  @classmethod
  def from_json(cls, record: dict[str, Any]) -> Progress:
    """Returns the progress that `to_json` wrote."""
    return cls(**record | {
        'position': tuple(record['position']),
        'surplus': tuple([records.from_json(t) for t in group]
                         for group in record['surplus']),
        'in_flight': tuple(map(Collected.from_json, record['in_flight'])),
        'best': tuple(record['best'] or ()) or None,
        'best_of': tuple(record.get('best_of', ()))})


@dataclasses.dataclass(frozen=True)
class Collected:
  """The trajectories that were sampled for one step, with their metrics."""

  groups: list[Group]  # groups to train on
  trajectories: list[Trajectory]  # all trajectories that this step sampled
  metrics: dict[str, float]  # about groups, searches and the weight sync
  progress: Progress  # progress after these rollouts, with the same step

  def to_json(self) -> dict[str, Any]:
    """Returns a dict that JSON can hold, for a checkpoint.

    It has each trajectory once. Groups refer to a trajectory by its index.
    """
    surplus = self.progress.surplus
    kept = {id(t): t for group in (*self.groups, self.trajectories, *surplus)
            for t in group}
    numbers = {key: number for number, key in enumerate(kept)}
    indices = lambda group: [numbers[id(t)] for t in group]
    return {
        'groups': [*map(indices, self.groups)],
        'sampled': indices(self.trajectories),
        'surplus': [*map(indices, surplus)],
        'metrics': {name: float(x) for name, x in self.metrics.items()},
        'progress': dataclasses.replace(self.progress, surplus=()).to_json(),
        'trajectories': [*map(records.to_json, kept.values())]}

  @classmethod
  def from_json(cls, record: dict[str, Any]) -> Collected:
    """Returns the `Collected` of a dict that `to_json` returned."""
    trajectories = [
        records.from_json(t) for t in record['trajectories']]
    groups, surplus = (
        [[trajectories[n] for n in group] for group in record[name]]
        for name in ('groups', 'surplus'))
    return cls(groups, [trajectories[n] for n in record['sampled']],
               record['metrics'], dataclasses.replace(
                   Progress.from_json(record['progress']),
                   surplus=tuple(surplus)))


@dataclasses.dataclass(frozen=True)
class Rounds:
  """Settings of the rounds in which questions are asked."""

  questions: int  # groups per batch
  group_size: int  # samples per question
  max_rounds: int = 1  # maximum number of rounds per step
  stop_when_full: bool = False  # drop unfinished samples when the batch is full
  temperature: float = 1.0  # sampling temperature
  truncation: sampling.Truncation = sampling.Truncation()  # tokens to draw from


def collect(
    sampler: Sampler,
    synced: weight_sync.Synced,
    progress: Progress,
    policy_step: int,
    *,
    draw: Draw,
    keep: Keep,
    search: SearchFn,
    scorer: scoring.Scorer,
    rounds: Rounds,
) -> Collected:
  """Samples the groups of a step's batch, and returns them with metrics.

  A group is the samples of one question. Rounds of questions are sampled until
  `keep` has accepted enough groups, or `rounds.max_rounds` is reached.

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

  Returns:
    At most `rounds.questions` groups to train on, all trajectories that were
    sampled, metrics, and the progress with the groups that are left over.

  Raises:
    ValueError: `check` refuses the settings, or a score is not valid.
  """
  check(rounds, scorer)
  score = scoring.once(scorer) if rounds.stop_when_full else scorer
  groups, carried = list(progress.surplus), len(progress.surplus)
  position, number = progress.position, progress.groups
  sampled: list[Trajectory] = []
  complete: list[Group] = []  # groups whose samples are all finished
  calls: list[call_metrics.Call] = []
  times_asked: collections.Counter[str] = collections.Counter()

  def fills_batch(finished: Sequence[Trajectory]) -> bool:
    return rounds.stop_when_full and len(groups) + len(_accepted(
        _complete(score(finished), rounds.group_size), keep
    )) >= rounds.questions

  for _ in range(rounds.max_rounds):
    if len(groups) >= rounds.questions:
      break
    questions, position = draw(position, _number_to_ask(
        rounds, len(groups), len(groups) - carried, len(complete)),
                               progress.step)
    rollouts = sampler.rollout(
        synced.weights,
        requests(questions, rounds.group_size, times_asked, number),
        search=search, temperature=rounds.temperature,
        truncation=rounds.truncation, step=progress.step,
        policy_step=policy_step, enough=fills_batch,
        routing=sampler.engine.records)
    number += len(questions)
    trajectories = score(rollouts.trajectories)
    sampled += trajectories
    calls += rollouts.calls
    round_groups = _complete(trajectories, rounds.group_size)
    complete += round_groups
    groups += _accepted(round_groups, keep)
  surplus = tuple(groups[rounds.questions:])
  groups = groups[:rounds.questions]
  metrics = _group_counts(complete, groups, carried, len(surplus))
  metrics |= (call_metrics.describe(calls) | engine_wrappers.pop(search) |
              synced.metrics())
  return Collected(groups, sampled, metrics, dataclasses.replace(
      progress, rollouts=progress.rollouts + len(sampled), groups=number,
      position=position, surplus=surplus))


def check(rounds: Rounds, scorer: scoring.Scorer) -> None:
  """Raises a ValueError if `rounds.stop_when_full` cannot be used.

  This option drops unfinished trajectories once the batch is full. It needs a
  single process, and a reward that scores each trajectory on its own.
  """
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


def _number_to_ask(rounds: Rounds, groups: int, accepted: int, complete: int
                  ) -> int:
  """Returns the number of questions to ask in the next round.

  It should fill the batch if the filter accepts the same share of groups as
  before. It is at most the number of questions of a batch.

  Args:
    rounds: Settings of the rounds.
    groups: Number of groups that the batch has.
    accepted: Number of groups that the filter accepted in this step.
    complete: Number of groups that the filter has seen in this step.
  """
  share = accepted / complete if complete else 1.0
  missing = rounds.questions - groups
  return min(rounds.questions,
             math.ceil(missing / max(share, 1 / rounds.questions)))


def requests(questions: Sequence[Question], size: int,
             times_asked: collections.Counter | None = None, number: int = 0
            ) -> list[Request]:
  """Returns `size` requests for each question, one for each of its samples.

  A question that was asked before gets new sample numbers, and therefore other
  random numbers.

  Args:
    questions: Questions, some perhaps several times.
    size: Number of samples of each question.
    times_asked: Count of earlier askings by uid, which is updated. None: there
      were none.
    number: Number of the first question's group.
  """
  times_asked = collections.Counter() if times_asked is None else times_asked
  requests = []
  for group, question in enumerate(questions, start=number):
    first = times_asked[question.uid] * size
    times_asked[question.uid] += 1
    requests += [Request(question, first + i, group) for i in range(size)]
  return requests


def _complete(trajectories: Sequence[Trajectory], size: int) -> list[Group]:
  """Returns the trajectories by group, without groups of fewer than `size`."""
  groups = collections.defaultdict(list)
  for trajectory in trajectories:
    groups[trajectory.group].append(trajectory)
  return [group for group in groups.values() if len(group) == size]


def _accepted(groups: list[Group], keep: Keep) -> list[Group]:
  """Returns the groups for which the algorithm's filter, `keep`, is true.

  Raises:
    ValueError: The filter gives rows of one group different answers.
  """
  if not groups:
    return []
  scores = np.array([np.nan if t.outcome_reward is None else t.outcome_reward
                     for group in groups for t in group])
  ids = np.repeat(np.arange(len(groups)), len(groups[0]))
  kept = np.asarray(keep(scores, ids), bool)
  if kept.shape != ids.shape or any(
      len({*row}) > 1 for row in kept.reshape(len(groups), -1).tolist()):
    raise ValueError(
        "an algorithm's keep must return one bool for each row, the same for "
        f'all rows of a question, but returned {str(kept.tolist())[:80]} for '
        f'the questions {str(ids.tolist())[:80]}. To leave rows out, give them '
        'an advantage of 0.')
  return [*itertools.compress(groups, kept[::len(groups[0])].tolist())]


def collate(groups: Sequence[Group], algorithm: algorithms.Algorithm,
            policy_step: int, rounds: Rounds, *, length: int,
            mask_truncated: bool, contexts: int = 1) -> trajectory_lib.Batch:
  """Returns the trajectories of all groups as a Batch of padded numpy arrays.

  The algorithm's `group_of` decides which rows share a baseline; by default,
  these are the rows of a group. Empty rows fill the batch up to questions times
  samples times contexts. The batch also has fields about turns if the algorithm
  reads them, and the engine's chosen experts if the trajectories have them.

  Args:
    groups: Groups to train on.
    algorithm: Algorithm that will train on the batch.
    policy_step: Number of updates that the policy has had before this batch.
    rounds: Settings of the rounds.
    length: Number of tokens per row.
    mask_truncated: Flag that leaves trajectories that reached a limit out of
      the loss.
    contexts: Number of rows per trajectory, one for each of its contexts.
  """
  trajectories = [t for group in groups for t in group]
  group_of = algorithm.group_of
  batch = trajectory_lib.collate(
      trajectories, policy_step=policy_step, length=length,
      group_ids=[t.group if group_of is None else group_of(t.question)
                 for t in trajectories],
      rows=rounds.questions * rounds.group_size * contexts,
      mask_truncated=mask_truncated, contexts=contexts)
  batch = routing.with_routing(batch, trajectories, contexts)
  return (turn_fields.with_turns(batch, trajectories, contexts)
          if algorithm.reads_turns else batch)


def _group_counts(complete: Sequence[Group], groups: Sequence[Group],
                  carried: int, surplus: int) -> dict[str, float]:
  """Returns metrics about the numbers, kinds and sizes of a step's groups.

  Args:
    complete: Groups that were sampled in this step.
    groups: Groups to train on. A size counts only samples with a score.
    carried: Number of groups that the previous step left over.
    surplus: Number of groups that this step leaves over.
  """
  scores = [[t.outcome_reward for t in group if t.outcome_reward is not None]
            for group in complete]
  kinds = collections.Counter(map(_kind, scores))
  sizes = [len(s) for s in scores] or [0]
  return {
      f'data/frac_group_{kind}': kinds[kind] / max(len(complete), 1)
      for kind in ('mixed', 'all_zero', 'all_one', 'failed')
  } | {
      'data/group_size/mean': float(np.mean(sizes)),
      'data/group_size/min': min(sizes),
      'data/groups_asked': len(complete),
      'data/groups_trained': sum(
          any(t.outcome_reward is not None for t in group)
          for group in groups),
      'data/groups_carried_in': carried,
      'data/groups_carried_out': surplus,
      'data/tries_per_kept_group': len(complete) / max(
          len(groups) - carried + surplus, 1),
  }


def _kind(scores: list[float]) -> str:
  """Returns the kind of a group, given the outcomes of its samples.

  It is 'failed' if there are no outcomes, 'mixed' if they differ, and else
  'all_zero', 'all_one' or 'constant' by their common value.
  """
  if not scores:
    return 'failed'
  best, tolerance = max(scores), advantages.MIN_SPREAD  # as `keep` uses
  if best - min(scores) > tolerance:
    return 'mixed'
  if abs(best) <= tolerance:
    return 'all_zero'
  return 'all_one' if abs(best - 1) <= tolerance else 'constant'
