# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""`config.search` in, a search engine with typed errors out.

The only caller of `factory.make`: training, evaluation, `ask` and the search
server all use the engines that are built here.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from searchrl.data import datasets
from searchrl.encoders import embedder
from searchrl.encoders import reranker
from searchrl.evaluation import suite
from searchrl.search import factory
from searchrl.search import wrapped
from searchrl.search.simulated import writers
from searchrl.trajectory import SearchFn

_load_encoder = embedder.cached_loader()  # compiled once a process


def engine(search: Any, corpus: Any, *, seed: int, steps: int = 0,
           load_writer: writers.LoadWriter | None = None) -> SearchFn:
  """The engine of a config over a corpus; its failures are SearchErrors.

  Args:
    search: config.search.
    corpus: the passages; None unless the engine `needs_corpus`.
    seed: of random passages, and of simulated ones.
    steps: of the run; for the curriculum of simulated ones.
    load_writer: loads the model that writes those, in this process.

  Raises:
    ValueError, FileNotFoundError: the engine cannot be built.
  """
  try:
    return wrapped.with_typed_errors(factory.make(
        search.engine, corpus, seed=seed, steps=steps,
        load_encoder=_load_encoder, load_judge=reranker.load,
        load_writer=load_writer, **search.options))
  except TypeError as error:
    if 'argument' not in str(error):
      raise
    raise ValueError(
        f'search.options must be those of {search.engine!r}, which docs/search'
        f'.md lists, but {dict(search.options)} are not: {error}.') from error


def of_evaluation(config: Any) -> dict[str, Any]:
  """What answers are judged through: {name in tables: config.search}.

  By default the engine of training; evaluate.search is another, and
  evaluate.engines are several.
  """
  own = config.evaluate.get('search')
  several = config.evaluate.get('engines') or (
      {own.engine: own} if own and own.engine else {})
  if not several:
    return {config.search.engine: config.search}
  return {name: _through(config.search, one) for name, one in several.items()}


def _through(search: Any, own: Any) -> Any:
  """config.search with another engine."""
  result = search.copy_and_resolve_references()
  with result.unlocked():
    result.engine, result.options = own.engine, own.options
  return result


def needs_corpus(search: Any) -> bool:
  """Whether a corpus has to be loaded for the engine of a config."""
  return factory.needs_corpus(search.engine, search.options)


def is_remote(search: Any) -> bool:
  """Whether the engine of a config waits for a network."""
  return factory.is_remote(search.engine, search.options)


def lasts_as_the_run(search: Any) -> bool:
  """Whether what is found at a step depends on train.num_steps."""
  return factory.lasts_as_the_run(search.engine, search.options)


def model_options(search: Any) -> dict[str, Any] | None:
  """Options of the model that writes in the run's process, if there is one."""
  return factory.model_options(search.engine, search.options)


def describe(search: Any, corpus: Any) -> dict[str, Any]:
  """The record of what a run searches: digests, the recall of an index."""
  return factory.describe(search.engine, corpus, search.options,
                          load_encoder=_load_encoder)


def engines(search: Any, sets: Sequence[datasets.Dataset], *, seed: int
           ) -> list[SearchFn]:
  """The engine of each set; sets over one corpus share one."""
  found = {}
  for dataset in sets:
    if id(dataset.corpus) not in found:
      found[id(dataset.corpus)] = engine(search, dataset.corpus, seed=seed)
  return [found[id(dataset.corpus)] for dataset in sets]


def cases(through: Mapping[str, Any], sets: Sequence[datasets.Dataset],
          options: Any, *, seed: int) -> list[suite.EvalCase]:
  """Every set in each decoding; the first, and famous, with random passages.

  These show whether answers come from retrieval: the first set should score
  about 0, and famous facts what the policy knows without.

  Args:
    through: engines, from `of_evaluation`.
    sets: to evaluate on.
    options: config.evaluate, whose decodings and noise are read.
    seed: of random passages.
  """
  def few(dataset):
    return dataclasses.replace(
        dataset, questions=dataset.few or dataset.questions)

  result = []
  for name, search in through.items():
    for dataset, found in zip(sets, engines(search, sets, seed=seed)):
      result += [suite.EvalCase(
          dataset if decoding == 'greedy' else few(dataset), name, found,
          decoding) for decoding in options.decodings]
  with_noise = [dataset for n, dataset in enumerate(sets)
                if options.noise and dataset.corpus is not None
                and (n == 0 or dataset.is_common and dataset.name == 'famous')]
  for dataset in with_noise:
    found = wrapped.with_typed_errors(
        factory.make('noise', dataset.corpus, seed=seed))
    result.append(suite.EvalCase(few(dataset), 'noise', found, 'greedy'))
  return result
