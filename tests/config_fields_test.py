# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""config_fields: what a command line makes of a config."""

import inspect
import re

import ml_collections
import pytest

from configs import dr_grpo
from configs import drzero
from configs import grpo
from configs import ppo
from configs import sft
from searchrl.experiment import build
from searchrl.rl import algorithms
from searchrl.runtime import config_fields
from searchrl.runtime import foreign_names
from searchrl.training import optimizer
from tools import tiny_base

ALGORITHMS = 'searchrl.rl.algorithms:'


def tree():
  return ml_collections.ConfigDict({
      'seed': 0, 'data': {'mix': (1, 2), 'names': ('a',), 'empty': ()},
      'search': {'options': {}, 'engine': 'bm25'}, 'ratio': 1.0, 'text': 'a',
      'deep': {'learning_rate': 1.0, 'inner': {'learning_rate': 2.0}},
      'is_on': False})


def assigned(config, *arguments):
  settings, others = config_fields.split(
      [f'--config.{argument}' for argument in arguments])
  assert not others
  config_fields.assign(config, settings, 'a.py')
  return config


def test_the_fields_that_a_command_line_sets():
  settings, others = config_fields.split([
      '--config=a.py', '--config.seed=1', '-config.data.mix', '(1,)',
      '--seeds=1', '--noconfig.flag', '--config.seed=2', 'config.no=1',
      '--x=--config.y=1', '--config.is_on', '--plan'])
  assert settings == {'seed': ['1', '2'], 'data.mix': ['(1,)'],
                      'flag': ['false'], 'is_on': [None]}
  assert others == ['--config=a.py', '--seeds=1', 'config.no=1',
                    '--x=--config.y=1', '--plan']


@pytest.mark.parametrize('argument, field, value', [
    ('seed=3', 'seed', 3), ('seed=-3', 'seed', -3), ('ratio=2', 'ratio', 2.0),
    ('ratio=1e-5', 'ratio', 1e-5), ('text=3', 'text', '3'),
    ('text=', 'text', ''), ('text=a=b', 'text', 'a=b'),
    ('is_on=true', 'is_on', True), ('is_on', 'is_on', True),
    ('is_on=0', 'is_on', False), ('data.mix=(0.5,)', 'data.mix', (0.5,)),
    ('data.mix=1', 'data.mix', (1,)), ('data.mix=()', 'data.mix', ()),
    ('data.names=b', 'data.names', ('b',)),
    ("data.empty=(1, 'a')", 'data.empty', (1, 'a')),
    ('search.engine=noise', 'search.engine', 'noise')])
def test_a_text_becomes_a_value_of_the_kind_of_its_field(
    argument, field, value):
  config = assigned(tree(), argument)
  group, _, name = field.rpartition('.')
  found = (config[group] if group else config)[name]
  assert found == value and type(found) is type(value)
  assert config.is_locked


def test_of_a_field_given_twice_the_last_counts_unless_it_is_a_tuple():
  assert assigned(tree(), 'seed=1', 'seed=2').seed == 2
  with pytest.raises(ValueError, match=r'^--config.data.mix must be given once,'
                     ' but is given 2 times, as 1 and 2. Give all in one'):
    assigned(tree(), 'data.mix=1', 'data.mix=2')


def test_a_locked_config_of_a_user_gets_keywords_too():
  config = assigned(grpo.get_config().lock(), 'algorithm.dual_clip=3')
  assert config.algorithm.dual_clip == 3 and config.is_locked


def test_groups_can_be_given_whole():
  assert assigned(tree(), "search.options={'any': 'thing'}"
                 ).search.options.any == 'thing'
  config = assigned(tree(), "data={'mix': (), 'names': ('b', 'c')}", 'deep={}',
                    "deep={'inner': {'learning_rate': 3}}")
  assert config.data.to_dict() == dict(mix=(), names=('b', 'c'), empty=())
  assert config.deep.to_dict() == dict(
      learning_rate=1.0, inner=dict(learning_rate=3.0))
  config = assigned(tree(), "search={'options': {'new': {'k': 2}}}")
  assert config.search.options.to_dict() == {'new': {'k': 2}}


