# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""An evaluation of methods that is killed again and again: the same bytes."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long]

ROOT = pathlib.Path(__file__).resolve().parent.parent
COMMAND = (
    sys.executable, '-m', 'searchrl.main', '--config=configs/evaluate.py:methods',
    "--config.evaluate.order=('direct','rag','cot','ra_agent')",
    '--config.evaluate.worlds.questions_per_hop=30',
    '--config.evaluate.worlds.common_per_hop=10')
OTHER = ('seconds.json', 'environment.json')  # what a clock or a machine says


def start(folder):
  return subprocess.Popen(
      [*COMMAND, f'--workdir={folder}'], cwd=ROOT, start_new_session=True,
      stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
      env=os.environ | {'JAX_PLATFORMS': 'cpu', 'NPROC': '1'})


def contents(folder):
  return {str(file.relative_to(folder)): file.read_bytes()
          for file in folder.glob('**/*')
          if file.is_file() and file.name not in OTHER}


def run(folder):
  """Runs the evaluation to its end; returns its seconds."""
  began, process = time.monotonic(), start(folder)
  _, said = process.communicate()
  assert process.returncode == 0, said.decode()
  return time.monotonic() - began


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  folder = tmp_path_factory.mktemp('whole')
  run(folder)  # compiles
  secs = run(tmp_path_factory.mktemp('timed'))
  return contents(folder), secs


@pytest.mark.parametrize('seed', [0, 1, 2])
def test_random_kills_change_no_byte(seed, whole, tmp_path):
  expected, secs = whole
  draws, kills = random.Random(seed), 0
  for _ in range(3):
    process = start(tmp_path)
    try:
      process.communicate(timeout=draws.uniform(0.1, 0.9) * secs)
      break  # it came to its end before the kill
    except subprocess.TimeoutExpired:
      os.killpg(process.pid, signal.SIGKILL)
      process.communicate()
      kills += 1
  assert kills  # at least one struck
  run(tmp_path)
  assert contents(tmp_path) == expected
