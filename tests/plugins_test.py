# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""plugins: 'module:function' finds any function, or names what is wrong."""

import sys
import types

import pytest

from searchrl.agent import rewards
from searchrl.rl import algorithms
from searchrl.runtime import plugins

OURS = 'searchrl.rl.algorithms:'


def resolve(name):
  return plugins.resolve(name, field='reward', ours='x:y and x:z')


def build(name, **options):
  return plugins.build(name, options, field='algorithm', ours='x:y and x:z')


def test_a_function_is_found_by_its_name(tmp_path, monkeypatch):
  assert resolve('searchrl.agent.rewards:em') is rewards.em
  (tmp_path / 'my_rewards.py').write_text('def always(trajectory): return 1.0')
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.delitem(sys.modules, 'my_rewards', raising=False)  # another's
  assert resolve('my_rewards:always')(None) == 1.0


@pytest.mark.parametrize('name', [
    '', 'em', ':em', 'searchrl.agent.rewards', 'searchrl.agent.rewards:',
    'searchrl.agent.rewards:exactmatch', 'searchrl.agent.reward:em',
    'searchrl.agent.rewards:em.x', 'no_such_lab.cispo:cispo'])
def test_what_cannot_be_found_is_named_with_examples(name):
  with pytest.raises(ValueError, match="reward must be 'module:function', but "
                                       f'{name!r} cannot be found: .* x:y'):
    resolve(name)


@pytest.mark.parametrize('name, why', [
    ('dspo', 'it has another form'),
    ('searchrl.rl.nowhere:dspo', 'there is no module searchrl.rl.nowhere'),
    ('no_such_lab.cispo:cispo', 'there is no module no_such_lab here or on '
                                'PYTHONPATH'),
    (OURS + 'dsop', "has no function 'dsop', did you mean dspo?"),
    (OURS + 'zzzz', "has no function 'zzzz'. Ours"),
    ('searchrl.rl.losses:AGGREGATIONS', "has no function 'AGGREGATIONS'"),
])
def test_the_message_has_the_reason(name, why):
  with pytest.raises(ValueError) as error:
    resolve(name)
  assert why in str(error.value)


@pytest.mark.parametrize('name, source, why', [
    ('broken_lab', 'import not_installed_anywhere',
     "ModuleNotFoundError: No module named 'not_installed_anywhere'"),
    ('torn_lab', 'def mine(:', 'SyntaxError: invalid syntax'),
    ('loud_lab', 'raise RuntimeError("not today")', 'RuntimeError: not today')])
def test_a_module_that_cannot_be_imported_says_why(
    tmp_path, monkeypatch, name, source, why):
  (tmp_path / f'{name}.py').write_text(source + '\n')
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ValueError, match=f'^.* to import {name} raised {why}'):
    resolve(f'{name}:mine')


def test_an_option_of_another_kind_is_named_with_its_field():
  with pytest.raises(ValueError, match="^algorithm must have options that .*: "
                     "but {'clip_low': 'a'} are refused: '<=' not supported"
                     .replace(': but', 'but')):
    build(OURS + 'grpo', clip_low='a')


def test_options_reach_the_function():
  assert build(OURS + 'grpo', kl_coef=0.0).needs == frozenset()
  assert build(OURS + 'grpo', kl_coef=0.1).needs == {'ref_logprobs'}
  assert isinstance(build('docs.cispo:cispo', clip_high=3.0),
                    algorithms.Algorithm)


def test_a_recipe_of_your_own_needs_no_registration(monkeypatch):
  module = types.ModuleType('my_lab')
  module.mine = lambda **options: algorithms.grpo(**options)
  monkeypatch.setitem(sys.modules, 'my_lab', module)
  assert build('my_lab:mine', kl_coef=0.1).needs == {'ref_logprobs'}


@pytest.mark.parametrize('name, options, message', [
    (OURS + 'dspo', dict(clip_lo=0.1),
     'algorithm.clip_lo is no option of .*:dspo, which takes clip_low, '
     'clip_high, .* Did you mean clip_low?'),
    (OURS + 'reinforce', dict(minibatches=2),
     'algorithm.minibatches is no option of .* Remove it'),
    (OURS + 'dr_grpo', {},
     'algorithm.length must be given for .*:dr_grpo, which has no default'),
    # What the function itself refuses stays as it says it.
    (OURS + 'grpo', dict(aggregation='mean'), 'aggregation must be one of'),
])
def test_a_bad_option_is_refused_by_name(name, options, message):
  with pytest.raises(ValueError, match=message):
    build(name, **options)


def test_a_function_without_options_is_named(monkeypatch):
  module = types.ModuleType('my_lab')
  module.bare = lambda: 1
  monkeypatch.setitem(sys.modules, 'my_lab', module)
  assert build('my_lab:bare') == 1
  with pytest.raises(ValueError, match='which takes none. Remove it'):
    build('my_lab:bare', x=1)


def bind(name, **options):
  return plugins.bind(name, options, field='reward', ours='x:y',
                      option_field='reward_options')


def test_options_are_bound_and_the_rest_is_called(monkeypatch):
  module = types.ModuleType('my_lab')
  module.fee = lambda trajectory, size, *, unit=1.0: (trajectory, size, unit)
  monkeypatch.setitem(sys.modules, 'my_lab', module)
  assert bind('my_lab:fee', size=2)('t') == ('t', 2, 1.0)
  assert bind('my_lab:fee', size=2, unit=.5)('t') == ('t', 2, .5)
  assert bind('searchrl.agent.rewards:em') is rewards.em
  for options, message in (
      (dict(siz=2), 'reward_options.siz is no option of my_lab:fee, which '
                    'takes size, unit. Did you mean size?'),
      (dict(trajectory=2, size=1), 'reward_options.trajectory is no option'),
      (dict(unit=2), 'reward_options.size must be given for my_lab:fee')):
    with pytest.raises(ValueError, match=message):
      bind('my_lab:fee', **options)


@pytest.mark.parametrize('function, takes', [
    (lambda trajectory: 0, 'trajectory'), (lambda *rest: 0, 'rest'),
    (lambda trajectories, *, a=1: 0, 'trajectories'), (lambda: 0, ''),
    (lambda *, a=1: 0, ''), (lambda **options: 0, '')])
def test_what_a_function_takes_is_known(function, takes):
  assert plugins.argument(function) == takes
