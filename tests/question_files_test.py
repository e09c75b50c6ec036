# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""question_files: names and folders of a config; Search-R1's parquet."""

import csv
import gzip
import json
import sys

import pytest

from searchrl.agent import chains
from searchrl.data import question_files
from searchrl.data import question_metadata
from searchrl.data import questions as questions_lib
from searchrl.trajectory import Question

ROW = {'id': 'test_0', 'question': 'who', 'golden_answers': ['x']}


def write(path, rows):
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  return path


def write_parquet(path, rows):
  pyarrow = pytest.importorskip('pyarrow')
  from pyarrow import parquet
  parquet.write_table(pyarrow.Table.from_pylist(rows), path)
  return path


def search_r1(source, index, **fields):
  """A row of Search-R1's parquet, without FlashRAG's columns."""
  return {'data_source': source, 'ability': 'fact-reasoning',
          'prompt': [{'role': 'user', 'content':
                      f'Answer the given question. Question: who {index}?\n'}],
          'reward_model': {'style': 'rule', 'ground_truth': {
              'target': [f'{source} {index}', 'other']}},
          'extra_info': {'split': 'train', 'index': index}, **fields}


def found(text, **options):
  return [(file.name, file.path.name, file.is_named) for file in
          question_files.named(text, 'data.train', **options)]


def test_a_path_names_and_several_paths_are_told_apart(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'lr=1').mkdir()
  for name in ('nq.jsonl', 'b.jsonl', 'a=1,b.jsonl', 'lr=1/c.jsonl'):
    write(tmp_path / name, [ROW])
  assert found('') == []
  assert found('nq.jsonl') == [('', 'nq.jsonl', False)]
  assert found('nq=nq.jsonl') == [('nq', 'nq.jsonl', True)]
  assert found('nq.jsonl, other=b.jsonl') == [
      ('nq', 'nq.jsonl', False), ('other', 'b.jsonl', True)]
  assert found('a=1,b.jsonl') == [('', 'a=1,b.jsonl', False)]  # it is there
  assert found('lr=1/c.jsonl') == [('', 'c.jsonl', False)]
  assert found('c=lr=1/c.jsonl') == [('c', 'c.jsonl', True)]


@pytest.mark.parametrize('text, message', [
    ('nq.jsonl,', 'data.train must be a path, or name=path,name=path, '),
    ('nq=', 'data.train must be a path'),
    ('n q=nq.jsonl', 'with names of letters'),
    ('a=nq.jsonl,a=b.jsonl', "'a' is the name of two. Write name=path"),
    ('nq.jsonl,nq.jsonl', "'nq' is the name of two"),
    ('gone.jsonl', 'but gone.jsonl is not a file. Check data.train'),
    ('.', 'but . is not a file'),
    ('nq=s3://b/nq.jsonl', 'data.train must be a path on this machine, but is '
     "'nq=s3://b/nq.jsonl'. Copy it here first."),
])
def test_what_cannot_be_named_is_refused(tmp_path, monkeypatch, text, message):
  monkeypatch.chdir(tmp_path)
  for name in ('nq.jsonl', 'b.jsonl'):
    write(tmp_path / name, [ROW])
  with pytest.raises((ValueError, FileNotFoundError), match=message):
    question_files.named(text, 'data.train')


def test_a_folder_is_its_files_of_questions_without_the_corpus(tmp_path):
  write(tmp_path / 'corpus.jsonl', [{'id': '0', 'contents': '"T"\ntext'}])
  (tmp_path / 'notes.txt').write_text('x')
  (tmp_path / 'empty.jsonl').write_text('')
  with pytest.raises(FileNotFoundError,
                     match='holds corpus.jsonl, empty.jsonl'):
    found(str(tmp_path), may_be_folder=True)
  for name, key in (('a', 'completion'), ('b', 'messages'), ('c', 'segments')):
    write(tmp_path / f'{name}.jsonl', [{key: [], 'question': {'text': 'who'}}])
  write(tmp_path / 'nq.jsonl', [ROW])
  write(tmp_path / 'bamboogle.jsonl', [ROW])
  assert found(str(tmp_path), may_be_folder=True) == [
      ('bamboogle', 'bamboogle.jsonl', False), ('nq', 'nq.jsonl', False)]
  write_parquet(tmp_path / 'test.parquet', [search_r1('nq', 0)])
  write_parquet(tmp_path / 'wiki.parquet', [{'id': '0', 'contents': 'x'}])
  assert [name for name, _, _ in found(str(tmp_path), may_be_folder=True)] == [
      'bamboogle', 'nq', 'test']


