# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""progress: a bar or plain lines, and seconds by phase."""

import io
import re
import sys

import pytest

from searchrl.runtime import progress


def test_timer_adds_up_and_starts_anew(monkeypatch):
  ticks = iter([0, 2, 10, 13, 20, 21])
  monkeypatch.setattr(progress.time, 'perf_counter', lambda: next(ticks))
  timer = progress.Timer()
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
  monkeypatch.setattr(progress.time, 'monotonic', lambda: next(clock))
  bar = progress.ProgressBar(200, 10)
  bar.update(outcome=0.3125, mixed=0.5, searches=2.125,
             tokens_per_sec=12345.6, kl=0.000123)
  bar.update()
  bar.close()
  out, err = capsys.readouterr()
  assert out == '' and err.splitlines() == [
      'step 11/200  outcome 0.312  mixed 50%  searches/question 2.12  '
      '12,346 tokens/s  kl 0.000123  ETA 1:34:30',
      'step 12/200  ETA 1:34:00']


def test_progress_is_a_bar_on_a_terminal_and_silent_if_asked(monkeypatch):
  pytest.importorskip('tqdm')
  terminal = io.StringIO()
  terminal.isatty = lambda: True
  monkeypatch.setattr(sys, 'stderr', terminal)
  silent = progress.ProgressBar(5, enabled=False)
  silent.update(outcome=0.5)
  silent.close()
  assert terminal.getvalue() == ''
  bar = progress.ProgressBar(5, 3)
  bar.update(outcome=0.5)
  bar.update(outcome=0.75)
  bar.close()
  assert re.search(r'5/5 .*outcome 0.750', terminal.getvalue())
