# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""What failed together, asked once more before a run goes on.

A server may answer one short query at once, and never a whole turn: in time,
in memory, or because of a limit. A run that asked it for one query before each
sampling would go on without searches. So the largest load that failed is kept,
and a run waits until that is answered.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
import itertools
import threading
from typing import Any, TypeVar

from searchrl.trajectory import SearchError

Task = TypeVar('Task', bound=Hashable)
Answer = Callable[[list[Task]], Sequence[Any]]  # a SearchError where it failed

_SHARE = 10  # one task of so many may fail, or one alone, by its own fault


class Rehearsal:
  """The largest load that failed; see the top of this file."""

  def __init__(self):
    self._lock = threading.Lock()
    self._under_way: dict[object, list[Task]] = {}
    self._failed: list[Task] = []

  def watch(self, answer: Answer, tasks: list[Task]) -> Sequence[Any]:
    """The answers to tasks; keeps the load if they fail together."""
    key = object()
    with self._lock:
      self._under_way[key] = tasks
    try:
      answers = answer(tasks)
    finally:
      with self._lock:  # with all that other threads ask meanwhile
        load = [*dict.fromkeys(itertools.chain(*self._under_way.values()))]
        del self._under_way[key]
    if _has_failed(answers):
      with self._lock:
        self._failed = max(self._failed, load, key=len)
    return answers

  def probe(self, ping: Callable[[], Any], answer: Answer) -> Any:
    """What `ping` returns; a SearchError if it or the load fails.

    Args:
      ping: makes a small call.
      answer: answers the tasks of the load.
    """
    found = ping()
    load = self._failed
    if isinstance(found, SearchError) or not load:
      return found
    answers = answer(load)
    if _has_failed(answers):
      errors = [a for a in answers if isinstance(a, SearchError)]
      return SearchError(
          errors[0].kind, f'{len(errors)} of {len(load)} at a time failed, the '
          f'first of them: {errors[0].detail}')
    self._failed = []
    return found


def _has_failed(answers: Sequence[Any]) -> bool:
  """Whether more than a few have, which may be due to what they asked."""
  failed = sum(isinstance(answer, SearchError) for answer in answers)
  return failed > max(1, len(answers) // _SHARE)
