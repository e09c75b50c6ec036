# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The tools of a config: lists them for a dialogue, and binds them to a run."""

from collections.abc import Mapping
import functools
import json
import types
from typing import Any

from searchrl.agent import dialogue as dialogues
from searchrl.experiment import search as searches
from searchrl.rollouts.sampler import Sampler
from searchrl.search import engines
from searchrl.toolbox import toolbox
from searchrl.trajectory import SearchFn, Tool


def listed(config) -> tuple[Tool, ...]:
  """Returns the tools that a config gives to the policy.

  If config.tools names an MCP server, the first call in a process starts it.

  Raises:
    ValueError: A tool of config.tools does not exist, or refuses its options.
  """
  options = config.get('tool_options') or {}
  if hasattr(options, 'to_dict'):
    options = options.to_dict()
  return _listed(tuple(config.get('tools', ('search',))),
                 json.dumps(options, sort_keys=True))


@functools.cache
def _listed(names: tuple[str, ...], options: str) -> tuple[Tool, ...]:
  return toolbox.make(names, json.loads(options), dialogues.SEARCH, _engine)


def _engine(name: str, options: Mapping[str, Any]) -> Tool:
  """Returns the tool of a search engine that is not the run's own."""
  field = f'tool_options.{name}'
  if not {'engine'} <= options.keys() <= {'engine', 'options', 'description'}:
    raise ValueError(
        f'{field} must have an engine, and may have options and a description, '
        f'but has {sorted(options)}. Give for instance '
        "dict(engine='dense', options={}).")
  search = types.SimpleNamespace(
      engine=options['engine'], options=options.get('options', {}))
  spec = searches.spec(search, field)
  engines.check(spec)
  if spec.is_joint:
    raise ValueError(
        f'{field} must search in each process on its own, but its index is on '
        "the devices of all (backend='mesh'). Make that the run's own engine, "
        'in config.search.')

  def bind(corpus: Any, seed: int) -> SearchFn:
    return searches.engine(search, corpus, seed=seed)

  return Tool(name, options.get('description', dialogues.SEARCH.description),
              dialogues.SEARCH.parameters, bind=bind)


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

  It takes a search engine and its corpus (or None). `seed` is the seed of
  further search engines among the tools.
  """
  return binder(sampler.dialogue, sampler.tokenizer, seed=seed,
                result_tokens=sampler.budgets.result_tokens)
