# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""metrics: no line is lost, torn or doubled; curves, tables and timers."""

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest

from searchrl.runtime import metrics

STEP = 'training/global_step'


def steps(path):
  return [line[STEP] for line in metrics.read(path)]


def test_lines_are_on_disk_when_write_returns(tmp_path):
  writer = metrics.Writer(tmp_path / 'run', tensorboard=False)
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
  writer = metrics.Writer(tmp_path, tensorboard=False)
  with pytest.raises(ValueError, match=r'but grads has shape \(2,\)'):
    writer.write(1, {'grads': np.ones(2)})
  with pytest.raises(ValueError, match=f'must leave {STEP} to `step`'):
    writer.write(1, {STEP: 3})
  assert metrics.read(writer.path) == []


def test_a_resumed_run_neither_doubles_nor_loses_a_step(tmp_path):
  writer = metrics.Writer(tmp_path, tensorboard=False)
  for step in range(1, 6):
    writer.write(step, {'reward': step / 10})
  writer.close()
  writer = metrics.Writer(tmp_path, tensorboard=False)  # restored step 3
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
  writer = metrics.Writer(tmp_path, tensorboard=False)
  writer.write(3, {})
  assert steps(path) == [1, 2, 3]


def test_a_killed_process_leaves_whole_lines(tmp_path):
  child = subprocess.Popen(
      [sys.executable, '-c', textwrap.dedent('''
          import sys
          from searchrl.runtime import metrics
          writer = metrics.Writer(sys.argv[1], tensorboard=False)
          for step in range(10**9):
            writer.write(step, {'reward': 0.5})
            print(step, flush=True)
          '''), str(tmp_path)],
      env=os.environ | {'PYTHONPATH': os.getcwd()}, stdout=subprocess.PIPE)
  for _ in range(20):
    told = int(child.stdout.readline())
  child.send_signal(signal.SIGKILL)
  child.communicate()
  got = steps(tmp_path / 'metrics.jsonl')
  assert got == list(range(len(got))) and len(got) > told


def test_tensorboard_mirrors_and_purges_what_will_come_again(tmp_path):
  pytest.importorskip('tensorboardX')
  writer = metrics.Writer(tmp_path)
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


def test_without_tensorboardx_the_file_is_still_written(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'tensorboardX', None)
  writer = metrics.Writer(tmp_path)
  writer.write(1, {'reward': 0.5})
  assert steps(writer.path) == [1]
  assert not (tmp_path / 'tensorboard').exists()


def test_running_mean_by_hand():
  got = metrics.running_mean([1, 3, math.nan, 5, 9], window=3)
  np.testing.assert_allclose(got, [1, 2, 2, 4, 7])
  assert np.isnan(metrics.running_mean([math.nan])).all()
  assert metrics.running_mean([]).shape == (0,)


def test_timer_adds_up_and_starts_anew(monkeypatch):
  ticks = iter([0, 2, 10, 13, 20, 21])
  monkeypatch.setattr(metrics.time, 'perf_counter', lambda: next(ticks))
  timer = metrics.Timer()
  with timer('rollout'):
    pass
  with pytest.raises(KeyError), timer('rollout'):
    raise KeyError
  with timer('update'):
    pass
  assert timer.pop() == {'timing_s/rollout': 5, 'timing_s/update': 1}
  assert timer.pop() == {}


def test_progress_writes_plain_lines_where_there_is_no_terminal(
    capsys, monkeypatch):
  clock = iter([0.0, 30.0, 60.0])
  monkeypatch.setattr(metrics.time, 'monotonic', lambda: next(clock))
  progress = metrics.Progress(200, 10)
  progress.update(reward=0.3125, mixed=0.5, searches=2.125,
                  tokens_per_sec=12345.6, kl=0.000123)
  progress.update()
  progress.close()
  out, err = capsys.readouterr()
  assert out == '' and err.splitlines() == [
      'step 11/200  reward 0.312  mixed 50%  searches/question 2.12  '
      '12,346 tokens/s  kl 0.000123  ETA 1:34:30',
      'step 12/200  ETA 1:34:00']


def test_progress_is_a_bar_on_a_terminal_and_silent_if_asked(monkeypatch):
  pytest.importorskip('tqdm')
  terminal = io.StringIO()
  terminal.isatty = lambda: True
  monkeypatch.setattr(sys, 'stderr', terminal)
  silent = metrics.Progress(5, enabled=False)
  silent.update(reward=0.5)
  silent.close()
  assert terminal.getvalue() == ''
  progress = metrics.Progress(5, 3)
  progress.update(reward=0.5)
  progress.update(reward=0.75)
  progress.close()
  assert re.search(r'5/5 .*reward 0.750', terminal.getvalue())


def test_curve_draws_both_files_and_the_same_ones_again(tmp_path):
  pytest.importorskip('matplotlib')
  x = np.arange(1, 41)
  series = {'reward': (x, x / 40), 'entropy': (x, [math.nan] * 5 + [1.0] * 35),
            'speed': (x[::10], [1234.5] * 4), 'nothing yet': ([], [])}
  units = {'reward': 'exact match', 'speed': 'tokens per second'}
  paths = [metrics.curve(tmp_path / name / 'dspo.v2', series, title='DSPO <1>',
                         units=units) for name in ('a', 'b')]
  png, svg = paths[0]
  assert (png.name, svg.name) == ('dspo.v2.png', 'dspo.v2.svg')
  assert png.read_bytes().startswith(b'\x89PNG')
  text = svg.read_text()
  for word in ('DSPO &lt;1&gt;', 'reward', 'exact match', 'tokens per second',
               'training step', '1,234'):
    assert f'<!-- {word} -->' in text, word
  assert svg.read_bytes() == paths[1][1].read_bytes()


def test_table_by_hand():
  rows = [{'method': 'direct', 'em': 0.03125, 'n': 500},
          {'method': 'DSPO', 'em': 0.5, 'n': 500, 'note': 'ours'}]
  assert metrics.table(rows, ['method', 'em', 'n', 'note']) == (
      'method     em    n  note\n'
      '------  -----  ---  ----\n'
      'direct  0.031  500\n'
      'DSPO    0.500  500  ours')
  assert metrics.table([], ['a']) == 'a\n-'
