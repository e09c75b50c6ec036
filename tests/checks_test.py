# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""checks: each rule of the table refuses what breaks it, and nothing else."""

import importlib
import pathlib

import pytest

from searchrl.experiment import checks

CONFIGS = sorted(path.stem for path in (
    pathlib.Path(__file__).parents[1] / 'configs').glob('*.py')
                 if path.stem not in (
                     '__init__', 'common', 'models', 'settings'))
BAD = {'build': ('ivf',), 'corpus': '', 'data.fresh': 1.5,
       'rollout.truncation': 'ignore'}


def configured(name):
  config = importlib.import_module(f'configs.{name}').get_config()
  if name == 'build_index':
    config.corpus = 'c.jsonl'  # has no default
  return config


def having(field):
  """A config that has the field."""
  for name in CONFIGS:
    config = configured(name)
    if list(checks._values(config, field)):
      return config
  raise AssertionError(f'no config has {field}')


@pytest.mark.parametrize('name', CONFIGS)
def test_every_config_as_it_stands_is_legal(name):
  assert checks.check(configured(name)) is None  # and nothing is raised


@pytest.mark.parametrize('rule', checks.RULES, ids=lambda rule: rule.field)
def test_a_broken_rule_names_field_rule_and_value(rule):
  config = having(rule.field)
  bad = BAD.get(rule.field, -1)
  group, _, name = rule.field.rpartition('.')
  (config[group] if group else config)[name] = bad
  with pytest.raises(ValueError) as caught:
    checks.check(config)
  assert str(caught.value).startswith(
      f'{rule.field} must be {rule.must_be}, but is {bad!r}.')
  assert rule.remedy in str(caught.value)


def test_a_bound_itself_is_legal_or_not_as_the_rule_says():
  config = configured('grpo')
  config.train.update(num_steps=0, checkpoint_every=1)
  checks.check(config)
  config.rollout.temperature = 0.0
  with pytest.raises(ValueError, match='rollout.temperature must be above 0'):
    checks.check(config)
