# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The model card of an exported policy: how it was trained, and its scores."""

import json
import pathlib
from typing import Any

import jax

from searchrl.evaluation import summary
from searchrl.experiment import health
from searchrl.experiment import past_runs
from searchrl.runtime import checkpoint
from searchrl.training import supervised


def write(model: pathlib.Path, run: pathlib.Path, step: int) -> None:
  """Writes the README.md of a model's directory.

  Args:
    model: Directory of the model, with its other files.
    run: Directory of the run that trained it.
    step: Step of the exported policy. The card has its scores if the run was
      evaluated at this step.
  """
  config = past_runs.recorded(run)
  progress = checkpoint.extra(run / 'checkpoints', step)
  facts = _facts(config, run) | {
      'steps, trajectories': f'{step:,}, {progress.get("rollouts", 0):,}',
      'jax': jax.__version__} | supervised.digests(model)
  (model / 'README.md').write_text('\n'.join([
      f'# A policy that searches, step {step} of {run.resolve().name}', '',
      'Trained by `python -m searchrl.main` with reinforcement learning. To ask '
      'it, to serve it', 'or to evaluate it as it was trained, use the dialogue '
      'and the budgets below.', '', *supervised.table(facts), '', '## Scores',
      '', *_scores(run, step), '', '## Limits', '', *_limits(config), '']))


def _limits(config: dict[str, Any]) -> list[str]:
  """Returns lines about the limits of the scores."""
  lines = ['The scores are of the questions, the search engine and the budgets '
           'above, and of', 'one seed. With others they may be lower. Answers '
           'may be wrong, also where a passage', 'is right.']
  if not config['data']['train']:
    lines += ['It was trained on generated worlds, whose people and places do '
              'not exist, and knows', 'nothing about ours.']
  return lines


def _facts(config: dict[str, Any], run: pathlib.Path) -> dict[str, Any]:
  """Returns names and values for the rows of the card."""
  data, search, lora = config['data'], config['search'], config['model']['lora']
  name = config['algorithm']['name']
  return {
      'begun from': _origin(config, run),
      'recipe': f'{name.removeprefix("searchrl.rl.algorithms:")}, '
                f'seed {config["seed"]}',
      'reward': f'`{config["reward"]}`',
      'questions': f'`{data["train"]}`' if data['train'] else (
          f'a generated world, seed {data["world_seed"]}'),
      'corpus': f'`{search["corpus"]}`' if search['corpus'] else (
          'the generated world' if not data['train'] else 'remote'),
      'search engine': search['engine'],
      'dialogue': f'`{config["dialogue"] or "the default of the model"}`',
      'budgets': ', '.join(f'{key}={value}' for key, value in config[
          'rollout']['budgets'].items()),
      'tokens of a conversation': config['rollout']['max_length'],
      'adapters': f'LoRA of rank {lora["rank"]}, merged' if lora['rank']
                  else 'none'}


def _origin(config: dict[str, Any], run: pathlib.Path) -> str:
  """Returns the model, or the run, from which a run began."""
  note = run / f'{past_runs.INIT}.json'
  if note.exists():
    begun = json.loads(note.read_text())
    return f'step {begun["step"]} of {begun["run"]}'
  return config['model']['path'] or 'the tiny base model'


def _scores(run: pathlib.Path, step: int) -> list[str]:
  """Returns lines with the scores of a step, if it was evaluated."""
  evaluations = run / 'evaluation'
  newest = checkpoint.steps(run / 'checkpoints')[-1]
  for name, is_it in (('after', step == newest),
                      (f'{health.DURING}{step:06d}', True),
                      ('before', step == 0)):
    if is_it and (evaluations / name / 'table.json').exists():
      text = summary.scores(evaluations, name)
      return ['```text', *text.splitlines(), '```']
  return ['The run was not evaluated at this step.']
