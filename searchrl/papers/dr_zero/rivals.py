# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rewards of methods like Dr. Zero: majority answers, unrepeated questions.

Sources: R-Zero, arXiv:2508.05004, section 3; SQLM, arXiv:2508.03682, section 3.
Neither knows golden answers: the most common answer of the solver's attempts
counts as right.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
import itertools
import math

import numpy as np

from searchrl.agent import rewards
from searchrl.trajectory import Scores, Trajectory

_SAME = 0.5  # 1 - BLEU below which R-Zero joins clusters of questions
_LONGEST = 4  # words of BLEU's longest n-gram
_EMPTY = 0.1  # count for an n-gram order without a match (nltk's method1)


def majority(attempts: Sequence[Trajectory]) -> tuple[str, float]:
  """Returns the most common answer, and the share of the attempts that gave it.

  Answers are compared after normalisation. Of several equally common answers,
  the first counts. Without any answer, the result is ('', 0).
  """
  answers = [(rewards.normalise(t.answer), t.answer) for t in attempts
             if t.answer and rewards.normalise(t.answer)]
  if not answers:
    return '', 0.0
  plain, count = Counter(plain for plain, _ in answers).most_common(1)[0]
  return dict(reversed(answers))[plain], count / len(attempts)


def agreement(trajectories: Sequence[Trajectory]) -> list[Scores]:
  """Returns a reward for each trajectory: 1 if it agrees with the majority.

  The trajectories of one question form a group. The reward is 1 for the most
  common answer of the group, and 0 for any other or none.

  Source: the reward of SQLM's solver.
  """
  groups: dict[int, list[Trajectory]] = defaultdict(list)
  for trajectory in trajectories:
    groups[trajectory.group].append(trajectory)
  common = {group: rewards.normalise(majority(samples)[0])
            for group, samples in groups.items()}
  return [Scores(float(bool(common[t.group]) and common[t.group] ==
                       rewards.normalise(t.answer or '')))
          for t in trajectories]


def repetition(questions: Sequence[str]) -> list[float]:
  """Returns for each question the size of its cluster, as a share of all.

  Similar questions are in one cluster. A question that is like no other has a
  cluster of its own. The distance is 1 - BLEU, with average linkage.

  Source: R-Zero, eq. 5.
  """
  if len(questions) < 2:
    return [1 / max(len(questions), 1)] * len(questions)
  from sklearn import cluster  # slow to import
  distances = np.zeros((len(questions), len(questions)))
  words = [question.split() for question in questions]
  for i, j in itertools.combinations(range(len(questions)), 2):
    distances[i, j] = distances[j, i] = 1 - bleu(words[i], words[j])
  labels = cluster.AgglomerativeClustering(
      n_clusters=None, metric='precomputed', linkage='average',
      distance_threshold=_SAME).fit_predict(distances)
  return [float(np.mean(labels == label)) for label in labels]


def bleu(reference: Sequence[str], words: Sequence[str]) -> float:
  """Returns the BLEU score of a sentence against a reference, in [0, 1].

  Both are given as words. Source: Papineni et al. 2002.
  """
  logs = []
  for n in range(1, _LONGEST + 1):
    theirs, ours = (Counter(zip(*(text[i:] for i in range(n))))
                    for text in (reference, words))
    matches = sum((theirs & ours).values())
    if n == 1 and not matches:
      return 0.0
    logs.append(math.log((matches or _EMPTY) / max(sum(ours.values()), 1)))
  brevity = min(1 - len(reference) / len(words), 0.0)
  return math.exp(brevity + sum(logs) / _LONGEST)
