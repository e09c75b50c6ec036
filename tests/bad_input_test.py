# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Bad input of every kind ends in one line that says what was wrong.

Not in a traceback, not in silence, not in a hang; and before any device is
touched, where it can be known before. The rows are in bad_inputs.py.
"""

import json
import os
import subprocess
import sys

import bad_inputs
import pytest

HINT = '(SEARCHRL_TRACEBACK=1 shows where.)'
INDEXES = range(len(bad_inputs.ROWS))


def _environ(folder, *more):
  paths = [str(bad_inputs.ROOT), str(folder), os.environ.get('PYTHONPATH', '')]
  unset = ('XLA_FLAGS', 'NPROC')  # one device
  return {name: value for name, value in os.environ.items()
          if name not in unset} | dict(
              PYTHONPATH=os.pathsep.join(paths)) | dict(more)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """The files that the rows name."""
  folder = tmp_path_factory.mktemp('bad')
  bad_inputs.write(folder)
  return folder


@pytest.fixture(scope='module')
def found(request, folder):
  """{index: what became of the row}: all that are asked for, in one process."""
  asked = sorted({item.callspec.params['index']
                  for item in request.session.items
                  if item.path == request.path
                  and 'found' in item.fixturenames})
  results = folder / 'results.jsonl'
  done = subprocess.run(
      [sys.executable, bad_inputs.__file__, folder, results],
      cwd=bad_inputs.ROOT, input=json.dumps(asked), text=True,
      env=_environ(folder), capture_output=True, check=False)
  rows = [json.loads(line) for line in results.read_text().splitlines()]
  assert len(rows) == len(asked), (
      f'row {asked[len(rows)]} ended the process:\n{done.stderr[-2000:]}')
  return dict(rows)


def _check_line(text, words):
  """Checks that the last line before the hint is a sentence with the words."""
  lines = text.strip().removesuffix(HINT).strip().splitlines()
  assert lines and 'Traceback' not in text, text
  *before, line = lines
  assert all(one.startswith('Warning: ') for one in before), text
  for word in words:
    assert word in line, f'{word!r} is not in: {line}'


@pytest.mark.parametrize('index', [
    pytest.param(n, id=f'{n}-{bad_inputs.ROWS[n].name}', marks=(
        [pytest.mark.slow] * bad_inputs.ROWS[n].slow)) for n in INDEXES])
def test_it_ends_in_one_line_that_says_what_was_wrong(found, index):
  row, of = bad_inputs.ROWS[index], found[index]
  assert not of['raised'], of['raised']
  assert of['code'] not in (0, None), f'it was accepted: {of["printed"][-500:]}'
  _check_line(of['said'], row.words)
  assert row.device or not of['device'], 'a device was touched before'


def test_there_are_many_of_them():
  assert len(bad_inputs.ROWS) >= 150
  assert len({row.command for row in bad_inputs.ROWS}) > 150


@pytest.mark.slow
@pytest.mark.parametrize('index', [
    pytest.param(n, id=bad_inputs.ROWS[n].name) for n in INDEXES
    if bad_inputs.ROWS[n].as_command])
def test_it_does_so_as_a_command(folder, tmp_path, index):
  row = bad_inputs.ROWS[index]
  done = subprocess.run(
      [sys.executable, '-m', 'searchrl.main',
       *row.arguments(folder, tmp_path / 'run')], cwd=bad_inputs.ROOT,
      text=True, env=_environ(folder, *row.environ), capture_output=True,
      check=False)
  assert done.returncode not in (0, None) and not done.stdout
  _check_line(done.stderr, row.words)
