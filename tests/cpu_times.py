# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The quick tier: the tests that took less than half a CPU second.

  python -m pytest -m quick
  python -m pytest -m "not slow" --record_cpu_times   # measures them again

The second command writes tests/golden/cpu_times.json, which lists the other
tests of that run with their CPU seconds: those of set-up, call and teardown, and
those of child processes. A test that the file does not know is quick.
"""

import json
import os
import pathlib
import time

import pytest

FILE = pathlib.Path(__file__).parent / 'golden' / 'cpu_times.json'
QUICK_SECS = 0.5  # CPU seconds that a test of the quick tier stays below


def slow_tests() -> dict[str, float]:
  """Returns the CPU seconds of the tests that are too slow for the tier."""
  return json.loads(FILE.read_text()) if FILE.exists() else {}


def pytest_addoption(parser):
  """Adds --record_cpu_times."""
  parser.addoption(
      '--record_cpu_times', action='store_true',
      help='write tests/golden/cpu_times.json, by which -m quick is chosen')


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
  """Marks the quick tests."""
  slow = slow_tests()
  for item in items:
    if item.nodeid not in slow and not item.get_closest_marker('slow'):
      item.add_marker('quick')


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
  """Notes when a test began."""
  item.stash[_BEGAN] = _cpu_secs()
  return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
  """Reports the CPU seconds of a test with its teardown."""
  report = yield
  if call.when == 'teardown':
    report.user_properties.append(
        ('cpu_secs', _cpu_secs() - item.stash[_BEGAN]))
  return report


def pytest_terminal_summary(terminalreporter, config):
  """Writes the file, if it is asked for."""
  if not config.getoption('--record_cpu_times'):
    return
  times = {
      report.nodeid: round(value, 2) for report in
      terminalreporter.getreports('') for name, value in report.user_properties
      if name == 'cpu_secs' and value >= QUICK_SECS}
  FILE.write_text(json.dumps(times, indent=0, sort_keys=True) + '\n')
  terminalreporter.write_line(
      f'{FILE} lists {len(times)} tests of {QUICK_SECS} CPU s or more.')


_BEGAN = pytest.StashKey[float]()


def _cpu_secs() -> float:
  return sum(os.times()[:4]) if os.name == 'posix' else time.process_time()