@pytest.mark.parametrize('argument, sentence', [
    ('seed=a', "seed must be a whole number, but is 'a'"),
    ('seed=1.5', "seed must be a whole number, but is '1.5'"),
    ('seed=', "seed must be a whole number, but is ''"),
    ('seed', 'seed must be a whole number, but is none'),
    ('text', 'text must be a text, but is none'),
    ('is_on=', "is_on must be true or false, but is ''"),
    ('ratio=fast', "ratio must be a number, but is 'fast'"),
    ('is_on=2', "is_on must be true or false, but is '2'"),
    ('data.mix=(1,', r'data.mix must be a tuple, as in "\(1, 2\)", but is '),
    ("data.mix=('a', 'b')", 'a tuple of numbers'),
    ('data.names=(1,)', 'a tuple of texts'),
    ('search.options=[1]', r"search.options must be a dict, as in \"{'k': 1}"),
    ('data=(1,)', "data must be a dict"),
    ("deep={'learning_rate': 1.0, 'more': 1}", 'config.deep.more must be a '
     'field of a.py'),
    ('data.mix=((0,(1,1)),)', 'a tuple of numbers'),  # has no rule here
    ("data={'mix': 'a'}", 'config.data.mix must be a tuple of numbers'),
])
def test_a_value_of_another_kind_is_refused(argument, sentence):
  with pytest.raises(ValueError, match=sentence):
    assigned(tree(), argument)


@pytest.mark.parametrize('field, near', [
    ('sed', 'Did you mean --config.seed?'),
    ('data.mixx', 'Did you mean --config.data.mix?'),
    ('learning_rate', 'Did you mean --config.deep.learning_rate?'),
    ('seed.x', 'Did you mean --config.seed?'),
    ('seed.real', 'Did you mean --config.seed?'),
    ('num_generations', '--config=a.py --help lists all.'),
    ('qqqqq', '--config=a.py --help lists all.')])
def test_a_field_that_is_none_names_the_nearest(field, near):
  with pytest.raises(ValueError) as error:
    assigned(tree(), f'{field}=1')
  assert str(error.value) == (
      f'--config.{field} must be a field of a.py, but there is none of that '
      f'name. {near}')


def test_leaves_are_dotted_names_with_values():
  assert dict(config_fields.leaves({'a': {'b': 1, 'c': {}}, 'd': ()})) == {
      'a.b': 1, 'a.c': {}, 'd': ()}


@pytest.mark.parametrize('name', [
    'ppo', 'grpo', 'dr_grpo', 'dapo', 'gspo', 'dspo', 'gmpo', 'rloo',
    'reinforce', 'reinforce_plus_plus', 'hrpo', 'mt_grpo', 'gigpo', 'sft'])
def test_every_keyword_of_every_algorithm_can_be_set(name):
  parameters = inspect.signature(getattr(algorithms, name)).parameters
  assert parameters
  for keyword, parameter in parameters.items():
    text, value = {'bool': ('false', False), 'str': ('k2', 'k2'),
                   'int': ('7', 7), 'float': ('0.25', 0.25)}[
                       parameter.annotation.split()[0]]
    config = grpo.get_config()
    config.algorithm = dict(name=ALGORITHMS + 'grpo')
    assigned(config, f'algorithm.name={ALGORITHMS}{name}',
             f'algorithm.{keyword}={text}')
    expected = {'name': ALGORITHMS + name, keyword: value}
    if value == parameter.default:  # the config is that without the flag
      del expected[keyword]
    assert config.algorithm.to_dict() == expected


