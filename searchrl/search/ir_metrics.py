# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Answer recall: whether a gold answer occurs in the retrieved passages.

It needs no relevance judgements, which data sets of questions and answers lack.
The Empirical Study (arXiv:2505.15117) calls it recall.
"""

from collections.abc import Callable, Sequence
import re

import numpy as np

from searchrl.trajectory import (Passages, Query, Question, SearchError,
                                 SearchFn)

Normalise = Callable[[str], str]


def answer_recall(passages: Passages, golds: Sequence[str],
                  normalise: Normalise, *, whole_words: bool = False) -> float:
  """Returns 1 if a gold answer is a substring of a passage, else 0.

  Answers and passages are normalised before the comparison. A gold answer that
  normalises to the empty string is never found.

  Args:
    passages: Passages of a question.
    golds: Gold answers of the question.
    normalise: Function applied to answers and passages.
    whole_words: Flag for answers that must be whole words. If False, 'art' is
      found in 'party' and 'yes' in 'yesterday'.

  Source: the Empirical Study, arXiv:2505.15117, and FlashRAG.
  """
  form = ' {} ' if whole_words else '{}'
  texts = [form.format(normalise(re.sub(r'\s+', ' ', f'{p.title} {p.text}')))
           for p in passages]
  return float(any(form.format(gold) in text for gold in map(normalise, golds)
                   if gold for text in texts))


def answers(search: SearchFn, questions: Sequence[Question], *,
            top_ks: Sequence[int], normalise: Normalise, batch: int = 256
            ) -> dict[str, float]:
  """Measures for how many questions a search finds a gold answer.

  The text of a question is its query. The answers 'yes' and 'no' occur in
  almost any passage, and an empty answer in none. Questions with such an answer
  are left out and counted.

  Args:
    search: Search that is measured. Each query is searched once, with the
      largest of top_ks. For a smaller k the first k passages count.
    questions: Questions, whose texts are the queries.
    top_ks: The k of each recall@k.
    normalise: Function applied to answers and passages before the comparison.
    batch: Number of queries per call.

  Returns:
    Shares in [0, 1]. `retrieval/recall@k`, `retrieval/word_recall@k` (for whole
    words) and `retrieval/failed` (failed searches, which found nothing) are
    shares of the questions that were searched. `retrieval/left_out` is a share
    of all questions.
  """
  queries = [Query(question.text, max(top_ks), question)
             for question in questions if not any(
                 normalise(a) in ('', 'yes', 'no') for a in question.answers)]
  results: list[Passages | SearchError] = []
  for start in range(0, len(queries), batch):
    results += search(queries[start:start + batch])

  def mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else 0.0

  return {
      f'retrieval/{name}@{k}': mean(
          [0.0 if isinstance(result, SearchError) else
           answer_recall(result[:k], query.question.answers, normalise,
                         whole_words=name == 'word_recall')
           for result, query in zip(results, queries)])
      for name in ('recall', 'word_recall') for k in top_ks
  } | {'retrieval/failed': mean(
      [isinstance(result, SearchError) for result in results]),
       'retrieval/left_out': 1 - len(queries) / max(len(questions), 1)}
