# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Runs that exist already: their names, recorded configs and kept steps."""

from collections.abc import Sequence
import pathlib
from typing import Any

from searchrl.runtime import checkpoint
from searchrl.runtime import processes
from searchrl.runtime import run_store
from searchrl.runtime import workdir as workdirs

INIT = 'init'  # folder of a run's initial model, if it has train.init_from


def parse_run(text: str) -> tuple[pathlib.Path, int | None]:
  """Returns the directory and the step of a text such as 'runs/dspo@20'.

  Without '@', the step is None, which means the newest checkpoint.
  'runs/dspo@best' is the step of the best validation.
  'runs/dspo@before_collapse' is the step that `guards` trusts, from before the
  run collapsed, or the newest checkpoint if it did not collapse.

  A run in an object store is copied first, and the directory is that of the
  copy.

  Raises:
    FileNotFoundError, ValueError: A step has a name, but the run has no
      checkpoints or no best validation, or the store cannot be read.
  """
  run, _, step = text.rpartition('@')
  has_step = step.isdecimal() or step in ('best', 'before_collapse')
  if not run or not has_step or pathlib.Path(text).is_dir():
    return pathlib.Path(run_store.local(text)), None
  folder = pathlib.Path(run_store.local(run))
  return folder, int(step) if step.isdecimal() else _named_step(folder, step)


def _named_step(run: pathlib.Path, name: str) -> int | None:
  path = run / 'checkpoints'
  progress = checkpoint.extra(
      path, kept_step(run, None, f'the part before @{name}'))
  if name == 'before_collapse':
    return progress.get(name)
  best = progress.get('best')
  if not best:
    raise ValueError(
        f'@best needs a run that was validated (evaluate.every) and kept its '
        f'best (train.keep_best), but {run} was not. Name a step, as in '
        f'{run}@{checkpoint.steps(path)[-1]}.')
  return best[0]


def kept_step(run: pathlib.Path, step: int | None, field: str) -> int:
  """Returns the step if its checkpoint is kept; for None, the newest step.

  If the newest checkpoint cannot be read, there is a warning, and None means
  the newest step that can be read.

  Raises:
    FileNotFoundError: The directory has no run with checkpoints.
    ValueError: The step is not kept.
  """
  steps = checkpoint.steps(run / 'checkpoints')
  if not steps or not recorded(run):
    folder, _, name = str(run).rpartition('@')
    is_run = folder and checkpoint.steps(pathlib.Path(folder) / 'checkpoints')
    way_out = (
        f'{name!r} is no step: write {folder}@STEP, {folder}@best, '
        f'{folder}@before_collapse, or {folder} alone.' if is_run else
        'Name the --workdir of a training run; a relative path begins in the '
        'present folder.')
    raise FileNotFoundError(
        f'{field} must be the folder of a run with checkpoints, but {run} is '
        f'none. {way_out}')
  if step is not None and step not in steps:
    raise ValueError(
        f'{field} must be at a step whose checkpoint {run} has kept, one of '
        f'{", ".join(map(str, steps))}, but is at {step}. Choose one of these; '
        'a later run keeps more with train.keep_checkpoints.')
  return _newest(run, steps) if step is None else step


def _newest(run: pathlib.Path, steps: Sequence[int]) -> int:
  """Returns the newest step that can be read; the newest if none can be."""
  for step in reversed(steps):
    try:
      checkpoint.extra(run / 'checkpoints', step)
    except ValueError as error:
      processes.say(f'Warning: {error} An older step is taken if there is one.')
      continue
    return step
  return steps[-1]


def recorded(run: pathlib.Path) -> dict[str, Any]:
  """Returns the config that a run recorded; {} if it recorded none."""
  return workdirs.read_config(run) if (run / workdirs.CONFIG).exists() else {}


def with_rollouts(run: pathlib.Path, field: str) -> dict[str, Any]:
  """Returns the config of a run that trained with rollouts.

  Raises:
    ValueError: The run was tuned on demonstrations.
  """
  config = recorded(run)
  if 'rollout' not in config:
    raise ValueError(
        f'{field} must be a run that trained with rollouts, but {run} is one '
        f'of {config["job"]}. Its model is the folder {run / "model"}, which '
        'config.model.path may name.')
  return config


def search_of_run(run: str) -> tuple[str, dict[str, Any]]:
  """Returns the name and the options of the engine that evaluates a run.

  It is evaluate.search of the run's config, or else the engine of training.
  Without a run, it is BM25 without options.
  """
  config = recorded(parse_run(run)[0]) if run else {}
  search = config.get('evaluate', {}).get('search', {})
  if not search.get('engine'):  # uses the engine of training
    search = config.get('search', {})
  return search.get('engine', 'bm25'), search.get('options', {})
