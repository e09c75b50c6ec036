# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""log: levels of what a command says, and the flag that sets them."""

import logging
import re

from absl import logging as absl_logging
import pytest

from searchrl import main
from searchrl.runtime import log


@pytest.fixture(autouse=True)
def _same_level_after():
  yield
  log.set_level('info')


def say_all():
  log.LOGGER.debug('detail')
  log.say('Resumed.')
  log.say('Warning: slow.')
  log.LOGGER.error('broken')


@pytest.mark.parametrize('level, said', [
    ('info', ['Resumed.', 'Warning: slow.', 'broken']),
    ('warning', ['Warning: slow.', 'broken']), ('error', ['broken'])])
def test_a_level_leaves_out_what_is_below_it(level, said, capsys):
  log.set_level(level)
  say_all()
  assert capsys.readouterr().err.splitlines() == said
  assert log.informs() == (level == 'info')


def test_debug_has_all_with_times(capsys):
  log.set_level('debug')
  say_all()
  lines = capsys.readouterr().err.splitlines()
  assert [line.split(' ', 2)[2] for line in lines] == [
      'detail', 'Resumed.', 'Warning: slow.', 'broken']
  assert all(re.match(r'\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ', line)
             for line in lines)


def test_texts_have_the_levels_of_logging_and_no_format_is_read(monkeypatch):
  records = []
  monkeypatch.setattr(log.LOGGER, 'handle', records.append)
  log.say('50 % done')
  log.say('Warning: 50 %s')
  assert [(r.levelno, r.getMessage()) for r in records] == [
      (logging.INFO, '50 % done'), (logging.WARNING, 'Warning: 50 %s')]


def test_the_flag_sets_the_level(tmp_path, capsys):
  folder = tmp_path / 'run'
  with pytest.raises(SystemExit):
    main.run(['--config=configs/report.py', '--verbosity=warning',
              f'--workdir={folder}'])
  assert not log.informs()
  with pytest.raises(SystemExit, match="--verbosity: invalid choice: 'loud'"):
    main.run(['--config=configs/report.py', '--verbosity=loud'])


def test_messages_of_other_packages_are_written_once(capsys, monkeypatch):
  monkeypatch.setattr(  # as the package has when it is imported
      logging.getLogger('huggingface_hub'), 'handlers',
      [logging.StreamHandler()])
  main._write_others('info')
  logging.getLogger('huggingface_hub.utils').warning('Retrying')
  logging.getLogger('another.package').warning('slow')
  logging.getLogger('another.package').info('detail')
  absl_logging.warning('odd')
  lines = capsys.readouterr().err.splitlines()
  assert [line.rpartition('] ')[2] for line in lines] == [
      'Retrying', 'slow', 'odd']
