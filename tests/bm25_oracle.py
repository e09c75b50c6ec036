# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A ranking by BM25 that sums every posting, for tests and benchmarks/fusion.py."""

import numpy as np


def all_scores(index, text):
  """The score of every passage, from every posting of the query's terms."""
  total = np.zeros(index.postings.size)
  for _, start, stop, count in index.spans(text):
    total[index.postings.passages[start:stop]] += (
        count * index.postings.impacts[start:stop])
  return total.astype(np.float32)


def top(scores, k):
  """Positions of the k highest scores above 0; the lower wins ties."""
  hits = np.flatnonzero(scores > 0)
  if 0 < k < len(hits):
    worst = np.partition(scores[hits], -k)[-k]
    hits = hits[scores[hits] >= worst]
  return hits[np.argsort(-scores[hits], kind='stable')][:k]
