# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Builds the search engine of `config.search`, with typed errors.

Training, evaluation, `ask` and the search server use the engines that are built
here.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import difflib
from typing import Any

from searchrl.data import datasets
from searchrl.encoders import embedder
from searchrl.encoders import reranker
from searchrl.evaluation import evaluator
from searchrl.search import engines as registry
from searchrl.search import engine_wrappers
from searchrl.search.simulated import writers
from searchrl.trajectory import SearchFn

_load_encoder = embedder.cached_loader()  # compiled once a process


def engine(search: Any, corpus: Any, *, seed: int, steps: int = 0,
           load_writer: writers.LoadWriter | None = None) -> SearchFn:
  """Builds the engine of a config; its failures are SearchErrors.

  Args:
    search: The field config.search.
    corpus: The passages; None unless the engine `needs_corpus`.
    seed: Seed of random and of simulated passages.
    steps: Number of steps of the run, for the curriculum of simulated passages.
    load_writer: Function that loads the model that writes simulated passages,
      in this process.

  Raises:
    ValueError, FileNotFoundError: The engine cannot be built.
  """
  try:
    return engine_wrappers.with_typed_errors(registry.make(
        search.engine, corpus, seed=seed, steps=steps,
        load_encoder=_load_encoder, load_judge=reranker.load,
        load_writer=load_writer, **search.options))
  except TypeError as error:  # no such option, or a value of another kind
    raise ValueError(
        f'search.options must be those of {search.engine!r}, which docs/search'
        f'.md lists, but {dict(search.options)} are not: {error}.') from error


def check(search: Any, field: str = 'search') -> None:
  """Raises a ValueError for an engine or an option that does not exist.

  Args:
    search: The field config.search, or another engine with its options. No
      engine at all is accepted.
    field: Name of the config field, for the error.
  """
  if search.get('engine'):
    _check(search.engine, search.options, f'{field}.engine', f'{field}.options')


def _check(name: str, options: Mapping[str, Any], engine_field: str,
           field: str) -> None:
  """Checks an engine and the engines that it is built over.

  Args:
    name: Name of the engine.
    options: Options of the engine.
    engine_field: Config field of the name.
    field: Config field of the options.
  """
  engine = registry.find(name, engine_field)
  legal = registry.options_of(engine, options)
  unknown = [option for option in options
             if legal is not None and option not in legal]
  if unknown:
    near = difflib.get_close_matches(unknown[0], legal, n=1)
    known = 'Remove it.' if ':' in name else 'docs/search.md lists all.'
    hint = f'Did you mean {near[0]}?' if near else known
    raise ValueError(
        f'{field} must be those of {name!r}, which are '
        f'{", ".join(legal) or "none"}, but {unknown[0]!r} is given. {hint}')
  registry.check_given(name, engine, options, field)
  for spec in registry.inner_specs(name, options):
    if hasattr(spec, 'items') and 'name' in spec:  # else `make` refuses it
      inner = {key: spec[key] for key in spec if key != 'name'}
      inner_field = f'{field}.{engine.inner}'
      _check(spec['name'], inner, inner_field, inner_field)


def of_evaluation(config: Any) -> dict[str, Any]:
  """Returns the engines of an evaluation: {name in tables: config.search}.

  The default is the engine of training. evaluate.search names another one, and
  evaluate.engines names several.
  """
  own = config.evaluate.get('search')
  several = config.evaluate.get('engines') or (
      {own.engine: own} if own and own.engine else {})
  if not several:
    return {config.search.engine: config.search}
  return {name: _through(config.search, one) for name, one in several.items()}


def _through(search: Any, own: Any) -> Any:
  """Returns config.search with another engine."""
  result = search.copy_and_resolve_references()
  with result.unlocked():
    result.engine, result.options = own.engine, own.options
  return result


def needs_corpus(search: Any) -> bool:
  """Returns whether a corpus must be loaded for the engine of a config."""
  return registry.needs_corpus(search.engine, search.options)


def is_remote(search: Any) -> bool:
  """Returns whether the engine of a config waits for a network."""
  return registry.is_remote(search.engine, search.options)


def lasts_as_the_run(search: Any) -> bool:
  """Returns whether results of a step depend on train.num_steps."""
  return registry.lasts_as_the_run(search.engine, search.options)


def model_options(search: Any) -> dict[str, Any] | None:
  """Returns the options of the model that writes in this process, or None."""
  return registry.model_options(search.engine, search.options)


def describe(search: Any, corpus: Any) -> dict[str, Any]:
  """Returns the record of what a run searches: digests, index recall."""
  return registry.describe(search.engine, corpus, search.options,
                          load_encoder=_load_encoder)


def engines(search: Any, sets: Sequence[datasets.Dataset], *, seed: int
           ) -> list[SearchFn]:
  """Returns the engine of each set; sets over one corpus share one."""
  found = {}
  for dataset in sets:
    if id(dataset.corpus) not in found:
      found[id(dataset.corpus)] = engine(search, dataset.corpus, seed=seed)
  return [found[id(dataset.corpus)] for dataset in sets]


def cases(through: Mapping[str, Any], sets: Sequence[datasets.Dataset],
          options: Any, *, seed: int) -> list[evaluator.EvalCase]:
  """Returns every set in each decoding, and some with random passages.

  Random passages, for the first set and for famous facts, show whether answers
  come from retrieval: the first set should then score about 0, and famous facts
  the share that the policy knows without a search.

  Args:
    through: Engines, from `of_evaluation`.
    sets: Sets of questions to evaluate on.
    options: The field config.evaluate, whose decodings and noise are read.
    seed: Seed of random passages.
  """
  def few(dataset):
    return dataclasses.replace(
        dataset, questions=dataset.few or dataset.questions)

  result = []
  for name, search in through.items():
    for dataset, found in zip(sets, engines(search, sets, seed=seed)):
      result += [evaluator.EvalCase(
          dataset if decoding == 'greedy' else few(dataset), name, found,
          decoding) for decoding in options.decodings]
  with_noise = [dataset for n, dataset in enumerate(sets)
                if options.noise and dataset.corpus is not None
                and (n == 0 or dataset.is_common and dataset.name == 'famous')]
  for dataset in with_noise:
    found = engine_wrappers.with_typed_errors(
        registry.make('noise', dataset.corpus, seed=seed))
    result.append(evaluator.EvalCase(few(dataset), 'noise', found, 'greedy'))
  return result
