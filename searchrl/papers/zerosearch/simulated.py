# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A search engine whose documents come from a writer, with scheduled noise.

A config names this engine as 'searchrl.papers.zerosearch.simulated:make'.

Source: ZeroSearch, arXiv:2505.04588, section 3. Its code looks up the question
and answer of a query by the number of the query's row, but counts only the rows
that search. If a row does not search, the queries of later rows therefore get
the question and answer of another row. Here each query carries its own.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import time
from typing import Any

from searchrl.papers.zerosearch import completions
from searchrl.papers.zerosearch import document_oracle
from searchrl.papers.zerosearch import documents
from searchrl.papers.zerosearch import model_writer
from searchrl.papers.zerosearch import simulator_prompts
from searchrl.runtime import option_rules
from searchrl.search import engine_wrappers
from searchrl.search import engines
from searchrl.search.corpus import Corpus
from searchrl.search.remote import transport
from searchrl.trajectory import Passage, Passages, Query, SearchError

MALFORMED = ('nothing', 'error')
WRITERS = ('oracle', 'served', 'model')


@dataclasses.dataclass(frozen=True)
class Curriculum:
  """The probability that a query is answered with noisy documents.

    p(i) = start + (base^(i / steps) - 1) / (base - 1) (end - start)

  At step `steps` and later, the probability is `end`. The noise grows where
  start is below end, falls where it is above, and is constant where both are
  equal. With both at 0, there is no noise.

  Source: ZeroSearch, arXiv:2505.04588, eq. 1, where base is 4.

  Attributes:
    start: Probability at step 0, p_s in the paper, in [0, 1].
    end: Probability at step `steps`, p_e in the paper, in [0, 1].
    base: Base of the exponential, b in the paper, above 0. The noise changes
      mostly late if it is above 1, mostly early if below 1, evenly if 1.
    steps: Number of steps of the run, m in the paper, at least 1.

  Raises:
    ValueError: A field is out of range.
  """

  start: float = 0.0
  end: float = 0.5
  base: float = 4.0
  steps: int = 1

  def __post_init__(self):
    option_rules.check(
        'search.options.curriculum.',
        ('start', self.start, 0 <= self.start <= 1, 'in [0, 1]'),
        ('end', self.end, 0 <= self.end <= 1, 'in [0, 1]'),
        ('base', self.base, 0 < self.base < float('inf'), 'above 0 and finite'),
        ('steps', self.steps, self.steps >= 1, 'at least 1'))

  def noise(self, step: int) -> float:
    """Returns the probability of noise, p, at a step counted from 0."""
    part = min(step, self.steps) / self.steps
    if self.base != 1:
      part = (self.base ** part - 1) / (self.base - 1)
    return self.start + part * (self.end - self.start)


class Simulated:
  """A search engine that a writer simulates, as in ZeroSearch.

  It is a SearchFn. The writer, a language model or an oracle, is asked for
  useful or for noisy documents. Ids of passages begin with 'useful' or 'noisy'.
  `pop` returns metrics, and `wait` waits while the writer is out of service.

  Args:
    writer: Function that writes the documents of all queries of a call.
    curriculum: Curriculum, with the probability of noisy documents of a step.
    seed: Seed of the run.
    malformed: Result for a text that `documents.read` rejects:
      'nothing' returns no passages, and 'error' returns a SearchError, which
      ends the trajectory.
    titled: Flag that says that a document may begin with its title in double
      quotes. If False, passages have no titles.

  Raises:
    ValueError: `malformed` is neither of the two.
  """

  def __init__(self, writer: documents.Writer,
               curriculum: Curriculum, *, seed: int,
               malformed: str = 'nothing', titled: bool = False):
    if malformed not in MALFORMED:
      raise ValueError(f'search.options.malformed must be one of {MALFORMED}, '
                       f'but is {malformed!r}.')
    self._writer, self._curriculum, self._seed = writer, curriculum, seed
    self._malformed, self._titled = malformed, titled
    self._counts = engine_wrappers.Counts()
    self._noise = curriculum.noise(0)  # at the latest step

  def __call__(
      self, queries: Sequence[Query]) -> list[Passages | SearchError]:
    """Returns written passages for each query, or none for a blank query.

    Raises:
      ValueError: The writer did not return one text per query.
    """
    tasks = {place: self._task(query) for place, query in enumerate(queries)
             if query.text.strip() and query.top_k > 0}
    results: list[Passages | SearchError] = [()] * len(queries)
    if not tasks:
      return results
    start = time.perf_counter()
    texts = self._writer([*tasks.values()])
    self._counts.add(secs=time.perf_counter() - start)
    if len(texts) != len(tasks):
      raise ValueError(f'{len(texts)} texts for {len(tasks)} queries')
    for (place, task), text in zip(tasks.items(), texts):
      results[place] = self._passages(task, text)
    return results

  def pop(self) -> dict[str, float]:
    """Returns the metrics since the last call: noise, malformed texts, cost.

    `simulated/noise` is the probability of noise at the latest step. The rates
    are fractions of the queries. `simulated/secs` is the time spent writing.
    """
    counts = self._counts.pop()
    queries = max(counts['queries'], 1)
    return {
        'simulated/noise': self._noise,
        'simulated/noisy_rate': counts['noisy'] / queries,
        'simulated/malformed_rate': counts['malformed'] / queries,
        'simulated/secs': counts['secs'],
    } | engine_wrappers.pop(self._writer)

  def wait(self) -> None:
    """Waits until the writer can answer requests."""
    engine_wrappers.wait(self._writer)

  def _task(self, query: Query) -> documents.Task:
    self._noise = noise = self._curriculum.noise(query.step)
    task = documents.task(query, noise=noise, seed=self._seed)
    self._counts.add(queries=1, noisy=not task.useful)
    return task

  def _passages(self, task: documents.Task, text: str | SearchError
               ) -> Passages | SearchError:
    if isinstance(text, SearchError):
      return text
    try:
      texts = documents.read(text, task.query.top_k)
    except documents.Malformed as error:
      self._counts.add(malformed=1)
      return () if self._malformed == 'nothing' else SearchError(
          'malformed', str(error))
    return tuple(self._passage(task, text) for text in texts)

  def _passage(self, task: documents.Task, text: str) -> Passage:
    digest = hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:16]
    quality = 'useful' if task.useful else 'noisy'
    return Passage(f'{quality}-{digest}', *(
        documents.titled(text) if self._titled else ('', text)))


