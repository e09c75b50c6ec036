# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Scoring: adds reward, outcome and parts to finished trajectories.

This is the only place where rewards are called. A value that is not a finite
number raises an error that names the trajectory, so it is never trained on.
"""

from collections.abc import Callable, Mapping, Sequence, Set
import dataclasses
import itertools
import json
import math
from typing import Any

from searchrl.agent import rewards
from searchrl.runtime import processes
from searchrl.trajectory import Scores, Trajectory

_WAIT_SECS = 24 * 3600  # limit of the wait for the process that judges
# Least size that is infinite in float32, in which advantages are computed.
_INFINITE = (2 - 2 ** -24) * 2.0 ** 127
_WAY_OUT = 'Correct it, or give a number there, too.'
Score = Callable[[Sequence[Trajectory]], list[Trajectory]]
TurnReward = Callable[[Trajectory], Sequence[float | None]]


@dataclasses.dataclass(frozen=True)
class Scorer:
  """A function that returns the given trajectories with their scores.

  The scores are the reward to train on, the outcome (the value that filters
  read), named parts of the reward, and possibly a reward for each turn.
  """

  judge: rewards.Judge  # gives the reward, and perhaps the outcome
  outcome: Callable[[Trajectory], float] = rewards.em  # if the judge gives none
  name: str = 'the reward'  # name of the judge in error messages
  # Gives a reward per turn if the judge gives none; None: turns have no reward.
  turns: TurnReward | None = None

  def __call__(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Returns the trajectories of a round of sampling with their scores.

    Trajectories that a failed search ended are returned without scores. All
    processes call it with the same trajectories. The first process judges, or
    all processes do if the judge is collective. All get the scores of the first
    process.

    Raises:
      ValueError: A score is missing, is not a finite number, or could not be
        computed. All processes raise it.
    """
    finished = [t for t in trajectories if t.stop_reason != 'search_error']
    if not finished:
      return list(trajectories)
    scores = iter(self._of_first(finished))
    return [t if t.stop_reason == 'search_error' else _scored(t, next(scores))
            for t in trajectories]

  def _of_first(self, trajectories: Sequence[Trajectory]) -> list[dict]:
    """Returns the first process's scores. If a process raised, all raise."""
    scores, error = [], None
    if processes.is_first() or self.judge.collective:
      try:
        scores = self._checked_scores(trajectories)
      except ValueError as raised:
        error = raised
    payloads = processes.exchange(
        'scores', json.dumps([scores, error and str(error)]).encode(),
        _WAIT_SECS)
    if error:
      raise error
    results = [json.loads(payload) for payload in payloads]
    for _, message in results:
      if message:
        raise ValueError(message)
    return results[0][0]

  def _checked_scores(self, trajectories: Sequence[Trajectory]) -> list[dict]:
    """Judges trajectories; returns a dict of checked score fields for each."""
    rounds = ([[t] for t in trajectories] if self.judge.one_by_one
              else [trajectories])
    scores = itertools.chain.from_iterable(map(self._judge_round, rounds))
    return [self._fields(t, s) for t, s in zip(trajectories, scores)]

  def _judge_round(self, trajectories: Sequence[Trajectory]
                  ) -> Sequence[Scores | rewards.JudgeError]:
    """Returns a score for each trajectory, from one call of the judge."""
    scores = _call(self.judge.score, trajectories, self.name, trajectories)
    if not hasattr(scores, '__len__') or len(scores) != len(trajectories):
      result = len(scores) if hasattr(scores, '__len__') else repr(scores)
      raise ValueError(
          f'{self.name} must return a list of Scores, one for each of '
          f'{len(trajectories)} trajectories, but returned {result} for '
          f'{_name(trajectories)}. Return them in the order they came in.')
    return scores

  def _fields(self, trajectory: Trajectory, scores: Scores | rewards.JudgeError
             ) -> dict[str, Any]:
    """Returns the fields of a trajectory that its scores set, as a dict.

    If the judge failed, this is `judge_error` alone.

    Raises:
      ValueError: A score is missing or is not a finite number.
    """
    named = _name([trajectory])
    if isinstance(scores, rewards.JudgeError):
      return {'judge_error': f'{scores.kind}: {scores.detail}'}
    if not isinstance(scores, Scores):
      raise ValueError(f'{self.name} must return Scores, but returned '
                       f'{scores!r} for {named}. {_WAY_OUT}')
    outcome = scores.outcome
    if outcome is None:
      outcome = _call(self.outcome, trajectory, 'the outcome', [trajectory])
    parts = scores.parts if isinstance(scores.parts, Mapping) else {
        'parts': scores.parts}  # fails below, because it is not a number

    def number(field: str, value: Any) -> float:
      return _number(f'{self.name}: {field}', value, named)

    turns = scores.turns
    if turns is None and self.turns:
      turns = _call(self.turns, trajectory, 'turn_reward', [trajectory])
    if turns is not None and (
        isinstance(turns, Mapping | Set)  # they give their keys, or no order
        or not hasattr(turns, '__len__')
        or len(turns) != len(trajectory.turns)):
      raise ValueError(
          f'{self.name}: the turns must have a reward or None for each of '
          f'{len(trajectory.turns)} turns, but are {turns!r} for {named}. '
          'Return one list entry per turn, in order.')
    return dict(
        reward=number('the reward', scores.reward),
        outcome_reward=number('the outcome', outcome),
        parts={str(part): number(f'the part {part!r}', value)
               for part, value in parts.items()},
        turn_rewards=None if turns is None else [
            None if value is None else number(f'turn {n}', value)
            for n, value in enumerate(turns, start=1)])


def _scored(trajectory: Trajectory, fields: dict[str, Any]) -> Trajectory:
  """Returns a trajectory with score fields that were decoded from JSON."""
  turns = fields.get('turn_rewards')
  return dataclasses.replace(trajectory, **fields | {
      'turn_rewards': None if turns is None else tuple(turns)})


def once(score: Score) -> Score:
  """Returns `score` with a memory, so that no trajectory is scored twice."""
  known = {}

  def scored(trajectories):
    new = [t for t in trajectories if t not in known]
    known.update(zip(new, score(new), strict=True))
    return [known[t] for t in trajectories]
  return scored


def _call(function: Callable[[Any], Any], argument: Any, name: str,
          trajectories: Sequence[Trajectory]) -> Any:
  """Returns function(argument); turns whatever it raises into a ValueError."""
  try:
    return function(argument)
  except Exception as error:
    reason = ': '.join(filter(None, (type(error).__name__, str(error))))
    raise ValueError(f'{name} must score {_name(trajectories)}, but raised '
                     f'{reason}. {_WAY_OUT}') from error


def _number(name: str, value: Any, trajectory: str) -> float:
  """Returns the value as a float.

  Raises:
    ValueError: It is not finite in float32.
  """
  try:
    number = math.nan if isinstance(value, (str, bytes)) else float(value)
  except (TypeError, ValueError, OverflowError):
    number = math.nan
  if not abs(number) < _INFINITE:  # also NaN
    raise ValueError(f'{name} must be a finite number, but is {value!r} for '
                     f'{trajectory}. {_WAY_OUT}')
  return number


def _name(trajectories: Sequence[Trajectory]) -> str:
  """Returns a text such as "question 'q7', sample 2, and 3 more"."""
  first, *others = trajectories
  named = f'question {first.question.uid!r}, sample {first.sample}'
  return f'{named}, and {len(others)} more' if others else named
