# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rewards: exact match (EM), subEM and F1 of a trajectory's answer.

A reward is any function of (trajectory) -> float, named `module:function` in a
config, so users can bring their own. A trajectory without an answer gets 0.
"""

from collections import Counter
from collections.abc import Callable, Sequence
import re
import string

from searchrl.trajectory import Trajectory

RewardFn = Callable[[Trajectory], float]

_PUNCTUATION = str.maketrans('', '', string.punctuation)
_ARTICLES = re.compile(r'\b(a|an|the)\b')


def normalise(text: str) -> str:
  """Lower case, no ASCII punctuation, no articles, single spaces.

  Source: SQuAD (Rajpurkar et al. 2016), as all five systems use it.
  """
  text = text.lower().translate(_PUNCTUATION)
  return ' '.join(_ARTICLES.sub(' ', text).split())


def exact_match(answer: str, golds: Sequence[str]) -> float:
  """1 if the answer equals a gold after normalisation, else 0.

  A gold that normalises to nothing matches nothing.
  """
  golds = [normalise(gold) for gold in golds]
  return float(normalise(answer) in [gold for gold in golds if gold])


def cover_match(answer: str, golds: Sequence[str]) -> float:
  """1 if a normalised gold is a substring of the answer, else 0."""
  answer = normalise(answer)
  return float(any(gold in answer for gold in map(normalise, golds) if gold))


def token_f1(answer: str, golds: Sequence[str]) -> float:
  """The best harmonic mean of token precision and recall over the golds."""
  words = normalise(answer).split()
  best = 0.0
  for gold in golds:
    gold_words = normalise(gold).split()
    common = sum((Counter(words) & Counter(gold_words)).values())
    if common:
      best = max(best, 2 * common / (len(words) + len(gold_words)))
  return best


def em(trajectory: Trajectory) -> float:
  """Exact match of the trajectory's answer: Search-R1's reward."""
  return _of_answer(exact_match, trajectory)


def subem(trajectory: Trajectory) -> float:
  """1 if the answer contains a gold: DSPO's reward, ZeroSearch's "cover-EM"."""
  return _of_answer(cover_match, trajectory)


def f1(trajectory: Trajectory) -> float:
  """Token F1 of the trajectory's answer: ZeroSearch's reward."""
  return _of_answer(token_f1, trajectory)


def _of_answer(score: Callable[[str, Sequence[str]], float],
               trajectory: Trajectory) -> float:
  if trajectory.answer is None:
    return 0.0
  return score(trajectory.answer, trajectory.question.answers)
