# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rewards: exact match (EM), subEM, F1, and rewards that include the format.

A config names a reward as `module:function`, so that users can write their own.
A function (trajectory) -> float or Scores scores one trajectory. A function
(trajectories) -> list of Scores scores a whole round. A function of options
alone returns a `Judge`, which can do either. EM, subEM and F1 are 0 without an
answer. The rewards for the format are those of arXiv:2505.15117 (the Study).

The answer is the first block that the policy closes with </answer>, even inside
a thought. The tag ends the turn. It also ends the trajectory, unless the block
is empty, so a response has no second answer. Text after the tag is not read.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
import dataclasses
import re

from searchrl.agent import formats
from searchrl.texts import normalise
from searchrl.trajectory import Passage, Question, Scores, Trajectory, Turn

# Function from questions and a number of attempts to that many trajectories of
# a frozen solver for each question. A reward whose first parameter is `play`
# gets such a function.
Play = Callable[[Sequence[Question], int], Sequence[Sequence[Trajectory]]]


@dataclasses.dataclass(frozen=True)
class JudgeError:
  """Result of a reward function whose judge could not score a trajectory.

  It takes the place of the reward. The trajectory is not trained on.
  """

  kind: str  # 'timeout', 'unavailable', 'no_verdict', ...
  detail: str = ''


RewardFn = Callable[[Trajectory], float | Scores | JudgeError]


@dataclasses.dataclass(frozen=True)
class Judge:
  """A judge: a function that gives scores to finished trajectories.

  It does not get trajectories that a failed search ended. Trajectories with the
  same `Trajectory.group` are samples of one question.
  """

  # Function from the trajectories of a round to their scores, in order. A
  # trajectory that cannot be judged gets a JudgeError, and is not trained on.
  score: Callable[[Sequence[Trajectory]], Sequence[Scores | JudgeError]]
  # True if a score depends on its trajectory alone, so that a round may be
  # scored in parts.
  one_by_one: bool = False
  # True if the judge samples rollouts, so that all processes must call it. Else
  # the first process calls it for all.
  collective: bool = False

  def __call__(self, trajectories: Sequence[Trajectory]
              ) -> Sequence[Scores | JudgeError]:
    """Returns the scores of the trajectories, in their order."""
    return self.score(trajectories)


def each(reward: RewardFn) -> Judge:
  """Returns the judge that applies a reward function to each trajectory."""
  def score(trajectories):
    # A list, because a StopIteration of the reward would end a `map` silently.
    values = [reward(trajectory) for trajectory in trajectories]
    return [v if isinstance(v, Scores | JudgeError) else Scores(v)
            for v in values]
  return Judge(score, one_by_one=True)


def normalised(gold_answers: Iterable[str]) -> list[str]:
  """Returns the gold answers normalised, without those that become empty.

  An empty text would match everything.
  """
  return list(filter(None, map(normalise, gold_answers)))


def exact_match(answer: str, gold_answers: Sequence[str]) -> float:
  """Returns 1 if the answer equals a gold answer, both normalised; else 0."""
  return float(normalise(answer) in normalised(gold_answers))


def cover_match(answer: str, gold_answers: Sequence[str]) -> float:
  """Returns 1 if the answer contains a gold answer, both normalised; else 0."""
  answer = normalise(answer)
  return float(any(gold in answer for gold in normalised(gold_answers)))


def token_f1(answer: str, gold_answers: Sequence[str]) -> float:
  """Returns the highest F1 of the answer's words over all gold answers.

  F1 is the harmonic mean of precision and recall. The answer and the gold
  answers are normalised and split into words. The result is in [0, 1].
  """
  words = normalise(answer).split()
  best = 0.0
  for gold in gold_answers:
    gold_words = normalise(gold).split()
    common = sum((Counter(words) & Counter(gold_words)).values())
    if common:
      best = max(best, 2 * common / (len(words) + len(gold_words)))
  return best


def em(trajectory: Trajectory) -> float:
  """Returns 1 if the answer equals a gold answer, both normalised; else 0.

  This is exact match, Search-R1's reward.
  """
  return _score_answer(exact_match, trajectory)


def subem(trajectory: Trajectory) -> float:
  """Returns 1 if the answer contains a gold answer, both normalised; else 0.

  This is DSPO's reward and ZeroSearch's "cover-EM".
  """
  return _score_answer(cover_match, trajectory)


