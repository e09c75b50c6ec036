# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""watchdog: it ends what is stuck, prints where, and does nothing else."""

import subprocess
import sys

import pytest

from searchrl.runtime import watchdog
import loopback


class Clock:
  """A time that a test sets."""

  now = 0.0

  def __call__(self):
    return self.now


def test_watchdog_reports_the_last_beat():
  clock = Clock()
  dog = watchdog.Watchdog(30, clock)
  clock.now = 1.0
  dog.beat('step 7')
  clock.now = 31.0
  assert dog.report() == ''
  clock.now = 31.1
  assert dog.report() == (
      "Watchdog: no beat for 30 s after 'step 7', but 30 s is the limit (10 x "
      'the median interval, at least 30 s).')


def test_watchdog_allows_for_the_usual_interval():
  clock = Clock()
  dog = watchdog.Watchdog(30, clock)
  assert dog.limit_secs() == 30
  for secs in (500, 20, 20, 21, 19):  # the first compiles
    clock.now += secs
    dog.beat('step')
  assert dog.limit_secs() == 200
  with pytest.raises(ValueError, match='floor_secs must be above 0, but is 0'):
    watchdog.Watchdog(0)


def test_watchdog_leaves_with_its_block():
  with watchdog.Watchdog(60) as dog:
    dog.beat('x')
  assert not dog._thread.is_alive()


def test_watchdog_ends_a_stuck_process_and_dumps_its_stack():
  code = ('import threading\n'
          'from searchrl.runtime import watchdog\n'
          'def stuck():\n  threading.Event().wait()\n'
          'with watchdog.Watchdog(0.3) as dog:\n'
          '  dog.beat("step 3")\n  stuck()\n')
  done = subprocess.run(
      [sys.executable, '-c', code], timeout=60, capture_output=True,
      text=True, cwd=loopback.ROOT)
  assert done.returncode == watchdog.EXIT_CODE == 70
  assert "after 'step 3'" in done.stderr and 'in stuck' in done.stderr
