# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""main: flags that are given twice, several commands in a process, --help.

bad_input_test.py has what is refused.
"""

import ast
import pathlib
import subprocess
import sys

from absl import flags
from ml_collections import config_flags
import pytest

from configs import grpo
from searchrl import main

ROOT = pathlib.Path(__file__).parents[1]


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


SEVERAL = """
from searchrl import main
from absl import flags
seen = []
main.main = lambda argv: seen.append((
    main._WORKDIR.value, main._PLAN.value, main._CONFIG.value.seed,
    main._CONFIG.value.data.mix, 'config.data.mix' in flags.FLAGS))
for arguments in (
    ['--config=configs/grpo.py', '--config.seed=1', '--workdir=a', '--plan'],
    ['--config=configs/grpo.py', '--config.data.mix=(1,)'],
    ['--config=configs/grpo.py', '--config.sed=1'],
    ['--config=configs/sft.py', '--config.nothing=1'],
    ['--config=configs/grpo.py:smoke', '--config.data.mix=(2,)']):
  try:
    main.run(arguments)
  except SystemExit as error:
    if error.code: seen.append('refused')
print(seen)
"""


def test_a_process_can_run_several_commands_which_know_nothing_of_each_other():
  found = subprocess.run([sys.executable, '-c', SEVERAL], capture_output=True,
                         check=True, text=True, cwd=ROOT)
  assert ast.literal_eval(found.stdout) == [
      ('a', True, 1, (1, 1, 1), False), (None, False, 0, (1,), True),
      'refused', 'refused', (None, False, 0, (2,), True)]


@pytest.mark.parametrize('arguments, has', [
    (['--help'], ['configs/common.py', '--workdir']),
    (['--config=configs/dspo.py', '--help'], [
        '--config.rollout.budgets.max_prompt_tokens=96', '--config.seed=0',
        "--config.algorithm.name='searchrl.rl.algorithms:dspo'"])])
def test_help_names_the_fields_or_says_where_they_are(arguments, has):
  found = subprocess.run([sys.executable, '-m', 'searchrl.main', *arguments],
                         capture_output=True, check=True, text=True, cwd=ROOT)
  assert not found.stderr and '--allow_changes' in found.stdout.replace(
      '[no]', '')
  for text in has:
    assert text in found.stdout


def test_a_refusal_imports_nothing_that_it_does_not_need():
  """What takes long: of all these a sentence about a config needs none."""
  code = ('import sys\nfrom searchrl import main\ntry:\n  main.run(["--config='
          'configs/grpo.py", "--config.rollout.temperature=0"])\nexcept '
          'SystemExit as error:\n  assert "temperature" in str(error.code)\n'
          'print(sorted(set(sys.modules)))')
  found = subprocess.run([sys.executable, '-c', code], capture_output=True,
                         check=True, text=True, cwd=ROOT)
  slow = {'transformers', 'matplotlib', 'sklearn', 'scann',
          'scipy.stats', 'pyarrow', 'tensorboardX', 'huggingface_hub',
          'uvicorn', 'jinja2', 'torch', 'tensorflow'}
  assert not slow & set(ast.literal_eval(found.stdout))
