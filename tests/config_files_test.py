# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""config_files: a config is loaded, or one sentence says why not."""

import pathlib

import pytest

from configs import grpo
from searchrl.runtime import config_files


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
    ('def get_config(): return 1', "takes no text after a colon, but .* has 'big'"),
    ('def get_config(size):\n  return {}[size]', "line 2, raised KeyError: 'b"),
    ('def get_config(size): return {}', 'must return a ConfigDict, but returned'),
    ('import none_such', 'line 1, raised ModuleNotFoundError: No module'),
    ('def get_config(size): raise ValueError("too " + size)', '^too big$')])
def test_what_is_no_config_says_why(tmp_path, source, sentence):
  file = tmp_path / 'mine.py'
  file.write_text(source)
  with pytest.raises(ValueError, match=sentence):
    config_files.load(f'{file}:big')
