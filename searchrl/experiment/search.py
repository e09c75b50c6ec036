# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Builds the search engine of `config.search`; its failures are SearchErrors.

Training, evaluation, `ask` and the search server use the engines that are built
here.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

from searchrl.data import datasets
from searchrl.encoders import embedder
from searchrl.encoders import reranker
from searchrl.evaluation import evaluator
from searchrl.models.inference import sampling
from searchrl.runtime import progress
from searchrl.search import engine_wrappers
from searchrl.search import engines as registry
from searchrl.trajectory import SearchFn

Bind = Callable[[SearchFn, Any], SearchFn]  # adds tools to (engine, corpus)

_load_encoder = embedder.cached_loader()  # compiled once a process


def engine(search: Any, corpus: Any, *, seed: int, steps: int = 0,
           load_model: Callable[..., Any] | None = None,
           field: str = 'search') -> SearchFn:
  """Builds the search engine that a field such as config.search describes.

  The engine raises no errors. The result of a failed query is a SearchError.

  Args:
    search: Field with the engine's name and options.
    corpus: Passages that are searched; None if the engine needs none.
    seed: Seed of the run.
    steps: Number of steps of the run; 0 outside of training.
    load_model: Function that loads a language model beside the policy, for
      engines that need one.
    field: Name of the field, for errors.

  Raises:
    ValueError, FileNotFoundError: The engine cannot be built.
  """
  name, options = search.engine, search.options
  try:
    with progress.phase(f'Building the search engine {name}'):
      return engine_wrappers.with_typed_errors(registry.make(
          name, corpus, seed=seed, steps=steps,
          load_encoder=_load_encoder, load_judge=reranker.load,
          load_model=load_model, **options))
  except TypeError as error:  # no such option, or a value of another kind
    raise ValueError(
        f'{field}.options must be those of {name!r}, which docs/search'
        f'.md lists, but {dict(options)} are not: {error}.') from error


def spec(search: Any, field: str = 'search') -> registry.Spec:
  """Returns the Spec of a field like config.search: its engine and traits.

  `field` is the name of the field, for errors.

  Raises:
    ValueError: There is no such engine, or an inner engine is not valid.
  """
  return registry.parse(search.engine, search.options, f'{field}.engine',
                        f'{field}.options')


def of_evaluation(config: Any) -> dict[str, Any]:
  """Returns {name of an engine in the evaluation's tables: its field}.

  A field is like config.search, with an engine and options. The result has the
  entries of evaluate.engines. If there are none, it has only evaluate.search,
  or config.search if evaluate.search names no engine.

  Raises:
    ValueError: An entry of evaluate.engines is not a dict of this form.
  """
  search = config.evaluate.get('search')
  engines = config.evaluate.get('engines') or (
      {search.engine: search} if search and search.engine else {})
  if not engines:
    return {config.search.engine: config.search}
  return {name: _through(config.search, other, f'evaluate.engines.{name}')
          for name, other in engines.items()}


def _through(search: Any, other: Any, field: str) -> Any:
  """Returns a copy of config.search with the engine and options of `other`.

  Options that are missing are {}.
  """
  named: dict[str, Any] = {'options': {}} | (
      dict(other) if hasattr(other, 'items') else {})
  if ({*named} != {'engine', 'options'} or not isinstance(named['engine'], str)
      or not hasattr(named['options'], 'items')):
    raise ValueError(
        f'{field} must be a dict with an engine, and with options if it has '
        "any, such as {'engine': 'bm25', 'options': {}}, but is "
        f'{getattr(other, "to_dict", lambda: other)()!r}.')
  result = search.copy_and_resolve_references()
  with result.unlocked():
    result.engine, result.options = named['engine'], named['options']
  return result


def evaluation_needs_corpus(config: Any) -> bool:
  """Returns whether an engine of an evaluation needs a corpus."""
  return any(spec(search).needs_corpus
             for search in of_evaluation(config).values())


