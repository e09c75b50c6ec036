# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A SearchFn built over others: passes on their metrics, waits and failures.

Some engines give more than results: `pop` returns metrics since its last call,
and `wait` returns once a search can be expected to succeed. An engine over
others passes both on. `with_typed_errors` turns exceptions into SearchErrors.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
import dataclasses
from typing import Protocol, runtime_checkable

from searchrl.trajectory import Passages, Query, SearchError, SearchFn


@runtime_checkable
class Monitored(Protocol):
  """A SearchFn that keeps metrics and may be out of service for a while."""

  def pop(self) -> dict[str, float]:
    """Returns the metrics since the last call, and resets them."""

  def wait(self) -> None:
    """Returns once it works; raises a ConnectionError if it takes too long."""


@dataclasses.dataclass(frozen=True)
class Wrapped:
  """A search that asks others.

  Attributes:
    search: answers the queries.
    inner: the searches that it asks.
  """

  search: SearchFn
  inner: tuple[SearchFn, ...]

  def __call__(
      self, queries: Sequence[Query]) -> Sequence[Passages | SearchError]:
    return self.search(queries)

  def pop(self) -> dict[str, float]:
    """The metrics of the inner searches, added up."""
    total = collections.Counter()
    for search in self.inner:
      total.update(pop(search))
    return dict(total)

  def wait(self) -> None:
    """Waits for every inner search."""
    for search in self.inner:
      wait(search)


def pop(search: SearchFn) -> dict[str, float]:
  """The metrics of a search, if it keeps any."""
  return search.pop() if isinstance(search, Monitored) else {}


def wait(search: SearchFn) -> None:
  """Waits while a search is out of service, if it is monitored."""
  if isinstance(search, Monitored):
    search.wait()


def with_typed_errors(search: SearchFn) -> Wrapped:
  """A search that returns a SearchError per query where another one fails.

  An exception becomes SearchError('unavailable'), and another number of results
  than of queries becomes SearchError('bad_response'). SearchError('timeout')
  comes from whoever measures the time: a client, a server or the driver.
  """

  def safe(queries: Sequence[Query]) -> list[Passages | SearchError]:
    try:
      results = list(search(queries))
    except Exception as error:  # whatever it is, the run must go on
      detail = f'{type(error).__name__}: {error}'
      return [SearchError('unavailable', detail)] * len(queries)
    if len(results) != len(queries):
      detail = f'{len(results)} results for {len(queries)} queries'
      return [SearchError('bad_response', detail)] * len(queries)
    return results

  return Wrapped(safe, (search,))
