# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The command `searchrl`, a short form of `python -m searchrl.main`.

  searchrl train configs/dspo.py --config.seed=1
  searchrl ask runs/dspo --question "Who founded ..."
  searchrl NAME [TEXT] [FLAGS]

`searchrl NAME TEXT` is `python -m searchrl.main --config=configs/NAME.py:TEXT`.
NAME is any config that the package has; `serve` is short for `serve_model`.
`searchrl train FILE` takes the file of a config, either the package's or the
user's. All commands take the flags of `searchrl.main`.
"""

import difflib
from importlib import metadata
import runpy
import sys

from searchrl.runtime import config_files

_SHORT = {'serve': 'serve_model'}  # name of a command -> config


def run() -> None:
  """Runs the command of the process's arguments; see `searchrl.main.run`."""
  arguments = sys.argv[1:]
  if not arguments or arguments[0] in ('help', '--help', '-h') or (
      arguments[0] == 'train' and arguments[1:2] in (['--help'], ['-h'])):
    print(_help())
    return
  if arguments[0] == '--version':
    print(metadata.version('searchrl'))
    return
  try:
    sys.argv[1:] = expand(arguments)
  except ValueError as error:
    sys.exit(f'{type(error).__name__}: {error}')
  runpy.run_module('searchrl.main', run_name='__main__', alter_sys=True)


def expand(arguments: list[str]) -> list[str]:
  """Returns the arguments of `searchrl` as arguments of `searchrl.main`.

  For instance, ['ask', 'runs/dspo', '--config.seed=1'] becomes
  ['--config=configs/ask.py:runs/dspo', '--config.seed=1']. Arguments that begin
  with a flag are returned unchanged.

  Raises:
    ValueError: There is no command of this name, `train` has no file, or
      several texts follow the name.
  """
  if arguments[0].startswith('-'):
    return arguments
  name, *others = arguments
  texts = [text for text in others[:1] if not text.startswith('-')]
  flags = others[len(texts):]
  if texts and flags and not flags[0].startswith('-'):
    raise ValueError(
        f'searchrl {name} must have one text and then flags, but {texts[0]!r} '
        f'and {flags[0]!r} follow it. Join several by commas, as in searchrl '
        'report runs/a,runs/b.')
  if name == 'train':
    if not texts:
      raise ValueError('train must be followed by the file of a config, as in '
                       'searchrl train configs/dspo.py.')
    return [f'--config={texts[0]}', *flags]
  stem = _SHORT.get(name, name)
  if stem not in config_files.shipped():
    near = difflib.get_close_matches(
        name, ['train', *_SHORT, *config_files.shipped()], n=1)
    hint = f'Did you mean searchrl {near[0]}? ' if near else ''
    raise ValueError(
        f'searchrl must be followed by a command, but {name!r} is none. {hint}'
        'searchrl --help lists all.')
  return [f'--config=configs/{stem}.py' + ''.join(f':{text}' for text in texts),
          *flags]


def _help() -> str:
  """Returns the usage of the command, with a line for each config."""
  names = {stem: name for name, stem in _SHORT.items()}
  lines = [f'  {names.get(stem, stem):24} {summary}'
           for stem, summary in config_files.shipped().items()]
  return '\n'.join([
      __doc__.split('\n\n', 1)[1].rstrip(), '', '  train FILE',
      *lines, '', 'searchrl NAME --help lists the flags and fields of one.'])
