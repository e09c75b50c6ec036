# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""checks: each rule of the table refuses what breaks it, and nothing else."""

import importlib
import math
import pathlib

import pytest

from searchrl.experiment import build as builds
from searchrl.experiment import config_checks

CONFIGS = ['tools.tiny_base', *sorted(f'configs.{path.stem}' for path in (
    pathlib.Path(__file__).parents[1] / 'configs').glob('*.py')
    if path.stem not in ('__init__', 'arguments', 'common'))]
BAD = {'build': ('ivf',), 'corpus': '', 'data.fresh': 1.5,
       'data.demonstrations.mix': (0, 0), 'data.per_hop': (1, -1),
       'data.mix': (1, -.5), 'evaluate.decodings': ('beam',),
       'evaluate.worlds.kinds': ('known', 'known'), 'mesh.data': -2,
       'mesh.fsdp': 0, 'mesh.tensor': -2, 'retrieval.top_ks': ()} | {
           field: 'none such' for field in (
               'export.dtype', 'model.dtype', 'model.save_dtype',
               'learner.dtype', 'rollout.dtype', 'encoder.dtype',
               'model.attention', 'optimizer.mu_dtype', 'optimizer.schedule',
               'importance_correction.method',
               'importance_correction.level', 'learner.remat',
               'train.lockstep', 'rollout.search_order', 'rollout.attention',
               'rollout.truncation')}


def configured(name):
  config = importlib.import_module(name).get_config()
  if name == 'configs.build_index':
    config.corpus = 'c.jsonl'  # has no default
  return config


def having(field):
  """A config that has the field."""
  for name in CONFIGS:
    config = configured(name)
    if list(config_checks._values(config, field)):
      return config
  raise AssertionError(f'no config has {field}')


@pytest.mark.parametrize('name', CONFIGS)
def test_every_config_as_it_stands_is_legal(name):
  assert config_checks.check(configured(name)) is None  # and nothing is raised


@pytest.mark.parametrize('rule', config_checks.RULES, ids=lambda rule: rule.field)
def test_a_broken_rule_names_field_rule_and_value(rule):
  config = having(rule.field)
  bad = BAD.get(rule.field, -1)
  group, _, name = rule.field.rpartition('.')
  (config[group] if group else config)[name] = bad
  with pytest.raises(ValueError) as caught:
    config_checks.check(config)
  assert str(caught.value).startswith(
      f'{rule.field} must be {rule.must_be}, but is {bad!r}.')
  assert rule.remedy in str(caught.value)


def test_a_bound_itself_is_legal_or_not_as_the_rule_says():
  config = configured('configs.grpo')
  config.train.update(num_steps=0, checkpoint_every=1)
  config_checks.check(config)
  config.rollout.temperature = 0.0
  with pytest.raises(ValueError, match='rollout.temperature must be above 0'):
    config_checks.check(config)


@pytest.mark.parametrize('field, value', [
    ('optimizer.learning_rate', math.nan), ('rollout.temperature', math.inf),
    ('data.mix', (1, math.nan)), ('critic.optimizer.b2', -math.inf),
    ('algorithm.clip_low', math.nan)])
def test_no_number_of_a_config_is_nan_or_infinite(field, value):
  config = configured('configs.ppo')
  config.data.mix = (1.0, 1.0)
  config.update_from_flattened_dict({field: value})
  with pytest.raises(ValueError, match=f'^{field} must be finite, but is '):
    config_checks.check(config)


@pytest.mark.parametrize('seed', [2**63, 10**30, -1])
def test_a_seed_fits_into_eight_bytes(seed):
  config = configured('configs.grpo')
  config.seed = seed
  with pytest.raises(ValueError, match=r'^seed must be from 0 to 2\^63 - 1, b'):
    config_checks.check(config)
  config.seed = 2**63 - 1
  config_checks.check(config)


def test_no_policy_is_judged_in_the_world_it_learns_from():
  config = configured('configs.grpo')
  config.evaluate.worlds.world_seed = config.data.world_seed
  with pytest.raises(ValueError, match='^evaluate.worlds.world_seed must not'):
    config_checks.check_seeds(config.data, config)
  for change in (dict(per_hop=()), dict(train='a.jsonl'),
                 dict(evaluate='a.jsonl'), dict(world_seed=2)):
    other = config.copy_and_resolve_references()
    other.data.update(change)
    config_checks.check_seeds(other.data, other)
  config.evaluate.worlds.kinds = ()
  config_checks.check_seeds(config.data, config)


