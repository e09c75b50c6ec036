# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""summary: a run's table."""

import json

from searchrl.evaluation import summary


def test_table_of_a_run_shows_before_and_after(tmp_path):
  for name, em in (('before', 0.25), ('after', 0.75)):
    (tmp_path / 'evaluation' / name).mkdir(parents=True)
    (tmp_path / 'evaluation' / name / 'table.json').write_text(json.dumps([
        {'set': 'known', 'engine': 'bm25', 'decoding': 'greedy', 'hops': 1,
         'n': 8, 'em': em, 'searches': 1.5}]))
  assert '0.25 -> 0.75' in summary.table(tmp_path)


def test_sets_with_and_without_hop_counts_stand_in_one_table(tmp_path):
  rows = [('nq', 'all', 0.5, 10), ('world', 1, 0.25, 4), ('world', 2, 0.75, 4),
          ('world', 'all', 0.5, 8)]
  folder = tmp_path / 'evaluation' / 'after'
  folder.mkdir(parents=True)
  (folder / 'table.json').write_text(json.dumps([
      {'set': name, 'engine': 'bm25', 'decoding': 'greedy', 'hops': hops,
       'n': n, 'em': em, 'searches': 1.5} for name, hops, em, n in rows]))
  header, _, nq, world, *_ = summary.table(tmp_path).splitlines()
  assert header.split() == ['set', 'engine', 'decoding', 'EM', 'EM', '1-hop',
                            'EM', '2-hop', 'n', 'searches']
  assert nq.split() == ['nq', 'bm25', 'greedy', '0.50', '10', '1.5']
  assert world.split() == ['world', 'bm25', 'greedy', '0.50', '0.25', '0.75',
                           '8', '1.5', '1.5']