@pytest.mark.parametrize('name', ['corpus.jsonl', 'corpus.jsonl.gz',
                                  'corpus.parquet'])
def test_a_corpus_of_beir_without_titles_may_be_in_the_folder(tmp_path, name):
  row = {'_id': 'MED-10', 'text': 'A passage.'}
  if name.endswith('.gz'):
    (tmp_path / name).write_bytes(gzip.compress(json.dumps(row).encode()))
  else:
    (write_parquet if name.endswith('.parquet') else write)(
        tmp_path / name, [row])
  write(tmp_path / 'nq.jsonl', [ROW])
  write(tmp_path / 'queries.jsonl', [row])
  assert [name for name, _, _ in found(str(tmp_path), may_be_folder=True)] == [
      'nq', 'queries']


def test_search_r1s_columns_are_read_in_both_forms(tmp_path):
  bare = write_parquet(tmp_path / 'bare.parquet', [
      search_r1('nq', 0), search_r1('nq', 1)])
  assert questions_lib.read(bare) == [
      Question(f'{n}', f'who {n}?', (f'nq {n}', 'other'), 1, 'nq')
      for n in (0, 1)]
  flash = write_parquet(tmp_path / 'flash.parquet', [
      search_r1('nq', 7, **ROW, metadata={'hops': 2, 'context': ['long']}),
      search_r1('nq', 8, **ROW | {'id': None}, metadata={'hops': None})])
  assert questions_lib.read(flash, question_mark=True) == [
      Question('test_0', 'who?', ('x',), 2, 'nq'),
      Question('8', 'who?', ('x',), 1, 'nq')]


@pytest.mark.parametrize('as_text', [False, True])
def test_chains_of_a_parquet_file_are_those_of_a_jsonl_file(as_text, tmp_path):
  metadata = {'hops': 2, 'chain': [['river of a', 'b'], ['mouth of b', 'c']],
              'poor_queries': [['a'], []]}
  rows = [ROW | {'metadata': metadata}, ROW | {'id': 'bare'}]
  file = write_parquet(tmp_path / 'a.parquet', [
      row | {'metadata': json.dumps(row['metadata'])}
      if as_text and 'metadata' in row else row for row in rows])
  reader = question_metadata.Reader()
  questions_lib.read(file, admit=reader.admit)
  chained, bare = (chains.parse(values, place)
                   for place, values in reader.read(str(file)).values())
  assert chained == chains.parse(metadata, '') and len(chained.hops) == 2
  assert bare is None


@pytest.mark.parametrize('kind', ['dictionary', 'bytes', 'map'])
def test_metadata_of_other_types_of_parquet_are_read(kind, tmp_path):
  pyarrow = pytest.importorskip('pyarrow')
  from pyarrow import parquet
  metadata = pyarrow.array(['{"hops": 2}', '{"hops": 3}']).dictionary_encode()
  if kind == 'bytes':
    metadata = pyarrow.array([b'{"hops": 2}', b'{"hops": 3}'])
  elif kind == 'map':
    metadata = pyarrow.array([[('hops', '2')], [('hops', '3')]],
                             pyarrow.map_(pyarrow.string(), pyarrow.string()))
  parquet.write_table(pyarrow.table({
      'id': ['1', '2'], 'question': ['q?', 'r?'],
      'golden_answers': [['Albi'], ['Tarn']], 'metadata': metadata}),
                      tmp_path / 'a.parquet')
  read = questions_lib.read(tmp_path / 'a.parquet')
  assert [question.hops for question in read] == [2, 3]


