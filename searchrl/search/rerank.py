# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Reranking: a cross-encoder reorders the passages that a SearchFn finds."""

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import math

from searchrl.trajectory import Passage, Passages, Query, SearchError, SearchFn

Pair = tuple[str, str]  # a query's text, and a passage written by `pair_text`
ScoreFn = Callable[[Sequence[Pair]], Iterable[float]]


def pair_text(passage: Passage) -> str:
  """Returns the cross-encoder's input for a passage, in Search-R1's format."""
  return f'(Title: "{passage.title}") {passage.text}'


def reranked(engine: SearchFn, score: ScoreFn, *, candidates: int = 10
            ) -> SearchFn:
  """Returns a search that reorders the best passages of an engine.

  Args:
    engine: Search that finds the candidates; its SearchErrors are passed on.
    score: Function from pairs to scores, where higher is better. It is called
      once for all queries.
    candidates: Number of passages per query that are scored, or top_k if that
      is larger.

  Returns:
    A search whose passages have the new scores. Passages with equal scores keep
    the engine's order.

  Raises:
    ValueError: The number of candidates is below 1. The search itself raises a
      ValueError unless `score` returns one finite score per pair.
  """
  if candidates < 1:
    raise ValueError('search.options.candidates must be at least 1, but is '
                     f'{candidates}. Search-R1 takes 10.')

  def search(queries: Sequence[Query]) -> list[Passages | SearchError]:
    results = engine([dataclasses.replace(
        q, top_k=max(q.top_k, candidates) if q.top_k > 0 else 0)
                      for q in queries])
    pairs = [(query.text, pair_text(passage))
             for query, passages in zip(queries, results, strict=True)
             if not isinstance(passages, SearchError) for passage in passages]
    scores = [float(s) for s in score(pairs)] if pairs else []
    if len(scores) != len(pairs) or not all(map(math.isfinite, scores)):
      raise ValueError(
          f'a reranker must return one finite score a pair, {len(pairs)} in '
          f'all, but returned {len(scores)}. Check the model.')
    remaining = iter(scores)
    return [passages if isinstance(passages, SearchError) else
            _ordered(passages, remaining, query.top_k)
            for query, passages in zip(queries, results)]

  return search


def _ordered(passages: Passages, scores: Iterator[float], top_k: int
            ) -> Passages:
  scored = [dataclasses.replace(p, score=next(scores)) for p in passages]
  return tuple(sorted(scored, key=lambda p: -p.score)[:top_k])
