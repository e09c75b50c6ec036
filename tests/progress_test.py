# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""progress: phases that last, one bar at a time, and seconds by phase."""

import contextlib
import fcntl
import io
import os
import re
import struct
import subprocess
import sys
import termios
import threading

import pytest

from searchrl.runtime import progress


class Screen(io.StringIO):
  """A stream that may be a terminal; `lines` is what one would see."""

  def __init__(self, terminal: bool):
    super().__init__()
    self.isatty = lambda: terminal

  @property
  def lines(self) -> list[str]:
    """Text that is visible: after a carriage return, it replaces the line."""
    return [line.rpartition('\r')[2].replace('\x1b[K', '')
            for line in self.getvalue().split('\n')]


@pytest.fixture(autouse=True)
def a_second(monkeypatch):
  """Phases are announced after a second, as outside of tests."""
  monkeypatch.setattr(progress, 'WAIT_SECS', 1.0)


class Clock:
  """A clock that a test sets."""

  def __init__(self):
    self.now = 100.0

  def __call__(self) -> float:
    return self.now


@pytest.fixture
def clock():
  return Clock()


def displayed(terminal: bool, clock: Clock, monkeypatch, columns: int = 80
             ) -> tuple[progress.Display, Screen]:
  monkeypatch.setenv('COLUMNS', str(columns))
  screen = Screen(terminal)
  return progress.Display(lambda: screen, clock), screen


def pass_time(display: progress.Display, clock: Clock, secs: float) -> None:
  """Lets time pass as the thread sees it, in looks of a quarter second."""
  for _ in range(round(secs * 4)):
    clock.now += 0.25
    display.tick()


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


@pytest.mark.parametrize('terminal', (False, True))
def test_a_quick_phase_says_nothing(terminal, clock, monkeypatch):
  display, screen = displayed(terminal, clock, monkeypatch)
  phase = display.begin('Loading')
  pass_time(display, clock, 0.75)
  display.end(phase)
  assert screen.getvalue() == '' and not display.tick()


def test_a_long_phase_has_few_lines_in_a_file(clock, monkeypatch):
  display, screen = displayed(False, clock, monkeypatch)
  phase = display.begin('Compiling the programs that sample')
  pass_time(display, clock, 75)
  display.end(phase)
  assert screen.lines == [
      'Compiling the programs that sample ...',
      'Compiling the programs that sample: 31 s so far',
      'Compiling the programs that sample: 61 s so far',
      'Compiling the programs that sample: 75 s', '']


def test_counted_work_says_how_much_is_left(clock, monkeypatch):
  display, screen = displayed(False, clock, monkeypatch)
  phase = display.begin('Evaluating', total=2000, unit='answer')
  pass_time(display, clock, 40)
  display.advance(phase, 500)
  pass_time(display, clock, 30)
  display.advance(phase, 3000)  # more than there are
  pass_time(display, clock, 60)
  display.end(phase)
  assert screen.lines == [
      'Evaluating ...',
      'Evaluating: 0 of 2,000 answers, 31 s',  # nothing tells the pace
      'Evaluating: 500 of 2,000 answers, 61 s, 0:03:03 left',
      'Evaluating: 2,000 of 2,000 answers, 91 s, 0:00:00 left',
      'Evaluating: 2,000 of 2,000 answers, 0:02:01, 0:00:00 left',
      'Evaluating: 2,000 answers, 0:02:10', '']


def test_a_unit_has_its_plural(clock, monkeypatch):
  display, screen = displayed(False, clock, monkeypatch)
  phase = display.begin('Computing the loss', total=2, unit='batch')
  display.advance(phase, 2)
  pass_time(display, clock, 40)
  display.end(phase)
  assert screen.lines[-2] == 'Computing the loss: 2 batches, 40 s'


def test_work_within_work_does_not_count_as_its_time(clock, monkeypatch):
  display, screen = displayed(False, clock, monkeypatch)
  evaluating = display.begin('Evaluating', total=300, unit='answer')
  compiling = display.begin('Compiling')
  pass_time(display, clock, 60)
  display.end(compiling)
  display.advance(evaluating, 300)
  pass_time(display, clock, 8)
  display.end(evaluating)
  assert [line for line in screen.lines if line.endswith(' s')] == [
      'Compiling: 60 s', 'Evaluating: 300 answers, 8 s']


def test_the_innermost_phase_speaks_and_a_failed_one_has_no_end(
    clock, monkeypatch):
  display, screen = displayed(False, clock, monkeypatch)
  outer = display.begin('Evaluating', total=10, unit='answer')
  inner = display.begin('Compiling')
  pass_time(display, clock, 8)
  display.end(inner)
  pass_time(display, clock, 2)
  display.end(outer, failed=True)
  assert screen.lines == [
      'Compiling ...', 'Compiling: 8 s', 'Evaluating ...', '']


