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
