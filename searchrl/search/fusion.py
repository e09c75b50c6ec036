# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Reciprocal rank fusion: merges the results of several SearchFns."""

import collections
from collections.abc import Sequence
from concurrent import futures
import dataclasses
import math

from searchrl.trajectory import Passage, Passages, Query, SearchError, SearchFn


def fuse(rankings: Sequence[Passages], *, k: float, top_k: int) -> Passages:
  """Merges rankings by reciprocal rank; returns the top_k best passages.

    score(p) = sum over rankings with p of  1 / (k + rank of p)

  Ranks count from 1. Passages with equal id, title and text are the same
  passage, and within one ranking its first occurrence counts. Passages with
  equal scores are ordered by their best rank, and then by the ranking in which
  they have this rank. The engines' own scores are not used.

  Source: Cormack, Clarke and Buettcher 2009, Reciprocal Rank Fusion outperforms
    Condorcet and individual Rank Learning Methods, SIGIR; its k is 60.
  """
  shares: dict[Passage, list[float]] = collections.defaultdict(list)
  first: dict[Passage, tuple[int, int]] = {}
  for number, passages in enumerate(rankings):
    plain = (dataclasses.replace(p, score=0.0) for p in passages)
    for rank, passage in enumerate(dict.fromkeys(plain), start=1):
      shares[passage].append(1 / (k + rank))
      first[passage] = min(first.get(passage, (rank, number)), (rank, number))
  scores = {p: math.fsum(terms) for p, terms in shares.items()}  # exact sums
  best = sorted(scores, key=lambda p: (-scores[p], first[p]))[:max(top_k, 0)]
  return tuple(dataclasses.replace(p, score=scores[p]) for p in best)


def fused(engines: Sequence[SearchFn], *, k: float = 5.0, depth: int = 50
         ) -> SearchFn:
  """Returns a search that asks all engines at once and merges their rankings.

  A query that fails in one engine gets its SearchError, because a fusion
  without one of its engines would be a different engine.

  Args:
    engines: The engines, at least one, over the same passages.
    k: Constant of the weight 1 / (k + rank). The larger k is, the less the
      weights of ranks differ. The usual 60 is too large for agents, which read
      few passages (BENCHMARKS.md).
    depth: Number of passages requested from each engine, or top_k if that is
      larger.

  Raises:
    ValueError: An option is out of range.
  """
  if not engines or not k >= 0 or depth < 1:
    raise ValueError(
        'search.options must have engines, k of at least 0 and depth of at '
        f'least 1, but there are {len(engines)} engines, k={k} and '
        f'depth={depth}.')

  def search(queries: Sequence[Query]) -> list[Passages | SearchError]:
    deep = [dataclasses.replace(q, top_k=max(q.top_k, depth)) for q in queries]
    with futures.ThreadPoolExecutor(len(engines)) as threads:
      results = [*threads.map(lambda engine: engine(deep), engines)]
    return [
        next((ranking for ranking in rankings
              if isinstance(ranking, SearchError)), None)
        or fuse(rankings, k=k, top_k=query.top_k)
        for query, *rankings in zip(queries, *results, strict=True)]

  return search
