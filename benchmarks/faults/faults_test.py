# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""benchmarks/faults/faults.py in short: one run of each kind of fault."""

import argparse

import pytest

import faults


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize('scenario, number', [
    ('kills', 1), ('damages', 0), ('damages', 4), ('disk', 2), ('readonly', 1),
    ('signals', 0), ('processes', 0), ('search', 0), ('search', 1)])
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


def test_the_table_has_the_mean_of_a_collapse():
  row = dict(scenario='collapse', number=0, fault='rate x 50', faults=1, lost=0,
             happened='seed 0: exit code 0, 1 rollbacks, greedy exact match '
             '0.900', equal=None)
  other = dict(row, number=3, happened='seed 1: exit code 0, 2 rollbacks, '
               'greedy exact match 0.800')
  assert faults.table([row, other]).splitlines()[2] == (
      '| rate x 50 | 2 | 2 seeds, rollbacks 1, 2; greedy exact match 0.850 ± '
      '0.071 | 0 |  |')
