# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""benchmarks/faults.py in short: one run of each kind of fault."""

import argparse
import pathlib
import sys

import pytest

sys.path.append(str(pathlib.Path(__file__).parents[1] / 'benchmarks'))
import faults  # pylint: disable=g-import-not-at-top


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize('scenario, number', [
    ('kills', 1), ('damages', 0), ('damages', 4), ('disk', 2), ('signals', 0),
    ('processes', 0), ('search', 0), ('search', 1)])
def test_a_disturbed_run_ends_as_one_that_was_not(tmp_path, scenario, number):
  bench = faults.Bench(tmp_path, argparse.Namespace())
  outcome, = getattr(bench, scenario)(number)
  assert outcome.equal in (True, None), outcome
  assert outcome.faults >= 1


def test_the_table_adds_up_the_runs_of_a_fault():
  row = dict(scenario='kills', number=0, fault='SIGKILL (dspo)',
             happened='export, time', faults=2, lost=1, equal=True)
  text = faults.table([row, row | dict(number=1), row | dict(number=2),
                       row | dict(number=3, equal=False, happened='time')])
  assert text.splitlines()[2] == (
      '| SIGKILL (dspo) | 8 | export 3, time 4 | 4 | 3 of 4 runs |')
