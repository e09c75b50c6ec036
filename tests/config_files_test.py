# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""config_files: a config is loaded, and what a command line makes of it."""

import pathlib

import pytest

from configs import grpo
from searchrl.runtime import config_files

TREE = {'seed': 0, 'data': {'mix': (1, 2), 'names': ('a',), 'empty': ()},
        'search': {'options': {}, 'engine': 'bm25'},
        'deep': {'learning_rate': 1.0, 'inner': {'learning_rate': 2.0}}}


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch):
  monkeypatch.chdir(pathlib.Path(__file__).parents[1])


@pytest.mark.parametrize('size', ['', 'smoke'])
def test_a_config_is_that_of_its_function(size):
  name = 'configs/grpo.py' + f':{size}' * bool(size)
  expected = grpo.get_config(size) if size else grpo.get_config()
  assert config_files.load(name) == expected


def test_a_changed_file_is_read_again(tmp_path):
  file = tmp_path / 'mine.py'
  for number in (1, 2):
    file.write_text('import ml_collections\ndef get_config(size=""):\n  return '
                    f'ml_collections.ConfigDict(dict(n={number}, size=size))\n')
    config = config_files.load(f'{file}:a:b')
    assert (config.n, config.size) == (number, 'a:b')


@pytest.mark.parametrize('source, sentence', [
    ('x = 1', 'must name a file with a function get_config, but .* has none'),
    ('def get_config(): return 1', "has one size, but .* asks for 'big'"),
    ('def get_config(size):\n  return {}[size]', "line 2, raised KeyError: 'b"),
    ('def get_config(size): return {}', 'must return a ConfigDict, but returned'),
    ('import none_such', 'line 1, raised ModuleNotFoundError: No module'),
    ('def get_config(size): raise ValueError("too " + size)', '^too big$')])
def test_what_is_no_config_says_why(tmp_path, source, sentence):
  file = tmp_path / 'mine.py'
  file.write_text(source)
  with pytest.raises(ValueError, match=sentence):
    config_files.load(f'{file}:big')


def test_the_fields_that_a_command_line_sets():
  assert config_files.named([
      '--config=a.py', '--config.seed=1', '-config.data.mix', '(1,)',
      '--seeds=1', '--noconfig.flag', '--config.seed=2', 'config.no=1',
      '--x=--config.y=1',
  ]) == ['seed', 'data.mix', 'flag']


@pytest.mark.parametrize('field, near', [
    ('sed', 'Did you mean --config.seed?'),
    ('data.mixx', 'Did you mean --config.data.mix?'),
    ('learning_rate', 'Did you mean --config.deep.learning_rate?'),
    ('seed.x', 'Did you mean --config.seed?'),
    ('qqqqq', '--config=a.py --help lists all.')])
def test_a_field_that_is_none_names_the_nearest(field, near):
  with pytest.raises(ValueError) as error:
    config_files.check_fields([field], TREE, 'a.py')
  assert str(error.value) == (
      f'--config.{field} must be a field of a.py, but there is none of that '
      f'name. {near}')


def test_fields_and_groups_pass():
  assert config_files.check_fields([  # raises nothing
      'seed', 'data', 'data.mix', 'search.options', 'stages[0].a'], TREE,
                                   '') is None


@pytest.mark.parametrize('path, value, sentence', [
    (('data', 'mix'), ('a', 'b'), 'a tuple of numbers'),
    (('data', 'names'), (1,), 'a tuple of texts'),
    (('data',), {}, 'data must have all fields .* empty, mix, names'),
    (('deep',), {'learning_rate': 1.0, 'inner': {}, 'more': 1}, 'inner')])
def test_a_value_of_another_kind_is_refused(path, value, sentence):
  with pytest.raises(ValueError, match=sentence):
    config_files.check_values(['.'.join(path)], TREE, _changed(path, value))


@pytest.mark.parametrize('path, value', [
    (('data', 'mix'), (0.5,)), (('data', 'mix'), ()),
    (('data', 'empty'), (1, 'a')), (('search', 'options'), {'any': 'thing'}),
    (('seed',), 3),
    (('data',), {'mix': (), 'names': (), 'empty': ()})])
def test_a_value_of_the_same_kind_passes(path, value):
  assert config_files.check_values(  # raises nothing
      ['.'.join(path)], TREE, _changed(path, value)) is None


def _changed(path, value):
  head, *rest = path
  return TREE | {head: (_replaced(TREE[head], rest, value))}


def _replaced(tree, path, value):
  return value if not path else tree | {
      path[0]: _replaced(tree[path[0]], path[1:], value)}


def test_leaves_are_dotted_names_with_values():
  assert dict(config_files.leaves({'a': {'b': 1, 'c': {}}, 'd': ()})) == {
      'a.b': 1, 'a.c': {}, 'd': ()}
