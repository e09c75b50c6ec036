# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Every config with every size, setting and suite: values, plan, model."""

import functools
import importlib
import inspect
import itertools
import pathlib
import re

import pytest

from searchrl.experiment import build
from searchrl.experiment import config_checks
from searchrl.jobs import plan
from searchrl.models import weights
from searchrl.papers.known_models import MODELS

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONFIGS = sorted(file.stem for file in (ROOT / 'configs').glob('*.py')
                 if file.stem not in ('__init__', 'arguments'))
# A chat template, none, one without tools, and a small one.
KINDS = ('qwen2.5-7b-instruct', 'llama-3.2-3b', 'deepseek-r1-distill-qwen-7b',
         'smollm2-360m-instruct')
LAPTOP_ONLY = {('zerosearch', 'writer'), ('evaluate_simulator', 'writer'),
               ('evaluate', 'suite=trained'), ('predict', 'suite=trained')}
TRAININGS = ('train:run', 'sweep:run', 'rejection:run', 'selfplay:run')
# A job fills it in, or reads it as "none".
LEFT_OPEN = re.compile(r'(^|\.)(init_from|run|tuning\.model\.path)$')


@functools.cache
def module(name):
  return importlib.import_module(f'configs.{name}')


@functools.cache
def keys(name):
  """{key: values} of a config's text, as its own error lists them."""
  takes_text = inspect.signature(module(name).get_config).parameters
  if not takes_text or name in ('report', 'show'):  # runs, a line
    return {}
  with pytest.raises(ValueError) as error:
    module(name).get_config('nothing=of_this')
  listed = re.search(r'must be pairs of (.*?), but is', str(error.value))[1]
  return {key: values.split('|') for key, values in (
      pair.split('=') for pair in listed.split(', '))}


def texts(name, models=KINDS):
  """Every size, every model with every setting, and every value of the rest."""
  legal = dict(keys(name))
  if not legal:
    return ['']
  sizes, settings = legal.pop('size', []), legal.pop('setting', [''])
  takes_models = legal.pop('model', [])
  others = [f'{key}={value}' for key, values in legal.items()
            for value in values]
  bases = [f'size={size}' for size in sizes]
  large = [f'model={model}' + (setting and f',setting={setting}')
           for model, setting in itertools.product(
               models, {'': None, **dict.fromkeys(settings)}) if takes_models]
  return ['', *bases, *large, *others, *(
      f'{other},{base}' for other in others for base in (*bases, *large[:1])
      if not ('model' in base and LAPTOP_ONLY & {
          (name, other), (name, other.partition('=')[0])}))]


def get(name, text):
  get_config = module(name).get_config
  return get_config(text) if keys(name) else get_config()


def paths(tree, prefix=''):
  """(dotted name, value) of all fields that name a model or a run."""
  for key, child in tree.items():
    if isinstance(child, dict):
      yield from paths(child, f'{prefix}{key}.')
    elif key in ('path', 'run', 'init_from'):
      yield prefix + key, child


@pytest.mark.parametrize('name', CONFIGS)
def test_every_text_makes_a_config_whose_model_is_the_named_one(name):
  for text in texts(name):
    config = get(name, text).lock()
    assert str(config) and config.job
    if 'rollout' in config and 'evaluate' in config:
      config_checks.check(config)
    if 'model=' in text:
      hub_ids = {model.hub_id for model in MODELS.values()}
      for field, value in paths(config.to_dict()):
        if field.startswith('evaluate.methods.'):
          value = value or config.model.path  # as the job reads it
        if 'sqlm' in text and field == 'proposer.solver.path':
          assert not value  # the proposer is the solver
          continue
        assert value in hub_ids or (not value and LEFT_OPEN.search(field)), (
            text, field, value)


@pytest.mark.slow
@pytest.mark.parametrize('number, name', [*enumerate(CONFIGS)])
def test_every_training_of_a_model_is_planned_and_says_its_values(
    number, name, capsys, monkeypatch):
  """Each has its own setting, another one, and a value of another key."""
  monkeypatch.setattr(weights, 'locate', lambda path: pytest.fail(path))
  if get(name, '').job.rpartition('.')[2] not in TRAININGS:
    return
  large = [text for text in texts(name, KINDS[:1]) if 'model=' in text]
  for text in dict.fromkeys((large[0], large[number % len(large)], large[-1])):
    config = get(name, text)
    config.plan.update(devices='h200-64', compile=False)
    plan.run(config.lock(), '')
    printed = capsys.readouterr().out
    parts = build.beside_job(config, 'phases') or (
        build.beside_job(config, 'trainings'))
    assert printed.count('7.62 billion parameters on 64 x h200') == (
        len(parts) or 1), text
