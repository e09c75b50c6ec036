# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""`config.search` in, a search engine with typed errors out.

The only caller of `factory.make`: training, evaluation, `ask` and the search
server all use the engines that are built here.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import difflib
import inspect
from typing import Any

from searchrl.data import datasets
from searchrl.encoders import embedder
from searchrl.encoders import reranker
from searchrl.evaluation import evaluator
from searchrl.search import factory
from searchrl.search import fusion
from searchrl.search import engine_wrappers
from searchrl.search.index import bm25
from searchrl.search.index import in_memory
from searchrl.search.index import open_index
from searchrl.search.simulated import writers
from searchrl.trajectory import SearchFn

_ENGINES = ('bm25', 'dense', 'noise', 'remote', 'web',
            'simulated', 'fusion', 'rerank', 'cache')
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
    return engine_wrappers.with_typed_errors(factory.make(
        search.engine, corpus, seed=seed, steps=steps,
        load_encoder=_load_encoder, load_judge=reranker.load,
        load_writer=load_writer, **search.options))
  except TypeError as error:  # no such option, or a value of another kind
    raise ValueError(
        f'search.options must be those of {search.engine!r}, which docs/search'
        f'.md lists, but {dict(search.options)} are not: {error}.') from error


def check(search: Any, field: str = 'search') -> None:
  """Raises a ValueError for an engine or an option that there is not.

  Args:
    search: config.search, or another engine with its options; no engine passes.
    field: the config's, for the error.
  """
  if search.get('engine'):
    _check(search.engine, search.options, f'{field}.engine', f'{field}.options')


def _check(name: str, options: Mapping[str, Any], engine: str, field: str
          ) -> None:
  """Of an engine, and of those that it is built over.

  Args:
    name: of the engine.
    options: of the engine.
    engine: the field of its name.
    field: of its options.
  """
  if name not in _ENGINES:
    raise ValueError(f'{engine} must be one of {", ".join(_ENGINES)}, but is '
                     f'{name!r}.')
  takes = _takes(name, options)
  unknown = [option for option in options
             if takes is not None and option not in takes]
  if unknown:
    near = difflib.get_close_matches(unknown[0], takes, n=1)
    hint = f'Did you mean {near[0]}?' if near else 'docs/search.md lists all.'
    raise ValueError(
        f'{field} must be those of {name!r}, which are '
        f'{", ".join(takes) or "none"}, but {unknown[0]!r} is given. {hint}')
  inner = {'engines': options.get('engines', ())}
  inner['engine'] = [options['engine']] if 'engine' in options else []
  for part, specs in inner.items():
    for spec in specs:
      if hasattr(spec, 'items') and 'name' in spec:  # else refused by `factory`
        own = {key: spec[key] for key in spec if key != 'name'}
        _check(spec['name'], own, f'{field}.{part}', f'{field}.{part}')


def _takes(name: str, options: Mapping[str, Any]) -> tuple[str, ...] | None:
  """The options of an engine; None for those that check them by themselves."""
  if name == 'dense' and 'index' in options:
    return _keywords(open_index.indexed, 'index')
  return {
      'noise': (),
      'bm25': _keywords(bm25.bm25, 'index'),
      'dense': _keywords(in_memory.search, 'index', 'links', 'construction',
                         'visited', 'dim', 'n'),
      'fusion': _keywords(fusion.fused, 'engines'),
      'rerank': ('engine', 'model', 'max_length', 'batch', 'candidates'),
      'cache': ('engine', 'path', 'entries', 'index')}.get(name)


def _keywords(function: Any, *others: str) -> tuple[str, ...]:
  """The names of a function's keyword arguments that a config may set."""
  return (*others, *(p.name for p in inspect.signature(
      function).parameters.values() if p.kind is p.KEYWORD_ONLY
                     and p.name != 'load_encoder'))


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
          options: Any, *, seed: int) -> list[evaluator.EvalCase]:
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
      result += [evaluator.EvalCase(
          dataset if decoding == 'greedy' else few(dataset), name, found,
          decoding) for decoding in options.decodings]
  with_noise = [dataset for n, dataset in enumerate(sets)
                if options.noise and dataset.corpus is not None
                and (n == 0 or dataset.is_common and dataset.name == 'famous')]
  for dataset in with_noise:
    found = engine_wrappers.with_typed_errors(
        factory.make('noise', dataset.corpus, seed=seed))
    result.append(evaluator.EvalCase(few(dataset), 'noise', found, 'greedy'))
  return result
