# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Command line: runs the job that a config names; kept short on purpose."""

import collections
from collections.abc import Sequence
import functools
import os
import pathlib
import sys

from absl import app
from absl import flags
from absl import logging
import jax
from ml_collections import config_flags

from searchrl.runtime import devices
from searchrl.runtime import folder_lock
from searchrl.runtime import moved
from searchrl.runtime import plugins
from searchrl.runtime import processes
from searchrl.runtime import signals

_CONFIG = config_flags.DEFINE_config_file(
    'config', None, 'A file under configs/, with :size after it if need be.',
    lock_config=True)
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
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  signals.raise_at_sigterm()
  logging.set_verbosity(logging.WARNING)  # Orbax logs every save
  cache = pathlib.Path(os.environ.get(
      'JAX_COMPILATION_CACHE_DIR',
      pathlib.Path.home() / '.cache' / 'searchrl' / 'xla'))
  cache.mkdir(parents=True, exist_ok=True, mode=0o700)
  jax.config.update('jax_compilation_cache_dir', str(cache))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.1)
  devices.make_threads()
  processes.initialize()
  config = _CONFIG.value
  name = flags.FLAGS['config'].config_filename  # the path, without its size
  workdir = _WORKDIR.value or str(
      pathlib.Path('runs') / pathlib.Path(name.partition(':')[0]).stem)
  if 'allow_changes' in config:
    config.allow_changes = _ALLOW_CHANGES.value
  try:
    moved.refuse_options(config.to_dict())
    refuse_repeated(config, sys.argv[1:])
    if _QUESTION.value is not None:
      _take_question(config, _QUESTION.value)
    if _TRAJECTORY.value is not None:
      _take_trajectory(config, _TRAJECTORY.value)
    name = 'searchrl.jobs.plan:run' if _PLAN.value else config.job
    if _SEEDS.value is not None and not _PLAN.value:
      name = 'searchrl.jobs.sweep:run'
    job = plugins.resolve(name, field='job', ours='searchrl.jobs.train:run')
    with folder_lock.given_back():
      job(config, workdir, *_seeds())
  except signals.Stopped as stop:
    processes.say(str(stop))
    sys.exit(signals.EXIT_CODE)
  except KeyboardInterrupt as error:
    by = 'SIGTERM' if isinstance(error, signals.Terminated) else 'Ctrl-C'
    processes.say(f'Ended by {by}. What {workdir} holds is whole; run the same '
                  'command to go on.')
    sys.exit(signals.EXIT_CODE)
  except (ValueError, FileNotFoundError, ConnectionError) as error:
    if os.environ.get('SEARCHRL_TRACEBACK'):
      raise
    sys.exit(f'{type(error).__name__}: {error}\n'
             '(SEARCHRL_TRACEBACK=1 shows where.)')


def refuse_repeated(config, arguments: Sequence[str]) -> None:
  """Raises a ValueError if a tuple is given twice: absl would join the two."""
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
  """The seeds of --seeds, if it is given; arguments of the job."""
  if _SEEDS.value is None or _PLAN.value:
    return []
  if not all(seed.isdecimal() for seed in _SEEDS.value):
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


def run() -> None:
  try:
    moved.refuse_flags(sys.argv[1:])  # else absl calls them unknown
  except ValueError as error:
    sys.exit(str(error))
  flags.mark_flag_as_required('config')
  app.run(main)


if __name__ == '__main__':
  run()
