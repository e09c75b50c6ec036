# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the job that a config names.

  python -m searchrl.main --config=configs/dspo.py --config.seed=1

Every field of a config is a flag, --config.NAME.NAME=VALUE. The fields of a
training run are in configs/common.py, one per line with its meaning. Those of
another job are in its own file under configs/. --config=FILE --help lists all
fields of FILE.
"""

import collections
from collections.abc import Sequence
import functools
import os
import pathlib
import re
import sys
from typing import Any, NoReturn

from searchrl.runtime import signals

if __name__ == '__main__':
  signals.exit_at_sigterm()  # because the imports take seconds

# pylint: disable=wrong-import-position
from absl import app
from absl import flags
from absl import logging
import jax
from ml_collections import config_flags

from searchrl.runtime import config_files
from searchrl.runtime import devices
from searchrl.runtime import folder_lock
from searchrl.runtime import plugins
from searchrl.runtime import processes
from searchrl.runtime import error_logging

_argv: list[str] = []  # arguments of the current command
_CONFIG = config_flags.DEFINE_config_file(
    'config', None, 'A file under configs/, with :size after it if need be.',
    lock_config=True, sys_argv=_argv)
_WORKDIR = flags.DEFINE_string(
    'workdir', None, "The run's folder; default runs/<config name>.")
_PLAN = flags.DEFINE_bool(
    'plan', False, 'Print what the run would hold in memory, and end.')
_QUESTION = flags.DEFINE_string(
    'question', None, 'What configs/ask.py answers; without it, it proposes.')
_TRAJECTORY = flags.DEFINE_string(
    'trajectory', None, 'What configs/show.py prints, as FILE:LINE.')
_SEEDS = flags.DEFINE_list(
    'seeds', None, 'Several seeds, as in 0,1,2: a run each, and one table.')
_ALLOW_CHANGES = flags.DEFINE_bool(
    'allow_changes', False, 'Go on in a folder whose config was another one.')


def main(argv) -> None:
  """Runs the job of the parsed flags, and ends the process on errors."""
  del argv  # all arguments have been parsed
  signals.raise_at_sigterm()
  logging.set_verbosity(logging.WARNING)  # Orbax logs every save
  if not os.environ.get('SEARCHRL_TRACEBACK'):
    error_logging.tell_errors_once()
  config = _CONFIG.value
  name = flags.FLAGS['config'].config_filename  # the path, without its size
  workdir = _WORKDIR.value or str(
      pathlib.Path('runs') / pathlib.Path(name.partition(':')[0]).stem)
  if 'allow_changes' in config:
    config.allow_changes = _ALLOW_CHANGES.value
  try:
    refuse_repeated(config, _argv[1:])
    if pathlib.Path(workdir).is_file():
      raise ValueError(f'--workdir must be a folder, but {workdir} is a file.')
    _use_cache()
    devices.make_threads()
    processes.initialize()
    if _QUESTION.value is not None:
      _take_question(config, _QUESTION.value)
    if _TRAJECTORY.value is not None:
      _take_trajectory(config, _TRAJECTORY.value)
    name = 'searchrl.jobs.plan:run' if _PLAN.value else config.get('job', '')
    if _SEEDS.value is not None and not _PLAN.value:
      name = 'searchrl.jobs.sweep:run'
    job = plugins.resolve(name, field='job', ours='searchrl.jobs.train:run')
    with folder_lock.given_back():
      job(config, workdir, *_seeds())
    signals.ignore_more()  # the job is done
  except signals.Stopped as stop:
    signals.ignore_more()
    processes.say(str(stop))
    sys.exit(signals.EXIT_CODE)
  except KeyboardInterrupt as error:
    signals.ignore_more()
    by = 'SIGTERM' if isinstance(error, signals.Terminated) else 'Ctrl-C'
    processes.say(f'Ended by {by}. What {workdir} holds is whole; run the same '
                  'command to go on.')
    sys.exit(signals.EXIT_CODE)
  except (ValueError, OSError) as error:
    _refuse(error, workdir)


def _refuse(error: Exception, workdir: str = '') -> NoReturn:
  """Ends the command with one sentence that says what was wrong."""
  if os.environ.get('SEARCHRL_TRACEBACK'):
    raise error
  where = ''
  if isinstance(error, OSError) and error.errno and not error.filename:
    where = f', in a run whose folder is {workdir}'  # such as a full disk
  sys.exit(f'{type(error).__name__}: {error}{where}\n'
           '(SEARCHRL_TRACEBACK=1 shows where.)')


def _use_cache() -> None:
  """Makes jax cache compiled programs on disk."""
  cache = pathlib.Path(os.environ.get(
      'JAX_COMPILATION_CACHE_DIR',
      pathlib.Path.home() / '.cache' / 'searchrl' / 'xla'))
  try:
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
  except OSError as error:
    raise ValueError(
        'JAX_COMPILATION_CACHE_DIR must be a folder that can be written, by '
        f'default one in your home, but {cache} is none: {error}. Set it to '
        'another.') from error
  jax.config.update('jax_compilation_cache_dir', str(cache))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.1)


def refuse_repeated(config, arguments: Sequence[str]) -> None:
  """Raises a ValueError if a tuple is given twice, as absl would join both."""
  given = collections.Counter(
      argument.lstrip('-').partition('=')[0] for argument in arguments)
  for flag, times in given.items():
    if times > 1 and flag.startswith('config.'):
      value = functools.reduce(
          lambda node, name: getattr(node, name, None), flag.split('.')[1:],
          config)
      if isinstance(value, tuple):
        raise ValueError(
            f'--{flag} must be given once, but is given {times} times, whose '
            f'values together are {value}. Give all in one, as in '
            f'--{flag}="{value}".')


def _seeds() -> list[list[int]]:
  """Returns the job's further arguments: the list of --seeds, if given."""
  if _SEEDS.value is None or _PLAN.value:
    return []
  if not _SEEDS.value or not all(seed.isdecimal() for seed in _SEEDS.value):
    raise ValueError('--seeds must be numbers from 0 on, as in --seeds=0,1,2, '
                     f'but is {",".join(_SEEDS.value)!r}.')
  return [[int(seed) for seed in _SEEDS.value]]


