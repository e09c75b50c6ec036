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
