# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the job that a config names.

  python -m searchrl.main --config=configs/dspo.py --config.seed=1

Every field of a config is a flag, --config.NAME.NAME=VALUE. The fields of a
training run are in configs/common.py, with their meaning and range. Those of
another job are in its own file under configs/. --config=FILE --help lists all
fields of FILE, and the other keywords of its algorithm and its optimizer.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
import json
import logging
import os
import pathlib
import sys
from typing import Any, NoReturn

from searchrl.runtime import progress
from searchrl.runtime import signals

if __name__ == '__main__':
  signals.exit_at_sigterm()  # because the imports take seconds

# pylint: disable=wrong-import-position
with (progress.phase('Importing JAX') if __name__ == '__main__'
      else contextlib.nullcontext()):
  from absl import flags
  from absl import logging as absl_logging
  import jax
  from searchrl.runtime import compilation_cache  # imports JAX

from searchrl.runtime import config_fields
from searchrl.runtime import config_files
from searchrl.runtime import devices
from searchrl.runtime import error_logging
from searchrl.runtime import folder_lock
from searchrl.runtime import foreign_names
from searchrl.runtime import host_memory
from searchrl.runtime import log
from searchrl.runtime import plugins
from searchrl.runtime import processes
from searchrl.runtime import run_store
from searchrl.runtime import watchdog

# Fields that the config of a job has if it trains.
_TRAINS = {'optimizer', 'phases', 'selfplay'}


def run(arguments: Sequence[str] | None = None) -> NoReturn:
  """Runs the job of the config that the command line names, then exits.

  It may be called again in the same process.

  Args:
    arguments: Arguments of the command line. None: those of the process.

  Raises:
    SystemExit: The command has ended; always raised. Its code is the exit code
      or an error message.
  """
  try:
    settings, others = config_fields.split(
        sys.argv[1:] if arguments is None else arguments)
    options = _parse(others)
    if options.help:
      _print_help(options.config, settings)
      sys.exit()
    with progress.phase(f'Reading {options.config}'):  # it imports, too
      config = config_files.load(options.config)
    config_fields.assign(config, settings, options.config)
    workdir = _workdir(options)
  except (ValueError, OSError) as error:
    _refuse(error)
  with _exit_codes(workdir):
    _start(config, options.verbosity)
    job = _job(config, options)
    with folder_lock.release_at_end(), run_store.opened(workdir) as folder:
      if processes.count() > 1:
        processes.agree('config', json.loads(config.to_json()))
      job(config, folder)
    signals.ignore_more()  # the job is done
  sys.exit()


@contextlib.contextmanager
def _exit_codes(workdir: str) -> Iterator[None]:
  """Runs a `with` body; turns its errors into an exit code and a message.

  In a single process, these are ValueErrors, OSErrors and all that stops a run,
  such as Ctrl-C. With several processes, they are all errors, so that the other
  processes learn of them. Some messages name `workdir`, the run's directory.
  """
  try:
    yield
  except signals.Stopped as stop:
    signals.ignore_more()
    processes.say(str(stop))
    sys.exit(signals.EXIT_CODE)
  except processes.Left as left:
    signals.ignore_more()
    signals.say(str(left))
    sys.exit(left.code)
  except KeyboardInterrupt as error:
    signals.ignore_more()
    by = 'SIGTERM' if isinstance(error, signals.Terminated) else 'Ctrl-C'
    processes.say(f'Ended by {by}. What {workdir} holds is whole; run the same '
                  'command to go on.')
    _leave(signals.EXIT_CODE)
  except Exception as error:
    if isinstance(error, TimeoutError) and processes.count() > 1:
      signals.say(f'{type(error).__name__}: {error}')
      sys.exit(watchdog.EXIT_CODE)  # a process is late, or hangs
    is_nameless = isinstance(error, OSError) and error.errno and (
        not error.filename)  # such as a full disk
    place = f', in a run whose folder is {workdir}' * bool(is_nameless)
    if processes.count() > 1 and not _may_be_of_lost_process(error):
      _print(error, place)
      _leave(1)
    if not isinstance(error, (ValueError, OSError)):
      raise
    processes.leave(1)
    _refuse(error, place)


