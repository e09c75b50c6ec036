# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""main: a tuple that a command line gives twice is refused, not joined."""

import subprocess
import sys

from absl import flags
from ml_collections import config_flags
import pytest

from configs import grpo
from searchrl import main


def test_a_tuple_given_twice_is_refused():
  config = grpo.get_config()
  arguments = ['--config=configs/grpo.py', '--config.data.per_hop=1',
               '--config.data.mix=(1,)', '--config.data.per_hop=(2,)']
  with pytest.raises(ValueError, match=r'^--config.data.per_hop must be given '
                     'once, but is given 2 times'):
    main.refuse_repeated(config, arguments)
  main.refuse_repeated(config, arguments[:3])


def test_of_a_number_given_twice_the_last_counts_as_ever(monkeypatch):
  arguments = ['--config=configs/grpo.py', '--config.seed=1', '--config.seed',
               '2', '--config.seed=3']
  values = flags.FlagValues()
  config_flags.DEFINE_config_file('config', flag_values=values)
  monkeypatch.setattr(sys, 'argv', ['main', *arguments])  # read by the parser
  values(sys.argv)
  arguments += ['--workdir=a', '--workdir=b', '-x', '-x']
  arguments += ['--config.no.such=1', '--config.no.such=2']  # absl's to refuse
  assert main.refuse_repeated(values.config, arguments) is None  # nor raises
  assert values.config.seed == 3


def test_it_is_refused_before_a_run_begins(tmp_path):
  found = subprocess.run(
      [sys.executable, '-m', 'searchrl.main', '--config=configs/grpo.py',
       f'--workdir={tmp_path / "run"}', '--config.data.per_hop=(1,)',
       '--config.data.per_hop=(2,)'], capture_output=True, check=False,
      text=True)
  assert found.returncode == 1 and not (tmp_path / 'run').exists()
  assert found.stderr.startswith('ValueError: --config.data.per_hop must be '
                                 'given once, but is given 2 times, whose '
                                 'values together are (1, 2).')
