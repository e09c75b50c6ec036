# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""signals: one asks to stop, a second ends at once; handlers are restored."""

import os
import signal

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
