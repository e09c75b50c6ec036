# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""main: several commands in a process, --help, and what a refusal imports.

bad_input_test.py has what is refused.
"""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def test_it_is_refused_before_a_run_begins(tmp_path):
  found = subprocess.run(
      [sys.executable, '-m', 'searchrl.main', '--config=configs/grpo.py',
       f'--workdir={tmp_path / "run"}', '--config.data.per_hop=(1,)',
       '--config.data.per_hop=(2,)'], capture_output=True, check=False,
      text=True)
  assert found.returncode == 1 and not (tmp_path / 'run').exists()
  assert found.stderr.startswith('ValueError: --config.data.per_hop must be '
                                 'given once, but is given 2 times, as (1,) '
                                 'and (2,).')


SEVERAL = """
import sys, types
from searchrl import main
seen = []
sys.modules['jobs_of_test'] = types.SimpleNamespace(
    run=lambda config, workdir: seen.append(
        (workdir, config.seed, config.data.mix, config.allow_changes)))
sys.modules['searchrl.jobs.plan'] = types.SimpleNamespace(
    run=lambda config, workdir: seen.append('plan'))
job = '--config.job=jobs_of_test:run'
for arguments in (
    ['--config=configs/grpo.py', '--config.seed=1', '--workdir=a', '--plan'],
    ['--config=configs/grpo.py', '--config.seed=1', '--workdir=a', job,
     '--allow_changes'],
    ['--config=configs/grpo.py', '--config.data.mix=(1,)', job],
    ['--config=configs/grpo.py', '--config.sed=1'],
    ['--config=configs/sft.py', '--config.nothing=1'],
    [job, '--config.data.mix=(2,)', '--config=configs/grpo.py:smoke']):
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
      'plan', ('a', 1, (1, 1, 1), True), ('runs/grpo', 0, (1,), False),
      'refused', 'refused', ('runs/grpo', 0, (2,), False)]


TRAINS = """
import sys, types
from searchrl import main
seen = []
main.host_memory.keep = lambda: seen.append(name)
sys.modules['jobs_of_test'] = types.SimpleNamespace(
    run=lambda config, workdir: None)
for name in ('grpo', 'sft', 'archive', 'drzero', 'serve_search', 'build_index'):
  try:
    main.run([f'--config=configs/{name}.py', '--config.job=jobs_of_test:run'])
  except SystemExit:
    pass
print(seen)
"""


def test_jobs_that_train_keep_the_memory_of_freed_arrays():
  found = subprocess.run([sys.executable, '-c', TRAINS], capture_output=True,
                         check=True, text=True, cwd=ROOT)
  assert ast.literal_eval(found.stdout) == ['grpo', 'sft', 'archive', 'drzero']


@pytest.mark.parametrize('arguments, has', [
    (['--help'], ['configs/common.py', '--workdir']),
    (['--config=configs/dspo.py', '--help'], [
        '--config.rollout.budgets.max_prompt_tokens=96', '--config.seed=0',
        '--config.algorithm.dual_clip=None', '--config.optimizer.b1=0.9',
        '--config.rollout.temperature=1.0  # above 0',
        '--config.search.options={}\n  --config.',
        "--config.algorithm.name='searchrl.rl.algorithms:dspo'"])])
def test_help_names_the_fields_or_says_where_they_are(arguments, has):
  found = subprocess.run([sys.executable, '-m', 'searchrl.main', *arguments],
                         capture_output=True, check=True, text=True, cwd=ROOT)
  assert not found.stderr and '--allow_changes' in found.stdout
  for text in has:
    assert text in found.stdout


def test_a_refusal_imports_nothing_that_it_does_not_need():
  """These modules take long to import; a sentence about a config needs none."""
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
