# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Compares a run with the command that a paper's table has for it."""

from collections.abc import Sequence
import json
import pathlib
from typing import Any

from searchrl.experiment import rules
from searchrl.runtime import config_fields
from searchrl.runtime import config_files

# Fields, and groups of fields, that the numbers of a paper depend on. Those of
# devices, speed and folders are not among them.
_COMPARED = (
    'algorithm.', 'reward', 'reward_options.', 'dialogue', 'model.path',
    'model.lora.', 'optimizer.', 'critic.', 'train.num_steps', 'train.epochs',
    'data.mix', 'data.limit', 'rollout.questions_per_step',
    'rollout.group_size', 'rollout.temperature', 'rollout.budgets.',
    'rollout.max_length', 'search.engine')


def of_run(folder: pathlib.Path, config: str, flags: Sequence[str],
           arm: str = '') -> list[str]:
  """Returns the config fields in which a run differs from its command.

  Only fields on which a paper's numbers depend are compared. A field is left
  out if the command lets the model or the data decide its value.

  Args:
    folder: Directory of the run.
    config: Name of the config in configs/, perhaps followed by :KEY=VALUE.
    flags: Flags of the command.
    arm: Name of the run within a sweep of several runs. '': the config is not a
      sweep.

  Returns:
    A text for each such field, with the run's value and the command's value:
    "train.num_steps=4, not 1005". [] if the directory has no config.json.
  """
  file = folder / 'config.json'
  if not file.is_file():
    return []
  made = config_files.load(f'configs/{config}')
  config_fields.assign(made, config_fields.split(flags)[0], config)
  unset = {name for name, _ in rules.unset(made)}
  expected = {name: value for name, value in config_fields.leaves(_plain(made))
              if name not in unset and value != ''}
  if arm:
    expected |= config_fields.leaves(_plain(made.sweep.runs[arm]))
  actual = dict(config_fields.leaves(json.loads(file.read_text())))
  return [f'{name}={actual[name]!r}, not {value!r}'
          for name, value in expected.items()
          if name.startswith(_COMPARED) and name in actual
          and not _is_same(name, actual[name], value)]


def _is_same(name: str, actual: Any, expected: Any) -> bool:
  """Returns whether two values of a field are equal.

  Model paths are equal if their last two parts are, since a folder may move.
  """
  if name == 'model.path':
    actual, expected = (
        pathlib.PurePath(path).parts[-2:] for path in (actual, expected))
  return actual == expected


def _plain(config: Any) -> dict[str, Any]:
  """Returns a config as a dict, as its config.json would be read."""
  return json.loads(config.to_json())
