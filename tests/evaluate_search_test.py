# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""evaluate_search: the table of an engine, and missing questions."""

import json

import filelock
import pytest

from configs import evaluate_search as evaluate_search_config
from searchrl.jobs import evaluate_search
from searchrl.runtime import folder_lock
from searchrl.runtime import processes


def write(path, records):
  path.write_text(''.join(json.dumps(r) + '\n' for r in records))
  return str(path)


@pytest.fixture
def config(tmp_path):
  config = evaluate_search_config.get_config()
  config.data.evaluate = write(tmp_path / 'q.jsonl', [
      {'id': '1', 'question': 'Tarn river', 'golden_answers': ['Garonne']},
      {'id': '2', 'question': 'Alps', 'golden_answers': ['Rhine']}])
  config.search.corpus = write(tmp_path / 'c.jsonl', [
      {'id': 'a', 'contents': '"Tarn"\nIt joins another river.'},
      {'id': 'b', 'contents': '"Other"\nThis river is the garonne.'},
      {'id': 'c', 'contents': '"Alps"\nMountains.'}])
  return config


def test_a_table_of_own_questions(config, tmp_path, capsys):
  evaluate_search.run(config, str(tmp_path / 'run'))
  row, = json.loads((tmp_path / 'run' / 'retrieval.json').read_text())
  assert row == {
      'set': 'q', 'engine': 'bm25', 'hops': 1, 'n': 2, 'recall@1': 0.0,
      'recall@3': 0.5, 'recall@10': 0.5, 'word_recall@1': 0.0,
      'word_recall@3': 0.5, 'word_recall@10': 0.5, 'failed': 0.0,
      'left_out': 0.0}
  assert 'recall@3' in capsys.readouterr().out


def test_the_first_process_alone_writes_and_prints(
    config, tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(processes, 'is_first', lambda: False)
  evaluate_search.run(config, str(tmp_path / 'run'))
  assert not (tmp_path / 'run').exists() and not capsys.readouterr().out


def test_generated_worlds_are_evaluated_too(tmp_path):
  config = evaluate_search_config.get_config('smoke')
  evaluate_search.run(config, str(tmp_path))
  rows = json.loads((tmp_path / 'retrieval.json').read_text())
  recall = {(r['set'], r['hops']): r['recall@10'] for r in rows}
  assert recall['known', 1] == recall['unseen', 1] == 1.0
  assert recall['known', 4] < 1.0


def test_a_folder_that_another_process_uses_is_refused(config, tmp_path):
  lock = filelock.FileLock(tmp_path / folder_lock.FILE)
  with lock, pytest.raises(ValueError, match='used by one run at a time'):
    evaluate_search.run(config, str(tmp_path))
  assert not (tmp_path / 'retrieval.json').exists()
  evaluate_search.run(config, str(tmp_path))
  assert (tmp_path / 'retrieval.json').exists()


def test_a_remote_engine_needs_questions(config, tmp_path):
  config.data.evaluate = ''
  config.search.engine = 'web'
  with pytest.raises(ValueError, match='must name questions'):
    evaluate_search.run(config, str(tmp_path))
