# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""signals: one asks to stop, a second ends at once; handlers are restored."""

import os
import signal
import subprocess
import sys

import pytest

from searchrl.runtime import signals


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_once(number):
  notices = []
  with signals.StopRequest(lambda: notices.append('stop')) as stop:
    assert not stop.is_requested and not stop.wait(0)
    os.kill(os.getpid(), number)
    assert stop.wait(5) and stop.is_requested
    os.kill(os.getpid(), signal.SIGTERM)
  assert notices == ['stop']


def test_a_second_ctrl_c_interrupts_and_handlers_come_back():
  before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
  with pytest.raises(KeyboardInterrupt):
    with signals.StopRequest():
      os.kill(os.getpid(), signal.SIGINT)
      os.kill(os.getpid(), signal.SIGINT)
      signal.sigtimedwait([], 1)  # a handler runs between two byte codes
  assert (signal.getsignal(signal.SIGINT),
          signal.getsignal(signal.SIGTERM)) == before


_IN_A_COLLECTION = """
import gc, signal, sys, time
# A job that a shell has started in the background ignores SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
from searchrl.runtime import signals
signals.raise_at_sigterm()
dropped, report = [], sys.unraisablehook

def noted(unraisable):
  dropped.append(type(unraisable.exc_value).__name__)
  report(unraisable)
  time.sleep({secs})

def at_collection(phase, info):
  gc.callbacks.clear()
  signal.raise_signal(signal.{number})

gc.callbacks.append(at_collection)
sys.unraisablehook = noted
try:
  gc.collect()
  while True:  # until the signal comes again, or the test's timeout
    time.sleep(0.01)
except KeyboardInterrupt as error:
  print(*dropped, type(error).__name__)
"""


@pytest.mark.parametrize('secs', [0, 0.1])  # the timer rings in a slow hook
@pytest.mark.parametrize(('number', 'exception'), [
    ('SIGTERM', 'Terminated'), ('SIGINT', 'KeyboardInterrupt')])
def test_a_signal_in_a_garbage_collection_is_not_lost(number, exception, secs):
  result = subprocess.run(
      [sys.executable, '-c', _IN_A_COLLECTION.format(number=number, secs=secs)],
      capture_output=True, text=True, timeout=120)
  assert result.stdout.split() == [exception, exception], result.stderr
  assert result.stderr == ''


def test_other_dropped_exceptions_are_still_reported():
  script = """
from searchrl.runtime import signals
signals.raise_at_sigterm()

class Broken:
  def __del__(self):
    raise ValueError('in a finalizer')

Broken()
"""
  result = subprocess.run([sys.executable, '-c', script], capture_output=True,
                          text=True, timeout=120)
  assert result.returncode == 0 and 'ValueError: in a finalizer' in result.stderr
