# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rewards of single turns, named `module:function` in `config.turn_reward`.

A turn reward is a function from a trajectory to one number or None per turn.
None means that the turn has no reward, and is in no baseline of turn rewards.
"""

from searchrl.agent import rewards
from searchrl.trajectory import Question, Trajectory, Turn


def evidence(trajectory: Trajectory, *, new: float = 1.0,
             duplicate: float = 0.0, invalid: float = 0.0
            ) -> list[float | None]:
  """Returns one reward per turn: for new evidence, minus two penalties.

  The penalties are for repeated actions and for invalid actions. A turn that
  answers has None, because the outcome's reward judges the answer.

  Args:
    trajectory: Finished trajectory.
    new: Reward of a turn that returns evidence: a gold passage, if the question
      names its gold passages (`Question.gold_passages`), or else a passage in
      which a gold answer is read. A passage that an earlier turn has returned
      does not count. MT-GRPO (arXiv:2505.11821) also gives a reward if a search
      returns a gold answer.
    duplicate: Penalty of a turn that repeats an earlier action. Two actions are
      equal if their texts, normalised like answers, are equal.
    invalid: Penalty of a turn whose text is not an action.
  """
  seen_passages: set[str] = set()
  seen_actions: set[tuple[str, ...]] = set()
  values: list[float | None] = []
  for turn in trajectory.turns:
    kind, texts = turn.action.kind, turn.action.texts
    action = (kind, *map(rewards.normalise, texts))
    found = _evidence(turn, trajectory.question)
    value = new * bool(found - seen_passages)
    value -= duplicate * (action in seen_actions) + invalid * (
        kind == 'invalid')
    values.append(None if kind == 'answer' else value)
    seen_passages |= found
    if texts:
      seen_actions.add(action)
  return values


def _evidence(turn: Turn, question: Question) -> set[str]:
  """Returns the ids of the passages of a turn that are evidence."""
  if question.gold_passages:
    titles = {*map(rewards.normalise, question.gold_passages)} - {''}
    return {passage.id for passage in turn.passages
            if passage.id in question.gold_passages
            or rewards.normalise(passage.title) in titles}
  return {passage.id for passage in rewards.with_gold(turn, question)}