def _may_be_of_lost_process(error: BaseException | None) -> bool:
  """Returns whether an error may be due to the end of another process.

  Such an error is of JAX's runtime, or was raised because of one. JAX then ends
  this process, too, with an exit code after which a launcher starts it again.
  """
  while error is not None:
    if isinstance(error, jax.errors.JaxRuntimeError):
      return not str(error).startswith('RESOURCE_EXHAUSTED')  # its own memory
    error = error.__cause__ or error.__context__
  return False


def _leave(code: int) -> NoReturn:
  """Tells the other processes that this one ends with an exit code, and exits.

  If they cannot be told, it exits at once, without waiting for them.
  """
  if not processes.leave(code):
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # would wait for processes that wait for it
  sys.exit(code)


def _print(error: Exception, place: str) -> None:
  """Prints an error as a message that ends with `place`, or as a traceback.

  ValueErrors and OSErrors are printed as messages, unless the environment
  variable SEARCHRL_TRACEBACK is set.
  """
  if isinstance(error, (ValueError, OSError)) and (
      not os.environ.get('SEARCHRL_TRACEBACK')):
    signals.say(_message(error, place))
  else:
    sys.excepthook(type(error), error, error.__traceback__)


def _refuse(error: Exception, place: str = '') -> NoReturn:
  """Exits with a message: the error and then `place`, where it occurred.

  If SEARCHRL_TRACEBACK is set, the error is raised instead.
  """
  if os.environ.get('SEARCHRL_TRACEBACK'):
    raise error
  sys.exit(_message(error, place))


def _message(error: Exception, place: str) -> str:
  return (f'{type(error).__name__}: {error}{place}\n'
          '(SEARCHRL_TRACEBACK=1 shows where.)')


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
      'python -m searchrl.main', add_help=False, allow_abbrev=False,
      description=__doc__, exit_on_error=False,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  for name, text in (
      ('config', 'Config file, with KEY=VALUE pairs after a colon, if any.'),
      ('workdir', 'Directory of the run, or an address such as s3://bucket/run; '
       'runs/<config name> by default.'),
      ('question', 'Question that configs/ask.py answers. Without it, ask.py '
       'proposes some.'),
      ('trajectory', 'Trajectory that configs/show.py prints, as FILE:LINE.'),
      ('seeds', 'Seeds of several runs, as in 0,1,2, with one table of all.')):
    parser.add_argument(f'--{name}', help=text)
  parser.add_argument(
      '--show_prompt', nargs='?', const='text', choices=('text', 'tokens'),
      help='Print the prompt and the other texts of the dialogue, as one text '
      'or with the id of each token, and end.')
  parser.add_argument(
      '--verbosity', choices=log.LEVELS, default='info',
      help='Level of the messages on stderr. warning: also without the bar; '
      'debug: with times, and with what other packages say.')
  for name, text in (
      ('plan', 'Print how much memory the run needs, and end.'),
      ('allow_changes', 'Continue in a directory whose config was different.'),
      ('help', 'Print the flags, and the fields of a config, and end.')):
    parser.add_argument(f'--{name}', action='store_true', help=text)
  return parser


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
  """Returns the flags of a command that are not fields of its config.

  Raises:
    ValueError: An argument is not one of these flags, or has no value.
  """
  try:
    options, unknown = _parser().parse_known_args(arguments)
  except argparse.ArgumentError as error:
    raise ValueError(f'{error}. --help lists the flags.') from error
  for argument in unknown:
    if argument.startswith('-'):
      name = argument.lstrip('-').partition('=')[0]
      theirs = foreign_names.OURS.get(foreign_names.known(name))
      near = '' if theirs else _similar_field(name, options.config)
      raise ValueError(
          f'--{name} is not a flag; --help lists the flags. ' + (
              near or 'A field of the config is set by --config.'
              f'{theirs or f"{name}=VALUE"}.'))
  if unknown or not (options.config or options.help):
    raise ValueError(
        ('a command must have flags alone, but has also '
         f'{" ".join(unknown)!r}. ' if unknown else
         'a command must have the flag --config=FILE, but lacks it. ') +
        'Write for instance --config=configs/dspo.py; --help lists the flags.')
  return options


def _similar_field(name: str, file: str | None) -> str:
  """Returns a sentence with a field that a flag may mean; '' if none does."""
  try:
    return config_fields.closest(name, config_files.load(file)) if file else ''
  except (ValueError, OSError):  # the flag's error is told first
    return ''


