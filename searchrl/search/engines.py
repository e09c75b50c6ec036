# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Builds a SearchFn from the name of an engine and a corpus, and describes it.

`ENGINES` has the engines of `builtin_engines.py`. Every other name is
'module:function', a function of the user that is called in the same way
(docs/extend.md).
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import hashlib
import inspect
import json
from typing import Any

from searchrl.runtime import plugins
from searchrl.search import builtin_engines
from searchrl.search.builtin_engines import Engine, Options
from searchrl.search.corpus import Corpus
from searchrl.search.index import open_index
from searchrl.search.simulated import writers
from searchrl.trajectory import SearchFn

ENGINES = builtin_engines.ENGINES


def traits(**values: Any) -> Callable[[Callable], Callable]:
  """Returns a decorator that sets traits of a user's engine.

  Without it the engine needs a corpus, is not remote, and may read more of a
  query than its text, so that a cache around it is refused.

  Args:
    **values: Fields of `Engine`, such as needs_corpus=False or is_remote=True.

  Raises:
    ValueError: A name is no trait of an engine.
  """
  names = [field.name for field in dataclasses.fields(Engine)
           if field.name != 'make']
  for name in values:
    if name not in names:
      raise ValueError(f'A trait of an engine must be one of '
                       f'{", ".join(names)}, but is {name!r}.')

  def mark(function):
    function.engine_traits = values
    return function

  return mark


def find(name: str, field: str = 'search.engine') -> Engine:
  """Returns the engine of a name: a built-in one, or a user's function.

  Args:
    name: A key of ENGINES, or 'module:function'.
    field: Config field that has the name, for the error.

  Raises:
    ValueError: There is no such engine.
  """
  if name in ENGINES:
    return ENGINES[name]
  if ':' not in str(name):
    raise ValueError(f"{field} must be one of {', '.join(ENGINES)}, or "
                     f"'module:function' of your own, but is {name!r}.")
  function = plugins.resolve(name, field=field, ours=', '.join(ENGINES))
  own = getattr(function, 'engine_traits', {})
  return Engine(function, **dict(
      reads_text_alone=False, is_identified=False) | own)


def options_of(engine: Engine, options: Options) -> tuple[str, ...] | None:
  """Returns the names of an engine's options; None if it checks them itself."""
  if engine.takes is not None:
    return engine.takes(options) if callable(engine.takes) else engine.takes
  parameters = list(inspect.signature(engine.make).parameters.values())[1:]
  if any(p.kind is p.VAR_KEYWORD for p in parameters):
    return None
  return tuple(p.name for p in parameters
               if p.name not in builtin_engines.FROM_THE_RUN)


