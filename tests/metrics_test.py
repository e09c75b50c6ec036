# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""metrics: no line is lost, torn or doubled."""

import contextlib
import json
import math
import os
import pathlib
import signal
import sqlite3
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest

from searchrl.runtime import loggers
from searchrl.runtime import metrics

ROOT = pathlib.Path(__file__).resolve().parent.parent
STEP = 'training/global_step'


def steps(path):
  return [line[STEP] for line in metrics.read(path)]


def test_lines_are_on_disk_when_write_returns(tmp_path):
  writer = metrics.Writer(tmp_path / 'run')
  writer.write(1, {'reward': np.float32(0.5), 'policy/entropy': jnp.ones(())})
  writer.write(2, {'reward': True, 'loss': math.nan, 'kl': -math.inf})
  first, second = (tmp_path / 'run/metrics.jsonl').read_text().splitlines()
  assert first == f'{{"{STEP}": 1, "reward": 0.5, "policy/entropy": 1.0}}'
  assert json.loads(second) == {STEP: 2, 'reward': 1.0, 'loss': None,
                                'kl': None}
  lines = metrics.read(writer.path)
  assert lines[0] == {STEP: 1, 'reward': 0.5, 'policy/entropy': 1.0}
  assert math.isnan(lines[1]['loss'])
  writer.close()


def test_a_value_that_is_no_scalar_is_named(tmp_path):
  writer = metrics.Writer(tmp_path)
  with pytest.raises(ValueError, match=r'but grads has shape \(2,\)'):
    writer.write(1, {'grads': np.ones(2)})
  with pytest.raises(ValueError, match=f'must leave {STEP} to `step`'):
    writer.write(1, {STEP: 3})
  assert metrics.read(writer.path) == []


def test_a_resumed_run_neither_doubles_nor_loses_a_step(tmp_path):
  writer = metrics.Writer(tmp_path)
  for step in range(1, 6):
    writer.write(step, {'reward': step / 10})
  writer.close()
  writer = metrics.Writer(tmp_path)  # restored step 3
  writer.truncate(3)
  assert steps(writer.path) == [1, 2, 3]
  for step in range(4, 7):
    writer.write(step, {'reward': step / 10})
  assert steps(writer.path) == [1, 2, 3, 4, 5, 6]
  writer.truncate(-1)
  assert writer.path.read_text() == ''
  assert [p.name for p in tmp_path.iterdir()] == ['metrics.jsonl']


def test_a_torn_last_line_is_left_out_and_then_dropped(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  path.write_text(f'{{"{STEP}": 1}}\n{{"{STEP}": 2}}\n{{"training/glo')
  assert steps(path) == [1, 2]
  writer = metrics.Writer(tmp_path)
  writer.write(3, {})
  assert steps(path) == [1, 2, 3]


def test_a_damaged_line_is_named(tmp_path):
  (tmp_path / metrics.FILE).write_text(
      '{"training/global_step": 1}\n{"training/glo\n')
  words = f'line 2 of {tmp_path}/{metrics.FILE} must be JSON, but is damaged'
  with pytest.raises(ValueError, match=words):
    metrics.read(tmp_path / metrics.FILE)
  with pytest.raises(ValueError, match=words):
    metrics.drop(tmp_path, 1, 'val/')


def test_a_killed_process_leaves_whole_lines(tmp_path):
  child = subprocess.Popen(
      [sys.executable, '-c', textwrap.dedent('''
          import sys
          from searchrl.runtime import metrics
          writer = metrics.Writer(sys.argv[1])
          for step in range(10**9):
            writer.write(step, {'reward': 0.5})
            print(step, flush=True)
          '''), str(tmp_path)],
      env=os.environ | {'PYTHONPATH': os.getcwd()}, stdout=subprocess.PIPE)
  for _ in range(20):
    last = int(child.stdout.readline())
  child.send_signal(signal.SIGKILL)
  child.communicate()
  got = steps(tmp_path / 'metrics.jsonl')
  assert got == list(range(len(got))) and len(got) > last


def test_tensorboard_mirrors_and_purges_what_will_come_again(tmp_path):
  writer = metrics.Writer(tmp_path, log_to=('tensorboard',))
  writer.write(1, {'reward': 0.5})
  writer.write(2, {'reward': 0.6})
  writer.truncate(1)
  writer.write(2, {'reward': 0.7})
  writer.close()
  first, second = sorted((tmp_path / 'tensorboard').iterdir())
  assert first.read_bytes().count(b'reward') == 2
  assert second.read_bytes().count(b'reward') == 1
  restart = b'\x10\x02:\x02\x08\x01'  # Event(step=2, session_log=START)
  assert restart in second.read_bytes()
  assert [line['reward'] for line in metrics.read(writer.path)] == [0.5, 0.7]


def test_a_package_that_is_missing_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'wandb', None)
  with pytest.raises(ValueError, match='pip install wandb'):
    loggers.resolve(['tensorboard', 'wandb'])
  with pytest.raises(ValueError, match='train.loggers must be .*Ours are tens'):
    loggers.resolve(['weights_and_biases'])