def test_ids_that_repeat_over_merged_sources_get_these_before_them(tmp_path):
  rows = [search_r1(source, n) for source in ('nq', 'hotpotqa')
          for n in range(2)]
  merged = write_parquet(tmp_path / 'merged.parquet', rows)
  assert [(q.uid, q.data_source) for q in questions_lib.read(merged)] == [
      ('nq/0', 'nq'), ('nq/1', 'nq'), ('hotpotqa/0', 'hotpotqa'),
      ('hotpotqa/1', 'hotpotqa')]
  write_parquet(merged, [*rows, search_r1('nq', 1)])
  with pytest.raises(ValueError, match="row 5 repeats '1' of row 2"):
    questions_lib.read(merged)


def test_missing_columns_are_named_with_those_that_are_there(tmp_path):
  file = write_parquet(tmp_path / 'a.parquet', [{'id': 1, 'text': 'x'}])
  with pytest.raises(ValueError, match='lacks question or prompt, '
                     'golden_answers or reward_model; it has id, text.'):
    questions_lib.read(file)
  write_parquet(file, [{'id': 1, 'question': 'who'}])
  assert questions_lib.read(file, needs_golds=False)[0].answers == ()
  with pytest.raises(ValueError, match='lacks golden_answers or reward_model'):
    questions_lib.read(file)
  write_parquet(file, [search_r1('nq', 1, reward_model={'style': 'rule'})])
  with pytest.raises(ValueError, match='row 1 must have .*KeyError'):
    questions_lib.read(file)
  write_parquet(file, [search_r1('nq', 1), search_r1('nq', 2, prompt=[
      {'role': 'user', 'content': None}])])
  with pytest.raises(ValueError, match='a.parquet, row 2 must have prompt'):
    questions_lib.read(file)
  file.write_bytes(b'PAR1 no')
  with pytest.raises(ValueError, match='must be a parquet file'):
    questions_lib.read(file)


def test_a_damaged_page_of_a_parquet_file_is_named(tmp_path):
  parquet = pytest.importorskip('pyarrow.parquet')
  pyarrow = pytest.importorskip('pyarrow')
  file = tmp_path / 'a.parquet'
  parquet.write_table(pyarrow.Table.from_pylist([
      {'id': f'{n}', 'question': f'who is {n}' * 20, 'golden_answers': ['x']}
      for n in range(99)]), file)
  data = bytearray(file.read_bytes())
  data[200:400] = bytes(200)
  file.write_bytes(data)
  with pytest.raises(ValueError, match='a.parquet must be a whole parquet '
                     'file, but: .* Fetch or write it again'):
    list(questions_lib.read(file))


def test_without_pyarrow_the_remedy_is_named(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'pyarrow', None)
  (tmp_path / 'a.parquet').write_bytes(b'')
  with pytest.raises(ValueError, match=r'pip install .searchrl\[parquet\]'):
    questions_lib.read(tmp_path / 'a.parquet')


