# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""What a job takes from the run whose policy it uses; before any device."""

import pathlib
from typing import Any

from searchrl.data import datasets
from searchrl.experiment import config_checks
from searchrl.experiment import policy
from searchrl.runtime import processes


def fill(config, run: str, field: str) -> None:
  """Sets what a config leaves open to what a run was trained with.

  That is the engine, the model and the dialogue; without a run they are BM25
  and those of the tiny base model. Other budgets than the run's are legal, and
  said.

  Args:
    config: of the job.
    run: the run's folder, as in `policy.parse_run`; '' is none.
    field: of the config that names the run, for errors.

  Raises:
    FileNotFoundError, ValueError: it is no run, lacks the step, or was trained
      with another dialogue.
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


def _say_budgets(ours: Any, theirs: Any, folder: pathlib.Path) -> None:
  """Says which limits of a conversation are not those of the run."""
  differ = [f'{name}={ours[name]} (there {theirs[name]})' for name in ours
            if theirs.get(name) != ours[name]]
  if differ:
    processes.say('Warning: rollout.budgets are not those that '
                  f'{folder} was trained with: {", ".join(differ)}.')


def judge_on_own_data(config, run: str) -> None:
  """Has a run that was trained on files judged on its own evaluation data.

  Raises:
    ValueError: it has none, and the config names none; or it would be judged in
      the generated world that it was trained in.
  """
  folder = policy.parse_run(run)[0]
  recorded = policy.recorded(folder) if run else {}
  theirs = recorded.get('data', {})
  if theirs:
    config_checks.check_seeds(theirs, config)
  if config.data.evaluate or not theirs.get('train'):
    return
  if not theirs['evaluate']:
    raise ValueError(
        f'data.evaluate must name the questions that {folder} is judged on, '
        f'as it was trained on those of {theirs["train"]} and generated worlds '
        'say nothing of them, but is empty. Give '
        f'--config.data.evaluate=my_test.jsonl, or {datasets.WORLDS!r} all the '
        'same.')
  config.data.evaluate = theirs['evaluate']
  if theirs['evaluate'] != datasets.WORLDS:
    config.data.question_mark = theirs.get('question_mark', False)
    config.search.corpus = config.search.corpus or recorded['search']['corpus']
