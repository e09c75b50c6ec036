# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""An engine's name and a corpus in, a SearchFn out; and a guard around any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from searchrl.search import bm25
from searchrl.search import dense
from searchrl.search import noise
from searchrl.search.corpus import Corpus
from searchrl.trajectory import Passages, Query, SearchError, SearchFn


def make(
    name: str, corpus: Corpus, *, seed: int = 0, **options: Any
) -> SearchFn:
  """Builds the engine of a name; every engine finds at most the whole corpus.

  Args:
    name: 'bm25', 'dense' (hashed n-grams, exact) or 'noise' (random).
    corpus: what it searches.
    seed: of the noise; other engines ignore it.
    **options: bm25: k1, b; dense: dim, n, batch; noise: none.

  Raises:
    ValueError: no engine has that name.
    TypeError: the engine has no such option.
  """
  if name == 'bm25':
    return bm25.bm25(corpus, **options)
  if name == 'dense':
    return _dense(corpus, **options)
  if name == 'noise':
    return noise.random_passages(corpus, seed=seed, **options)
  raise ValueError(f"engine must be 'bm25', 'dense' or 'noise', but is "
                   f'{name!r}. Correct it in the configuration.')


def _dense(
    corpus: Corpus, *, dim: int = 512, n: int = 3, batch: int = 64
) -> SearchFn:
  return dense.exact(
      corpus, dense.ngram_encoder(corpus, dim=dim, n=n), batch=batch)


def guarded(search: SearchFn) -> SearchFn:
  """Turns what goes wrong inside a search into an outcome of each query.

  An exception becomes SearchError('unavailable'), a number of results that is
  not that of the queries becomes SearchError('bad_response').
  """

  def safely(queries: Sequence[Query]) -> list[Passages | SearchError]:
    try:
      results = list(search(queries))
    except Exception as error:  # whatever it is, the run must go on
      detail = f'{type(error).__name__}: {error}'
      return [SearchError('unavailable', detail)] * len(queries)
    if len(results) != len(queries):
      detail = f'{len(results)} results for {len(queries)} queries'
      return [SearchError('bad_response', detail)] * len(queries)
    return results

  return safely
