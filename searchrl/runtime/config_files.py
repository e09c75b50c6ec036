# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Config files: loads them by name, and checks the fields that a command sets.

An unreadable file or an unknown field gives an error of one sentence.
"""

from collections.abc import Iterator, Mapping, Sequence
import difflib
import importlib.machinery
import importlib.util
import inspect
import pathlib
import re
import sys
import traceback
from typing import Any

_MODULE = 'config_config'  # name of the file's module while it is loaded
# Groups whose fields are keyword arguments, which may have any names.
_OPTIONS = re.compile(r'(options|algorithm|curriculum|engines|methods|habits)$')


def load(name: str) -> Any:
  """Loads the config of a file under configs/, named with or without :size.

  Raises:
    FileNotFoundError: The file does not exist.
    ValueError: The file has no get_config, takes no size, or raises an error.
  """
  path, colon, size = name.partition(':')
  file = pathlib.Path(path)
  if not file.is_file():
    raise FileNotFoundError(
        '--config must name a file, such as configs/dspo.py, with :size after '
        f'it if need be, but {path!r} is none. {_nearest(file)}')
  make = getattr(_run(file), 'get_config', None)
  if not callable(make):
    raise ValueError(f'--config must name a file with a function get_config, '
                     f'but {path} has none.')
  if colon and not inspect.signature(make).parameters:
    raise ValueError(f'{path} has one size, but --config={name} asks for '
                     f'{size!r}. Write --config={path}.')
  try:
    config = make(size) if colon else make()
  except (ValueError, FileNotFoundError):
    raise  # has its own message
  except Exception as error:
    raise _broken(file, error) from error
  if not hasattr(config, 'lock'):
    raise ValueError(f'get_config of {path} must return a ConfigDict, but '
                     f'returned {config!r}.')
  return config


def _run(file: pathlib.Path) -> Any:
  """Runs a file again, and returns its module."""
  loader = importlib.machinery.SourceFileLoader(_MODULE, str(file))
  module = importlib.util.module_from_spec(
      importlib.util.spec_from_loader(_MODULE, loader))
  sys.modules[_MODULE] = module
  try:
    loader.exec_module(module)
  except Exception as error:
    raise _broken(file, error) from error
  return module


def _broken(file: pathlib.Path, error: Exception) -> ValueError:
  """Returns an error that names the line of the file that raised."""
  lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)
           if frame.filename == str(file)]
  where = f'{file}, line {lines[-1]},' if lines else str(file)
  return ValueError(f'--config must name a file that gives a config, but '
                    f'{where} raised {type(error).__name__}: {error}.')


def _nearest(file: pathlib.Path) -> str:
  """Returns a hint with the nearest existing file."""
  there = [str(path) for folder in {file.parent, pathlib.Path('configs')}
           for path in sorted(folder.glob('*.py')) if path.stem != '__init__']
  near = difflib.get_close_matches(
      str(file), there, n=1) or difflib.get_close_matches(
          f'configs/{file.stem}.py', there, n=1)
  return f'Did you mean {near[0]}?' if near else (
      'Recipes are listed in the README, all others in docs/layout.md.')


def named(arguments: Sequence[str]) -> list[str]:
  """Returns the fields that a command line sets: 'seed' for --config.seed=1."""
  found = (re.match(r'--?(?:no)?config\.([^=]+)', one) for one in arguments)
  return list(dict.fromkeys(match[1] for match in found if match))


def check_fields(fields: Sequence[str], tree: Mapping[str, Any], file: str
                ) -> None:
  """Raises a ValueError for a field that a config does not have.

  Args:
    fields: Dotted names. Names with brackets are not checked here.
    tree: Config with the fields.
    file: Path of the file that gave the config.
  """
  for field in fields:
    if '[' in field or _has(tree, field):
      continue
    every = sorted((name for name, _ in leaves(tree)),
                   key=lambda name: name.count('.'))
    last = field.rpartition('.')[2]
    near = [name for name in every if name.rpartition('.')[2] == last] or (
        difflib.get_close_matches(field, every, n=1))
    hint = f'Did you mean --config.{near[0]}?' if near else (
        f'--config={file} --help lists all.')
    raise ValueError(f'--config.{field} must be a field of {file}, but there '
                     f'is none of that name. {hint}')


def check_values(fields: Sequence[str], before: Mapping[str, Any],
                 after: Mapping[str, Any]) -> None:
  """Raises a ValueError for a new value that does not match the old one.

  A group must keep its fields, unless these are keyword arguments. A tuple of
  numbers must stay a tuple of numbers, and a tuple of texts one of texts.

  Args:
    fields: Dotted names of the fields that have changed.
    before: Config as its file gave it.
    after: Config with the changes.
  """
  for field in fields:
    if '[' in field:
      continue
    old, new = _get(before, field), _get(after, field)
    if isinstance(old, Mapping) and not _OPTIONS.search(field):
      missing = {name for name, _ in leaves(old)} ^ {
          name for name, _ in leaves(new)}
      if missing:
        raise ValueError(
            f'--config.{field} must have all fields that it has in the file, '
            f'and no others, but differs in {", ".join(sorted(missing))}. Set '
            f'single ones, as in --config.{field}.{sorted(missing)[0]}=...')
    if isinstance(old, tuple):
      for kind, text in (((int, float), 'numbers'), (str, 'texts')):
        if old and all(isinstance(x, kind) for x in old) and not all(
            isinstance(x, kind) for x in new):
          raise ValueError(f'--config.{field} must be a tuple of {text}, as '
                           f'--config.{field}="{old}", but is {new}.')


def refused(field: str, arguments: Sequence[str], before: Mapping[str, Any]
           ) -> ValueError:
  """Returns the error for a field's value that cannot be read.

  Args:
    field: Dotted name of the field.
    arguments: Arguments of the command line.
    before: Config as its file gave it.
  """
  kind = next(text for types, text in (
      (bool, 'true or false'), (int, 'a whole number'), (float, 'a number'),
      (tuple, 'a tuple'), (object, "a dict, as in \"{'k': 1}\"")) if isinstance(
          _get(before, field), types))
  example = f', as in "{_get(before, field)}"' if kind == 'a tuple' else ''
  found = re.compile(rf'--?config\.{re.escape(field)}(?:=(.*))?$', re.DOTALL)
  values = [match[1] for match in map(found.match, arguments) if match]
  is_given = values and values[-1] is not None
  return ValueError(f'--config.{field} must be {kind}{example}, but is '
                    f'{repr(values[-1]) if is_given else "none"}.')


def leaves(tree: Mapping[str, Any], prefix: str = ''
          ) -> Iterator[tuple[str, Any]]:
  """Yields (dotted name, value) of each field, which may be an empty group."""
  for name, value in tree.items():
    if isinstance(value, Mapping) and value:
      yield from leaves(value, f'{prefix}{name}.')
    else:
      yield prefix + name, value


def _has(tree: Any, field: str) -> bool:
  name, _, rest = field.partition('.')
  return isinstance(tree, Mapping) and name in tree and (
      not rest or _has(tree[name], rest))


def _get(tree: Any, field: str) -> Any:
  for name in field.split('.'):
    tree = tree[name]
  return tree
