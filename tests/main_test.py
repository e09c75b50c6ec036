# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""main: several commands, --help, a refusal's imports, one process's errors.

bad_input_test.py has what is refused.
"""

import ast
import pathlib
import signal
import subprocess
import sys

import jax
import pytest

from searchrl import main
import loopback

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
    ['--config=configs/grpo.py', '--workdir=file:///a/run', job],
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
      ('/a/run', 0, (1, 1, 1), False), 'refused', 'refused',
      ('runs/grpo', 0, (2,), False)]


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


# Process 1 has an error; process 0 hears of it, or waits in another channel.
FAILS = r'''
import sys, threading
from searchrl import main
from searchrl.runtime import processes

processes.initialize()
kind, comes = sys.argv[1], sys.argv[2] == 'True'
processes._LEAVE_SECS = 30 if comes else 1
with main._exit_codes('runs/x'):
  if processes.index():
    raise dict(KeyError=KeyError, ValueError=ValueError)[kind]('a reason')
  if not comes:
    processes.channel('rollouts')
  processes.barrier('trajectories')
'''


@pytest.mark.parametrize('comes', [True, False])
@pytest.mark.parametrize('kind, text', [
    ('KeyError', 'Traceback (most recent call last):'),
    ('ValueError', 'a reason\n(SEARCHRL_TRACEBACK=1 shows where.)')])
def test_an_error_of_one_process_ends_it_with_1(kind, text, comes):
  first, other = loopback.run(
      2, FAILS, kind, comes, check=False, timeout=60,
      env={'SEARCHRL_HEARTBEAT_SECS': '3'})
  assert other.returncode == 1, other.stderr
  assert text in other.stderr and 'a reason' in other.stderr
  if comes:
    assert first.returncode == 1
    assert 'Process 1 has ended early, with exit code 1,' in first.stderr
  else:  # jax ends it when the heartbeats stop
    assert first.returncode == -signal.SIGABRT


def test_an_error_that_a_lost_process_may_cause_is_left_to_jax():
  lost = jax.errors.JaxRuntimeError('UNKNOWN: Gloo: Connection closed by peer')
  full = jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory')
  wrapped = ValueError('no checkpoint')
  wrapped.__cause__ = lost
  assert main._may_be_of_lost_process(lost)
  assert main._may_be_of_lost_process(wrapped)
  assert not main._may_be_of_lost_process(full)
  assert not main._may_be_of_lost_process(KeyError('x'))