def describe(search: Any, corpus: Any) -> dict[str, Any]:
  """Returns facts about the data that an engine searches, for a run's record.

  Args:
    search: A field such as config.search.
    corpus: Passages that are searched, or None.

  Returns:
    A dict with 'engine', the engine's name. With a corpus, it has 'corpus', the
    digest of the corpus, and 'passages', their number. An index adds facts such
    as its digest and recall, under 'index' if it is on the disk. An engine that
    calls others adds 'engines', a list of their facts.
  """
  return registry.describe(search.engine, corpus, search.options,
                           load_encoder=_load_encoder)


def describe_all(through: Mapping[str, Any],
                 sets: Sequence[datasets.Dataset]) -> dict[str, Any]:
  """Returns the facts of `describe` for each set: {name of a set: facts}.

  With several engines, it returns {name of an engine: {name of a set: facts}}.

  Args:
    through: Engines, from `of_evaluation`.
    sets: Sets of questions, with their corpora.
  """
  corpora = {id(dataset.corpus): dataset.corpus for dataset in sets}
  described = {}
  for name, search in through.items():
    facts = {key: describe(search, corpus)
             for key, corpus in corpora.items()}  # a shared one: once
    described[name] = {
        dataset.name: facts[id(dataset.corpus)] for dataset in sets}
  return described if len(described) > 1 else next(iter(described.values()))


def settings(search: Any) -> dict[str, Any]:
  """Returns an engine's name, as 'engine', and the options that matter.

  Options that do not change results are left out: paths and addresses of data.

  Args:
    search: A field such as config.search.
  """
  return registry.settings(search.engine, search.options)


def engines(search: Any, sets: Sequence[datasets.Dataset], *, seed: int,
            bind: Bind = lambda search, corpus: search) -> list[SearchFn]:
  """Returns the engine of each set. Sets with the same corpus share an engine.

  Args:
    search: A field such as config.search.
    sets: Sets of questions.
    seed: Seed of the engines.
    bind: Function that adds other tools to an engine; see `toolsets.binder`.
  """
  corpora = {id(dataset.corpus): dataset.corpus for dataset in sets}
  by_corpus = {key: bind(engine(search, corpus, seed=seed), corpus)
               for key, corpus in corpora.items()}
  return [by_corpus[id(dataset.corpus)] for dataset in sets]


def cases(through: Mapping[str, Any], sets: Sequence[datasets.Dataset],
          options: Any, *, seed: int, rollout: Any = None,
          bind: Bind = lambda search, corpus: search
          ) -> list[evaluator.EvalCase]:
  """Returns the evaluations to run: every set with each engine and decoding.

  A decoding other than 'greedy' has only the questions in `few` of its set.
  With the option `noise`, the first set and the set about famous facts are also
  evaluated with random passages, which shows whether answers come from
  retrieval. The first set should then score about 0, and famous facts the
  fraction that the policy knows.

  Args:
    through: Engines, from `of_evaluation`.
    sets: Sets of questions to evaluate on.
    options: The field config.evaluate, whose decodings, noise and score are
      read.
    seed: Seed of the engines.
    rollout: The field config.rollout, whose temperature, top_k, top_p and min_p
      sampled answers have. None: temperature 1, and all tokens.
    bind: Function that adds other tools to an engine; see `toolsets.binder`.
  """
  drawing: dict[str, Any] = {'temperature': 1.0} if rollout is None else dict(
      temperature=rollout.temperature, truncation=sampling.Truncation(
          rollout.top_k, rollout.top_p, rollout.min_p))

  def few(dataset: datasets.Dataset) -> datasets.Dataset:
    return dataclasses.replace(
        dataset, questions=dataset.few or dataset.questions)

  return [
      evaluator.EvalCase(dataset if decoding == 'greedy' else few(dataset),
                         name, search, decoding, score=options.score,
                         drawing=drawing)
      for name, other in through.items()
      for dataset, search in zip(
          sets, engines(other, sets, seed=seed, bind=bind))
      for decoding in options.decodings
  ] + [
      evaluator.EvalCase(
          few(dataset), 'noise', bind(engine_wrappers.with_typed_errors(
              registry.make('noise', dataset.corpus, seed=seed)),
                                      dataset.corpus), 'greedy',
          score=options.score)
      for number, dataset in enumerate(sets)
      if options.noise and dataset.corpus is not None and (
          number == 0 or dataset.is_common and dataset.name == 'famous')]