def f1(trajectory: Trajectory) -> float:
  """Returns token F1 of the trajectory's answer: ZeroSearch's reward."""
  return _score_answer(token_f1, trajectory)


def em_with_fee(trajectory: Trajectory, *, fee: float = 0.05) -> Scores:
  """Returns Scores whose reward is exact match minus a fee for each search.

  Their outcome, which filters read, is exact match (0 or 1) without the fee.
  """
  score = em(trajectory)
  return Scores(score - fee * trajectory.searches, outcome=score)


def _score_answer(score: Callable[[str, Sequence[str]], float],
                  trajectory: Trajectory) -> float:
  if trajectory.answer is None:
    return 0.0
  return score(trajectory.answer, trajectory.question.answers)


def format_em(*, lambda_f: float = 0.2, invalid: float = 0.0,
              fatal: bool = False, mixed_only: bool = False,
              needs_search: bool = False) -> Judge:
  """Makes the judge whose reward depends on exact match and on the format.

  The format is valid if the response consists of complete blocks in the right
  order (`agent.formats`). An answer is right if it equals a gold answer. The
  rewards are:

    format     right answer    wrong answer
    valid      1               lambda_f
    invalid    1 - lambda_f    invalid

  Args:
    lambda_f: Weight of the format, in [0, 1].
    invalid: Reward of a wrong answer in a wrong format, in [0, 1]: 0 in the
      paper, 0.1 in its published code.
    fatal: True to give 0 to a wrong format, whatever the answer.
    mixed_only: True to use only exact match in groups (the samples of one
      question) whose answers are all right or all wrong. Otherwise an all-wrong
      group is trained only on the format, which favours the shortest valid
      response: an answer without a search.
    needs_search: True if a response without a search is invalid.

  Raises:
    ValueError: An option is outside its range.

  Source: arXiv:2505.15117 (the Study), eq. 3.
  """
  equation = _study(lambda_f, 0.0, invalid, fatal)
  return _of_parts(lambda trajectory: _em_and_format(trajectory, needs_search),
                   equation, mixed_only)


def format_f1(*, lambda_f: float = 0.2, invalid: float = 0.0,
              fatal: bool = False, needs_search: bool = False) -> Judge:
  """Makes the judge whose reward depends on token F1 and on the format.

    format     reward
    valid      F1 + (1 - F1) lambda_f
    invalid    F1 (1 - lambda_f) + (1 - F1) invalid

  At an F1 of 0 or 1, the reward is that of `format_em`. Between them it is
  linear, which the paper leaves open.

  Args:
    lambda_f: Weight of the format, in [0, 1].
    invalid: Reward of an F1 of 0 in a wrong format, in [0, 1].
    fatal: True to give 0 to a wrong format, whatever the F1.
    needs_search: True if a response without a search is invalid.

  Raises:
    ValueError: An option is outside its range.

  Source: arXiv:2505.15117 (the Study), appendix D.
  """
  return _of_parts(lambda trajectory: dict(
      f1=f1(trajectory), format=_format(trajectory, needs_search)),
                   _study(lambda_f, 0.0, invalid, fatal), mixed_only=False)


def retrieval(*, lambda_f: float = 0.2, lambda_r: float = 0.1,
              invalid: float = 0.0, fatal: bool = False,
              mixed_only: bool = False, needs_search: bool = False) -> Judge:
  """Makes the judge whose reward depends on exact match, format and retrieval.

  The rewards are those of `format_em`, with one exception: a valid response
  with a wrong answer gets lambda_f + lambda_r if a gold answer is in a passage
  that the policy read. An invalid response gets no reward for the passage.

  Args:
    lambda_f: Weight of the format, in [0, 1].
    lambda_r: Weight of the success of the search, in [0, 1].
    invalid: Reward of a wrong answer in a wrong format, in [0, 1].
    fatal: True to give 0 to a wrong format, whatever the answer.
    mixed_only: True to use only exact match for questions whose sampled answers
      are all right or all wrong.
    needs_search: True if a response without a search is invalid.

  Raises:
    ValueError: An option is outside its range.

  Source: arXiv:2505.15117 (the Study), eq. 4.
  """
  def parts(trajectory: Trajectory) -> dict[str, float]:
    values = _em_and_format(trajectory, needs_search)
    return values | dict(
        retrieval=values['format'] and float(found_gold(trajectory)))

  equation = _study(lambda_f, lambda_r, invalid, fatal)
  return _of_parts(parts, equation, mixed_only)


