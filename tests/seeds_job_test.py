# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""seeds: a run for each, one table with means and spread by hand."""

import json

import pytest

from configs import grpo
from searchrl.jobs import seeds

DONE = []


def job(config, workdir):
  """A run whose exact match is its seed over ten."""
  import pathlib
  DONE.append(config.seed)
  table = pathlib.Path(workdir) / 'evaluation/after/table.json'
  table.parent.mkdir(parents=True, exist_ok=True)
  table.write_text(json.dumps([
      {'set': 'known', 'engine': 'bm25', 'decoding': 'greedy', 'hops': 1,
       'em': config.seed / 10, 'f1': 0.5, 'searches': 1.0}]))


def nothing(config, workdir):
  """A run that leaves no table."""
  del config, workdir


def config(name='job'):
  result = grpo.get_config('smoke')
  result.job = f'seeds_job_test:{name}'
  result.lock()
  return result


def test_each_seed_has_a_folder_and_the_table_their_spread(tmp_path, capsys):
  DONE.clear()
  seeds.run(config(), str(tmp_path), [1, 2, 6])
  assert DONE == [1, 2, 6]
  row, = json.loads((tmp_path / seeds.FILE).read_text())
  assert row['seeds'] == 3 and row['em'] == pytest.approx(0.3)
  assert row['em ±'] == pytest.approx(((.04 + .01 + .09) / 2) ** 0.5)
  assert row['f1 ±'] == 0.0
  assert 'Means over seeds 1, 2, 6' in capsys.readouterr().out
  seeds.run(config(), str(tmp_path), [4])
  row, = json.loads((tmp_path / seeds.FILE).read_text())
  assert row['seeds'] == 1 and 'em ±' not in row


@pytest.mark.parametrize('given', [[], [1, 1], [-1, 2]])
def test_seeds_that_are_none_are_refused(given, tmp_path):
  with pytest.raises(ValueError, match='--seeds must be different numbers'):
    seeds.run(config(), str(tmp_path), given)


def test_a_job_without_an_evaluation_is_refused(tmp_path):
  with pytest.raises(ValueError, match='has left no .*table.json'):
    seeds.run(config('nothing'), str(tmp_path), [0])