def test_steps_in_a_file_are_a_line_each_unless_they_are_fast(
    clock, monkeypatch):
  display, screen = displayed(False, clock, monkeypatch)
  monkeypatch.setattr(progress, 'DISPLAY', display)
  bar = progress.ProgressBar(200, 10)
  for _ in range(3):  # 10 s a step
    pass_time(display, clock, 10)
    bar.update(reward=0.3125, searches=2.125, tokens_per_sec=12345.6,
               mixed=0.5)
  for _ in range(20):
    pass_time(display, clock, 0.25)
    bar.update(reward=0.5)
  bar.close()
  assert all(len(line) < 80 for line in screen.lines)
  assert screen.lines == [
      'step 11/200  reward 0.31  searches 2.1  12,346 tok/s  mixed 50%  '
      'ETA 0:31:30',
      'step 12/200  reward 0.31  searches 2.1  12,346 tok/s  mixed 50%  '
      'ETA 0:31:20',
      'step 13/200  reward 0.31  searches 2.1  12,346 tok/s  mixed 50%  '
      'ETA 0:31:10',
      'step 33/200  reward 0.50  ETA 0:04:14', '']


def test_a_long_run_has_some_hundred_lines_in_a_file(clock, monkeypatch):
  display, screen = displayed(False, clock, monkeypatch)
  monkeypatch.setattr(progress, 'DISPLAY', display)
  bar = progress.ProgressBar(5000)
  for _ in range(5000):
    clock.now += 60
    bar.update(reward=0.5)
  assert 190 <= len(screen.lines) <= 210
  assert screen.lines[-2].startswith('step 5000/5000  reward 0.50')
  bar.close()


RUN = '''
import time
from searchrl.runtime import processes, progress
bar = progress.ProgressBar(1728, unit='rollout')
for done in range(0, 1728, 72):
  time.sleep(0.02)
  bar.update(done, reward=0.7253, searches=2.083, tokens_per_sec=124619.2,
             mixed=0.553)
  if done == 720:
    processes.say('Warning: something.')
bar.update(1728, reward=0.8, searches=2.5, tokens_per_sec=124619.2, mixed=0.5)
bar.close()
'''


def in_terminal(columns):
  """Returns what a program writes to a terminal of so many columns."""
  ours, theirs = os.openpty()
  fcntl.ioctl(theirs, termios.TIOCSWINSZ,
              struct.pack('HHHH', 24, columns, 0, 0))
  environment = {name: value for name, value in os.environ.items()
                 if name != 'COLUMNS'}
  with subprocess.Popen([sys.executable, '-c', RUN], stderr=theirs,
                        env=environment) as process:
    os.close(theirs)
    written = b''
    with contextlib.suppress(OSError):  # the other end is closed
      while part := os.read(ours, 1 << 16):
        written += part
  os.close(ours)
  assert process.returncode == 0
  screen = Screen(True)
  screen.write(written.decode().replace('\r\n', '\n'))
  return screen


def test_a_run_draws_one_line_in_a_terminal_of_80_columns():
  screen = in_terminal(80)
  assert screen.lines[0] == 'Warning: something.'
  bar, = screen.lines[1:-1]
  assert re.fullmatch(
      r'rollout 1728/1728 \|█{4,}\| 00:0\d<00:00  reward 0.80  searches 2.5  '
      '124,619 tok/s', bar)
  drawn = [text.replace('\x1b[K', '') for line in screen.getvalue().split('\n')
           for text in line.split('\r')]
  assert len(drawn) > 10 and max(map(len, drawn)) < 80


def test_a_run_has_few_lines_in_a_pipe():
  done = subprocess.run([sys.executable, '-c', RUN], stderr=subprocess.PIPE,
                        text=True, check=True)
  first, warning, last = done.stderr.splitlines()
  assert first.startswith('rollout 0/1728  reward 0.73  searches 2.1  124,619 ')
  assert warning == 'Warning: something.'
  assert last == ('rollout 1728/1728  reward 0.80  searches 2.5  124,619 tok/s'
                  '  ETA 0:00:00')


def test_a_slow_step_in_a_file_says_what_it_does(clock, monkeypatch):
  display, screen = displayed(False, clock, monkeypatch)
  monkeypatch.setattr(progress, 'DISPLAY', display)
  bar = progress.ProgressBar(2)
  bar.update()
  sampling = display.begin('sampling', is_quiet=True)
  pass_time(display, clock, 70)
  display.end(sampling)
  bar.update()
  bar.close()
  assert screen.lines == ['step 1/2  ETA 0:00:00', 'step 1/2: sampling 30 s',
                          'step 1/2: sampling 60 s', 'step 2/2  ETA 0:00:00',
                          '']