def _print_help(file: str | None, settings: config_fields.Settings) -> None:
  """Prints the flags of a command, and the fields of its config."""
  print(_parser().format_help())
  if file:
    config = config_files.load(file)
    config_fields.add_keywords(config, settings)
    print(f'The fields of {file}, their values and their ranges:\n')
    for field, value, rule in config_fields.fields(config):
      text = repr(value).strip()  # that of an empty ConfigDict ends its line
      print(f'  --config.{field}={text}'
            + (f'  # {rule.must_be}' if rule else ''))


def _workdir(options: argparse.Namespace) -> str:
  """Returns the directory of the run; default: runs/<name of the config file>.

  Raises:
    ValueError: The directory is a file.
  """
  file = pathlib.Path(options.config.partition(':')[0])
  workdir = options.workdir or str(pathlib.Path('runs') / file.stem)
  workdir = workdir.removeprefix(run_store.LOCAL)
  if not run_store.is_store(workdir):
    workdir = os.path.expanduser(workdir)  # shells leave the ~ of --workdir=~/x
  if pathlib.Path(workdir).is_file():
    raise ValueError(f'--workdir must be a folder, but {workdir} is a file.')
  return workdir


def _start(config: Any, verbosity: str) -> None:
  """Prepares the process: signals, logs, threads, memory, compilation cache."""
  signals.raise_at_sigterm()
  log.set_level(verbosity)
  _write_others(verbosity)
  if not os.environ.get('SEARCHRL_TRACEBACK'):
    error_logging.drop_repeated_errors()
  compilation_cache.start()
  devices.make_threads()
  if _TRAINS.intersection(config):
    host_memory.keep()
  with progress.phase('Waiting for the other processes'):
    processes.initialize()
  progress.DISPLAY.speaks = lambda: processes.is_first() and log.informs()


def _write_others(verbosity: str) -> None:
  """Writes the messages of other packages to stderr, each of them once."""
  flags.FLAGS.mark_as_parsed()  # else absl says that they have not been
  flags.FLAGS['logtostderr'].value = True
  absl_logging.use_absl_handler()
  absl_logging.set_verbosity(  # Orbax logs every save
      'warning' if verbosity == 'info' else verbosity)
  # This package has a handler of its own, beside that of the root.
  logging.getLogger('huggingface_hub').propagate = False


def _job(config: Any, options: argparse.Namespace) -> Callable[..., Any]:
  """Returns the function (config, folder) that runs the command's job.

  Flags that the job reads, such as --question, are written into the config.

  Raises:
    ValueError: A flag belongs to another job, or there is no such job.
  """
  for group, name in (('ask', 'question'), ('show', 'trajectory')):
    value = getattr(options, name)
    if value is None:
      continue
    if name not in config.get(group, {}):
      raise ValueError(
          f'--{name} is a flag of --config=configs/{group}.py alone, but is '
          f'{value!r} with {options.config}. Leave it out, or name that config.')
    if not value.strip():
      raise ValueError(
          f'--{name} must hold a {name}, but is {value!r}. Give one.')
    config[group][name] = value.strip()
  if 'allow_changes' in config:
    config.allow_changes = options.allow_changes
  name, more = config.get('job', ''), {}
  if options.plan:
    name = 'searchrl.jobs.plan:run'
  elif options.show_prompt:
    name = 'searchrl.jobs.show_prompt:run'
    more = dict(tokens=options.show_prompt == 'tokens')
  elif options.seeds is not None:
    name, more = 'searchrl.jobs.sweep:run', dict(seeds=_seeds(options.seeds))
  with progress.phase(f'Importing {name.partition(":")[0]}'):
    job = plugins.resolve(name, field='job', ours='searchrl.jobs.train:run')
  return functools.partial(job, **more)


def _seeds(text: str) -> list[int]:
  seeds = [seed.strip() for seed in text.split(',')]
  if not all(seed.isdecimal() for seed in seeds):
    raise ValueError('--seeds must be numbers from 0 on, as in --seeds=0,1,2, '
                     f'but is {text!r}.')
  return [int(seed) for seed in seeds]


if __name__ == '__main__':
  run()
