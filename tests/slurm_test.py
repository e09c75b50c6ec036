# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""launch/slurm.sbatch on a real SLURM of two nodes on this machine.

Needs the daemons, for instance of Debian, none of which has to be running:

    apt-get install --no-install-recommends slurmctld slurmd slurm-client
    python -m pytest -n 0 -m long tests/slurm_test.py

The script runs as it stands. Each node pretends to have a GPU, which is asked
for instead of 8, and JAX_PLATFORMS=cpu makes jax use the CPU. A job loses first a
worker and then a node. The oracle is a job that nobody disturbs.
"""

import contextlib
import getpass
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from searchrl.runtime import checkpoint
import train_test

PROGRAMS = ('slurmctld', 'slurmd', 'sbatch', 'scontrol', 'sinfo', 'squeue')
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.skipif(
    not all(map(shutil.which, PROGRAMS)), reason=f'needs {PROGRAMS}')]

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Jax connects to the first node by its name, which must be this machine's.
NODES = (socket.gethostname(), f'{socket.gethostname()}-2')
CONF = '''ClusterName=rehearsal
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
GresTypes=gpu
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait=5
ReturnToService=2
NodeName={nodes[0]} NodeAddr=127.0.0.1 Port={ports[1]} Gres=gpu:1
NodeName={nodes[1]} NodeAddr=127.0.0.1 Port={ports[2]} Gres=gpu:1
PartitionName=all Nodes=ALL Default=YES
'''
STEPS = 4
FLAGS = (
    '--config=configs/grpo.py:smoke', f'--config.train.num_steps={STEPS}',
    '--config.train.checkpoint_every=1', '--config.train.loggers=()',
    '--config.train.progress=False', '--config.evaluate.worlds.kinds=()',
    '--config.data.mix=(1,)', '--config.data.per_hop=(100,)',
    '--config.rollout.budgets.max_turns=2', '--config.rollout.budgets.top_k=1')


class Cluster:
  """The daemons of a SLURM with two nodes, and its commands."""

  def __init__(self, folder):
    self.folder, self._daemons = folder, {}
    with contextlib.ExitStack() as stack:
      ports = [stack.enter_context(socket.create_server(('127.0.0.1', 0))
                                  ).getsockname()[1] for _ in range(3)]
    (folder / 'slurm.conf').write_text(CONF.format(
        host=socket.gethostname(), user=getpass.getuser(), folder=folder,
        ports=ports, nodes=NODES))
    (folder / 'gres.conf').write_text('Name=gpu File=/dev/null\n')
    # Tests have more devices in each process than a node.
    self._env = {name: value for name, value in os.environ.items()
                 if name != 'XLA_FLAGS'} | dict(
        SLURM_CONF=str(folder / 'slurm.conf'), JAX_PLATFORMS='cpu', NPROC='2',
        SEARCHRL_HEARTBEAT_SECS='10',
        PATH=f'{pathlib.Path(sys.executable).parent}:{os.environ["PATH"]}')
    self._start('controller', 'slurmctld', '-D', '-i')
    for node in NODES:
      self.start_node(node)

  def _start(self, name, *command):
    with (self.folder / f'{name}.log').open('a') as log:
      self._daemons[name] = subprocess.Popen(
          command, env=self._env, stdout=log, stderr=log)

  def start_node(self, node):
    self._start(node, 'slurmd', '-D', '-N', node)

  def call(self, *command):
    return subprocess.run(command, env=self._env, cwd=ROOT, text=True,
                          check=True, capture_output=True).stdout

  def submit(self, workdir):
    """Submits the script as its comment says; returns the id of the job."""
    said = self.call(
        'sbatch', '--gpus-per-node=1', f'--output={self.folder}/job-%j.log',
        'launch/slurm.sbatch', *FLAGS, f'--workdir={workdir}')
    return re.search(r'\d+', said)[0]

  def facts(self, job):
    return dict(re.findall(r'(\w+)=(\S+)', self.call(
        'scontrol', 'show', 'job', job)))

  def wait_for_nodes(self):
    """Waits until both nodes are free, as the controller sees them."""
    deadline, states = time.monotonic() + 120, []
    while states != ['idle', 'idle']:
      assert time.monotonic() < deadline, self.logs()
      time.sleep(1)  # the controller is asked once a second
      states = self.call('sinfo', '--noheader', '-N', '-o', '%T').split()

  def wait(self, job, holds, secs=900):
    """Waits until facts of a job are as wanted.

    A requeued job starts after two minutes, when no node ends the last one.
    """
    deadline = time.monotonic() + secs
    while not holds(facts := self.facts(job)):
      assert time.monotonic() < deadline and facts['JobState'] not in (
          'FAILED', 'CANCELLED'), (facts, self.logs())
      time.sleep(0.2)
    return facts

  def tasks(self, job):
    """Returns {number of the task: id of its Python process} of a job."""
    result = {}
    for process in pathlib.Path('/proc').iterdir():
      with contextlib.suppress(OSError):
        environ = (process / 'environ').read_bytes().decode().split('\0')
        if (process.name.isdecimal() and f'SLURM_JOB_ID={job}' in environ
            and b'python\0-m\0searchrl' in (process / 'cmdline').read_bytes()):
          number, = (entry.partition('=')[2] for entry in environ
                     if entry.startswith('SLURM_PROCID='))
          result[int(number)] = int(process.name)
    return result

  def kill_node(self, node, task):
    """Kills the daemon of a node, and the task there with its ancestors."""
    self._daemons[node].kill()
    self._daemons[node].wait()
    script = parent(task)  # launch/run.sh; its parent is slurmstepd
    for process in (parent(script), script, task):
      os.kill(process, signal.SIGKILL)

  def logs(self):
    return '\n'.join(f'--- {file.name}\n{file.read_text()[-4000:]}'
                     for file in self.folder.glob('*.log'))

  def stop(self):
    self.call('scancel', f'--user={getpass.getuser()}')
    deadline = time.monotonic() + 30
    while self.call('squeue', '--noheader') and time.monotonic() < deadline:
      time.sleep(0.2)
    for daemon in self._daemons.values():
      daemon.terminate()
      daemon.wait()


def parent(process):
  status = pathlib.Path(f'/proc/{process}/status').read_text()
  return int(re.search(r'PPid:\s+(\d+)', status)[1])


@pytest.fixture(name='cluster')
def _cluster(tmp_path):
  cluster = Cluster(tmp_path)
  yield cluster
  cluster.stop()


def wait_for_step(cluster, job, folder, step):
  cluster.wait(job, lambda facts: (
      facts['JobState'] == 'RUNNING' and checkpoint.steps(
          folder / 'checkpoints')[-1:] >= [step]))


def test_a_job_that_loses_a_worker_and_a_node_ends_with_equal_bits(
    cluster, tmp_path):
  whole, broken = tmp_path / 'whole', tmp_path / 'broken'
  cluster.wait(cluster.submit(whole), lambda facts: (
      facts['JobState'] == 'COMPLETED'))
  job = cluster.submit(broken)
  wait_for_step(cluster, job, broken, 1)
  os.kill(cluster.tasks(job)[1], signal.SIGKILL)
  cluster.wait(job, lambda facts: facts['Restarts'] == '1')
  cluster.wait_for_nodes()
  wait_for_step(cluster, job, broken, 2)
  cluster.kill_node(NODES[1], cluster.tasks(job)[1])
  cluster.wait(job, lambda facts: facts['Restarts'] == '2')
  cluster.start_node(NODES[1])
  cluster.wait_for_nodes()
  facts = cluster.wait(job, lambda facts: facts['JobState'] == 'COMPLETED')
  assert facts['NumNodes'] == '2' and facts['ExitCode'] == '0:0'
  log = (cluster.folder / f'job-{job}.log').read_text()
  assert log.count('Resumed at step') == 2, log
  assert train_test.lines(broken) == train_test.lines(whole)
  assert train_test.state_digest(broken) == train_test.state_digest(whole)
