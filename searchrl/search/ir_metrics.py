# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""What an engine found in, how good it is out.

There are two kinds. Answers: whether a gold answer stands in what was found,
which needs no judgements and is what the Empirical Study calls recall. And
relevance: against the ids of passages that are known to be right.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
import math
import re

import numpy as np

from searchrl.trajectory import (Passage, Passages, Query, Question,
                                 SearchError, SearchFn)

Normalise = Callable[[str], str]


def answer_recall(passages: Passages, golds: Sequence[str],
                  normalise: Normalise) -> float:
  """1 if a gold is a substring of a passage, both normalised, else 0.

  'art' is in 'party', and a yes in yesterday: see `word_recall`. A gold that
  normalises to nothing is found nowhere.

  Source: the Empirical Study, arXiv:2505.15117, and FlashRAG.
  """
  golds = [gold for gold in map(normalise, golds) if gold]
  texts = [normalise(_text(passage)) for passage in passages]
  return float(any(gold in text for gold in golds for text in texts))


def word_recall(passages: Passages, golds: Sequence[str],
                normalise: Normalise) -> float:
  """As `answer_recall`, of whole words only."""
  golds = [gold for gold in map(normalise, golds) if gold]
  texts = [f' {normalise(_text(passage))} ' for passage in passages]
  return float(any(f' {gold} ' in text for gold in golds for text in texts))


def hit(ranked: Sequence[str], relevant: Collection[str], k: int) -> float:
  """1 if one of the first k ids is relevant, else 0."""
  return float(any(uid in relevant for uid in ranked[:k]))


def reciprocal_rank(ranked: Sequence[str], relevant: Collection[str],
                    k: int) -> float:
  """1 / rank of the first relevant id among the first k, else 0."""
  for rank, uid in enumerate(ranked[:k], start=1):
    if uid in relevant:
      return 1 / rank
  return 0.0


def ndcg(ranked: Sequence[str], grades: Mapping[str, float], k: int) -> float:
  """Discounted gain of the first k ids over that of the best order.

    DCG = sum over ranks i of  grade_i / log2(i + 1)

  Source: Jaervelin and Kekaelaeinen 2002, Cumulated gain-based evaluation of IR
    techniques, TOIS 20(4), in the form that trec_eval computes.
  """
  def gain(values):
    return math.fsum(value / math.log2(i + 2)
                     for i, value in enumerate(values[:k]))

  best = gain(sorted((g for g in grades.values() if g > 0), reverse=True))
  return gain([max(grades.get(uid, 0), 0) for uid in ranked]) / best if (
      best) else 0.0


def answers(search: SearchFn, questions: Sequence[Question], *,
            top_ks: Sequence[int], normalise: Normalise, batch: int = 256
            ) -> dict[str, float]:
  """How often the questions, asked as they stand, find their answers.

  Yes, no and nothing are found anywhere or nowhere: questions with such an
  answer are left out, and told of.

  Args:
    search: asked for the largest of top_ks; the others are its first.
    questions: what is asked.
    top_ks: passages that are looked at.
    normalise: of answers and texts.
    batch: queries a call.

  Returns:
    Shares: of the rest, `retrieval/recall@k` and `retrieval/word_recall@k`
    (failures count as not found) and `retrieval/failed`; of all,
    `retrieval/left_out`.
  """
  asked = [q for q in questions if not any(
      normalise(a) in ('', 'yes', 'no') for a in q.answers)]
  found = []
  for start in range(0, len(asked), batch):
    found += search([Query(q.text, max(top_ks), q)
                     for q in asked[start:start + batch]])
  failed = [isinstance(result, SearchError) for result in found]
  found = [() if bad else result for bad, result in zip(failed, found)]

  def mean(values):
    return float(np.mean(values)) if asked else 0.0

  return {
      f'retrieval/{name}@{k}': mean(
          [measure(passages[:k], question.answers, normalise)
           for passages, question in zip(found, asked)])
      for name, measure in (('recall', answer_recall),
                            ('word_recall', word_recall)) for k in top_ks
  } | {'retrieval/failed': mean(failed),
       'retrieval/left_out': 1 - len(asked) / max(len(questions), 1)}


def _text(passage: Passage) -> str:
  return re.sub(r'\s+', ' ', f'{passage.title} {passage.text}')
