# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The tools of a config: lists them for a dialogue, and binds them to a run."""

from collections.abc import Callable, Mapping
import functools
import json
import types
from typing import Any

from searchrl.agent import dialogue as dialogues
from searchrl.experiment import search as searches
from searchrl.rollouts.sampler import Sampler
from searchrl.search import engines
from searchrl.toolbox import mcp_client
from searchrl.toolbox import toolbox
from searchrl.trajectory import SearchFn, Tool, is_search


def listed(config) -> tuple[Tool, ...]:
  """Returns the tools that a config gives to the policy.

  If config.tools names an MCP server, the first call in a process starts it.

  Raises:
    ValueError: A tool of config.tools does not exist, or refuses its options,
      or an option has a dict whose keys are not texts.
  """
  options = config.get('tool_options') or {}
  if hasattr(options, 'to_dict'):
    options = options.to_dict()
  _check_keys(options, 'tool_options')
  return _listed(tuple(config.get('tools', ('search',))),
                 json.dumps(options, sort_keys=True))


@functools.cache
def _listed(names: tuple[str, ...], options: str) -> tuple[Tool, ...]:
  return toolbox.make(names, json.loads(options), dialogues.SEARCH, _engine)


def _check_keys(value: Any, field: str) -> None:
  """Raises a ValueError if a dict of an option has keys other than texts."""
  if isinstance(value, Mapping):
    for key, inner in value.items():
      if not isinstance(key, str):
        raise ValueError(f'{field} must have texts as keys, as JSON has, but '
                         f'has {key!r}. Write {str(key)!r}.')
      _check_keys(inner, f'{field}.{key}')
  elif isinstance(value, (list, tuple)):
    for inner in value:
      _check_keys(inner, field)


def note_served(config, note: Callable[..., None]) -> None:
  """Notes the schemas of the tools that MCP servers give, if there are any.

  Args:
    config: Config of a run.
    note: Function such as `Workdir.note`.
  """
  if schemas := mcp_client.schemas(listed(config)):
    note('tools', lambda: schemas)


def _engine(name: str, options: Mapping[str, Any]) -> Tool:
  """Returns the tool of a search engine that is not the run's own."""
  search, spec = _spec(name, options)

  def bind(corpus: Any, seed: int) -> SearchFn:
    if spec.needs_corpus and corpus is None:
      raise ValueError(
          f'tool_options.{name} needs a corpus, but the search engine has none '
          'here. Name one in search.corpus, or leave the tool out.')
    return searches.engine(search, corpus, seed=seed,
                           field=f'tool_options.{name}')

  return Tool(name, options.get('description', dialogues.SEARCH.description),
              dialogues.SEARCH.parameters, bind=bind)


def engine_specs(config) -> list[engines.Spec]:
  """Returns Specs of the engines among a config's tools, without the run's own.

  Raises:
    ValueError: An engine is unknown, refuses its options, or cannot be a tool.
  """
  options = config.get('tool_options') or {}
  return [_spec(name, options.get(name, {}))[1]
          for name in config.get('tools', ())
          if is_search(name) and name != 'search']


def _spec(name: str, options: Mapping[str, Any]) -> tuple[Any, engines.Spec]:
  """Returns a search tool's engine as a field like config.search and as a Spec.

  Raises the ValueErrors of `engine_specs`.
  """
  field = f'tool_options.{name}'
  if not {'engine'} <= {*options} <= {'engine', 'options', 'description'}:
    raise ValueError(
        f'{field} must have an engine, and may have options and a description, '
        f'but has {sorted(options)}. Give for instance '
        "dict(engine='dense', options={}).")
  search = types.SimpleNamespace(
      engine=options['engine'], options=options.get('options', {}))
  spec = searches.spec(search, field)
  engines.check(spec)
  for is_wrong, rule in (
      (spec.is_joint, 'search in each process on its own, but its index is on '
       "the devices of all (backend='mesh')"),
      (spec.depends_on_num_steps, 'not depend on the length of the run, but '
       f'{search.engine!r} does with these options'),
      (spec.local_model, f'load no language model, but {search.engine!r} loads '
       'one')):
    if is_wrong:
      raise ValueError(f"{field} must {rule}. Make that the run's own engine, "
                       'in config.search.')
  return search, spec


def binder(dialogue: dialogues.Dialogue, tokenizer: Any, *, result_tokens: int,
           seed: int) -> searches.Bind:
  """Returns a function that adds a dialogue's tools to a search engine.

  The returned function takes an engine and its corpus, which is None if the
  engine needs no corpus. It returns the toolset that a rollout calls. It raises
  a ValueError if a tool needs a corpus and there is none.

  Args:
    dialogue: Dialogue that lists the tools.
    tokenizer: Tokenizer of the policy.
    result_tokens: Number of tokens to which a tool's result is cut.
    seed: Seed of further search engines and of tools that act at random.
  """
  return lambda search, corpus: toolbox.bind(
      search, dialogue.tools, corpus=corpus, seed=seed, tokenizer=tokenizer,
      result_tokens=result_tokens)


def of_sampler(sampler: Sampler, seed: int) -> searches.Bind:
  """Returns a function that adds the tools of a sampler's dialogue to a search.

  The returned function and `seed` are as in `binder`.
  """
  return binder(sampler.dialogue, sampler.tokenizer, seed=seed,
                result_tokens=sampler.budgets.result_tokens)
