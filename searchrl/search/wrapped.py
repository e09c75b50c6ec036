# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Searches in, one that is made of them out; it counts and waits as they do.

Some engines have more to say than results: `pop` gives metrics since its last
call, and `wait` returns when a search may be expected to succeed. What is built
over them hands both on.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
import dataclasses
from typing import Protocol, runtime_checkable

from searchrl.trajectory import Passages, Query, SearchError, SearchFn


@runtime_checkable
class Attended(Protocol):
  """A SearchFn with metrics of its own, which can be out of order."""

  def pop(self) -> dict[str, float]:
    """Metrics since the last `pop`, which it forgets."""

  def wait(self) -> None:
    """Returns once it works; a ConnectionError if that takes too long."""


@dataclasses.dataclass(frozen=True)
class Wrapped:
  """A search that asks others."""

  search: SearchFn
  inner: tuple[SearchFn, ...]

  def __call__(
      self, queries: Sequence[Query]) -> Sequence[Passages | SearchError]:
    return self.search(queries)

  def pop(self) -> dict[str, float]:
    """The sums of the inner searches' metrics."""
    total = collections.Counter()
    for search in self.inner:
      total.update(pop(search))
    return dict(total)

  def wait(self) -> None:
    """Waits for every inner search."""
    for search in self.inner:
      wait(search)


def pop(search: SearchFn) -> dict[str, float]:
  """The metrics of a search, if it has any."""
  return search.pop() if isinstance(search, Attended) else {}


def wait(search: SearchFn) -> None:
  """Waits while a search is out of order, if it can tell."""
  if isinstance(search, Attended):
    search.wait()


def with_typed_errors(search: SearchFn) -> Wrapped:
  """Turns what goes wrong inside a search into an outcome of each query.

  An exception becomes SearchError('unavailable'), and a number of results that
  is not that of the queries becomes SearchError('bad_response'). A call that
  takes too long is SearchError('timeout') to whoever keeps the clock.
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

  return Wrapped(safely, (search,))
