# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Plugins: finds the function that a config names as 'module:function'.

There is no registry: users' functions are named in the same way as ours.
"""

from collections.abc import Callable, Sequence
import difflib
import functools
import importlib
import inspect
from typing import Any


def resolve(name: str, *, field: str, ours: str) -> Callable[..., Any]:
  """Imports and returns the function that a config names as 'module:function'.

  Args:
    name: Name of the function, as 'module:function'.
    field: Config field that holds the name, for the error message.
    ours: Names of functions that the package has, for the error message.

  Raises:
    ValueError: The module or the function does not exist, or importing the
      module fails.
  """
  def refuse(why: str) -> ValueError:
    return ValueError(f"{field} must be 'module:function', but {name!r} cannot "
                      f'be found: {why}. Ours are {ours}.')

  module_name, _, function = name.partition(':')
  if not (module_name and function.isidentifier()):
    raise refuse('it has another form')
  try:
    module = importlib.import_module(module_name)
  except Exception as error:
    if isinstance(error, ModuleNotFoundError) and (
        f'{module_name}.'.startswith(f'{error.name}.')):
      raise refuse(f'there is no module {error.name} here or on PYTHONPATH'
                  ) from error
    raise refuse(f'to import {module_name} raised {type(error).__name__}: '
                 f'{error}') from error
  plugin = getattr(module, function, None)
  if not callable(plugin):
    near = difflib.get_close_matches(function, [
        name for name in dir(module) if callable(getattr(module, name))])
    raise refuse(f'{module_name} has no function {function!r}' +
                 (f', did you mean {near[0]}?' if near else ''))
  return plugin


def build(name: str, options: dict[str, Any], *, field: str, ours: str) -> Any:
  """Calls a function that a config names, and returns its result.

  Args:
    name: Name of the function, as 'module:function'.
    options: Keyword arguments of the call, from the config.
    field: Config field that holds both, for the error message.
    ours: Names of functions that the package has, for the error message.

  Raises:
    ValueError: The function does not exist, or an option is unknown, missing or
      refused by the function itself.
  """
  function = resolve(name, field=field, ours=ours)
  _check_options(_parameters(function), name, options, field)
  try:
    return function(**options)
  except TypeError as error:  # an option of the wrong type
    raise ValueError(f'{field} must have options that {name} takes, but '
                     f'{options} are refused: {error}.') from error
  except ValueError as error:
    if str(error).partition(' ')[0] not in options:
      raise
    raise ValueError(f'{field}.{error}') from error


def bind(name: str, options: dict[str, Any], *, field: str, option_field: str,
         ours: str) -> Callable[..., Any]:
  """Returns a function that a config names, with its options filled in.

  The caller of the result passes only the function's first argument, if any.

  Args:
    name: Name of the function, as 'module:function'.
    options: Keyword arguments that are filled in, from the config.
    field: Config field that holds the name, for the error message.
    option_field: Config field that holds the options, for the error message.
    ours: Names of functions that the package has, for the error message.

  Raises:
    ValueError: The function does not exist, or an option is unknown or missing.
  """
  function = resolve(name, field=field, ours=ours)
  _check_options(_parameters(function)[bool(argument(function)):], name,
                 options, option_field)
  return functools.partial(function, **options) if options else function


def argument(function: Callable[..., Any]) -> str:
  """Returns the name of a function's first positional argument, or ''."""
  return next((p.name for p in _parameters(function)[:1] if p.kind in (
      p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)), '')


def keywords(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
  """Returns the parameters of a function that can be given by name."""
  return {p.name: p for p in _parameters(function) if p.kind in (
      p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
  return list(inspect.signature(function).parameters.values())


def _check_options(parameters: Sequence[inspect.Parameter], name: str,
                   options: dict[str, Any], field: str) -> None:
  """Raises a ValueError for an option that is unknown or missing."""
  legal = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
  takes_any = len(legal) < len(parameters)
  for option in () if takes_any else sorted(options.keys() - {*legal}):
    near = difflib.get_close_matches(option, legal)
    raise ValueError(
        f'{field}.{option} is no option of {name}, which takes '
        f'{", ".join(legal) or "none"}. '
        + (f'Did you mean {near[0]}?' if near else 'Remove it.'))
  for p in parameters:
    if p.default is p.empty and p.name not in options and p.kind in (
        p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD):
      raise ValueError(
          f'{field}.{p.name} must be given for {name}, which has no default '
          'for it.')


def beside(name: str, function: str, *, field: str, ours: str
          ) -> Callable[..., Any] | None:
  """Returns a function by its name, from the module of a config's function.

  Args:
    name: Name of the config's function, as 'module:function'.
    function: Name of the function to return, which is in the same module.
    field: Config field that holds `name`, for the error message.
    ours: Names of functions that the package has, for the error message.

  Returns:
    The function, or None if the module has none of this name.

  Raises:
    ValueError: The config's function does not exist.
  """
  resolve(name, field=field, ours=ours)
  module = importlib.import_module(name.partition(':')[0])
  return getattr(module, function, None)