def check_given(name: str, engine: Engine, options: Options,
                field: str = 'search.options') -> None:
  """Raises a ValueError if an option without a default is not given."""
  parameters = list(inspect.signature(engine.make).parameters.values())[1:]
  required = [p.name for p in parameters if p.default is p.empty
              and p.name not in builtin_engines.FROM_THE_RUN
              and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
  if not set(required) <= set(options):
    hint = (' An engine is given as dict(name=..., **options).'
            if engine.inner else '')
    raise ValueError(f'{field} of {name!r} must have {" and ".join(required)}, '
                     f'but have {sorted(options)}.{hint}')


def make(
    name: str,
    corpus: Corpus | None,
    *,
    seed: int = 0,
    steps: int = 0,
    load_encoder: open_index.LoadEncoder | None = None,
    load_judge: builtin_engines.LoadJudge | None = None,
    load_writer: writers.LoadWriter | None = None,
    **options: Any,
) -> SearchFn:
  """Builds an engine by its name.

  A search returns at most top_k passages, and at most the whole corpus.

  Args:
    name: Key of ENGINES, or 'module:function' of a user.
    corpus: Passages that are searched; None if `needs_corpus` is False.
    seed: Seed of 'noise', 'simulated' and a user's engine that takes it.
    steps: Number of steps of the run, for the curriculum of 'simulated'.
    load_encoder: Function that loads the text encoder of 'dense'; see
      `open_index.LoadEncoder`.
    load_judge: Function that loads the cross-encoder of 'rerank'; see
      `reranker.load`.
    load_writer: Function that loads the model that writes for 'simulated'.
    **options: Options of the engine, which docs/search.md lists.

  Raises:
    ValueError: There is no engine of that name, an option is missing or out of
      range, or a user's function returns no search.
    TypeError: The engine has no such option.
  """
  engine = find(name)
  check_given(name, engine, options)
  _leaves(name, options)  # raises its errors before any index is loaded
  common = dict(seed=seed, steps=steps, load_encoder=load_encoder,
                load_judge=load_judge, load_writer=load_writer)

  def make_inner(spec):
    inner, inner_options = _named(spec)
    return make(inner, corpus, **common, **inner_options)

  def fingerprint(spec):
    return _fingerprint(*_named(spec), corpus, load_encoder)

  from_the_run = common | dict(make_inner=make_inner, fingerprint=fingerprint)
  parameters = inspect.signature(engine.make).parameters
  given = {key: from_the_run[key] for key in builtin_engines.FROM_THE_RUN
           if key in parameters}
  search = engine.make(corpus, **given, **options)
  if not callable(search):
    raise ValueError(f'{name} must return a function of queries, but returned '
                     f'{search!r}.')
  return search


def needs_corpus(name: str, options: Options) -> bool:
  """Returns whether an engine, or a part of it, searches a corpus here."""
  return any(_trait('needs_corpus', *leaf) for leaf in _leaves(name, options))


def is_remote(name: str, options: Options) -> bool:
  """Returns whether an engine, or a part of it, waits for a network."""
  return any(_trait('is_remote', *leaf) for leaf in _leaves(name, options))


def reads_text_alone(name: str, options: Options) -> bool:
  """Returns whether results depend on a query's text and top_k alone.

  Otherwise they also depend on who asks: the question, the step, the sample,
  the turn or the turns before. A cache around such an engine is an error.
  """
  return all(_trait('reads_text_alone', *leaf)
             for leaf in _leaves(name, options))


def lasts_as_the_run(name: str, options: Options) -> bool:
  """Returns whether a curriculum takes as many steps as the run has."""
  return any(_trait('lasts_as_the_run', *leaf)
             for leaf in _leaves(name, options))


def deadline_secs(name: str, options: Options, queries: int) -> float:
  """Returns the seconds that an engine gives its servers; 0: it asks none.

  Args:
    name: Name of the engine.
    options: Options of the engine.
    queries: Number of queries at a time. Each is one request to a writer.
  """
  return max(find(leaf).deadline_secs(own, queries)
             for leaf, own in _leaves(name, options))


def model_options(name: str, options: Options) -> dict[str, Any] | None:
  """Returns the options of the model that writes in the run's process.

  Returns:
    The options of the first such model, or None if there is none.

  Raises:
    ValueError: The model has the name of no published simulator.
  """
  found = (find(leaf).model_options(own)
           for leaf, own in _leaves(name, options))
  return next((model for model in found if model is not None), None)


def describe(
    name: str,
    corpus: Corpus | None,
    options: Options,
    *,
    load_encoder: open_index.LoadEncoder | None = None,
) -> dict[str, Any]:
  """Returns what is searched, for a run's record: digests, index recall."""
  facts = {'engine': name}
  if corpus is not None:
    facts |= {'corpus': corpus.digest, 'passages': len(corpus)}
  facts |= find(name).describe(corpus, options, load_encoder)
  if specs := _inner_specs(name, options):
    facts['engines'] = [
        describe(inner, corpus, inner_options, load_encoder=load_encoder)
        for inner, inner_options in specs]
  return facts


def inner_specs(name: str, options: Options) -> list[Any]:
  """Returns the specs, as given, of the engines that one is built over."""
  option = find(name).inner
  if option not in options:
    return []
  specs = options[option]
  return [specs] if option == 'engine' else list(specs)


def _inner_specs(name: str, options: Options
                 ) -> list[tuple[str, dict[str, Any]]]:
  """Returns name and options of the engines that an engine is built over."""
  return list(map(_named, inner_specs(name, options)))


def _named(spec: Any) -> tuple[str, dict[str, Any]]:
  """Returns the name and the options of dict(name=..., **options)."""
  options = dict(spec) if hasattr(spec, 'items') else {}  # or a ConfigDict
  if 'name' not in options:
    raise ValueError('search.options must give an engine as dict(name=..., '
                     f'**options), but give {spec!r}.')
  return options.pop('name'), options


def _trait(trait: str, name: str, options: Options) -> bool:
  """Returns a trait of an engine that is built over no other."""
  value = getattr(find(name), trait)
  return bool(value(options)) if callable(value) else value


def _leaves(name: str, options: Options) -> list[tuple[str, Options]]:
  """Returns name and options of the parts that are built over no other.

  Raises:
    ValueError: A cache is built around a part that reads more than the text.
  """
  specs = _inner_specs(name, options)
  if not specs:
    return [(name, options)]
  leaves = [leaf for spec in specs for leaf in _leaves(*spec)]
  if name == 'cache':
    labels = sorted({leaf + find(leaf).label(own) for leaf, own in leaves
                     if not _trait('reads_text_alone', leaf, own)})
    if labels:
      raise ValueError(
          "search.options.engine of 'cache' must read no more of a query than "
          f'its text and top_k, but {", ".join(labels)} in it also reads '
          'who asks. Leave the cache out, or put it around the other engines.')
  return leaves


def _fingerprint(name: str, options: dict[str, Any], corpus: Corpus,
                 load_encoder: open_index.LoadEncoder | None) -> str:
  """Returns a digest of what an engine searches; '' if it cannot be known."""
  if not _trait('is_identified', name, options):
    return ''
  inner = [_fingerprint(*spec, corpus, load_encoder)
           for spec in _inner_specs(name, options)]
  if '' in inner:
    return ''
  facts = [describe(name, corpus, options, load_encoder=load_encoder), inner,
           options]
  text = json.dumps(facts, sort_keys=True, default=dict)
  return hashlib.sha256(text.encode()).hexdigest()
