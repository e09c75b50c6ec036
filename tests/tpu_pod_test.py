# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""launch/babysit_tpu.sh with a stand-in for gcloud whose hosts are real.

A slice is two folders of this machine, which are the homes of two hosts. What
`tpu-vm ssh` is asked to run is run in both: a clone of this repository, and the
training. A worker is killed, and the run goes on. The oracle is a slice that
nobody disturbs. The installation, which needs a network, is a stand-in, too.

    python -m pytest -n 0 -m long tests/tpu_pod_test.py
"""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from searchrl.runtime import checkpoint
import train_test

pytestmark = [pytest.mark.slow, pytest.mark.long]

ROOT = pathlib.Path(__file__).resolve().parent.parent
GCLOUD = '''#!/usr/bin/env bash
cd {slice}
case "$*" in
  *'queued-resources describe'*) cat state ;;
  *'queued-resources create'*) echo ACTIVE >state ;;
  *'queued-resources delete'*) rm state ;;
  *'tpu-vm ssh'*)
    for word in "$@"; do
      case $word in --command=*) command=${{word#*=}} ;; esac
    done
    worst=0
    export JAX_COORDINATOR_ADDRESS=127.0.0.1:$(<port) JAX_NUM_PROCESSES=2
    for i in 0 1; do
      mkdir -p host$i
      (cd host$i && HOME=$PWD JAX_PROCESS_ID=$i bash -c "$command") &
    done
    for job in $(jobs -p); do wait "$job" || worst=$?; done
    exit $worst ;;
esac
'''
# python3 -m pip install uv; -m uv venv; -m uv pip install: only .venv is made.
PYTHON3 = '''#!/usr/bin/env bash
if [[ $* == '-m uv venv'* ]]; then
  mkdir -p .venv/bin && echo 'PATH={python}:$PATH' >.venv/bin/activate
fi
'''
FLAGS = (
    '--config=configs/grpo.py:smoke', '--config.train.num_steps=4',
    '--config.train.checkpoint_every=1', '--config.train.loggers=()',
    '--config.train.progress=False', '--config.evaluate.worlds.kinds=()',
    '--config.data.mix=(1,)', '--config.data.per_hop=(100,)',
    '--config.rollout.budgets.max_turns=2', '--config.rollout.budgets.top_k=1')


def babysit(folder, workdir):
  """Starts the script on a slice that it has to create; returns its process."""
  (folder / 'bin').mkdir(parents=True)
  with socket.create_server(('127.0.0.1', 0)) as server:
    (folder / 'port').write_text(str(server.getsockname()[1]))
  for name, text in (
      ('gcloud', GCLOUD.format(slice=folder)),
      ('python3', PYTHON3.format(python=pathlib.Path(sys.executable).parent))):
    (folder / 'bin' / name).write_text(text)
    (folder / 'bin' / name).chmod(0o755)
  env = {name: value for name, value in os.environ.items()
         if name not in ('XLA_FLAGS', 'PYTHONPATH')}
  log = (folder / 'log').open('w')
  return subprocess.Popen(
      ['bash', 'launch/babysit_tpu.sh', *FLAGS, f'--workdir={workdir}'],
      cwd=ROOT, stdout=log, stderr=log, env=env | dict(
          PATH=f'{folder / "bin"}:{os.environ["PATH"]}', NAME='slice',
          ZONE='here', REPO=str(ROOT), LOGS=str(folder / 'logs'), POLL_SECS='0',
          QUICK_SECS='0', JAX_PLATFORMS='cpu', NPROC='2',
          SEARCHRL_HEARTBEAT_SECS='10',
          JAX_COMPILATION_CACHE_DIR=str(folder.parent / 'cache')))


def worker(folder, number):
  """Returns the id of the Python process of a host."""
  home = f'HOME={folder / f"host{number}"}'.encode()
  for process in pathlib.Path('/proc').iterdir():
    with contextlib.suppress(OSError):
      if (process.name.isdecimal()
          and home in (process / 'environ').read_bytes().split(b'\0')
          and b'python\0-m\0searchrl' in (process / 'cmdline').read_bytes()):
        return int(process.name)
  return None


def test_a_slice_that_loses_a_worker_goes_on_with_equal_bits(tmp_path):
  whole, broken = tmp_path / 'whole', tmp_path / 'broken'
  alone = babysit(tmp_path / 'slice0', whole)
  assert alone.wait(900) == 0, (tmp_path / 'slice0' / 'log').read_text()
  script = babysit(tmp_path / 'slice1', broken)
  log = tmp_path / 'slice1' / 'log'
  while checkpoint.steps(broken / 'checkpoints')[-1:] < [2]:
    assert script.poll() is None, log.read_text()
    time.sleep(0.1)
  os.kill(worker(tmp_path / 'slice1', 1), signal.SIGKILL)
  assert script.wait(900) == 0, log.read_text()
  said = log.read_text()
  assert 'The run ended before it was done, for the 1th time.' in said
  assert 'Resumed at step' in said and 'slice still costs' in said
  assert (tmp_path / 'slice1' / 'host1' / 'searchrl' / '.git').is_dir()
  assert train_test.lines(broken) == train_test.lines(whole)
  assert train_test.state_digest(broken) == train_test.state_digest(whole)