def test_a_function_of_a_user_is_a_logger(tmp_path, monkeypatch):
  (tmp_path / 'my_logger.py').write_text(
      'from searchrl.runtime import loggers\n\n'
      'def make(folder, config, first):\n'
      '  file = (folder / "mine.txt").open("a")\n'
      '  print(config["seed"], first, file=file)\n'
      '  return loggers.Logger(\n'
      '      lambda step, values: print(step, values, file=file), file.close)\n')
  monkeypatch.syspath_prepend(tmp_path)
  writer = metrics.Writer(tmp_path, log_to=('my_logger:make',),
                          config={'seed': 3})
  writer.truncate(4)
  writer.write(5, {'reward': 0.5})
  writer.close()
  assert (tmp_path / 'mine.txt').read_text() == "3 5\n5 {'reward': 0.5}\n"


LOGS_STEPS = """
import sys
from searchrl.runtime import metrics
writer = metrics.Writer(sys.argv[2], log_to=(sys.argv[1],))
for step in map(int, sys.argv[3:]):
  writer.write(step, {'reward': step / 10})
writer.close()
"""


def logs(name, folder, environment):
  """Two processes log to a run: steps 1 and 2, then step 3."""
  for numbers in (('1', '2'), ('3',)):
    subprocess.run([sys.executable, '-c', LOGS_STEPS, name, str(folder),
                    *numbers], check=True, env=os.environ | environment,
                   cwd=ROOT)


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_same_run_of_trackio(
    tmp_path):
  pytest.importorskip('trackio', reason='needs pip install trackio')
  logs('trackio', tmp_path / 'run', {'TRACKIO_DIR': str(tmp_path / 'trackio')})
  database, = (tmp_path / 'trackio').glob('*.db')
  with contextlib.closing(sqlite3.connect(database)) as connection:
    rows = connection.execute(
        'select run_name, step, metrics from metrics order by step').fetchall()
  assert len({name for name, _, _ in rows}) == 1
  assert [(step, json.loads(values)['reward']) for _, step, values in rows] == [
      (1, 0.1), (2, 0.2), (3, 0.3)]


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_same_run_of_wandb(tmp_path):
  pytest.importorskip('wandb', reason='needs pip install wandb')
  logs('wandb', tmp_path / 'run',
       {'WANDB_MODE': 'offline', 'WANDB_SILENT': 'true'})
  written = [*(tmp_path / 'run' / 'wandb').glob('offline-run-*')]
  assert len(written) == 2  # by two processes, of one run
  id_, = {log.name.partition('-run-')[2].partition('-')[2] for log in written}
  assert id_ == json.loads((tmp_path / 'run/loggers.json').read_text())['wandb']
