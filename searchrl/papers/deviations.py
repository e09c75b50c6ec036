# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Compares a run with the command that a paper's table has for it."""

from collections.abc import Mapping, Sequence
import json
import pathlib
import re
from typing import Any

from searchrl.experiment import model_defaults
from searchrl.experiment import rules
from searchrl.experiment import run_defaults
from searchrl.runtime import config_fields
from searchrl.runtime import config_files

# Fields, and groups of fields, that the numbers of a paper depend on. Those of
# devices, speed and folders are not among them.
_COMPARED = (
    'algorithm', 'reward', 'reward_options', 'outcome', 'dialogue', 'model.path',
    'model.lora', 'optimizer', 'critic', 'learner.minibatches',
    'train.num_steps', 'train.epochs', 'data.mix', 'data.common', 'data.limit',
    'data.question_mark', 'rollout.questions_per_step', 'rollout.group_size',
    'rollout.max_rounds', 'rollout.temperature', 'rollout.top_k',
    'rollout.top_p', 'rollout.min_p', 'rollout.budgets', 'rollout.max_length',
    'search.engine', 'search.options', 'evaluate.search',
    # Of self-play, besides those of its roles. Its iterations are not here,
    # because a row has the scores of one of them.
    'selfplay.hops', 'selfplay.seeds', 'selfplay.documents',
    'selfplay.document_tokens', 'selfplay.one_model', 'proposing.seeds',
    'proposing.samples', 'proposing.shuffle_answers', 'proposing.majority',
    'proposing.check', 'solver.path', 'solver.dialogue', 'solver.budgets',
    'solver.temperature')
# Options of an engine that only say where it is, or how fast.
_PLACE = re.compile(
    r'(evaluate\.)?search\.options\.(.+\.)?(index|urls?|proxy|tape|mode|batch|'
    r'connections|slots|tries|failures|response_bytes|memory_share|'
    r'cache_tokens|attention|\w+_(env|secs))')
_ROLES = 'proposer', 'solver'  # groups of self-play, each with a run's fields
# Groups that lack the keywords that have a function's default.
_KEYWORDS = re.compile(r'.*(algorithm|optimizer|options)\.\w.*')
# Fields that follow the model or the data if no recipe or flag sets them.
_CHOSEN = (*model_defaults.SAMPLING, *model_defaults.TRAINING,
           *model_defaults.TUNING, 'search.engine')
_OPEN = 'dialogue', 'model.path', 'search.engine'  # the same if they are ''


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
  if arm:
    with made.unlocked():
      config_fields.change(made, made.sweep.runs[arm], f'sweep.runs.{arm}')
  expected = _compared(json.loads(made.to_json()))
  actual = _compared(json.loads(file.read_text()))
  ignored = _left_open(made, expected)
  for search in ('search', 'evaluate.search'):
    engine = f'{search}.engine'
    if engine in ignored or expected.get(engine) != actual.get(engine):
      ignored |= {name for name in (*expected, *actual)
                  if name.startswith(f'{search}.options.')}
  return [f'{name}={actual.get(name)!r}, not {expected.get(name)!r}'
          for name in dict.fromkeys((*expected, *actual))
          if name not in ignored
          and (name in actual and name in expected or _KEYWORDS.match(name))
          and not _is_same(name, actual.get(name), expected.get(name))]


def _compared(tree: Mapping[str, Any]) -> dict[str, Any]:
  """Returns those fields of a config on which a paper's numbers depend."""
  return {name: value for name, value in config_fields.leaves(tree)
          if value != {} and not _PLACE.fullmatch(name)
          and any(f'{_of_role(name)}.'.startswith(f'{group}.')
                  for group in _COMPARED)}


def _left_open(made: Any, expected: Mapping[str, Any]) -> set[str]:
  """Returns the fields of a command whose value its run decides.

  The model, the data or, in an evaluation, the evaluated run decides them.
  """
  run, _ = run_defaults.run_of(made)
  return {name for name, _ in rules.unset(made)
          if run or _of_role(name) in _CHOSEN} | {
              name for name, value in expected.items()
              if value == '' and _of_role(name) in _OPEN}


def _of_role(name: str) -> str:
  """Returns a field's name in the config of a role's own run."""
  role, _, rest = name.partition('.')
  return rest if role in _ROLES and name not in _COMPARED else name


def _is_same(name: str, actual: Any, expected: Any) -> bool:
  """Returns whether two values of a field are equal.

  Model paths are equal if their last two parts are, since a folder may move.
  """
  if name.endswith(('.path', '.encoder')) and None not in (actual, expected):
    actual, expected = (
        pathlib.PurePath(path).parts[-2:] for path in (actual, expected))
  return actual == expected
