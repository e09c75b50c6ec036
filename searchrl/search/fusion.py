# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Several SearchFns in, one out that merges their rankings."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import math

from searchrl.trajectory import Passages, Query, SearchError, SearchFn


def fuse(rankings: Sequence[Passages], *, k: float, top_k: int) -> Passages:
  """Merges rankings by reciprocal rank.

    score(p) = sum over rankings with p of  1 / (k + rank of p)

  Ranks count from 1. Passages are one if id, title and text agree; in a ranking
  the first of them counts. Ties go to the better best rank, then to the earlier
  ranking. The engines' own scores play no part.

  Source: Cormack, Clarke and Buettcher 2009, Reciprocal Rank Fusion outperforms
    Condorcet and individual Rank Learning Methods, SIGIR; its k is 60.
  """
  shares, first = {}, {}
  for number, passages in enumerate(rankings):
    plain = (dataclasses.replace(p, score=0.0) for p in passages)
    for rank, passage in enumerate(dict.fromkeys(plain), start=1):
      shares.setdefault(passage, []).append(1 / (k + rank))
      first[passage] = min(first.get(passage, (rank, number)), (rank, number))
  scores = {p: math.fsum(its) for p, its in shares.items()}  # in any order
  best = sorted(scores, key=lambda p: (-scores[p], first[p]))[:max(top_k, 0)]
  return tuple(dataclasses.replace(p, score=scores[p]) for p in best)


def fused(engines: Sequence[SearchFn], *, k: float = 5.0, depth: int = 50
         ) -> SearchFn:
  """A search that asks all engines and merges what they find.

  A query that fails in one engine fails: half a fusion is another engine.

  Args:
    engines: at least one, over the same passages.
    k: how little the first ranks count more than the next. Agents read few
      passages, for which 60 counts them too little (BENCHMARKS.md).
    depth: passages of each engine, or top_k if that is more.

  Raises:
    ValueError: an option is out of range.
  """
  if not engines or not k >= 0 or depth < 1:
    raise ValueError(
        'search.options must have engines, k of at least 0 and depth of at '
        f'least 1, but there are {len(engines)} engines, k={k} and '
        f'depth={depth}.')

  def search(queries: Sequence[Query]) -> list[Passages | SearchError]:
    deep = [dataclasses.replace(q, top_k=max(q.top_k, depth)) for q in queries]
    found = [engine(deep) for engine in engines]
    return [_one(query, rankings)
            for query, *rankings in zip(queries, *found, strict=True)]

  def _one(query, rankings):
    for ranking in rankings:
      if isinstance(ranking, SearchError):
        return ranking
    return fuse(rankings, k=k, top_k=query.top_k)

  return search
