# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""predict: a line for every question of a file without golden answers."""

import json

import pytest

from configs import predict as configured
from searchrl.evaluation import evaluator
from searchrl.evaluation import shards
from searchrl.jobs import predict
from searchrl.search import corpus
from searchrl.trajectory import Passage


def config(**data):
  result = configured.get_config('smoke')
  result.data.update(data)
  return result


@pytest.mark.slow
def test_every_question_gets_a_line_and_no_golds_are_needed(tmp_path, capsys):
  asked = tmp_path / 'asked.jsonl'
  asked.write_text(''.join(json.dumps(
      {'id': f'q{n}', 'question': f'What is the river of Town {n}?'}) + '\n'
                           for n in range(5)))
  passages = tmp_path / 'corpus.jsonl'
  corpus.write(passages, [Passage('0', 'Town 1', 'Town 1 lies on the Elba.')])
  ready = config(evaluate=str(asked))
  ready.search.corpus = str(passages)
  predict.run(ready, str(tmp_path / 'out'))
  lines = [json.loads(line) for line in
           (tmp_path / 'out' / predict.FILE).read_text().splitlines()]
  assert [line['id'] for line in lines] == [f'q{n}' for n in range(5)]
  assert all(line['stop_reason'] and isinstance(line['searches'], list)
             for line in lines)
  assert not (tmp_path / 'out' / 'table.json').exists()
  assert 'predictions.jsonl' in capsys.readouterr().out
  corpus.write(passages, [Passage('0', 'Town 1', 'Town 1 lies on the Oder.')])
  with pytest.raises(ValueError, match='a run whose search was another'):
    predict.run(ready, str(tmp_path / 'out'))


@pytest.mark.parametrize('several', [(), ('engine', 'sample')])
def test_answers_of_several_engines_and_samples_say_which_they_are(
    several, tmp_path):
  shards.write(tmp_path / evaluator.RECORDS / 'nq' / '000000.jsonl.gz', [{
      'set': 'nq', 'question': 'Who?', 'answer': engine, 'engine': engine,
      'decoding': 'greedy', 'trajectory': {
          'question': {'uid': 'a'}, 'sample': sample, 'turns': [],
          'stop_reason': 'answer'}}
      for engine in ('bm25', 'dense')[:1 + bool(several)]
      for sample in range(1 + bool(several))])
  (tmp_path / evaluator.TABLE).touch()
  predict._write(tmp_path)
  lines = [json.loads(line) for line in
           (tmp_path / predict.FILE).read_text().splitlines()]
  assert len(lines) == 4 if several else 1
  for line in lines:
    assert [*line] == ['id', 'set', *several, 'question', 'answer', 'searches',
                       'stop_reason']
    assert line.get('engine', line['answer']) == line['answer']


def test_without_a_file_it_is_said_what_to_give(tmp_path):
  with pytest.raises(ValueError, match='data.evaluate must name the file of the '
                     'questions to answer'):
    predict.run(config(), str(tmp_path / 'out'))
  assert not (tmp_path / 'out').exists()
