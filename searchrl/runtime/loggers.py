# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Loggers: send a run's metrics to other services, besides metrics.jsonl.

A config names a logger's function `make(folder, config, first)`, which returns
a `Logger`. Built-in loggers have short names, and a user's logger is named as
'module:function'.
"""

from collections.abc import Callable, Mapping, Sequence
import importlib
import os
import pathlib
from typing import Any, NamedTuple

from searchrl.runtime import atomic_files
from searchrl.runtime import plugins

_IDS = 'loggers.json'  # file with the ids of a run's logs, in its folder


class Logger(NamedTuple):
  """A connection to a logging service: a function to send, and one to close."""

  log: Callable[[int, Mapping[str, float]], Any]  # a step and its metrics
  close: Callable[[], Any]  # sends what is left


# Folder of the run, its config by name, and the first step that will be logged
# again because the run was restored; None: nothing will.
Make = Callable[[pathlib.Path, Mapping[str, Any], int | None], Logger]


def tensorboard(folder: pathlib.Path, config: Mapping[str, Any],
                first: int | None) -> Logger:
  """Makes a logger that writes event files to `tensorboard/` in a folder."""
  del config
  import tensorboardX
  events = folder / 'tensorboard'
  older = len(list(events.glob('*')))  # names are by second
  writer = tensorboardX.SummaryWriter(
      str(events), purge_step=first, filename_suffix=f'.{older}')

  def log(step, values):
    for name, value in values.items():
      writer.add_scalar(name, value, step)
    writer.flush()

  return Logger(log, writer.close)


def wandb(folder: pathlib.Path, config: Mapping[str, Any],
          first: int | None) -> Logger:
  """Makes a logger for Weights & Biases. A resumed run continues its log there.

  Environment variables such as WANDB_PROJECT, WANDB_MODE=offline and
  WANDB_ENTITY configure it. If a resumed run repeats steps, the values that
  were logged first stay. `first` is not used.
  """
  del first
  import wandb as package
  run = package.init(
      project=os.environ.get('WANDB_PROJECT', 'searchrl'), name=folder.name,
      id=_id(folder, 'wandb'), resume='allow', dir=str(folder),
      config=dict(config))
  return Logger(lambda step, values: run.log(dict(values), step=step),
                run.finish)


def trackio(folder: pathlib.Path, config: Mapping[str, Any],
            first: int | None) -> Logger:
  """Makes a logger for Trackio, on this machine or in TRACKIO_SPACE_ID."""
  del first
  import trackio as package
  run = package.init(
      project=os.environ.get('TRACKIO_PROJECT', 'searchrl'),
      name=_id(folder, 'trackio'), resume='allow', config=dict(config),
      space_id=os.environ.get('TRACKIO_SPACE_ID'), embed=False)
  return Logger(lambda step, values: run.log(dict(values), step=step),
                run.finish)


OURS: dict[str, Make] = {
    'tensorboard': tensorboard, 'wandb': wandb, 'trackio': trackio}
_PACKAGES = {'tensorboard': 'tensorboardX'}


def resolve(names: Sequence[str]) -> tuple[Make, ...]:
  """Returns the functions that make the loggers with the given names.

  Args:
    names: Entries of the config field train.loggers: short names of built-in
      loggers, or 'module:function'.

  Raises:
    ValueError: There is no such logger, or its package is not installed.
  """
  makers = []
  for name in names:
    if name not in OURS:
      makers.append(plugins.resolve(
          name, field='train.loggers', ours=', '.join(OURS)))
      continue
    package = _PACKAGES.get(name, name)
    try:
      importlib.import_module(package)
    except ImportError as error:
      raise ValueError(
          f'train.loggers must name loggers whose packages are installed, but '
          f'{name!r} needs {package}: {error}. Run pip install {package}, or '
          f'leave it out of {tuple(names)}.') from error
    makers.append(OURS[name])
  return tuple(makers)


def _id(folder: pathlib.Path, name: str) -> str:
  """Returns the id of a folder's run at a service.

  The first call draws a random id and writes it to the folder.
  """
  file = folder / _IDS
  ids = atomic_files.read_json(file) or {}
  if name not in ids:
    ids[name] = f'{folder.name}-{os.urandom(4).hex()}'
    atomic_files.write_json(file, ids)
  return ids[name]
