# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads, builds and describes search engines, given their names and options.

`ENGINES` has the engines of `builtin_engines.py`. Every other name is
'module:function', a function of a user or of a paper, which is called in the
same way (docs/extend.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import difflib
import hashlib
import inspect
import json
import pathlib
from typing import Any

from searchrl.runtime import option_rules
from searchrl.runtime import plugins
from searchrl.search import builtin_engines
from searchrl.search.builtin_engines import Engine, LocalModel, Options
from searchrl.search.index import open_index
from searchrl.search.mapped_corpus import AnyCorpus
from searchrl.trajectory import SearchFn

ENGINES = builtin_engines.ENGINES
_OF_USERS: dict[str, Any] = dict(reads_text_alone=False, is_identified=False)
_PAPERS = pathlib.Path(__file__).parents[1] / 'papers'


# An engine with inner engines has a trait if `any` or `all` of them have it,
# the engine itself included.
_COMBINE = {'needs_corpus': any, 'is_remote': any, 'reads_text_alone': all,
            'is_identified': all, 'depends_on_num_steps': any, 'is_joint': any}


@dataclasses.dataclass(frozen=True)
class Spec:
  """An engine as a config names it, together with its inner engines.

  Attributes:
    name: Key of ENGINES, or 'module:function'.
    engine: The kind of engine that `name` stands for.
    options: Options of the engine.
    parts: Inner engines that the engine calls, such as the engine behind a
      cache.
    field: Config field that has the options, for error messages.
    needs_corpus, is_remote, reads_text_alone, is_identified,
      depends_on_num_steps, is_joint: Traits as in `Engine`, of the engine and
      its parts together. All of them must have reads_text_alone and
      is_identified; for the other traits, one of them is enough.
  """

  name: str
  engine: Engine
  options: Options
  parts: tuple[Spec, ...]
  field: str
  needs_corpus: bool
  is_remote: bool
  reads_text_alone: bool
  is_identified: bool
  depends_on_num_steps: bool
  is_joint: bool

  @property
  def leaves(self) -> list[Spec]:
    """The innermost engines; the engine itself if it calls no others."""
    return [leaf for part in self.parts for leaf in part.leaves] or [self]

  @property
  def whole(self) -> list[Spec]:
    """The engine itself and all engines that it calls, directly or not."""
    return [self, *(inner for part in self.parts for inner in part.whole)]

  @property
  def local_model(self) -> LocalModel | None:
    """Path and size of the first language model that `whole` loads, or None."""
    models = (spec.engine.local_model(spec.options) for spec in self.whole)
    return next(filter(None, models), None)

  def rows_on_devices(self, memory: float, hosts: int) -> dict[str, float]:
    """Returns {description: bytes} of the vectors on a process's devices.

    All engines of `whole` count. `memory` is the number of bytes that these
    devices have, and `hosts` is the number of processes.
    """
    rows: dict[str, float] = {}
    for spec in self.whole:
      rows |= spec.engine.rows_on_devices(spec.options, memory, hosts)
    return rows

  def deadline_secs(self, queries: int) -> float:
    """Returns the longest time, in seconds, that a call may take.

    The call has `queries` queries. The result is 0 if no engine calls a server.
    Else it is the engine's own time plus that of its slowest part, because most
    engines call their parts at the same time.
    """
    return self.engine.deadline_secs(self.options, queries) + max(
        (part.deadline_secs(queries) for part in self.parts), default=0.0)


def traits(**values: Any) -> Callable[[Callable], Callable]:
  """Returns a decorator for a user's engine, which sets traits of the engine.

  An engine without the decorator needs a corpus and is not remote. It may read
  more of a query than its text, so that it cannot be inside a cache.

  Args:
    **values: Fields of `Engine`, such as needs_corpus=False or is_remote=True.

  Raises:
    TypeError: A name is not a field of `Engine`. The decorator raises it.
  """
  def mark(function):
    function.search_engine = Engine(function, **{**_OF_USERS, **values})
    return function

  return mark


def find(name: str, field: str = 'search.engine') -> Engine:
  """Returns the kind of engine that a name stands for.

  The name is a key of ENGINES, or 'module:function' of a user. `field` is the
  config field that has the name, for errors.

  Raises:
    ValueError: There is no such engine.
  """
  if name in ENGINES:
    return ENGINES[name]
  if ':' not in str(name):
    raise ValueError(
        f"{field} must be one of {', '.join(ENGINES)}, or 'module:function' of "
        f'your own, but is {name!r}.{_engine_of_a_paper(name)}')
  function = plugins.resolve(name, field=field, ours=', '.join(ENGINES))
  return getattr(function, 'search_engine', Engine(function, **_OF_USERS))


def _engine_of_a_paper(name: str) -> str:
  """Returns a hint with the full name of the paper's engine `name`.

  The hint is '' if no module in `searchrl.papers` has such an engine.
  """
  for file in _PAPERS.glob('*/*.py'):
    if file.stem == name and 'def make(corpus' in file.read_text():
      return (' Did you mean '
              f"'searchrl.papers.{file.parent.name}.{name}:make'?")
  return ''


def parse(name: str, options: Options, engine_field: str = 'search.engine',
          field: str = 'search.options') -> Spec:
  """Returns a Spec: a named engine with its options, inner engines and traits.

  Inner engines, such as the one behind a cache, are parsed in the same way.
  The options themselves are checked by `check`, not here.

  Args:
    name: Name of a built-in engine, or 'module:function' of a user.
    options: Options of the engine.
    engine_field: Config field of the name, for errors.
    field: Config field of the options, for errors.

  Raises:
    ValueError: There is no such engine, an inner engine is not given as
      dict(name=..., **options), or a cache is built around an engine that reads
      more of a query than its text and top_k.
  """
  engine, parts = find(name, engine_field), []
  inner, inner_field = options.get(engine.inner), f'{field}.{engine.inner}'
  for part in [inner] if inner and engine.inner == 'engine' else inner or ():
    # A part may be a ConfigDict.
    part_options = dict(part) if hasattr(part, 'items') else {}
    if 'name' not in part_options:
      raise ValueError('search.options must give an engine as dict(name=..., '
                       f'**options), but give {part!r}.')
    parts.append(parse(part_options.pop('name'), part_options, inner_field,
                       inner_field))
  values = {}
  for trait, combine in _COMBINE.items():
    value = getattr(engine, trait)
    own_value = value(options) if callable(value) else value
    values[trait] = combine(
        [own_value, *(getattr(part, trait) for part in parts)])
  spec = Spec(name, engine, options, tuple(parts), field, **values)
  readers = sorted({leaf.name for leaf in spec.leaves
                    if not leaf.reads_text_alone})
  if name == 'cache' and readers:
    raise ValueError(
        "search.options.engine of 'cache' must answer by a query's text and "
        f'top_k alone, but {", ".join(readers)} in it may also use the '
        'question and the sample that ask. Leave the cache out, or put it '
        'around the other engines. (An engine of yours that does not use them '
        'says so by engines.traits(reads_text_alone=True).)')
  return spec


def check(spec: Spec) -> None:
  """Raises a ValueError if an option of an engine or of its parts is wrong.

  An option is wrong if it is unknown, missing, or a path on another machine. A
  user's function whose first argument is not the corpus is an error, too.
  """
  signature = inspect.signature(spec.engine.make)
  first = next(iter(signature.parameters.values()), None)
  if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
    raise ValueError(
        f'the function of {spec.name!r} must take the corpus first, which is '
        f'None for an engine that needs none, but its arguments are '
        f'{signature}. Begin them with corpus.')
  parameters = [p for p in [*signature.parameters.values()][1:]
                if p.name not in builtin_engines.FROM_THE_RUN]
  takes, inner = spec.engine.takes, [*filter(None, [spec.engine.inner])]
  legal = [*inner, *(takes(spec.options) if callable(takes) else takes or (
      p.name for p in parameters))]
  takes_all = not takes and any(p.kind is p.VAR_KEYWORD for p in parameters)
  unknown = [name for name in spec.options if name not in legal]
  if unknown and not takes_all:
    near = difflib.get_close_matches(unknown[0], legal, n=1)
    hint = (f'Did you mean {near[0]}?' if near else 'Remove it.'
            if ':' in spec.name else 'docs/search.md lists all.')
    raise ValueError(
        f'{spec.field} must be those of {spec.name!r}, which are '
        f'{", ".join(legal) or "none"}, but {unknown[0]!r} is given. {hint}')
  required = inner + [
      p.name for p in parameters if p.default is p.empty
      and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
  if not set(required) <= set(spec.options):
    hint = ' An engine is given as dict(name=..., **options).' * bool(inner)
    raise ValueError(
        f'{spec.field} of {spec.name!r} must have {" and ".join(required)}, '
        f'but have {sorted(spec.options)}.{hint}')
  for name in spec.engine.paths:
    option_rules.on_this_machine(
        f'{spec.field}.{name}', spec.options.get(name, ''))
  for part in spec.parts:
    check(part)


def make(
    name: str,
    corpus: AnyCorpus | None,
    *,
    seed: int = 0,
    steps: int = 0,
    load_encoder: open_index.LoadEncoder | None = None,
    load_judge: builtin_engines.LoadJudge | None = None,
    load_model: Callable[..., Any] | None = None,
    **options: Any,
) -> SearchFn:
  """Makes the search engine that a name and options describe.

  The engine is a function from a list of queries to a list with a result for
  each query: a tuple of at most top_k passages, or a SearchError. The arguments
  from `seed` to `load_model` are passed to the engine's own function, each only
  if that function has a parameter of this name.

  Args:
    name: Key of ENGINES, or 'module:function' for a user's engine.
    corpus: Passages to search; None if the engine's `needs_corpus` is False.
    seed: Seed of the run.
    steps: Number of steps of the run; 0 outside of training.
    load_encoder: Function that loads a text encoder.
    load_judge: Function that loads a cross-encoder, such as `reranker.load`.
    load_model: Function that loads a language model beside the policy, such as
      `policy.second`; None where no policy is trained.
    **options: Options of the engine, which docs/search.md lists.

  Raises:
    ValueError: There is no engine of that name, an option does not exist, is
      missing or out of range, or a user's function does not return a function.
    TypeError: An option has the wrong type.
  """
  spec = parse(name, options)
  check(spec)
  return _make(spec, corpus, dict(
      seed=seed, steps=steps, load_encoder=load_encoder, load_judge=load_judge,
      load_model=load_model))


def _make(spec: Spec, corpus: AnyCorpus | None, run: Mapping[str, Any]
         ) -> SearchFn:
  """Builds the inner engines of an engine, and then the engine itself.

  The engine's function gets those items of `run` that it has a parameter for.
  """
  named = inspect.signature(spec.engine.make).parameters
  keywords = {
      **run, 'parts': tuple(_make(part, corpus, run) for part in spec.parts),
      'fingerprint': lambda: _fingerprint(spec.parts[0], corpus,
                                          run['load_encoder'])}
  keywords = {key: keywords[key] for key in keywords if key in named}
  search = spec.engine.make(corpus, **keywords, **{
      key: value for key, value in spec.options.items()
      if key != spec.engine.inner})
  if not callable(search):
    raise ValueError(f'{spec.name} must return a function of queries, but '
                     f'returned {search!r}.')
  return search


def describe(name: str, corpus: AnyCorpus | None, options: Options, *,
             load_encoder: open_index.LoadEncoder | None = None
             ) -> dict[str, Any]:
  """Returns facts about the data that an engine searches, for a run's record.

  'engine' is the engine's name. If there is a corpus, 'corpus' is its digest
  and 'passages' its number of passages. A kind of engine may add more, such as
  'index'. 'engines' is a list of such facts, one entry per inner engine.
  """
  spec, facts = parse(name, options), dict[str, Any](engine=name)
  if corpus is not None:
    facts |= {'corpus': corpus.digest, 'passages': len(corpus)}
  facts |= spec.engine.describe(corpus, options, load_encoder)
  if spec.parts:
    facts['engines'] = [
        describe(part.name, corpus, part.options, load_encoder=load_encoder)
        for part in spec.parts]
  return facts


def settings(name: str, options: Options) -> dict[str, Any]:
  """Returns an engine's name and the options that its results depend on.

  The name is 'engine'. Paths are left out. So are all options of an engine that
  only asks a server, such as the server's address. 'engines' is a list of the
  settings of the inner engines. All values are JSON values.
  """
  spec = parse(name, options)
  apart = {*spec.engine.paths, spec.engine.inner}
  facts = {'engine': name} | {
      key: value for key, value in spec.options.items()
      if key not in apart and spec.engine.is_remote is not True}
  if spec.parts:
    facts['engines'] = [settings(part.name, part.options)
                        for part in spec.parts]
  return json.loads(json.dumps(facts, default=dict))  # without ConfigDicts


def _fingerprint(spec: Spec, corpus: AnyCorpus | None,
                 load_encoder: open_index.LoadEncoder | None) -> str:
  """Returns a digest of an engine's data and options; '' if not identified."""
  if not spec.is_identified:
    return ''
  parts = [_fingerprint(part, corpus, load_encoder) for part in spec.parts]
  facts = [describe(spec.name, corpus, spec.options,
                    load_encoder=load_encoder), parts, spec.options]
  text = json.dumps(facts, sort_keys=True, default=dict)
  return hashlib.sha256(text.encode()).hexdigest()