def _deadline_secs(options: engines.Options, queries: int) -> float:
  """Returns the longest time, in seconds, that a writer behind a server takes.

  It is the deadline of a request, times the number of rounds of parallel
  requests that the queries need. It is 0 for other writers.
  """
  if options.get('writer') != 'served':
    return 0.0
  connections = options.get('connections', completions.CONNECTIONS)
  secs = options.get('deadline_secs', transport.RetryPolicy.deadline_secs)
  return secs * -(-queries // connections)


def _local_model(options: engines.Options) -> engines.LocalModel | None:
  """Returns the settings of the model that writes in this process, or None.

  They say how much memory the model needs. Other writers have none.
  """
  if options.get('writer') != 'model':
    return None
  names = [field.name for field in dataclasses.fields(model_writer.Model)]
  options = {**options, **simulator_prompts.of_simulator(
      options.get('simulator', ''), 'model')}
  model = model_writer.Model(
      **{name: options[name] for name in names if name in options})
  return engines.LocalModel(
      model.path, field=model_writer.FIELD, slots=model.slots,
      length=model.length, dtype=model.dtype, cache_tokens=model.cache_tokens,
      shape=simulator_prompts.SHAPES.get(model.path, ''))


@engines.traits(
    needs_corpus=lambda options: options.get('writer') == 'oracle',
    is_remote=lambda options: options.get('writer') == 'served',
    depends_on_num_steps=lambda options: not (
        options.get('curriculum') or {}).get('steps'),
    deadline_secs=_deadline_secs, local_model=_local_model)
def make(corpus: Corpus, *, seed: int, steps: int,
         load_model: model_writer.LoadModel | None, writer: str,
         curriculum: Mapping[str, float] | None = None,
         malformed: str = 'nothing', titled: bool = False, **options: Any
         ) -> Simulated:
  """Builds a simulated search, in which a writer produces the documents.

  Args:
    corpus: Passages that the writer 'oracle' uses; None for other writers.
    seed: Seed of the run.
    steps: Number of steps of the run, for a curriculum without `steps`.
    load_model: Function that loads a second model in this process.
    writer: Name of the writer, one of WRITERS. 'oracle' knows the corpus. The
      others are language models, which are served over HTTP ('served') or
      sample in this process ('model').
    curriculum: Fields of `Curriculum`. If its `steps` is 0 or missing, the
      number of steps of the run is used.
    malformed: Result for a malformed text, as in `Simulated`.
    titled: Whether the documents have titles. The oracle then writes them. A
      language model must be prompted or tuned to write them.
    **options: Options of the writer. The oracle has none. The options of the
      language models are `simulator`, `prompts` and the arguments of
      `completions.Completions` ('served') or `model_writer.Model` ('model').
      See docs/search.md.

  Raises:
    ValueError: The writer is not available here, or an option is out of range.
    TypeError: The writer does not have an option that was given.
  """
  course: dict[str, Any] = dict(curriculum or {})
  course['steps'] = course.get('steps') or max(steps, 1)
  return Simulated(
      _writer(writer, corpus, load_model, titled, options),
      Curriculum(**course), seed=seed, malformed=malformed, titled=titled)


def _writer(name: str, corpus: Corpus,
            load_model: model_writer.LoadModel | None, titled: bool,
            options: dict[str, Any]) -> documents.Writer:
  """Makes the writer that a config names: one of WRITERS."""
  if name == 'oracle':
    return document_oracle.oracle(corpus, titled=titled, **options)
  if name not in WRITERS:
    raise ValueError(
        f'search.options.writer must be one of {WRITERS}, but is {name!r}.')
  options |= simulator_prompts.of_simulator(options.pop('simulator', ''), name)
  options['prompts'] = simulator_prompts.find(
      options.get('prompts', 'zerosearch'))
  if name == 'served':
    return completions.Completions(**options)
  if load_model is None:
    raise ValueError(
        "search.options.writer must be 'served' or 'oracle' outside of a "
        "training, but is 'model'. Set evaluate.search.engine to another "
        'engine, or serve the model and give its url.')
  return model_writer.ModelWriter(load_model, **options)