def _take_question(config, question: str) -> None:
  if 'question' not in config.get('ask', {}) or not question.strip():
    raise ValueError(
        '--question must hold a question, and belongs to '
        '--config=configs/ask.py, but is '
        f'{question!r} with {flags.FLAGS["config"].config_filename}.')
  config.ask.question = question.strip()


def _take_trajectory(config, name: str) -> None:
  if 'show' not in config:
    raise ValueError('--trajectory belongs to --config=configs/show.py, but is '
                     f'given with {flags.FLAGS["config"].config_filename}.')
  config.show.trajectory = name


class _Loaded(flags.ArgumentParser):
  """A parser that loads a config file and checks that the set fields exist."""

  def parse(self, path: str) -> Any:  # called by absl
    try:
      config = config_files.load(path)
      config_files.check_fields(
          config_files.named(_argv), config.to_dict(), path)
    except (ValueError, OSError) as error:
      _refuse(error)  # absl would add to the message
    config.lock()
    self.before = config.to_dict()
    return config


def _parsed(argv: Sequence[str]) -> list[str]:
  """Parses the flags, after it drops those of an earlier command."""
  _argv[:] = argv
  for name in [*flags.FLAGS]:
    if name.startswith('config.'):
      delattr(flags.FLAGS, name)
  flags.FLAGS.unparse_flags()
  if {'--help', '-help', '--helpshort', '-?'} & {*argv}:
    _help(argv)
  parser = flags.FLAGS['config'].parser = _Loaded()
  try:
    rest = flags.FLAGS(argv)
    if len(rest) > 1 or _CONFIG.value is None:
      raise ValueError(
          'a command must be flags alone, --config=FILE among them, but has '
          f'{" ".join(rest[1:]) or "none"!r}. Write for instance '
          '--config=configs/dspo.py; --help lists the flags.')
    config_files.check_values(config_files.named(argv), parser.before,
                              _CONFIG.value.to_dict())
  except flags.UnrecognizedFlagError as error:
    _refuse(ValueError(
        f'--{error.flagname} is no flag, which --help lists. A field of the '
        f'config is set by --config.{error.flagname}=VALUE.'))
  except (flags.Error, ValueError, TypeError, LookupError) as error:
    text = ' '.join(str(error).split())
    field = re.match(r'flag --config\.([\w.]+)=', text)
    _refuse(config_files.refused(field[1], argv, parser.before)
            if field else ValueError(text))
  return rest


def _help(argv: Sequence[str]) -> NoReturn:
  """Prints the flags of a command, and the fields of its config."""
  app.usage(shorthelp=True, writeto_stdout=True)
  for name in (one.partition('=')[2] for one in argv if re.match(
      '--?config=', one)):
    try:
      fields = config_files.leaves(config_files.load(name).to_dict())
    except (ValueError, OSError) as error:
      _refuse(error)
    print(f'The fields of {name}, and their values:\n')
    for field, value in fields:
      print(f'  --config.{field}={value!r}')
  sys.exit(0)


def run(arguments: Sequence[str] | None = None) -> None:
  """Runs a command; may be called again in the same process.

  Args:
    arguments: Arguments of the command line. None: those of the process.

  Raises:
    SystemExit: The command has ended; always raised. Its code is the exit code
      or an error message.
  """
  app.run(main, argv=sys.argv if arguments is None else [
      sys.argv[0], *arguments], flags_parser=_parsed)


if __name__ == '__main__':
  run()