@pytest.mark.parametrize('columns', (60, 80, 100))
def test_an_evaluation_leaves_the_bar_of_a_terminal_whole(
    columns, clock, monkeypatch):
  pytest.importorskip('tqdm')
  display, screen = displayed(True, clock, monkeypatch, columns)
  monkeypatch.setattr(progress, 'DISPLAY', display)
  bar = progress.ProgressBar(1728, unit='rollout')
  for done in (144, 288):
    pass_time(display, clock, 7)
    bar.update(done, reward=0.7253, searches=2.083, tokens_per_sec=4619.2,
               mixed=0.553)
    evaluation = display.begin('Evaluating after step 2', total=384,
                               unit='answer')
    pass_time(display, clock, 2)
    display.advance(evaluation, 300)
    pass_time(display, clock, 4)
    with display.hidden():
      screen.write('known.bm25.greedy: exact match 0.4\n')
    display.end(evaluation)
  seen = list(screen.lines)
  assert len(seen) == 5  # two lines of each evaluation, and the present one
  assert seen[:4] == ['known.bm25.greedy: exact match 0.4',
                      'Evaluating after step 2: 300 answers, 6 s'] * 2
  display.tick()
  bar_line = screen.lines[-1]
  assert bar_line.startswith('rollout 288/1728 |█')
  if columns >= 80:
    assert ('00:26<02:10  reward 0.73  searches 2.1  4,619 tok/s' in
            bar_line)
  for text in screen.getvalue().replace('\n', '\r').split('\r'):
    assert len(text.replace('\x1b[K', '')) < columns
  bar.close()
  assert screen.lines[-1] == '' and screen.lines[-2].startswith('rollout 288')


def test_a_bar_names_what_a_slow_step_does_now(clock, monkeypatch):
  pytest.importorskip('tqdm')
  display, screen = displayed(True, clock, monkeypatch)
  monkeypatch.setattr(progress, 'DISPLAY', display)
  bar = progress.ProgressBar(36)
  bar.update(reward=0.5)
  sampling = display.begin('sampling', is_quiet=True)
  pass_time(display, clock, 1)
  assert 'sampling' not in screen.lines[-1]
  pass_time(display, clock, 11)
  assert '  sampling 12 s  reward 0.50' in screen.lines[-1]
  display.end(sampling)
  display.tick()
  assert 'sampling' not in screen.lines[-1]
  bar.close()


def test_only_the_first_process_prints(clock, monkeypatch):
  screen = Screen(False)
  display = progress.Display(lambda: screen, clock, speaks=lambda: False)
  phase = display.begin('Compiling')
  pass_time(display, clock, 40)
  display.end(phase)
  monkeypatch.setattr(progress, 'DISPLAY', display)
  progress.ProgressBar(5, enabled=False).update(reward=0.5)
  assert screen.getvalue() == ''


def test_a_stream_that_is_closed_stops_nobody(clock, monkeypatch):
  display, screen = displayed(False, clock, monkeypatch)
  phase = display.begin('Compiling')
  screen.close()
  pass_time(display, clock, 10)
  display.end(phase)
  assert not display.tick()  # no phase is left


def test_a_thread_shows_the_phases_of_a_process(monkeypatch):
  screen, said = Screen(False), threading.Event()
  write = screen.write
  monkeypatch.setattr(screen, 'write', lambda text: (write(text), said.set()))
  monkeypatch.setattr(sys, 'stderr', screen)
  monkeypatch.setattr(progress, 'WAIT_SECS', 0.0)
  with progress.phase('Loading'):
    assert said.wait(60)
  assert screen.getvalue() == 'Loading ...\n'
  with pytest.raises(KeyError), progress.phase('Encoding', total=9):
    raise KeyError
  assert screen.lines in (['Loading ...', ''],
                          ['Loading ...', 'Encoding ...', ''])


def test_the_first_step_has_lines_of_its_own(clock, monkeypatch):
  display, screen = displayed(False, clock, monkeypatch)
  monkeypatch.setattr(progress, 'DISPLAY', display)
  timer = progress.Timer({'gen': 'sampling'})
  for _ in range(2):
    with timer('gen'):
      pass_time(display, clock, 6)
    with timer('other'):
      pass_time(display, clock, 6)
    timer.pop()
  assert screen.lines == ['First step, which compiles: sampling ...',
                          'First step, which compiles: sampling: 6 s', '']


def test_items_are_counted_as_they_are_taken():
  reached = []
  assert list(progress.counted('abc', reached.append)) == ['a', 'b', 'c']
  assert reached == [1, 2, 3]
