# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Sets the fields of a config that a command line names.

A config file need not list every keyword of its algorithm and its optimizer:
`--config.algorithm.dual_clip=3` works wherever the function has it. A keyword
that keeps the function's default stays out of the config.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
import difflib
import inspect
import re
from typing import Any

from ml_collections import config_dict
from ml_collections.config_flags import tuple_parser

from searchrl.runtime import foreign_names
from searchrl.runtime import plugins

# Groups that may get fields of any name: options of a function, or tables.
_FREE = re.compile(r'(options|algorithm|curriculum|engines|methods|habits)$')
_OPTIONAL = re.compile(r'\b(optimizer|algorithm)\.\w+$')  # fields may be None
OPTIMIZER = 'searchrl.training.optimizer:adamw'
_SIMPLE = (bool, int, float, str, tuple)  # types of fields

# Field -> the texts that a command line gives it, in order; None: no text.
Settings = dict[str, list[str | None]]


def split(arguments: Sequence[str]) -> tuple[Settings, list[str]]:
  """Splits command-line arguments into settings of config fields and the rest.

  A setting is --config.FIELD=VALUE, --config.FIELD VALUE or --noconfig.FIELD,
  which means false.

  Returns:
    The list of values of each field, as texts (None: no value was given), and
    the arguments that set no field. For ['--config.seed=1', '--help'], it is
    ({'seed': ['1']}, ['--help']).

  Raises:
    ValueError: An argument --noconfig.FIELD has a value.
  """
  settings: Settings = {}
  others, remaining = [], list(arguments)
  while remaining:
    argument = remaining.pop(0)
    match = re.fullmatch(r'--?(no)?config\.([^=]+)(?:=(.*))?', argument, re.S)
    if not match:
      others.append(argument)
      continue
    is_negated, field, value = match.groups()
    if is_negated and value is not None:
      raise ValueError(f'{argument} must have no value: write '
                       f'--config.{field}=false.')
    if is_negated:
      value = 'false'
    elif value is None and remaining and not remaining[0].startswith('--'):
      value = remaining.pop(0)
    settings.setdefault(field, []).append(value)
  return settings, others


def assign(config: config_dict.ConfigDict, settings: Settings, file: str
          ) -> None:
  """Sets the fields of a config from command-line texts, and locks the config.

  Args:
    config: Config that a config file made.
    settings: Texts for each field. If a field has several texts, the last one
      is used. A field that is a tuple must have only one text.
    file: Path of the config file, for errors.

  Raises:
    ValueError: There is no such field, a text is not of the field's type, or a
      tuple has several texts.
  """
  groups = {field: _group_of(config, field) for field in settings}
  has_all = all(group is not None and not isinstance(
      group[field.rpartition('.')[2]], config_dict.ConfigDict)
                for field, group in groups.items())
  added = {} if has_all else add_keywords(config, settings)
  for field, texts in settings.items():
    _set(config, field, texts, file)
  for field, default in added.items():
    group, name = _group_of(config, field), field.rpartition('.')[2]
    if group is not None and group[name] == default:
      del group[name]
  config.lock()


def change(config: config_dict.ConfigDict, changes: Mapping[str, Any],
           place: str) -> None:
  """Sets the fields of a config that `changes` names, group by group.

  A group whose name ends with 'options' is replaced as a whole.

  Args:
    config: Config of a run of a sweep; it must not be locked.
    changes: Values of fields, in nested dicts.
    place: Name of the changes, for errors.

  Raises:
    ValueError: The config does not have a field.
  """
  for name, value in changes.items():
    if name not in config:
      raise ValueError(f'{place} must name fields of the config, but {name!r} '
                       f'is none. There are {", ".join(config)}.')
    if hasattr(value, 'items') and not name.endswith('options'):
      change(config[name], value, f'{place}.{name}')
    else:
      config[name] = value


def add_keywords(config: config_dict.ConfigDict, settings: Settings
                ) -> dict[str, Any]:
  """Adds to a config the keywords of its algorithm and optimizer that it lacks.

  Args:
    config: Config that a config file made.
    settings: Texts of a command line, which may name another algorithm.

  Returns:
    The default of each added field; None for a keyword without a default.
  """
  added = {}
  config.unlock()
  for path, group in groups(config):
    for name, parameter in _keywords(path, group, settings).items():
      default = (None if parameter.default is parameter.empty
                 else parameter.default)
      if name not in group and isinstance(default, (*_SIMPLE, type(None))):
        added[f'{path}.{name}'] = default
        group[name] = default if default is not None else (
            config_dict.placeholder(_annotated(parameter)))
  return added


def leaves(tree: Mapping[str, Any], prefix: str = ''
          ) -> Iterator[tuple[str, Any]]:
  """Yields (dotted name, value) of each field of nested dicts.

  An empty dict counts as a field with the value {}.
  """
  for name, value in tree.items():
    if hasattr(value, 'items') and value:
      yield from leaves(value, f'{prefix}{name}.')
    else:
      yield prefix + name, value


def fields(config: config_dict.ConfigDict, group: str = ''
          ) -> Iterator[tuple[str, Any, Any]]:
  """Yields (dotted name, value, rule) of each field, in the config's order.

  The rule says which values are legal: a `Rule` of experiment/rules.py; None if
  the field has none. `group` is put before each name.
  """
  for name, value in config.items(preserve_field_references=True):
    if isinstance(value, config_dict.ConfigDict) and value:
      yield from fields(value, f'{group}{name}.')
    else:
      yield group + name, config[name], getattr(value, 'rule', None)


