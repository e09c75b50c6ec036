# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""search_cost: the paper's table from its counts; a run's own counts."""

import json

import pytest

from configs import search_cost as config_file
from searchrl.papers.zerosearch import search_cost as job

PRICES = {name: config_file.get_config().cost[name] for name in (
    'thousand_queries', 'device_hour')}


def test_the_papers_counts_give_the_papers_table():
  """ZeroSearch, Table 8."""
  found = job.Counts(queries=64_000, hours=12.0, writing_hours=0.0, tokens=0)
  rows = job.table(found, **PRICES, devices=(1, 2, 4))
  assert [row['in all'] for row in rows] == pytest.approx(
      [586.7, 17.7, 35.4, 70.8], rel=1e-3)
  assert rows[0]['paid for devices'] == 0 == rows[1]['paid for queries']
  assert [tuple(row) for row in rows] == [job.COLUMNS] * 4


STEPS = [
    {'training/global_step': 0, 'val/known/em/greedy': 0.5},
    {'search/queries': 100, 'timing_s/step': 60, 'simulated/secs': 30,
     'simulated/tokens': 7000},
    {'search/queries': 50, 'timing_s/step': 120, 'simulated/secs': 6,
     'simulated/tokens': 3000}]


def test_a_run_is_counted_over_its_steps():
  assert job.count(STEPS) == job.Counts(150, 0.05, 0.01, 10_000)
  shared = job.table(job.count(STEPS), thousand_queries=2.0,
                     device_hour=10.0, devices=(3,))
  assert [row['in all'] for row in shared] == pytest.approx([0.3, 1.5, 0.3])
  with pytest.raises(ValueError, match='must have steps with searches'):
    job.count(STEPS[:1])


def test_the_job_prints_the_table_of_a_run(tmp_path, capsys):
  (tmp_path / 'metrics.jsonl').write_text(
      ''.join(json.dumps(step) + '\n' for step in STEPS))
  config = config_file.get_config()
  config.cost.run = str(tmp_path)
  job.run(config, str(tmp_path / 'not'))
  shown = capsys.readouterr().out
  assert 'a model, while it writes' in shown and not (tmp_path / 'not').exists()
  assert '10,000 tokens were written, 67 a query.' in shown


@pytest.mark.parametrize('options, message', [
    (dict(run='nowhere'), "'nowhere' has no metrics.jsonl"),
    (dict(thousand_queries=-1.0), 'cost.thousand_queries must be at least 0'),
    (dict(device_hour=-1.0), 'cost.device_hour must be'),
    (dict(devices=(0,)), 'cost.devices must be numbers of at least 1')])
def test_bad_options_are_refused(options, message, tmp_path):
  config = config_file.get_config()
  config.cost.update(options)
  with pytest.raises((ValueError, FileNotFoundError), match=message):
    job.run(config, str(tmp_path))
