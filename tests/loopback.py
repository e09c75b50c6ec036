# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""N processes of one program on this machine, over the loopback interface.

    for done in loopback.run(2, CODE, 'argument'):
      assert done.stdout == ...

CODE (or a module's dotted name, for `python -m`) calls `processes.initialize()`
as a launched run does; each process has `devices` simulated CPU devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]

_CLASH = 'Failed to add port to server'  # jax then ends by a segmentation fault
_OTHERS = re.compile(r'(JAX_(COORD|NUM_PROC|PROCESS_ID)|SLURM_|TPU_|OMPI_).*|'
                     r'(?i:.*_proxy)')  # gRPC would ask a proxy for loopback


_OUTPUT = r'''
import json

def out(name, value):
  print(json.dumps([name, value]), flush=True)

def message(function, *args):
  try:
    return f'no error, but {function(*args)!r}'
  except (RuntimeError, TimeoutError, ValueError) as error:
    return f'{type(error).__name__}: {error}'
'''


class PortClash(Exception):
  """A port that was free a moment ago is not."""


class Group:
  """Running processes: `popen[i]` is process i; `folder` holds their logs."""

  def __init__(self, popen: list[subprocess.Popen], folder: pathlib.Path):
    self.popen, self.folder = popen, folder

  def wait(self, timeout: float) -> list[subprocess.CompletedProcess]:
    """Waits for all processes, and returns how each ended, in order.

    Raises:
      TimeoutError: A process still runs after `timeout` seconds. The message
        has all logs.
      PortClash: Another program took the coordinator's port.
    """
    deadline = time.monotonic() + timeout
    while any(process.poll() is None for process in self.popen):
      if self.popen[0].poll() and _CLASH in self._read(0, 'err'):
        raise PortClash(self.logs())  # the others would wait in vain
      if time.monotonic() > deadline:
        raise TimeoutError(f'not all ended within {timeout} s.\n{self.logs()}')
      time.sleep(0.02)
    return [subprocess.CompletedProcess(
        p.args, p.returncode, self._read(i, 'out'), self._read(i, 'err'))
            for i, p in enumerate(self.popen)]

  def logs(self) -> str:
    return '\n'.join(
        f'--- process {i}, exit code {p.poll()}, {kind}:\n{self._read(i, kind)}'
        for i, p in enumerate(self.popen) for kind in ('out', 'err'))

  def kill(self) -> None:
    """Kills the processes and their children by SIGKILL.

    After `initialize`, a process may outlive all other signals.
    """
    for process in self.popen:
      if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
          os.killpg(process.pid, signal.SIGKILL)
      process.wait()

  def _read(self, i: int, kind: str) -> str:
    return (self.folder / f'{i}.{kind}').read_text(errors='replace')


@contextlib.contextmanager
def start(
    processes: int, code_or_module: str, *args: str, devices: int = 2,
    env: Mapping[str, str] | None = None,
) -> Iterator[Group]:
  """Starts the processes, and kills those that still run at the end.

  Args:
    processes: Number of processes.
    code_or_module: Text of a program, or the dotted name of a module.
    *args: Arguments of all processes, in sys.argv.
    devices: Number of simulated CPU devices of each process.
    env: Further environment variables of all processes.
  """
  what = ['-m'] if re.fullmatch(r'[\w.]+', code_or_module) else ['-c']
  command = [sys.executable, *what, code_or_module, *map(str, args)]
  base = {k: v for k, v in os.environ.items() if not _OTHERS.fullmatch(k)} | {
      'JAX_PLATFORMS': 'cpu',
      'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}',
      'JAX_COORDINATOR_ADDRESS': f'127.0.0.1:{_free_port()}',
      'JAX_NUM_PROCESSES': str(processes),
      'SEARCHRL_START_SECS': '60', 'SEARCHRL_HEARTBEAT_SECS': '10',
      'SEARCHRL_SHUTDOWN_SECS': '90',
      'PYTHONPATH': f'{ROOT}{os.pathsep}{ROOT / "tests"}',
      **(env or {})}
  with tempfile.TemporaryDirectory(prefix='loopback') as folder:
    group = Group([], pathlib.Path(folder))
    try:
      for i in range(processes):
        with (group.folder / f'{i}.out').open('wb') as out, (
            group.folder / f'{i}.err').open('wb') as err:
          group.popen.append(subprocess.Popen(
              command, env=base | {'JAX_PROCESS_ID': str(i)}, stdout=out,
              stderr=err, stdin=subprocess.DEVNULL, start_new_session=True))
      yield group
    finally:
      group.kill()


def run(
    processes: int, code_or_module: str, *args: str, devices: int = 2,
    timeout: float = 120, check: bool = True,
    env: Mapping[str, str] | None = None,
) -> list[subprocess.CompletedProcess]:
  """Starts processes, waits, and returns how each ended, in order.

  Args:
    processes: Number of processes.
    code_or_module: Text of a program, or the dotted name of a module.
    *args: Arguments of all processes, in sys.argv.
    devices: Number of simulated CPU devices of each process.
    timeout: Seconds after which the processes are killed. A TimeoutError then
      holds the logs.
    check: Whether to raise an AssertionError with all logs unless all processes
      exit with 0.
    env: Further environment variables of all processes.
  """
  for last_try in (False, True):
    with start(processes, code_or_module, *args, devices=devices,
               env=env) as group:
      try:
        done = group.wait(timeout)
      except PortClash:
        if last_try:
          raise
        continue
      assert not check or not any(d.returncode for d in done), group.logs()
      return done


def outputs(processes: int, code: str, *args: str, **options) -> dict[str, list[Any]]:
  """Runs a program that calls out(name, value) for each of its results.

  The program also finds message(function, *args): the text of the error that
  the function raises.

  Returns:
    {name: [the value of process 0, of process 1, ...]}.
  """
  done = run(processes, _OUTPUT + code, *args, **options)
  results = [dict(map(json.loads, re.findall(r'^\[".*', d.stdout, re.M)))
             for d in done]  # Gloo prints, too
  assert all(result.keys() == results[0].keys() for result in results)
  return {name: [result[name] for result in results] for name in results[0]}


def _free_port() -> int:
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    return probe.getsockname()[1]
