# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""datasets: only an engine with a corpus of its own needs none here."""

import json

import pytest

from searchrl.data import datasets


@pytest.fixture
def questions(tmp_path):
  path = tmp_path / 'q.jsonl'
  path.write_text(json.dumps({'id': 'q', 'question': 'Where?',
                              'golden_answers': ['here']}) + '\n')
  return str(path)


def train_set(tmp_path, questions, **options):
  return datasets.train_set(tmp_path / 'data', train=questions, corpus='',
                            world_seed=1, per_hop=(1,), **options)


def evaluation_sets(tmp_path, **options):
  return datasets.evaluation_sets(
      tmp_path / 'data', corpus='', own_train=False, world_seed=1,
      kinds=('known',), questions_per_hop=1, max_hops=1, **options)


def test_a_remote_corpus_need_not_be_here(tmp_path, questions):
  data = train_set(tmp_path, questions, needs_corpus=False)
  assert data.corpus is None and len(data.questions) == 1
  held, = evaluation_sets(tmp_path, evaluate=questions, needs_corpus=False)
  assert held.corpus is None
  # A server has no world that is generated for evaluation.
  assert evaluation_sets(tmp_path, evaluate='', needs_corpus=False) == []


def test_else_it_is_missed(tmp_path, questions):
  with pytest.raises(ValueError, match='needs both data.train and search.corp'):
    train_set(tmp_path, questions)
  with pytest.raises(ValueError, match='needs search.corpus, but that'):
    evaluation_sets(tmp_path, evaluate=questions)


def test_generated_data_is_written_once_and_read_back(tmp_path):
  first = datasets.generated(tmp_path, name='known', source='known',
                             world_seed=3, per_hop=(2, 1))
  stamp = (tmp_path / 'questions.jsonl').stat().st_mtime_ns
  again = datasets.generated(tmp_path, name='known', source='known',
                             world_seed=3, per_hop=(2, 1))
  assert (tmp_path / 'questions.jsonl').stat().st_mtime_ns == stamp
  assert list(first.questions) == list(again.questions)
  assert first.corpus.digest == again.corpus.digest
  assert [q.hops for q in first.questions] == [1, 1, 2]
  other = datasets.generated(tmp_path, name='known', source='known',
                             world_seed=4, per_hop=(3,))
  assert [q.hops for q in other.questions] == [1, 1, 1]
  assert other.corpus.digest != first.corpus.digest