def test_a_warm_up_longer_than_the_run_is_said(capsys):
  config = configured('configs.grpo')
  config_checks.check_learner(config, builds.algorithm(config))
  assert not capsys.readouterr().err
  config.optimizer.warmup_steps = 100
  config_checks.check_learner(config, builds.algorithm(config))
  assert capsys.readouterr().err == (
      "Warning: optimizer.warmup_steps=100 are more than the run's 48 updates, "
      'so that it never reaches its learning rate.\n')


@pytest.fixture
def data(tmp_path):
  """A config of two training files, which are there."""
  config = configured('configs.grpo')
  for name in ('nq', 'hotpotqa'):
    (tmp_path / f'{name}.jsonl').write_text('')
  config.data.update(train=','.join(
      f'{name}={tmp_path}/{name}.jsonl' for name in ('nq', 'hotpotqa')))
  return config


@pytest.mark.parametrize('weights', [(1,), (1, 2, 3), (0, 0), (2, -1)])
def test_weights_must_be_a_number_a_file_and_one_above_zero(data, weights):
  data.data.weights = weights
  with pytest.raises(ValueError, match='data.weights must have a number of at '
                                       'least 0 for each of the 2 files'):
    config_checks.check_questions(data)
  data.data.weights = (0, 2)
  config_checks.check_questions(data)
  data.data.train = ''
  with pytest.raises(ValueError, match='each of the 0 files'):
    config_checks.check_questions(data)


def test_missing_files_are_named_before_a_model_is_loaded(data):
  data.data.evaluate = 'nq=gone.jsonl'
  with pytest.raises(FileNotFoundError, match='gone.jsonl is not a file. Check data.'):
    config_checks.check_questions(data)


def test_a_thread_that_samples_leaves_no_engine_to_evaluate_with(data):
  algorithm = builds.algorithm(data)
  config_checks.check_staleness(1, algorithm, 1)
  with pytest.raises(ValueError, match='evaluate.every must be 0 where roll'
                     'outs run ahead in a thread, .* is 5 with train.max_stale'):
    config_checks.check_staleness(1, algorithm, 1, every=5)


@pytest.mark.parametrize('field, value, message', [
    ('data.common', 0.4, r'^data.common must be 0 where worlds have no common '
     r'knowledge \(world.common=False\), but is 0.4. Set it to 0, or world.co'),
    ('evaluate.worlds.kinds', ('known', 'famous'),
     r"^evaluate.worlds.kinds must not name famous .* but is \('known', "
     r"'famous'\). Leave them out, or set world.common to True.$"),
])
def test_questions_about_knowledge_that_no_world_has_are_refused(
    field, value, message):
  config = configured('configs.grpo')
  config.world.common = False
  config.data.common = 0.0
  config.evaluate.worlds.kinds = ('known',)
  config_checks.check_worlds(config)  # the old world
  config.update_from_flattened_dict({field: value})
  with pytest.raises(ValueError, match=message):
    config_checks.check_worlds(config)
  config.data.update(train='train.jsonl', evaluate='test.jsonl')
  config_checks.check_worlds(config)  # nothing is generated


SIMULATED = 'searchrl.papers.zerosearch.simulated:make'
SERVED = dict(writer='served', urls=('http://127.0.0.1:1/v1',))


@pytest.mark.parametrize('engine, options, secs', [
    ('remote', dict(deadline_secs=60.0), 60),
    (SIMULATED, SERVED | dict(connections=36), 60),  # in two waves
    (SIMULATED, SERVED | dict(connections=10, deadline_secs=8.0), 64),
    ('cache', dict(engine=dict(name='web', deadline_secs=99.0)), 99)])
@pytest.mark.parametrize('field', ['search', 'evaluate.search'])
def test_a_search_must_end_while_somebody_waits(field, engine, options, secs):
  config = configured('configs.grpo')
  assert config.rollout.search_timeout_secs == 60
  assert config.rollout.max_num_seqs == 72
  search = config.search if field == 'search' else config.evaluate.search
  search.engine, search.options = engine, options
  with pytest.raises(ValueError, match=(
      'rollout.search_timeout_secs must be above what '
      rf'{field}.options gives its servers, {secs} seconds')):
    config_checks.check(config)
  config.rollout.search_timeout_secs = secs + 1.0
  config_checks.check(config)