PUBLISHED = {  # name: (row, id or '' for a hash, gold answers)
    'nq_flashrag': ({'id': 'test_0', 'question': 'who', 'golden_answers': [
        'x', 'y']}, 'test_0', ('x', 'y')),
    'hotpotqa_flashrag': (
        {'id': 'dev_0', 'question': 'who', 'golden_answers': ['yes'],
         'metadata': {'type': 'comparison', 'level': 'hard',
                      'supporting_facts': {'title': ['T'], 'sent_id': [0]},
                      'context': {'title': ['T'], 'sentences': [['a']]}}},
        'dev_0', ('yes',)),
    'search_r1': (search_r1('nq', 0, id='train_0', question='who?',
                            golden_answers=['x'], metadata=None),
                  'train_0', ('x',)),
    'hotpotqa': ({'_id': '5a8b', 'question': 'who', 'answer': 'x',
                  'type': 'bridge', 'level': 'hard', 'supporting_facts': [
                      {'title': 'T'}], 'context': [{'title': 'T'}]},
                 '5a8b', ('x',)),
    '2wiki': ({'_id': 'ab12', 'type': 'compositional', 'question': 'who',
               'context': '[["T", ["a"]]]', 'supporting_facts': '[["T", 0]]',
               'evidences': '[["T", "r", "x"]]', 'answer': 'x'},
              'ab12', ('x',)),
    'musique': ({'id': '2hop__1_2', 'paragraphs': [{'idx': 0, 'title': 'T'}],
                 'question': 'who', 'question_decomposition': [{'id': 1}],
                 'answer': 'x', 'answer_aliases': ['y'], 'answerable': True},
                '2hop__1_2', ('x', 'y')),
    'answer_float': ({'id': 3.0, 'question': 'who', 'answer': 1994.0}, '3',
                     ('1994',)),
    'bamboogle': ({'Question': 'who', 'Answer': 'x'}, '', ('x',)),
    'popqa': ({'id': 4222362, 'subj': 'S', 'prop': 'occupation', 'obj': 'x',
               's_aliases': '[]', 'o_aliases': '["y"]', 's_pop': 142,
               'question': 'who', 'possible_answers': '["x", "y"]'},
              '4222362', ('x', 'y')),
    'triviaqa': ({'question': 'who', 'question_id': 'tc_1',
                  'question_source': 'http://x', 'answer': {
                      'aliases': ['x', 'y'], 'normalized_aliases': ['x', 'y'],
                      'matched_wiki_entity_name': '', 'normalized_value': 'x',
                      'type': 'WikipediaEntity', 'value': 'x'}},
                 'tc_1', ('x', 'y')),
    'nq_open': ({'question': 'who', 'answer': ['x', 'y']}, '', ('x', 'y')),
    'squad': ({'id': '57', 'title': 'T', 'context': 'c', 'question': 'who',
               'answers': {'text': ['x'], 'answer_start': [3]}}, '57', ('x',)),
    'webquestions': ({'url': 'http://x', 'question': 'who', 'answers': ['x']},
                     '', ('x',)),
    'kilt': ({'id': 'k1', 'input': 'who', 'output': [
        {'answer': 'x', 'provenance': [{'title': 'T'}]},
        {'answer': None, 'provenance': [{'title': 'U'}]}]}, 'k1', ('x',)),
    'floats': ({'id': 7.0, 'question': 'who', 'golden_answers': [1994.0],
                'metadata': {'hops': 2.0}}, '7', ('1994',)),
}


@pytest.mark.parametrize('suffix', ['jsonl', 'parquet'])
@pytest.mark.parametrize('name', PUBLISHED)
def test_rows_as_they_are_published_are_read(name, suffix, tmp_path):
  row, uid, golds = PUBLISHED[name]
  path = tmp_path / f'{name}.{suffix}'
  (write if suffix == 'jsonl' else write_parquet)(path, [row])
  question, = questions_lib.read(path)
  assert question.text.rstrip('?') == 'who' and question.answers == golds
  assert question.uid == uid or not uid and len(question.uid) == 16
  assert found(str(tmp_path), may_be_folder=True) == [
      (name, path.name, False)]


@pytest.mark.parametrize('mark, suffix', [(',', 'csv'), ('\t', 'tsv')])
def test_tables_of_text_are_read_as_jsonl_is(mark, suffix, tmp_path):
  names = ['id', 'subj', 'question', 'possible_answers', 's_pop']
  rows = [['42', 'S', f'who{mark} "or"\nwhat', '["x", "y"]', '142'],
          ['43', '', 'é', '["z"]', '']]
  path = tmp_path / f'popqa.{suffix}'
  with path.open('w', encoding='utf-8-sig', newline='') as file:
    csv.writer(file, delimiter=mark).writerows([names, *rows])
  assert questions_lib.read(path) == questions_lib.read(write(
      tmp_path / 'popqa.jsonl', [
          dict(zip(names, row)) for row in rows])) == [
      Question('42', f'who{mark} "or"\nwhat', ('x', 'y'), 1, 'popqa'),
      Question('43', 'é', ('z',), 1, 'popqa')]


@pytest.mark.parametrize('data, message', [
    (b'id,question,answer\n1,who,x\n2,who\n', 'row 2 must .*it has not 3 fi'),
    (b'id,question,answer\n1,who,x,y\n', 'row 1 must have a field in UTF-8'),
    (b'id,question,answer,answer\n1,who,x,y\n',
     "row 1 must .*'answer' is the name of 2 of them"),
    (b'question,answer\nwho,x\nwhat,\n',
     'row 2 must .* is not: it has no .golden_answers'),
    (b'id,question,answer\n1,"who,x\n', 'row 1 must .* unexpected end of data'),
    (b'id,question,answer\n1,who,\xff\n', "row 1 must .*'utf-8' codec"),
    (b'', 'a.csv holds no question')])
