# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The turns for one question before and after training, as plain text."""

import collections
from collections.abc import Sequence
import dataclasses
from typing import Any

from searchrl.agent import rewards
from searchrl.evaluation import scores
from searchrl.evaluation.report import reading
from searchrl.trajectory import Trajectory

_WHERE = ('evaluated before', 'evaluated after')
_MOST = 3  # questions of a report
_PASSAGE = 160  # characters of a passage, or of another tool's result


@dataclasses.dataclass(frozen=True)
class Story:
  """A question that was evaluated before and after training."""

  run: str
  question: str
  golds: tuple[str, ...]
  set: str
  hops: int
  sides: tuple[dict[str, Any], ...]  # the answer before, and the one after

  @property
  def gain(self) -> float:
    """Score after training, minus the score before."""
    before, after = self.sides
    return after['score'] - before['score']


def stories(runs: Sequence[reading.Run]) -> list[Story]:
  """Returns up to three questions whose scores improved most by training.

  They are from the first run with evaluations before and after training. There
  is one for each number of hops, the most hops first: the question with the
  largest gain above 0 or, among equal gains, with the most turns afterwards.
  """
  for run in runs:
    if not all(where in run.sources for where in _WHERE):
      continue
    before, after = (
        {(entry.set, entry.trajectory.question.uid): entry
         for entry in reading.entries_of(run, where)
         if entry.set.endswith('greedy') and 'noise' not in entry.set}
        for where in _WHERE)
    best: dict[int, Story] = {}
    for key in before.keys() & after.keys():
      story = _story(run, before[key], after[key])
      if story.hops not in best or _rank(story) > _rank(best[story.hops]):
        best[story.hops] = story
    return [best[hops] for hops in sorted(best, reverse=True)
            if best[hops].gain > 0][:_MOST]
  return []


def _rank(story: Story) -> tuple[float, int, str]:
  """Returns a sort key, which is larger for the better of two stories."""
  return story.gain, len(story.sides[1]['turns']), story.question


def _story(run: reading.Run, *entries: reading.Entry) -> Story:
  question = entries[0].trajectory.question
  return Story(run.name, question.text, tuple(question.answers),
               entries[0].set, question.hops, tuple(map(_side, entries)))


def calls(trajectory: Trajectory) -> str:
  """Returns the calls as a text, such as '2 searches, 1 call of calculate'."""
  searches = trajectory.searches
  tools = collections.Counter(
      turn.action.kind for turn in trajectory.turns if turn.observation_tokens
      and turn.action.is_call and not turn.action.is_search)
  return ', '.join((
      f'{searches} search{"es" * (searches != 1)}',
      *(f'{count} call{"s" * (count > 1)} of {name}'
        for name, count in tools.items())))


def _side(entry: reading.Entry) -> dict[str, Any]:
  """Returns the answer, the score and the turns of a trajectory."""
  trajectory = entry.trajectory
  golds = rewards.normalised(trajectory.question.answers)
  return {
      'answer': trajectory.answer, 'score': entry.score or 0.0,
      'calls': calls(trajectory),
      'turns': [{
          'text': turn.text,
          'result': _cut(turn.observation) if turn.action.is_call and (
              not turn.action.is_search) else '',
          'passages': [
              {'title': passage.title, 'text': _cut(passage.text),
               'gold': scores.has_gold(passage, golds)}
              for passage in turn.passages]} for turn in trajectory.turns]}


def _cut(text: str) -> str:
  """Returns the beginning of a text, and … if it is cut."""
  return text[:_PASSAGE] + '…' * (len(text) > _PASSAGE)
