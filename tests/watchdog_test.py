# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""watchdog: it ends what is stuck, prints where, and does nothing else."""

import pathlib
import subprocess
import sys

import pytest

from searchrl.runtime import watchdog
import loopback


class Clock:
  """Time that passes only when someone waits."""

  def __init__(self):
    self.now = 0.0

  def __call__(self):
    return self.now

  def wait(self, secs):
    self.now += secs
    return False


def test_watchdog_reports_the_last_beat():
  clock, reports = Clock(), []
  dog = watchdog.Watchdog(30, on_timeout=reports.append, clock=clock,
                          wait=clock.wait)
  clock.now = 1.0
  dog.beat('step 7')
  dog._watch()
  assert clock.now == pytest.approx(31, abs=0.1)
  assert reports == [
      "Watchdog: no beat for 30 s after 'step 7', but 30 s is the limit (10 x "
      'the median interval, at least 30 s).']


def test_watchdog_allows_for_the_usual_interval():
  clock = Clock()
  dog = watchdog.Watchdog(30, factor=4, clock=clock)
  assert dog.limit_secs() == 30
  for secs in (500, 20, 20, 21, 19):  # the first compiles
    clock.now += secs
    dog.beat('step')
  assert dog.limit_secs() == 80
  with pytest.raises(ValueError, match='floor_secs > 0 and factor > 1'):
    watchdog.Watchdog(0)


def test_watchdog_leaves_with_its_block():
  reports = []
  with watchdog.Watchdog(60, on_timeout=reports.append) as dog:
    dog.beat('x')
  assert not dog._thread.is_alive() and not reports


def test_watchdog_ends_a_stuck_process_and_dumps_its_stack(tmp_path):
  code = ('import sys, threading\n'
          'from searchrl.runtime import watchdog\n'
          'def stuck():\n  threading.Event().wait()\n'
          'with watchdog.Watchdog(0.3, file=sys.argv[1]) as dog:\n'
          '  dog.beat("step 3")\n  stuck()\n')
  done = subprocess.run(
      [sys.executable, '-c', code, tmp_path / 'stacks.txt'], timeout=60,
      capture_output=True, text=True, cwd=loopback.ROOT)
  assert done.returncode == watchdog.EXIT_CODE == 70
  for text in done.stderr, pathlib.Path(tmp_path, 'stacks.txt').read_text():
    assert "after 'step 3'" in text and 'in stuck' in text
