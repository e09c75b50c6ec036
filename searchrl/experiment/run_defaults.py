# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Defaults that a job takes from the run whose policy it uses."""

import pathlib
from typing import Any

from searchrl.data import datasets
from searchrl.experiment import config_checks
from searchrl.experiment import policy
from searchrl.runtime import processes


def fill(config, run: str, field: str) -> None:
  """Fills empty fields of a config with the values of a run's training.

  These are the engine, the model and the dialogue. Without a run, they are BM25
  and the tiny base model with its dialogue. Budgets may differ from the run's,
  which gives a warning. No device is used.

  Args:
    config: Config of the job.
    run: Directory of the run, as in `policy.parse_run`. '': none.
    field: Config field that names the run, for errors.

  Raises:
    FileNotFoundError, ValueError: The directory holds no run, or the run lacks
      the step or was trained with another dialogue.
  """
  if not config.search.engine:
    config.search.engine, config.search.options = policy.search_of_run(run)
  if run:
    folder, step = policy.parse_run(run)
    policy.kept_step(folder, step, field)
    recorded = policy.recorded(folder)
    config.model.path = config.model.path or recorded['model']['path']
    config.dialogue = config.dialogue or recorded['dialogue']
    if config.dialogue != recorded['dialogue']:
      raise ValueError(
          f'dialogue must be what {folder} was trained with, '
          f'{recorded["dialogue"]!r}, but is {config.dialogue!r}. Set it to '
          'that.')
    _say_budgets(config.rollout.budgets, recorded['rollout']['budgets'], folder)
  config.dialogue = config.dialogue or policy.TINY_DIALOGUE


def _say_budgets(budgets: Any, trained: Any, folder: pathlib.Path) -> None:
  """Prints a warning of the conversation limits that differ from the run's."""
  differences = [
      f'{name}={budgets[name]} (there {trained[name]})' for name in budgets
      if trained.get(name) != budgets[name]]
  if differences:
    processes.say('Warning: rollout.budgets are not those that '
                  f'{folder} was trained with: {", ".join(differences)}.')


def judge_on_own_data(config, run: str) -> None:
  """Makes the run's own evaluation data the default, if it trained on files.

  Raises:
    ValueError: Neither the run nor the config names evaluation data, or the
      policy would be evaluated in the generated world that it was trained in.
  """
  folder = policy.parse_run(run)[0]
  recorded = policy.recorded(folder) if run else {}
  data = recorded.get('data', {})
  if data:
    config_checks.check_seeds(data, config)
  if config.data.evaluate or not data.get('train'):
    return
  if not data['evaluate']:
    raise ValueError(
        f'data.evaluate must name the questions that {folder} is judged on, '
        f'as it was trained on those of {data["train"]} and generated worlds '
        'say nothing of them, but is empty. Give '
        f'--config.data.evaluate=my_test.jsonl, or {datasets.WORLDS!r} all the '
        'same.')
  config.data.evaluate = data['evaluate']
  if data['evaluate'] != datasets.WORLDS:
    config.data.question_mark = data.get('question_mark', False)
    config.search.corpus = config.search.corpus or recorded['search']['corpus']
