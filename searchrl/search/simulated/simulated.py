# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A SearchFn whose documents a writer produces, with noise on a schedule.

Source: ZeroSearch, arXiv:2505.04588, section 3. Its code looks up question and
answer by the query's index among the rows that search. As soon as one row does
not search, it uses the question and answer of a different row. Here each query
carries its own question and answer.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
import hashlib
import threading
import time

from searchrl.search import engine_wrappers
from searchrl.search.simulated import simulated_documents
from searchrl.search.simulated.curriculum import Curriculum
from searchrl.trajectory import Passage, Passages, Query, SearchError

MALFORMED = ('nothing', 'error')


class Simulated:
  """A SearchFn with the methods `pop` and `wait`.

  The id of a passage begins with 'useful' or 'noisy', the quality that was
  requested from the writer.

  Args:
    writer: Function that writes the documents of all queries of a call.
    curriculum: Probability of noisy documents for each step.
    seed: Seed of the run.
    malformed: Result for a text that `simulated_documents.read` rejects:
      'nothing' returns no passages, and 'error' returns a SearchError, which
      ends the trajectory.
    titled: Flag that says that a document may begin with its title in double
      quotes. If False, passages have no titles.

  Raises:
    ValueError: `malformed` is neither of the two.
  """

  def __init__(self, writer: simulated_documents.Writer,
               curriculum: Curriculum, *, seed: int,
               malformed: str = 'nothing', titled: bool = False):
    if malformed not in MALFORMED:
      raise ValueError(f'search.options.malformed must be one of {MALFORMED}, '
                       f'but is {malformed!r}.')
    self._writer, self._curriculum, self._seed = writer, curriculum, seed
    self._malformed, self._titled = malformed, titled
    self._lock, self._counts = threading.Lock(), collections.Counter()
    self._noise = curriculum.noise(0)

  def __call__(
      self, queries: Sequence[Query]) -> list[Passages | SearchError]:
    """Returns written passages for each query; none for a blank query.

    Raises:
      ValueError: The writer returned another number of texts than queries.
    """
    asked = {place: self._task(query) for place, query in enumerate(queries)
             if query.text.strip() and query.top_k > 0}
    if not asked:
      return [()] * len(queries)
    start = time.perf_counter()
    texts = list(self._writer([*asked.values()]))
    self._count(secs=time.perf_counter() - start)
    if len(texts) != len(asked):
      raise ValueError(f'{len(texts)} texts for {len(asked)} queries')
    found = {place: self._passages(task, text)
             for (place, task), text in zip(asked.items(), texts)}
    return [found.get(place, ()) for place in range(len(queries))]

  def pop(self) -> dict[str, float]:
    """Returns the metrics since the last call: noise, malformed texts, cost.

    `simulated/noise` is the probability of noise at the latest step. The rates
    are shares of the queries. `simulated/secs` is the time spent writing.
    """
    with self._lock:
      counts, self._counts = self._counts, collections.Counter()
      noise = self._noise
    queries = max(counts['queries'], 1)
    return {
        'simulated/noise': noise,
        'simulated/noisy_rate': counts['noisy'] / queries,
        'simulated/malformed_rate': counts['malformed'] / queries,
        'simulated/secs': counts['secs'],
    } | engine_wrappers.pop(self._writer)

  def wait(self) -> None:
    """Waits until the writer is in service."""
    engine_wrappers.wait(self._writer)

  def _task(self, query: Query) -> simulated_documents.Task:
    noise = self._curriculum.noise(query.step)
    with self._lock:
      self._noise = noise
    task = simulated_documents.task(query, noise=noise, seed=self._seed)
    self._count(queries=1, noisy=not task.useful)
    return task

  def _passages(self, task: simulated_documents.Task, text: str | SearchError
               ) -> Passages | SearchError:
    if isinstance(text, SearchError):
      return text
    try:
      texts = simulated_documents.read(text, task.query.top_k)
    except simulated_documents.Malformed as error:
      self._count(malformed=1)
      return () if self._malformed == 'nothing' else SearchError(
          'malformed', str(error))
    return tuple(self._passage(task, text) for text in texts)

  def _passage(self, task: simulated_documents.Task, text: str) -> Passage:
    digest = hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:16]
    quality = 'useful' if task.useful else 'noisy'
    title, text = (
        simulated_documents.titled(text) if self._titled else ('', text))
    return Passage(f'{quality}-{digest}', title, text)

  def _count(self, **numbers: float) -> None:
    with self._lock:
      self._counts.update(numbers)
