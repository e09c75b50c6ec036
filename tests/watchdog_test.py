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


def secs_until_the_end(monkeypatch, stops):
  """Returns the seconds after which a watchdog of 60 s ends the process.

  The watchdog checks after each second. Each of the first 31 seconds ends with
  a beat. `stops` has the seconds for which the process is stopped in addition,
  by the number of the check that follows, from 0.
  """
  clock, ends = Clock(), []
  dog = watchdog.Watchdog(60, clock)

  class Waits:
    count = 0

    def wait(self, secs):
      assert secs == 1
      clock.now += secs + stops.get(self.count, 0)
      if self.count <= 30:
        dog.beat(f'step {self.count}')
      self.count += 1
      return self.count > 1000

  dog._over = Waits()
  monkeypatch.setattr(watchdog.os, '_exit', lambda code: ends.append(clock.now))
  monkeypatch.setattr(watchdog.os, 'write', lambda *_: None)
  monkeypatch.setattr(watchdog.faulthandler, 'dump_traceback', lambda *_, **__: 0)
  dog._watch()
  end, = ends
  return end


@pytest.mark.parametrize('check', [3, 30, 31, 89])
def test_watchdog_does_not_count_the_time_of_a_stopped_process(
    monkeypatch, check):
  assert secs_until_the_end(monkeypatch, {}) == 31 + 61
  # A stop after the last beat counts as one second, in which it may have begun.
  counted = 1 if check > 30 else 0
  assert secs_until_the_end(monkeypatch, {check: 5000}) == (
      5000 + 31 + 61 - counted)


def test_watchdog_counts_the_time_between_many_short_stops(monkeypatch):
  stops = {check: 0.5 for check in range(1000)}  # as on a busy machine
  assert secs_until_the_end(monkeypatch, stops) == 31 * 1.5 + 61.5


def test_watchdog_ends_a_stuck_process_and_dumps_its_stack_and_dumps_its_stack():
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
