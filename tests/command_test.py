# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""command: the command `searchrl` stands for flags of `searchrl.main`."""

import pytest

from searchrl.runtime import command
from searchrl.runtime import config_files


@pytest.mark.parametrize('given, wanted', [
    ('train my/own.py --config.seed=1', '--config=my/own.py --config.seed=1'),
    ('train configs/dspo.py:smoke', '--config=configs/dspo.py:smoke'),
    ('ask runs/dspo@20 --question Who?',
     '--config=configs/ask.py:runs/dspo@20 --question Who?'),
    ('serve runs/a', '--config=configs/serve_model.py:runs/a'),
    ('dapo --plan', '--config=configs/dapo.py --plan'),
    ('--config=configs/dspo.py --plan', '--config=configs/dspo.py --plan')])
def test_a_command_stands_for_flags(given, wanted):
  assert command.expand(given.split(' ')) == wanted.split(' ')


@pytest.mark.parametrize('given, message', [
    ('train', 'searchrl train configs/dspo.py'),
    ('train --plan', 'must be followed by the file'),
    ('evalute runs/a', "'evalute' is none. Did you mean searchrl evaluate?"),
    ('trian configs/dspo.py', 'Did you mean searchrl train?'),
    ('serv', 'Did you mean searchrl serve?'),
    ('report runs/a runs/b --config.seed=1', "'runs/b' follow it. Join several by")
])
def test_a_wrong_command_is_refused(given, message):
  with pytest.raises(ValueError, match=message):
    command.expand(given.split())


@pytest.mark.parametrize('arguments', [['--help'], ['train', '--help']])
def test_help_without_a_config_lists_the_commands(
    arguments, capsys, monkeypatch):
  monkeypatch.setattr('sys.argv', ['searchrl', *arguments])
  command.run()
  assert 'train FILE' in capsys.readouterr().out


def test_the_text_after_show_is_the_trajectory():
  config = config_files.load('configs/show.py:runs/a/trajectories/s.jsonl.gz:3')
  assert config.show.trajectory == 'runs/a/trajectories/s.jsonl.gz:3'


def test_the_help_names_every_config_and_every_name_works(capsys, monkeypatch):
  monkeypatch.setattr('sys.argv', ['searchrl'])
  command.run()
  printed = capsys.readouterr().out.splitlines()
  for stem, summary in config_files.shipped().items():
    assert summary
    line, = [line for line in printed if line.endswith(f' {summary}')]
    name = line.split()[0]
    assert command.expand([name]) == [f'--config=configs/{stem}.py']


def test_a_config_of_the_package_is_found_from_another_folder(
    tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert config_files.load('configs/dspo.py:smoke').job
  with pytest.raises(FileNotFoundError, match='Did you mean configs/dspo.py'):
    config_files.load('configs/dsop.py')


def test_a_user_may_have_a_folder_of_the_same_name(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'configs').mkdir()
  (tmp_path / 'configs' / 'mine.py').write_text(
      'from configs import dspo\n\n'
      'def get_config():\n'
      '  config = dspo.get_config("smoke")\n'
      '  config.seed = 7\n'
      '  return config\n')
  assert config_files.load('configs/mine.py').seed == 7
