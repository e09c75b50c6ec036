# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A probe that repeats the largest failed load before a run continues.

A load is a list of tasks that are sent to a server at the same time. A server
may answer one short query, but fail on the queries of a full turn: it may lack
time or memory, or have a limit. A run that probed it with one query would then
continue without searches. The largest load that failed is therefore kept, and a
run waits until a server answers it.
"""

from collections.abc import Callable, Sequence
import itertools
import threading
from typing import Any

from searchrl.trajectory import SearchError

# Answers tasks, which are hashable; a failed one gets a SearchError.
Answer = Callable[[list[Any]], Sequence[Any]]

_SHARE = 10  # one task in this many, or one alone, may fail by its own fault


class Rehearsal:
  """A record of the largest load that failed, so that it can be tried again."""

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._under_way: dict[object, list[Any]] = {}
    self._failed: list[Any] = []

  def watch(self, answer: Answer, tasks: list[Any]) -> Sequence[Any]:
    """Returns `answer(tasks)`, and remembers a load under which tasks failed.

    The load is the tasks of this call and those that other threads have in
    flight. If more than one task and more than a tenth of `tasks` fail, the
    load is remembered, unless a larger one is already.

    Args:
      answer: Function from tasks to one answer each; a failed task gets a
        SearchError.
      tasks: Tasks, such as queries.
    """
    key = object()
    with self._lock:
      self._under_way[key] = tasks
    try:
      answers = answer(tasks)
    finally:
      with self._lock:  # the load includes other threads' tasks in flight
        load = [*dict.fromkeys(itertools.chain(*self._under_way.values()))]
        del self._under_way[key]
    if _has_failed(answers):
      with self._lock:
        self._failed = max(self._failed, load, key=len)
    return answers

  def probe(self, ping: Callable[[], Any], answer: Answer) -> Any:
    """Tries whether a service answers again.

    If the small call succeeds, the load that `watch` remembers is tried, too.
    It is forgotten if it succeeds.

    Args:
      ping: Function that makes a small call.
      answer: Function that answers tasks, as for `watch`.

    Returns:
      The result of `ping`, or a SearchError if `ping` or the load fails.
    """
    reply = ping()
    load = self._failed
    if isinstance(reply, SearchError) or not load:
      return reply
    answers = answer(load)
    if _has_failed(answers):
      errors = [a for a in answers if isinstance(a, SearchError)]
      return SearchError(
          errors[0].kind, f'{len(errors)} of {len(load)} at a time failed, the '
          f'first of them: {errors[0].detail}')
    self._failed = []
    return reply


def _has_failed(answers: Sequence[Any]) -> bool:
  """Returns True if more than one task, and more than a tenth of all, failed.

  So many failures mean that the service itself is down.
  """
  failed = sum(isinstance(answer, SearchError) for answer in answers)
  return failed > max(1, len(answers) // _SHARE)
