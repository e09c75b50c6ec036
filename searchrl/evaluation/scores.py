# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Scores of an evaluation, for one trajectory and for a set of them."""

from collections.abc import Mapping, Sequence
import collections
import dataclasses

import numpy as np

from searchrl.agent import rewards
from searchrl.trajectory import Passage, Trajectory

# Columns of a table, in their order. A search that failed counts as wrong.
ANSWERS = ('em', 'subem', 'f1')  # scores of an answer
# Further columns, which an evaluation with a judge has.
JUDGED = ('judged', 'agrees_with_em', 'judge_error')
NAMES = (*ANSWERS, 'recall', 'hit@1', 'searches', 'queries',
         'answered', 'finished', 'tokens')


@dataclasses.dataclass(frozen=True)
class Score:
  """Values of a trajectory that stay in memory after its record is written.

  `recall` is 1 if a gold answer occurs in a passage that was found, and `hit@1`
  if it occurs in the first passage of a query. `searches` and `queries` are
  counted separately, because a search may have several queries. `answered` is 1
  if there is an answer, and `finished` if it came before any limit. `tokens` is
  the number of tokens that the policy wrote.
  """

  uid: str  # uid of the question
  hops: int
  answer: str  # normalised answer; '' if there is none
  failed: bool  # a failed search ended the trajectory
  values: Mapping[str, float]  # values by name, of NAMES and JUDGED
  judge_error: str | None = None  # kind and detail, if its judge failed


def score_trajectory(trajectory: Trajectory) -> Score:
  """Returns the values by which a finished trajectory is evaluated."""
  question, answer = trajectory.question, trajectory.answer
  searches = [turn for turn in trajectory.turns
              if turn.action.is_search and (
                  turn.observation_tokens or turn.passages)]
  golds = rewards.normalised(question.answers)
  hits = [(has_gold(passage, golds), is_first) for turn in searches
          for passage, is_first in _with_firsts(
              turn.passages, len(turn.action.texts))]
  return Score(question.uid, question.hops, rewards.normalise(answer or ''),
               trajectory.stop_reason == 'search_error', {
      'em': rewards.em(trajectory), 'subem': rewards.subem(trajectory),
      'f1': rewards.f1(trajectory),
      'recall': float(any(hit for hit, _ in hits)),
      'hit@1': float(any(hit and is_first for hit, is_first in hits)),
      'searches': float(len(searches)),
      'queries': float(sum(len(turn.action.texts) for turn in searches)),
      'answered': float(bool(answer)),
      'finished': float(trajectory.stop_reason == 'answer'),
      'tokens': float(sum(len(turn.action_tokens)
                          for turn in trajectory.turns))})


def with_judgement(score: Score, judged: Trajectory) -> Score:
  """Returns a copy of a score with the values that a judge's verdict adds.

  If there is a verdict, `judged` is the judge's reward, which is 0 after a
  failed search. `agrees_with_em` is 1 if the exact match equals this reward,
  else 0. `judge_error` is 0. If the judge gave no verdict on an answer, only
  `judge_error` is added, and it is 1. Without an answer, no verdict is needed:
  `judged` is then 0.
  """
  error = judged.judge_error if score.values['answered'] else None
  values = {'judge_error': float(error is not None)}
  if error is None:
    reward = judged.reward or 0.0
    values |= {'judged': reward,
               'agrees_with_em': float(reward == score.values['em'])}
  return dataclasses.replace(
      score, values={**score.values, **values}, judge_error=error)


def warnings(scores: Sequence[Score]) -> list[str]:
  """Returns warnings of the answers that a search or the judge failed on."""
  lost = sum(score.failed for score in scores)
  errors = [score.judge_error for score in scores
            if score.judge_error is not None]
  texts = []
  if lost:
    texts.append(f'Warning: {lost} of {len(scores)} answers ended with a '
                 'failed search, and count as wrong.')
  if errors:
    texts.append(
        f'Warning: the judge failed on {len(errors)} of {len(scores)} answers, '
        f'first with {errors[0]}. Each counts as the mean of the answers that '
        'it judged.')
  return texts


def has_gold(passage: Passage, golds: Sequence[str]) -> bool:
  """Returns whether a normalised gold answer occurs in a passage."""
  text = rewards.normalise(f'{passage.title} {passage.text}')
  return any(gold in text for gold in golds)


def _with_firsts(passages: Sequence[Passage], queries: int
                ) -> list[tuple[Passage, bool]]:
  """Returns each passage, and whether it is the first of a query's passages.

  A trajectory does not say which query found a passage. If the passages can be
  divided equally among the queries, they are. Otherwise a passage with a higher
  score than the passage before is the first of the next query.
  """
  each, rest = divmod(len(passages), queries or 1)
  return [(passage, not number or (
      passage.score > passages[number - 1].score if rest else
      number % each == 0)) for number, passage in enumerate(passages)]


def means(scores: Sequence[Score]) -> dict[str, float]:
  """Returns the mean of each value over all scores.

  A score that lacks a value has no verdict on its answer. It counts as the mean
  of the answers that have one, so that failures of a judge do not change the
  expected mean, whatever the share of questions without an answer. A value that
  no answer has is left out.
  """
  result = {}
  for name in (*NAMES, *JUDGED):
    numbers = [score.values[name] for score in scores if name in score.values]
    if missing := len(scores) - len(numbers):
      of_answers = [score.values[name] for score in scores
                    if name in score.values and score.values['answered']]
      if not of_answers:
        continue
      numbers += [float(np.mean(of_answers))] * missing
    if numbers:
      result[name] = float(np.mean(numbers))
  return result


def sample_statistics(scores: Sequence[Score], name: str = 'em'
                     ) -> dict[str, float]:
  """Returns statistics over several samples per question.

  Args:
    scores: Scores of all samples.
    name: Name of the score from which the statistics are computed.

  Returns:
    {} if a question has fewer than two samples. Otherwise it has three values,
    where k is the smallest number of samples of a question. 'pass@k' is the
    mean over questions of the best score of k samples. For exact match, this is
    the fraction of questions that at least one sample answers. 'majority' is
    the mean over questions of the score of the most common answer. If several
    answers are equally common, the first one counts. 'spread' is the standard
    deviation of k means: the mean score of the first samples of all questions,
    of their second samples, and so on.
  """
  by_question: dict[str, list[Score]] = collections.defaultdict(list)
  for score in scores:
    by_question[score.uid].append(score)
  count = min(map(len, by_question.values()), default=0)
  if count < 2:
    return {}
  right = np.array([[score.values[name] for score in group[:count]]
                    for group in by_question.values()])
  return {f'pass@{count}': float(right.max(1).mean()),
          'majority': float(np.mean([_majority(group, name)
                                     for group in by_question.values()])),
          'spread': float(right.mean(0).std(ddof=1))}


def _majority(group: Sequence[Score], name: str) -> float:
  """Returns the score of a question's most common answer; 0 without answers."""
  answers = collections.Counter(score.answer for score in group if score.answer)
  if not answers:
    return 0.0
  answer = answers.most_common(1)[0][0]
  return max(score.values[name] for score in group if score.answer == answer)