def groups(config: Mapping[str, Any], path: str = ''
           ) -> Iterator[tuple[str, config_dict.ConfigDict]]:
  """Yields (dotted name, group) of each dict in a config, at any depth."""
  for name, value in config.items():
    if isinstance(value, config_dict.ConfigDict):
      yield path + name, value
      yield from groups(value, f'{path}{name}.')


def closest(field: str, config: Mapping[str, Any]) -> str:
  """Returns a hint for an unknown field: a sentence with a similar, legal name.

  The hint is '' if no field of the config is similar.
  """
  names = sorted((name for name, _ in leaves(config)),
                 key=lambda name: name.count('.'))
  if answer := foreign_names.answer(field, names):
    return answer
  last = field.rpartition('.')[2]
  near = [name for name in names if name.rpartition('.')[2] == last] or (
      difflib.get_close_matches(field, names, n=1))
  return f'Did you mean --config.{near[0]}?' if near else ''


def _set(config: config_dict.ConfigDict, field: str,
         texts: Sequence[str | None], file: str) -> None:
  """Sets a field to the last of the given values.

  Raises:
    ValueError: There is no such field, the value is not valid for it, or a
      field that is a tuple is given several times.
  """
  group, name, text = _group_of(config, field), field.split('.')[-1], texts[-1]
  if group is None:
    near = closest(field, config) or f'--config={file} --help lists all.'
    raise ValueError(f'--config.{field} must be a field of {file}, but there '
                     f'is none of that name. {near}')
  old, kind = group[name], group.get_type(name)
  if text in ('None', 'none') and _OPTIONAL.search(field):
    group[name] = None
    return
  new = _read(text, kind, field, f', as in "{old}"' if kind is tuple else '')
  if isinstance(old, tuple):
    rule = {field: rule for field, _, rule in fields(group)}[name]
    _check_tuple(field, old, new, texts, bool(rule) and rule.nests)
  if isinstance(new, dict) and not _FREE.search(field):
    for key, value in new.items():
      _set(config, f'{field}.{key}', [str(value)], file)
  else:
    group[name] = new


def _check_tuple(field: str, old: tuple[Any, ...], new: tuple[Any, ...],
                 texts: Sequence[str | None], nests: bool) -> None:
  """Raises a ValueError for a new tuple whose entries have a wrong type.

  It also raises one if the command line gives the tuple several times.
  """
  if len(texts) > 1:
    raise ValueError(
        f'--config.{field} must be given once, but is given {len(texts)} '
        f'times, as {" and ".join(map(str, texts))}. Give all in one, as in '
        f'--config.{field}="{old}".')
  for types, content in (((int, float), 'numbers'), (str, 'texts')):
    if old and all(isinstance(x, types) for x in old) and not all(
        isinstance(x, types) or nests and isinstance(x, tuple) for x in new):
      raise ValueError(f'--config.{field} must be a tuple of {content}, as '
                       f'--config.{field}="{old}", but is {new}.')


def _read(text: str | None, kind: type, field: str, example: str) -> Any:
  """Returns a text as a value of type `kind`, or raises a ValueError."""
  read, words = next(
      reader for base, *reader in _READERS if issubclass(kind, base))
  if text is None and kind is bool:
    return True
  try:
    if text is None:
      raise ValueError
    return read(text)
  except (ValueError, KeyError, SyntaxError, RecursionError) as error:
    raise ValueError(
        f'--config.{field} must be {words}{example}, but is '
        f'{"none" if text is None else repr(text)}.') from error


def _dict(text: str) -> dict[str, Any]:
  value = ast.literal_eval(text)
  if not isinstance(value, dict):
    raise ValueError(text)
  return value


_BOOLS = {'true': True, '1': True, 'false': False, '0': False}
_READERS: tuple[Any, ...] = (  # type, function of a text, words
    (bool, lambda text: _BOOLS[text.lower()], 'true or false'),
    (int, int, 'a whole number'), (float, float, 'a number'),
    (str, str, 'a text'), (tuple, tuple_parser.TupleParser().parse, 'a tuple'),
    (config_dict.ConfigDict, _dict, "a dict, as in \"{'k': 1}\""),
    (object, ast.literal_eval, 'a Python literal'))


def _keywords(path: str, group: Mapping[str, Any], settings: Settings
             ) -> dict[str, inspect.Parameter]:
  """Returns the keywords of the function that receives a group's fields.

  Only groups named optimizer or algorithm have such a function; others give {}.
  """
  last = path.rpartition('.')[2]
  if last == 'optimizer':
    field, name = path, OPTIMIZER
  elif last == 'algorithm' and 'name' in group:
    field = f'{path}.name'
    name = str(settings.get(field, [group['name']])[-1])
  else:
    return {}
  return plugins.keywords(plugins.resolve(
      name, field=field, ours='searchrl.rl.algorithms:grpo, :dspo and others'))


def _annotated(parameter: inspect.Parameter) -> type:
  """Returns the type in a parameter's annotation; object if unknown."""
  return next((kind for kind in _SIMPLE if re.search(
      rf'\b{kind.__name__}\b', str(parameter.annotation))), object)


def _group_of(config: Any, field: str) -> config_dict.ConfigDict | None:
  """Returns the group that has a field, or None."""
  for name in field.split('.'):
    if not isinstance(config, config_dict.ConfigDict) or name not in config:
      return None
    group, config = config, config[name]
  return group
