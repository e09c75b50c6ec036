# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Searches built over other searches: their metrics, waits and failures.

An engine may have the methods `pop`, which returns the metrics since its last
call and resets them, and `wait`, which returns once a search can be expected to
succeed, or raises a ConnectionError after too long. If `is_joint` is true, the
engine searches one index that is split over the devices of all processes. Each
search is then a joint one, in which all processes take part. The method
`finish` takes part in the others' searches until all processes have finished.
An engine that calls inner engines passes all of these on.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
import numbers
import threading
from typing import Any

from searchrl.trajectory import (
    Passage, Passages, Query, SearchError, SearchFn, ToolCall, ToolResult)


class Counts:
  """Named numbers that several threads increase."""

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._numbers: dict[str, float] = collections.defaultdict(int)

  def add(self, **numbers: float) -> None:
    """Adds to the numbers of these names."""
    with self._lock:
      for name, number in numbers.items():
        self._numbers[name] += number

  def pop(self) -> dict[str, float]:
    """Returns the sums since the last `pop`, by name; 0 for other names."""
    with self._lock:
      numbers, self._numbers = self._numbers, collections.defaultdict(int)
    return numbers


class Outer:
  """Methods of a search that calls the searches in its field `inner`."""

  inner: tuple[Callable[..., Any], ...]

  def pop(self) -> dict[str, float]:
    """Returns the sum of the inner searches' metrics, and resets them."""
    total: collections.Counter[str] = collections.Counter()
    for search in self.inner:
      total.update(pop(search))
    return dict(total)

  def wait(self) -> None:
    """Waits for every inner search."""
    for search in self.inner:
      wait(search)

  @property
  def is_joint(self) -> bool:
    """True if an inner search is joint, so that all processes take part."""
    return any(map(is_joint, self.inner))

  def finish(self) -> None:
    """Takes part in joint searches until all processes have finished."""
    for search in filter(is_joint, self.inner):
      finish(search)


@dataclasses.dataclass(frozen=True)
class Wrapped(Outer):
  """A search that calls other searches.

  Attributes:
    search: Function that answers the queries, or the calls of a tool.
    inner: The searches that it calls.
    tools: Function of each tool of a dialogue by the tool's name, if this is a
      `toolset`; else None.
  """

  search: Callable[[Sequence[Any]], Sequence[Any]]
  inner: tuple[Callable[..., Any], ...]
  tools: Mapping[str, Callable[[Sequence[Any]], Sequence[Any]]] | None = None

  def __call__(self, queries: Sequence[Any]) -> Sequence[Any]:
    """Returns the results of the queries, in their order."""
    return self.search(queries)


def toolset(tools: Mapping[str, Callable[[Sequence[Any]], Sequence[Any]]]
           ) -> Wrapped:
  """Returns one object with the functions of all tools of a dialogue.

  The object has the functions in its field `tools`. A call of the object itself
  calls the function of the tool 'search'.

  Args:
    tools: Function of each tool by its name. A function maps a list of queries,
      or of calls by the policy, to one result each.
  """
  return Wrapped(
      lambda queries: tools['search'](queries), tuple(tools.values()), tools)


def tools_of(search: Callable[..., Any]) -> Mapping[str, Callable[..., Any]]:
  """Returns a toolset's functions by name; {'search': search} for a search."""
  return getattr(search, 'tools', None) or {'search': search}


def each(search: Callable[..., Any], wrap: Callable[..., Any]
        ) -> Callable[..., Any]:
  """Returns `wrap(search)`, or a toolset with each function so wrapped."""
  if getattr(search, 'tools', None) is None:
    return wrap(search)
  return toolset({name: wrap(tool) for name, tool in tools_of(search).items()})


def pop(search: Callable[..., Any]) -> dict[str, float]:
  """Returns the metrics of a search, and resets them; {} if it has none."""
  return search.pop() if hasattr(search, 'pop') else {}


def wait(search: Callable[..., Any]) -> None:
  """Waits while a search is out of service, if it has a method `wait`."""
  if hasattr(search, 'wait'):
    search.wait()


def is_joint(search: Callable[..., Any]) -> bool:
  """Returns True if all processes take part in each call of a search."""
  return getattr(search, 'is_joint', False)


def finish(search: Callable[..., Any]) -> None:
  """Takes part in other processes' searches until all have finished.

  It returns at once unless `is_joint(search)`.
  """
  if is_joint(search):
    search.finish()  # type: ignore[attr-defined]


def with_typed_errors(search: SearchFn) -> Wrapped:
  """Returns a search that never raises: a failure becomes SearchErrors.

  If `search` raises, each query gets SearchError('unavailable'). If it returns
  another number of results than there are queries, each query gets
  SearchError('bad_response'). A single result of a wrong type is replaced by
  SearchError('bad_response'). Time is not limited here; the caller limits it.
  """

  def safe(queries: Sequence[Query]) -> list[Passages | SearchError]:
    try:
      results = list(search(queries))
    except Exception as error:  # the run must go on after any error
      detail = f'{type(error).__name__}: {error}'
      return [SearchError('unavailable', detail)] * len(queries)
    if len(results) != len(queries):
      detail = f'{len(results)} results for {len(queries)} queries'
      return [SearchError('bad_response', detail)] * len(queries)
    return list(map(_typed, results, queries))

  return Wrapped(safe, (search,))


def _typed(result: Any, asked: Query | ToolCall) -> Any:
  """Returns a result, or a SearchError if its type is wrong.

  A Query (`asked`) needs Passages, and a ToolCall needs a ToolResult.
  """
  if isinstance(result, SearchError):
    return result
  if isinstance(asked, ToolCall):
    passages = (_passages(result.passages) if isinstance(result, ToolResult)
                and isinstance(result.text, str) else None)
    if passages is not None:
      return dataclasses.replace(result, passages=passages)
    needs = 'a ToolResult'
  else:
    passages = _passages(result)
    if passages is not None:
      return passages
    needs = 'Passages with texts and scores'
  return SearchError('bad_response', f'{needs} must be returned, but there is '
                     f'{result!r:.200}')


def _passages(values: Any) -> Passages | None:
  """Returns passages as a tuple with float scores; None if a value is wrong."""
  if not isinstance(values, list | tuple) or not all(
      isinstance(value, Passage) and isinstance(value.score, numbers.Real)
      and math.isfinite(value.score) and all(isinstance(text, str) for text in (
          value.id, value.title, value.text)) for value in values):
    return None
  return tuple(
      passage if type(passage.score) is float else dataclasses.replace(
          passage, score=float(passage.score)) for passage in values)
