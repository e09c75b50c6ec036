# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Loads config files by name, with a one-line error if this is not possible.

The package has a copy of `configs/`, which is used if the present directory has
no such file.
"""

import ast
import difflib
import importlib
import inspect
import pathlib
import runpy
import sys
import traceback
from typing import Any

_SHIPPED = pathlib.Path(__file__).resolve().parents[1] / 'configs'


def load(name: str) -> Any:
  """Runs a config file and returns the config that its `get_config` makes.

  Args:
    name: Path of the file. After a colon it may have a text, such as KEY=VALUE,
      which get_config receives.

  Raises:
    FileNotFoundError: The file does not exist.
    ValueError: The file has no get_config, takes no text after a colon, or
      raises an error.
  """
  path, colon, text = name.partition(':')
  file = _find(pathlib.Path(path))
  _provide()
  if not file.is_file():
    raise FileNotFoundError(
        '--config must name a file, such as configs/dspo.py, perhaps with '
        f':KEY=VALUE after it, but {path!r} is none. {nearest(path)}')
  try:
    make = runpy.run_path(str(file)).get('get_config')
  except Exception as error:
    raise _broken(file, error) from error
  if not callable(make):
    raise ValueError(f'--config must name a file with a function get_config, '
                     f'but {path} has none.')
  if colon and not inspect.signature(make).parameters:
    raise ValueError(
        f'{path} takes no text after a colon, but --config={name} has {text!r}. '
        f'Write --config={path}; with --help it lists its flags and fields.')
  try:
    config = make(text) if colon else make()
  except (ValueError, FileNotFoundError):
    raise  # has its own message
  except Exception as error:
    raise _broken(file, error) from error
  if not hasattr(config, 'lock'):
    raise ValueError(f'get_config of {path} must return a ConfigDict, but '
                     f'returned {config!r}.')
  return config


def _broken(file: pathlib.Path, error: Exception) -> ValueError:
  """Returns an error that names the line of `file` at which `error` arose."""
  lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)
           if frame.filename == str(file)]
  where = f'{file}, line {lines[-1]},' if lines else str(file)
  return ValueError(f'--config must name a file that gives a config, but '
                    f'{where} raised {type(error).__name__}: {error}.')


def _find(file: pathlib.Path) -> pathlib.Path:
  """Returns `file`, or the package's copy of it for a missing configs/NAME."""
  shipped = _SHIPPED / file.name
  return shipped if file.parent == pathlib.Path('configs') and (
      not file.is_file() and shipped.is_file()) else file


def _provide() -> None:
  """Makes `import configs` find the user's configs, then the package's."""
  try:
    configs = importlib.import_module('configs')
  except ModuleNotFoundError:
    configs = sys.modules['configs'] = importlib.import_module(
        'searchrl.configs')
  folders = [pathlib.Path(folder).resolve() for folder in configs.__path__]
  if _SHIPPED.resolve() not in folders:
    configs.__path__.append(str(_SHIPPED))


def shipped() -> dict[str, str]:
  """Returns the configs in the package: name -> first line of the docstring."""
  texts = {file.stem: file.read_text(encoding='utf-8')
           for file in sorted(_SHIPPED.glob('*.py'))}
  return {name: (ast.get_docstring(ast.parse(text)) or '').partition('\n')[0]
          for name, text in texts.items() if 'def get_config' in text}


def nearest(path: str) -> str:
  """Returns a hint for a config file that does not exist, with a similar one.

  If no name is similar, the hint says where config files are listed.
  """
  file = pathlib.Path(path)
  there = [str(path) for path in sorted(file.parent.glob('*.py'))
           if path.stem != '__init__']
  there += [f'configs/{name}.py' for name in shipped()]
  near = difflib.get_close_matches(
      str(file), there, n=1) or difflib.get_close_matches(
          f'configs/{file.stem}.py', there, n=1)
  return f'Did you mean {near[0]}?' if near else (
      'Recipes are listed in the README, all others in docs/layout.md.')
