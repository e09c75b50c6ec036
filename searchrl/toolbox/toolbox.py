# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Makes the tools that a config names, checks calls, and binds them to a run.

`TOOLS` has the built-in tools. Every other name is 'module:function', a
function of a user, which is called in the same way (docs/extend.md).
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import re
from typing import Any

import jsonschema

from searchrl.runtime import plugins
from searchrl.search import engine_wrappers
from searchrl.toolbox import tool_schemas
from searchrl.trajectory import (
    SearchError, SearchFn, Tool, ToolCall, ToolResult, is_search)

TOOLS = {  # functions that return a Tool, or several
    'open': 'searchrl.toolbox.documents:make',
    'calculate': 'searchrl.toolbox.calculator:make',
    'python': 'searchrl.toolbox.sandbox:make',
    'mcp': 'searchrl.toolbox.mcp_client:make'}
_RESERVED = ('think', 'information', 'answer', 'question', 'invalid', 'summary',
             'tool_call', 'tool_response')
_NAME = re.compile(r'[A-Za-z][A-Za-z0-9_.-]{0,63}')
_BOUND = ('corpus', 'tokenizer', 'result_tokens', 'seed')


def make(names: Sequence[str], options: Mapping[str, Any], search: Tool,
         engine: Callable[[str, dict[str, Any]], Tool]) -> tuple[Tool, ...]:
  """Returns the tools of a config, in its order.

  Args:
    names: Names of config.tools. A name is 'search', a search engine whose name
      begins with 'search_', a key of TOOLS, or 'module:function'. Any other
      name needs the option `tool`: a key of TOOLS, or 'module:function'.
    options: Options of each tool by its name, as in config.tool_options.
    search: The tool of the run's search engine.
    engine: Function of a name and options that returns the tool of another
      engine.

  Raises:
    ValueError: A name is unknown or given twice, an option is unknown, or a
      function returns no tools.
  """
  unused = sorted(options.keys() - set(names))
  if unused:
    raise ValueError(
        f'tool_options must be of names in tools, which are {", ".join(names)},'
        f' but has {unused[0]!r}. Add it to tools, or remove its options.')
  tools: list[Tool] = []
  for name in names:
    own_options = dict(options.get(name, {}))
    if name == 'search':
      tools.append(search)
    elif is_search(name):
      tools.append(engine(name, own_options))
    else:
      tools += _make(name, own_options)
  _check(tools)
  return tuple(tools)


def _make(name: str, options: dict[str, Any]) -> Sequence[Tool]:
  """Returns the tools that a name other than a search stands for.

  Raises:
    ValueError: See `make`.
  """
  kind = options.pop('tool', name)
  if kind not in TOOLS and ':' not in kind:
    raise ValueError(
        f"tools must each be search, {', '.join(TOOLS)}, or 'module:function' "
        f'of your own, but one is {kind!r}. If {name!r} is your own name for '
        f'one of these, say which by tool_options.{name}.tool.')
  made = plugins.build(
      TOOLS.get(kind, kind), options, field=f'tool_options.{name}',
      ours=', '.join(TOOLS))
  if isinstance(made, Tool):
    made = [dataclasses.replace(made, name=name) if name != kind else made]
  if not isinstance(made, Sequence) or not made or not all(
      isinstance(tool, Tool) for tool in made):
    raise ValueError(f'tools must name functions that return a Tool, or '
                     f'several, but {kind} returned {made!r}.')
  for tool in made:
    if is_search(tool.name):
      raise ValueError(
          'the names search and search_... are for search engines, but '
          f'{kind} returned a tool {tool.name!r}. Rename it; or, if it is an '
          f'engine, put {tool.name!r} in tools, and name the engine in '
          f'tool_options.{tool.name}.engine.')
  return made


def built_in(name: str, options: Mapping[str, Any]) -> Tool:
  """Returns the built-in tool `name`, made with `options`.

  Raises:
    ValueError: There is no such tool, or it refuses its options.
  """
  tool, = _make(name, dict(options))
  return tool


def _check(tools: Sequence[Tool]) -> None:
  """Raises a ValueError for tools that a dialogue cannot offer.

  These are tools with a name that is illegal, is a tag of the protocol or
  occurs twice, and tools with parameters that are not a JSON schema.
  """
  names = [tool.name for tool in tools]
  for tool in tools:
    if not _NAME.fullmatch(tool.name) or tool.name.lower() in _RESERVED:
      raise ValueError(
          'a tool must have a name of letters, digits, _, . and - that is no '
          f'tag of the protocol, but has {tool.name!r}. Rename it; or leave it '
          'out, if a server gives it, by the option names.')
    if names.count(tool.name) > 1:
      raise ValueError(
          f'tools must have different names, but {tool.name!r} occurs twice. '
          'Give one of them another name.')
    if fault := tool_schemas.fault(tool.parameters):
      raise ValueError(
          f'the parameters of tool {tool.name!r} must be a JSON schema, but '
          f'{fault}. Correct them; or leave the tool out, if a server gives '
          'it, by the option names.')


def bind(search: SearchFn, tools: Sequence[Tool], **run: Any) -> SearchFn:
  """Returns one object that has the functions of all tools of a dialogue.

  The object is a toolset: its field `tools` has the functions by name, and a
  call of the object itself is a search. A tool that needs something of the run,
  such as the corpus, gets it here.

  Args:
    search: The run's search engine.
    tools: Tools of the dialogue.
    **run: Keywords that a tool's `bind` may take: corpus, tokenizer,
      result_tokens and seed.

  Returns:
    The toolset, or `search` itself if it is the only tool of the dialogue.
  """
  if [tool.name for tool in tools] == ['search']:
    return search
  functions: dict[str, Any] = {}
  for tool in tools:
    call: Any = search if tool.name == 'search' else tool.call
    if tool.bind:
      named = plugins.keywords(tool.bind)
      call = tool.bind(**{key: run[key] for key in _BOUND if key in named})
    functions[tool.name] = call if is_search(tool.name) else checked(tool, call)
  return engine_wrappers.toolset(functions)


def checked(tool: Tool, call: Callable[[Sequence[ToolCall]], Sequence[Any]]
           ) -> engine_wrappers.Wrapped:
  """Returns a function that passes a tool only calls that fit its schema.

  The result of any other call is a message to the policy that names the error.
  If the tool returns a wrong number of results, all get a SearchError.
  """
  validator = tool_schemas.validator(tool.parameters)

  def call_checked(calls: Sequence[ToolCall]) -> list[ToolResult | SearchError]:
    problems = [_problem(validator, call.arguments) for call in calls]
    good = [c for c, problem in zip(calls, problems) if not problem]
    results = list(call(good)) if good else []
    if len(results) != len(good):
      return [SearchError('bad_response', f'{len(results)} results for '
                          f'{len(good)} calls')] * len(calls)
    remaining = iter(results)
    return [ToolResult(problem, is_error=True) if problem else next(remaining)
            for problem in problems]

  return engine_wrappers.Wrapped(call_checked, (call,))


def _problem(validator: Any, arguments: Mapping[str, Any]) -> str:
  """Returns a sentence on how arguments break a schema; '' if they do not."""
  error = jsonschema.exceptions.best_match(
      validator.iter_errors(dict(arguments)))
  return f'Error: wrong arguments: {error.message[:300]}.' if error else ''
