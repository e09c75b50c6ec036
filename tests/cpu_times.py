# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The quick tier: tests whose slowest case took less than 0.3 CPU seconds.

A test that waited, so that it took a second and more, is not quick either.

  python -m pytest -m quick
  python -m pytest -m "not slow" --record_cpu_times   # measures them again
  python -m pytest tests/x_test.py --record_cpu_times  # or those of one file

The latter write tests/golden/cpu_times.json, which has the CPU seconds of each
test's slowest case: those of set-up, call and teardown, and those of child
processes. For a test that waited, it has the seconds by the clock. A test that
the file does not know is not quick.
"""

import collections
import json
import os
import pathlib
import time

import pytest

FILE = pathlib.Path(__file__).parent / 'golden' / 'cpu_times.json'
QUICK_SECS = 0.3  # CPU seconds that a test of the quick tier stays below
_WAITED_SECS = 1.0  # seconds by the clock, from which they count instead


def recorded() -> dict[str, dict[str, float]]:
  """Returns the seconds of each test's slowest case, by file and name."""
  return json.loads(FILE.read_text()) if FILE.exists() else {}


def pytest_addoption(parser):
  """Adds --record_cpu_times."""
  parser.addoption(
      '--record_cpu_times', action='store_true',
      help='write tests/golden/cpu_times.json, by which -m quick is chosen')


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
  """Marks the quick tests."""
  times = recorded()
  for item in items:
    file, name = _place(item.nodeid)
    if times.get(file, {}).get(name, QUICK_SECS) < QUICK_SECS and (
        not item.get_closest_marker('slow')):
      item.add_marker('quick')


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
  """Notes when a test began."""
  item.stash[_BEGAN] = _cpu_secs(), time.monotonic()
  return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
  """Reports the seconds of a test with its teardown."""
  report = yield
  if call.when == 'teardown':
    cpu, clock = item.stash[_BEGAN]
    cpu, clock = _cpu_secs() - cpu, time.monotonic() - clock
    report.user_properties.append(
        ('cpu_secs', max(cpu, clock) if clock >= _WAITED_SECS else cpu))
  return report


def pytest_terminal_summary(terminalreporter, config):
  """Writes the file, if it is asked for."""
  if not config.getoption('--record_cpu_times'):
    return
  slowest = collections.defaultdict(dict)
  for report in terminalreporter.getreports(''):
    file, name = _place(report.nodeid)
    for key, secs in report.user_properties:
      if key == 'cpu_secs':
        slowest[file][name] = max(round(secs, 2), slowest[file].get(name, 0))
  times = recorded()
  times |= {file: times.get(file, {}) | tests
            for file, tests in slowest.items()}
  FILE.write_text(json.dumps(times, indent=0, sort_keys=True) + '\n')
  terminalreporter.write_line(
      f'{FILE} has the CPU seconds of {sum(map(len, times.values()))} tests.')


_BEGAN = pytest.StashKey[tuple[float, float]]()  # CPU seconds, and the clock


def _cpu_secs() -> float:
  return sum(os.times()[:4]) if os.name == 'posix' else time.process_time()


def _place(nodeid: str) -> tuple[str, str]:
  """Returns the file and the name of a test, without its parameters."""
  file, _, name = nodeid.partition('[')[0].partition('::')
  return file, name