def found_gold(trajectory: Trajectory) -> bool:
  """Returns whether the policy read a gold answer; see `with_gold`."""
  return any(with_gold(turn, trajectory.question) for turn in trajectory.turns)


def with_gold(turn: Turn, question: Question) -> list[Passage]:
  """Returns the passages of a turn in which the policy read a gold answer.

  The answer must occur both in the passage and in the turn's observation, which
  may have only the beginning of the passage. All texts are normalised.
  """
  observation = observed(turn)
  golds = normalised(answer for answer in question.answers
                     if _plain(answer) in observation)
  return [passage for passage in turn.passages if any(
      gold in normalise(f'{passage.title} {passage.text}') for gold in golds)]


def observed(turn: Turn) -> str:
  """Returns the text that the policy read after a turn's action, normalised.

  JSON escapes and tags become spaces, so that they do not join two words.
  """
  return _plain(turn.observation)


def _plain(text: str) -> str:
  return normalise(re.sub(r'\\+[nrt]|</?\w+>', ' ', text))


def _em_and_format(trajectory: Trajectory, needs_search: bool
                  ) -> dict[str, float]:
  return dict(em=em(trajectory), format=_format(trajectory, needs_search))


def _format(trajectory: Trajectory, needs_search: bool) -> float:
  return float(formats.is_well_formed(trajectory, needs_search=needs_search))


def _study(lambda_f: float, lambda_r: float, invalid: float, fatal: bool
          ) -> Callable[..., float]:
  """Returns the Study's reward: a function of answer, format and retrieval.

  It is equations 3 and 4 of arXiv:2505.15117, made linear in the score of the
  answer. The function's arguments are the score of the answer in [0, 1], the
  format (1 if it is valid, else 0) and the retrieval (1 if a gold answer was
  found, else 0; default 0).

  Raises:
    ValueError: An option is outside [0, 1], both `fatal` and `invalid` are
      given, or a wrong answer could have a higher reward than a right one.
  """
  for name, value in (('lambda_f', lambda_f), ('lambda_r', lambda_r),
                      ('invalid', invalid)):
    if not isinstance(value, (int, float)) or not 0 <= value <= 1:
      raise ValueError(
          f'reward_options.{name} must be a number in [0, 1], as rewards are, '
          f'but is {value!r}. Choose one such as 0.2.')
  if fatal and invalid:
    raise ValueError(
        'reward_options.invalid must be 0 with fatal=True, which gives 0 to a '
        f'wrong format, but is {invalid}. Leave one of them out.')

  most = 1 - lambda_f
  for name, value in (('lambda_r', lambda_r), ('invalid', invalid)):
    if value > most + 1e-9:
      raise ValueError(
          f'reward_options.{name} must be at most 1 - lambda_f = {most:g}, so '
          'that no wrong answer has a higher reward than a right one, but is '
          f'{value}. Choose a smaller one.')

  def reward(score: float, format: float, retrieval: float = 0.0) -> float:
    if not format:
      return 0.0 if fatal else score * (1 - lambda_f) + (1 - score) * invalid
    return score + (1 - score) * (lambda_f + lambda_r * retrieval)
  return reward


def _of_parts(parts_of: Callable[[Trajectory], dict[str, float]],
              equation: Callable[..., float], mixed_only: bool) -> Judge:
  """Makes the judge whose reward is an equation of several parts.

  `parts_of` computes the parts of a trajectory's score, by name. `equation`
  gets their values, in order. For `mixed_only` see `format_em`.
  """
  def scores(trajectory: Trajectory) -> Scores:
    parts = parts_of(trajectory)
    return Scores(equation(*parts.values()), parts=parts)
  return _in_mixed_groups(scores) if mixed_only else each(scores)


def _in_mixed_groups(scores: Callable[[Trajectory], Scores]) -> Judge:
  """Makes a judge that uses `scores` if a group has right and wrong answers.

  A group is the samples of one question. If its answers are all right or all
  wrong, their reward is exact match alone.
  """
  def score(trajectories):
    scored, outcomes = list(map(scores, trajectories)), defaultdict(set)
    for trajectory, result in zip(trajectories, scored):
      outcomes[trajectory.group].add(result.parts['em'])
    return [
        result if len(outcomes[trajectory.group]) > 1 else
        dataclasses.replace(result, reward=result.parts['em'])
        for trajectory, result in zip(trajectories, scored)]
  return Judge(score)