@pytest.mark.parametrize('get_config, group', [
    (grpo.get_config, 'optimizer'), (ppo.get_config, 'critic.optimizer'),
    (sft.get_config, 'optimizer'), (tiny_base.get_config, 'optimizer'),
    (drzero.get_config, 'solver.optimizer')])
def test_every_keyword_of_every_optimizer_can_be_set(get_config, group):
  for keyword, parameter in inspect.signature(
      optimizer.adamw).parameters.items():
    text = {'str': 'bfloat16', 'Schedule': 'linear', 'int': '77'}.get(
        parameter.annotation.split()[0], '0.0625')
    config = assigned(get_config(), f'{group}.{keyword}={text}')
    for name in group.split('.'):
      config = config[name]
    assert str(config[keyword]) == text


def test_set_keywords_reach_the_algorithm_and_others_stay_out():
  config = assigned(grpo.get_config(), 'algorithm.kl_estimator=k2',
                    'algorithm.dual_clip=none', 'optimizer.max_grad_norm=None')
  listed = grpo.get_config().algorithm.to_dict()
  assert config.algorithm.to_dict() == listed | {'kl_estimator': 'k2'}
  assert config.optimizer.max_grad_norm is None
  assert assigned(grpo.get_config(), 'algorithm.dual_clip=none').to_dict() == (
      grpo.get_config().to_dict())
  with pytest.raises(ValueError, match='^algorithm.dual_clip must be above 1'):
    build.algorithm(assigned(grpo.get_config(), 'algorithm.dual_clip=0.5'))


def test_a_required_keyword_of_another_algorithm_can_be_set():
  config = dr_grpo.get_config()
  config.algorithm = dict(name=ALGORITHMS + 'grpo')
  assigned(config, f'algorithm.name={ALGORITHMS}dr_grpo', 'algorithm.length=9')
  assert config.algorithm.to_dict() == {
      'name': ALGORITHMS + 'dr_grpo', 'length': 9}
  assert build.algorithm(config).keep is algorithms.keep_all
  without = dr_grpo.get_config()
  without.algorithm = dict(name=ALGORITHMS + 'grpo')
  with pytest.raises(ValueError, match='length'):
    build.algorithm(assigned(without, f'algorithm.name={ALGORITHMS}dr_grpo'))


def test_an_algorithm_of_a_user_has_its_keywords(tmp_path, monkeypatch):
  (tmp_path / 'my_lab.py').write_text(
      'from searchrl import algorithms\n'
      'def mine(*, margin=0.5, hard=False, cap: float | None = None):\n'
      '  return algorithms.grpo(clip_high=margin)\n')
  monkeypatch.syspath_prepend(tmp_path)
  config = grpo.get_config()
  config.algorithm = dict(name='my_lab:mine')
  assigned(config, 'algorithm.margin=1', 'algorithm.hard=true',
           'algorithm.cap=2')
  assert config.algorithm.to_dict() == dict(
      name='my_lab:mine', margin=1.0, hard=True, cap=2.0)
  build.algorithm(config)


def test_a_name_whose_field_the_config_lacks_says_so():
  with pytest.raises(ValueError, match='gamma is called algorithm.discount '
                     'here, but this config does not have it'):
    assigned(grpo.get_config(), 'algorithm.gamma=1')


@pytest.mark.parametrize('name', foreign_names.OURS)
def test_a_name_of_another_library_is_answered_with_a_field_of_ours(name):
  has_groups = 'normalize_std' in foreign_names.OURS[name]
  config = (grpo if has_groups else ppo).get_config()
  with pytest.raises(ValueError) as error:
    assigned(config, f'actor.{name}=1')
  assert str(error.value).endswith(
      f' {name} is called {foreign_names.OURS[name]} here.')
  fields = dict(config_fields.leaves(config))
  targets = re.findall(r'\w+(?:\.\w+)+', foreign_names.OURS[name]) or [
      foreign_names.OURS[name].partition(',')[0]]  # a field without a group
  assert targets and {*targets} <= {*fields}
