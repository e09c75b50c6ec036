# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Defaults that a job takes from the run whose policy it uses."""

import copy
import pathlib
from typing import Any

from searchrl.data import datasets
from searchrl.experiment import config_checks
from searchrl.experiment import model_defaults
from searchrl.experiment import past_runs
from searchrl.experiment import rules
from searchrl.runtime import processes

# Fields, and groups of fields, that are the run's unless something sets them.
_OF_RUN = ('model.', 'tools', 'rollout.', 'world.', 'data.question_mark',
           'evaluate.decodings', 'evaluate.noise', 'evaluate.score', 'evaluate.worlds.kinds',
           'evaluate.worlds.max_hops')


def complete(config, run: str, field: str, folder: pathlib.Path | None = None
            ) -> Any:
  """Returns a copy of a config whose unset fields are filled in.

  With a run, they get the values that the run was trained with: model,
  dialogue, engine, limits of a conversation and so on. No device is used for
  this. A field that was set by a flag or a setting keeps its value. Limits that
  then differ from the run's give a warning. Without a run, an unset engine is
  BM25, and other fields depend on the model; see `model_defaults.resolved`.

  Args:
    config: Config of the job.
    run: Directory of the run, perhaps with a step: 'runs/dspo@20'. '': none.
    field: Config field that names the run, for errors.
    folder: Directory of the job. If the job was started there before, it keeps
      the values of its first start. None: the job has no directory.

  Raises:
    FileNotFoundError, ValueError: The directory holds no run, or the run lacks
      the step or was trained with another dialogue.
  """
  config = copy.deepcopy(config)
  is_open = 'search' in config and not config.search.engine
  if is_open:
    take_engine(config.search, run)
  if not run:
    return model_defaults.resolved(config, folder)
  place, step = past_runs.parse_run(run)
  past_runs.kept_step(place, step, field)
  recorded = past_runs.with_rollouts(place, field)
  config.model.path = config.model.path or recorded['model']['path']
  config.dialogue = config.dialogue or recorded['dialogue']
  if recorded['dialogue'] and config.dialogue != recorded['dialogue']:
    raise ValueError(
        f'dialogue must be what {place} was trained with, '
        f'{recorded["dialogue"]!r}, but is {config.dialogue!r}. Set it to '
        'that.')
  if 'tools' in dict(rules.unset(config)) and not config.tool_options:
    config.tool_options = recorded.get('tool_options', {})
  for name, unset in rules.unset(config):
    if name.startswith(_OF_RUN):
      value = rules.get(recorded, name)
      if value is not None:
        unset.set(tuple(value) if isinstance(value, list) else value)
  if is_open and not config.get('evaluate', {}).get('engines', True):
    config.evaluate.engines = recorded['evaluate'].get('engines', {})
  _say_differences(config, recorded, place)
  return model_defaults.resolved(config) if not config.dialogue else config


def take_engine(search, run: str) -> None:
  """Sets the engine of a field such as config.search to that of a run.

  Its options are those of the run, unless the field has some. Without a run,
  the engine is BM25.
  """
  search.engine, options = past_runs.search_of_run(run)
  search.options = search.options or options


def take_protocol(config, run: str) -> None:
  """Sets the model, the dialogue, its tools and all limits to those of a run.

  A run without a recorded config changes nothing.
  """
  recorded = past_runs.recorded(past_runs.parse_run(run)[0])
  if not recorded:
    return
  config.model.path, config.dialogue = (
      recorded['model']['path'], recorded['dialogue'])
  config.tools = tuple(recorded.get('tools', config.tools))
  config.tool_options = recorded.get('tool_options', {})
  rollout = recorded['rollout']
  config.rollout.budgets.update(rollout['budgets'])
  config.rollout.max_length = rollout.get(
      'max_length', config.rollout.max_length)


def run_of(config) -> tuple[str, str]:
  """Returns the run that a config names, and the field; both '' if none."""
  field = next((f'{group}.run' for group in ('evaluate', 'ask', 'collect')
                if config.get(group, {}).get('run')), '')
  return config[field.partition('.')[0]].run if field else '', field


def _say_differences(config, recorded: dict[str, Any], place: pathlib.Path
                    ) -> None:
  """Prints a warning if the model or limits differ from the run's."""
  ours, theirs = config.rollout, recorded['rollout']
  rows = [('model.path', config.model.path, recorded['model']['path']),
          ('rollout.max_length', ours.max_length, theirs.get('max_length'))]
  rows += [(f'rollout.budgets.{name}', value, theirs['budgets'].get(name))
           for name, value in ours.budgets.items()]
  differences = [f'{name}={value} (there {there})'
                 for name, value, there in rows if value != there]
  if differences:
    processes.say(f'Warning: not everything is as {place} was trained: '
                  f'{", ".join(differences)}.')


def judge_on_own_data(config, run: str) -> None:
  """Sets an empty data.evaluate to the run's, if the run trained on files.

  If questions of files are then evaluated without a corpus, the corpus is the
  run's, too. Without a run, nothing is set.

  Raises:
    ValueError: Neither the run nor the config names evaluation data, or the
      policy would be evaluated in the generated world that it was trained in.
  """
  folder = past_runs.parse_run(run)[0]
  recorded = past_runs.recorded(folder) if run else {}
  data = recorded.get('data', {})
  if data:
    config_checks.check_seeds(data, config)
  if not config.data.evaluate and data.get('train'):
    if not data['evaluate']:
      raise ValueError(
          f'data.evaluate must name test questions, but is empty: {folder} was '
          f'trained on {data["train"]}, and generated worlds do not test that. '
          'Give --config.data.evaluate=my_test.jsonl, or '
          f'{datasets.WORLDS!r} for generated worlds all the same.')
    config.data.evaluate = data['evaluate']
  if data and config.data.evaluate not in ('', datasets.WORLDS):
    config.search.corpus = config.search.corpus or corpus_of(folder)


def corpus_of(run: pathlib.Path) -> str:
  """Returns the path of the corpus that a run trained on; '' if it has none."""
  generated = run / 'data' / 'train' / 'corpus.jsonl'
  return past_runs.recorded(run).get('search', {}).get('corpus') or (
      str(generated) if generated.is_file() else '')
