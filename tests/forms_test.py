# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""forms: records of GPQA, SimpleQA, ASQA and ELI5 as questions, by hand."""

import csv
import json

import pytest

from searchrl.agent import rewards
from searchrl.data import datasets
from searchrl.data import forms
from searchrl.data import questions

GPQA = {'Record ID': 'rec1', 'Question': ' Which is basic? ',
        'Correct Answer': 'NaOH', 'Incorrect Answer 1': 'HCl',
        'Incorrect Answer 2': 'H2O', 'Incorrect Answer 3': 'NaCl',
        'Explanation': 'long'}
SIMPLEQA = {'metadata': "{'topic': 'Art'}", 'problem': 'Who won?',
            'answer': 'Ann Lee'}
ASQA = {'sample_id': 7, 'ambiguous_question': 'When was it built?',
        'qa_pairs': [{'question': 'When first?', 'short_answers': ['1901']}],
        'annotations': [{'long_answer': 'First in 1901.'},
                        {'long_answer': 'In 1901, again in 1950.'}]}
ELI5 = {'q_id': '5lc', 'title': 'Why is the sky blue?', 'selftext': '',
        'answers': {'a_id': ['x', 'y'], 'text': ['It scatters.', 'Rayleigh.'],
                    'score': [3, 1]}}
BROWSECOMP = {  # encrypted byte by byte; the question is longer than the key
    'problem': 'sZGUCOOMpoyJ26DzHyQ2M8Tcu4VJmILj+HZqC/WVXLeQnNtc4prowA==',
    'answer': 'p5eVCMaa4w==', 'problem_topic': 'Art', 'canary': 'a canary'}
BROWSECOMP_PLUS = {'query_id': '769', 'query': 'Which one?', 'answer': 'Ann',
                   'gold_docs': [{'docid': '1', 'text': 'Ann'}],
                   'evidence_docs': [], 'negative_docs': []}
EXPECTED = {  # uid, text, golds
    'browsecomp': (None, 'Who is she, and where did she live then?', ('Ann Lee',)),
    'browsecomp_plus': ('769', 'Which one?', ('Ann',)),
    'gpqa': ('rec1', 'Which is basic?\n- H2O\n- HCl\n- NaCl\n- NaOH', ('NaOH',)),
    'simpleqa': (None, 'Who won?', ('Ann Lee',)),
    'asqa': ('7', 'When was it built?',
             ('First in 1901.', 'In 1901, again in 1950.')),
    'eli5': ('5lc', 'Why is the sky blue?', ('It scatters.', 'Rayleigh.'))}
RECORDS = {'gpqa': GPQA, 'simpleqa': SIMPLEQA, 'asqa': ASQA, 'eli5': ELI5,
           'browsecomp': BROWSECOMP, 'browsecomp_plus': BROWSECOMP_PLUS}


def written(path, record):
  if path.suffix == '.jsonl':
    path.write_text(json.dumps(record) + '\n')
  else:
    pyarrow = pytest.importorskip('pyarrow')
    from pyarrow import parquet
    parquet.write_table(pyarrow.Table.from_pylist([record]), path)
  return path


@pytest.mark.parametrize('suffix', ['jsonl', 'parquet'])
@pytest.mark.parametrize('name', RECORDS)
def test_a_benchmarks_own_record_is_a_question(name, suffix, tmp_path):
  file = written(tmp_path / f'x.{suffix}', RECORDS[name])
  question, = questions.read(file)
  uid, text, golds = EXPECTED[name]
  assert (question.text, question.answers) == (text, golds)
  assert question.data_source == name and question.uid == (uid or question.uid)
  assert questions.read(file) == [question]


def test_a_folder_of_benchmarks_is_a_set_each(tmp_path):
  for name, record in RECORDS.items():
    written(tmp_path / f'{name}.jsonl', record)
  (tmp_path / 'corpus.jsonl').write_text('{"id": "1", "contents": "x"}\n')
  sets = datasets.evaluation_sets(
      tmp_path, evaluate=str(tmp_path), corpus='', own_train=False,
      world_seed=0, kinds=(), questions_per_hop=1, max_hops=1,
      needs_corpus=False)
  assert [one.name for one in sets] == sorted(RECORDS)


def test_simpleqa_and_browsecomp_are_read_from_csv_as_published(tmp_path):
  for name in ('simpleqa', 'browsecomp'):
    with (tmp_path / f'{name}.csv').open('w', newline='') as file:
      rows = csv.DictWriter(file, RECORDS[name])
      rows.writeheader()
      rows.writerow(RECORDS[name])
    question, = questions.read(tmp_path / f'{name}.csv')
    assert (question.text, question.answers) == EXPECTED[name][1:]


def test_questions_without_an_id_are_named_by_their_text(tmp_path):
  def uid(problem):
    return questions.read(written(
        tmp_path / 'x.jsonl', SIMPLEQA | {'problem': problem}))[0].uid
  assert uid('Who won?') == uid(' Who won? ') != uid('Who lost?')


def test_a_number_may_be_an_id_even_if_it_is_0(tmp_path):
  path = written(tmp_path / 'x.jsonl', SIMPLEQA | {'id': 0})
  assert questions.read(path)[0].uid == '0'


@pytest.mark.parametrize('record', [
    {'problem': 'One and one?', 'answer': 'because #### 2'},
    {'question': 'One and one?', 'problem': 'One and one?',
     'golden_answers': ['x'], 'answer': 'because #### 2'}])
def test_a_form_of_a_user_comes_before_all_others(
    record, monkeypatch, tmp_path):
  monkeypatch.setattr(forms, 'FORMS', [*forms.FORMS, forms.Form(
      name='sums', question='problem', ids='id', others=('answer',),
      golds=lambda record: [record['answer'].split('####')[-1].strip()])])
  question, = questions.read(written(
      tmp_path / 'x.jsonl', record | {'id': 's1'}))
  assert (question.uid, question.answers, question.data_source) == (
      's1', ('2',), 'sums')


def test_a_long_answer_is_scored_against_the_best_of_several():
  golds = EXPECTED['asqa'][2]
  # 'in 1901' has both of its words in each: 2 * 2 / (2 + 3), 2 * 2 / (2 + 5).
  assert rewards.token_f1('In 1901', golds) == pytest.approx(0.8)


@pytest.mark.parametrize('record, words', [
    ({'Question': 'Which?', 'Correct Answer': 'x'},
     'must have what gpqa has, Question, .*Incorrect Answer 1'),
    (BROWSECOMP | {'answer': 'no base64'}, 'must have what browsecomp has, '),
    ({'problem': 'Who?'}, 'at least one golden answer.* or leave the row out'),
    ({'title': 3, 'answers': {'text': ['x']}}, 'must have what eli5 has')])
def test_a_record_that_lacks_something_is_named(record, words, tmp_path):
  with pytest.raises(ValueError, match=f'x.jsonl, line 1 {words}' if (
      'what' in words) else words):
    questions.read(written(tmp_path / 'x.jsonl', record))


def test_a_single_text_of_a_form_is_one_answer(monkeypatch, tmp_path):
  form = forms.Form(name='one', question='ask', ids='nr', others='short',
                    golds=lambda record: record['short'])
  assert form.columns == ('ask', 'nr', 'short')
  monkeypatch.setattr(forms, 'FORMS', [form])
  question, = questions.read(written(
      tmp_path / 'x.jsonl', {'ask': 'Where?', 'nr': 3, 'short': 'Paris'}))
  assert question.answers == ('Paris',)