def test_a_damaged_table_of_text_is_refused(data, message, tmp_path):
  path = tmp_path / 'a.csv'
  path.write_bytes(data)
  with pytest.raises(ValueError, match=f'a.csv,? ?{message}' if 'row' in message
                     else message):
    questions_lib.read(path)


def test_long_fields_and_marks_in_capitals_are_read(tmp_path):
  path = tmp_path / 'a.csv'
  path.write_text('question,answer,context,answerable\n'
                  f'who,x,{"long " * 50_000},TRUE\nwhat,y,short,FALSE\n')
  question, = questions_lib.read(path)
  assert (question.text, question.answers) == ('who', ('x',))


@pytest.mark.parametrize('uid, metadata, hops', [
    ('2hop__482757_12019', {}, 2), ('3hop1__9285_5188_23307', None, 3),
    ('4hop3__754156_88460_30152_20999', {'hops': None}, 4),
    ('3hop1__9285_5188_23307', {'hops': 2}, 2), ('9hop__1', {}, 1),
    ('dev_2hop__1', {}, 1)])
def test_ids_of_musique_say_the_hops(uid, metadata, hops, tmp_path):
  path = write(tmp_path / 'musique.jsonl', [
      {'id': uid, 'question': 'who', 'golden_answers': ['x'],
       'metadata': metadata}])
  question, = questions_lib.read(path)
  assert (question.uid, question.hops) == (uid, hops)


def test_queries_of_beir_are_questions_without_gold_answers(tmp_path):
  path = write(tmp_path / 'queries.jsonl', [
      {'_id': 'PLAIN-2', 'text': 'who', 'metadata': {}}])
  question, = questions_lib.read(path, needs_golds=False)
  assert (question.uid, question.text) == ('PLAIN-2', 'who')
  with pytest.raises(ValueError, match='queries.jsonl, line 1 must have a que'):
    questions_lib.read(path)


@pytest.mark.parametrize('suffix', ['jsonl', 'parquet', 'csv'])
@pytest.mark.parametrize('mark', [
    {'answerable': False}, {'is_impossible': True}], ids=str)
def test_unanswerable_twins_are_left_out_and_counted(
    mark, suffix, tmp_path, capsys):
  """MuSiQue-Full has each question twice, with one id."""
  (name, false), = mark.items()
  rows = [{'id': uid, 'question': 'who', 'answer': 'x', name: value}
          for uid in ('2hop__1_2', '3hop1__1_2_3')
          for value in (not false, false)]
  path = tmp_path / f'full.{suffix}'
  if suffix == 'csv':
    with path.open('w', newline='') as file:
      table = csv.DictWriter(file, rows[0])
      table.writeheader()
      table.writerows(rows)
  else:
    (write if suffix == 'jsonl' else write_parquet)(path, rows)
  for needs_golds in (True, False):
    assert [(q.uid, q.hops) for q in questions_lib.read(
        path, needs_golds=needs_golds)] == [('2hop__1_2', 2),
                                            ('3hop1__1_2_3', 3)]
  assert capsys.readouterr().err == (
      f'{path}: 2 questions that are marked as unanswerable are left out.\n')
  if suffix == 'jsonl':
    write(path, [rows[0], *rows[2:], rows[0]])
    with pytest.raises(ValueError, match='line 4 repeats .2hop__1_2. of line 1'):
      questions_lib.read(path)
    write(path, rows[1:2])
    with pytest.raises(ValueError, match='holds no question'):
      questions_lib.read(path)


@pytest.mark.parametrize('row', [
    {'question': 'who', 'answer': True, 'passage': 'p'},  # BoolQ
    {'_id': 'a', 'question': 'who', 'type': 'bridge'},  # a test split
    {'id': 'a', 'question': 'who', 'answer': None, 'golden_answers': None},
    {'id': 'a', 'input': 'who', 'output': [{'provenance': []}]}])
def test_rows_without_an_answer_are_named(row, tmp_path):
  path = write(tmp_path / 'q.jsonl', [row])
  with pytest.raises(ValueError, match='q.jsonl, line 1 must'):
    questions_lib.read(path)
