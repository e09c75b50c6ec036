# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""questions: files read strictly; a stream that draws fairly and resumes."""

import codecs
from collections import Counter
import dataclasses
import datetime
import decimal
import gzip
import hashlib
import json

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from searchrl.agent import rewards
from searchrl.data import datasets
from searchrl.data import golds as golds_lib
from searchrl.data import questions as questions_lib
from searchrl.trajectory import Question

FIRST = [  # of the default run of that revision
    'train-1-0-1-222', 'train-1-0-2-345', 'train-1-0-3-367', 'train-1-0-4-1',
    'train-1-0-1-435', 'train-1-0-2-83', 'train-1-0-1-110', 'train-1-0-2-264',
    'train-1-0-3-22', 'train-1-0-4-249', 'train-1-0-1-335', 'train-1-0-2-389']
GOOD = '{"id": "a", "question": " Who? ", "golden_answers": ["x", "y"]}'


def read(tmp_path, *lines):
  file = tmp_path / 'nq.jsonl'
  file.write_text('\n'.join(lines), encoding='utf-8')
  return questions_lib.read(file)


def some(count, hops=(1,)):
  return [Question(f'{n}', f'q{n}', ('a',), hops=hops[n % len(hops)])
          for n in range(count)]


def test_what_is_written_is_read_back(tmp_path):
  questions = [Question('a', 'Wer? "Ü"\\ 日本', ('ä', ' b '), 3, 'nq_3hop'),
               Question('b', 'two\nlines', ('e\u2028',), 1, 'x')]
  questions[1] = dataclasses.replace(questions[1], gold_passages=('p', 'A b'))
  questions_lib.write(tmp_path / 'q.jsonl', questions)
  assert questions_lib.read(tmp_path / 'q.jsonl') == questions
  assert len((tmp_path / 'q.jsonl').read_bytes().splitlines()) == 2


def test_the_schema_of_flashrag_is_read(tmp_path):
  assert read(tmp_path, GOOD, '', json.dumps({
      'id': 7, 'question': 'Q', 'golden_answers': 'one', 'metadata': {
          'hops': 2, 'data_source': 'musique'}, 'other': 1})) == [
              Question('a', 'Who?', ('x', 'y'), 1, 'nq'),
              Question('7', 'Q', ('one',), 2, 'musique')]


@pytest.mark.parametrize('line, message', [
    ('{', 'line 3 must be .*JSONDecodeError'),
    ('[]', 'line 3 must be .* is a JSON list'),
    ('{"id": "b", "question": "q"}', "line 3 must be .*'golden_answers'"),
    ('{"question": "q", "golden_answers": ["x"]}', "line 3 must be .*'id'"),
    ('{"id": "b", "question": 3, "golden_answers": ["x"]}', 'line 3 must be'),
    ('{"id": "b", "question": "q", "golden_answers": true}', 'line 3 must be'),
    ('[{"id": "b", "question": "q", "golden_answers": ["x"]}]',
     'line 3 must be .* is a JSON list. Write one object a line'),
    ('{"id": "b", "question": "q", "golden_answers": ["x"], "metadata": 3}',
     'line 3 must be'),
    ('{"id": "b", "question": "q", "golden_answers": ["x"], "metadata": '
     '{"hops": 1e400}}', 'line 3 must be .*OverflowError'),
    ('{"id": "b", "question": "q", "golden_answers": ["x"], "metadata": '
     '{"hops": 2.7}}', 'line 3 .*hops must be a whole number, but is 2.7'),
    ('{"id": "b", "question": " ", "golden_answers": ["x"]}',
     'line 3 must have a question'),
    ('{"id": "b", "question": "q", "golden_answers": []}',
     'line 3 must have a question and at least one golden answer'),
    (GOOD, "line 3 repeats 'a' of line 1"),
])
def test_a_bad_line_is_named(tmp_path, line, message):
  with pytest.raises(ValueError, match=f'nq.jsonl, {message}'):
    read(tmp_path, GOOD, '', line)


@pytest.mark.parametrize('golds, answers', [
    ({'target': ['x', 'y']}, ('x', 'y')), ({'target': 'x'}, ('x',)),
    ([1984, 'x', 2.5], ('1984', 'x', '2.5')), ('x', ('x',)),
    ([' x '], (' x ',)), ([3.0, 1994.0], ('3', '1994')),
    ([0.0, -0.0, 0], ('0', '0', '0')),
    ([1e16, 1e-05, 1e2], ('10000000000000000', '0.00001', '100')),
    ([1.7000000476837158], ('1.7',)),  # single precision
    (['1.0', '-5'], ('1.0', '-5')), ({'target': [3.0]}, ('3',)),
    (3, ('3',)), (1994.0, ('1994',)), ({'target': 1994.0}, ('1994',)),
    ('1994.0', ('1994',)), (['1994.0', '100.0'], ('1994', '100.0')),
    ('["1994.0"]', ('1994',)), (['nan', 'naan'], ('nan', 'naan')),
    (['None'], ('None',)), ('null', ('null',)),
    ('["x", "y"]', ('x', 'y')), ("['x', \"y's\"]", ('x', "y's")),
    ("['x' 'y']", ('x', 'y')),  # numpy's
    ("array(['x', 'y'], dtype=object)", ('x', 'y')), ("('x', 'y')", ('x', 'y')),
    ('[1994.0, 3]', ('1994', '3')), (['["x", "y"]', 'z'], ('x', 'y', 'z')),
    ('{"target": ["x"]}', ('x',)), (["b'x'"], ('x',)),
    (['[0, 1]', '(3, 4)'], ('[0, 1]', '(3, 4)')), ('(3, 4)', ('(3, 4)',)),
    ('[sic]', ('[sic]',)), (['x', 'The', 'A.'], ('x', 'The', 'A.')),
    ({'value': 'x', 'aliases': ['x', 'y'], 'normalized_value': 'X'},
     ('x', 'y')), ({'text': ['x', 'y'], 'answer_start': [3, 9]}, ('x', 'y')),
    ([{'answer': 'x', 'provenance': []}, {'answer': 'y'}], ('x', 'y'))])
def test_golden_answers_are_read_as_they_are_meant(tmp_path, golds, answers):
  question, = read(tmp_path, json.dumps(
      {'id': 'a', 'question': 'Who?', 'golden_answers': golds}))
  assert question.answers == answers


@pytest.mark.parametrize('golds', [
    [None], ['x', None], ['', ' '], ['x', ' '], [['x']], [{'a': 'x'}], [True],
    {'targets': ['x']}, {'target': None}, {'target': []}, None, '', True,
    float('nan'), 'nan', 'NaN', ['<NA>'], '<unk>', {'target': ['nan']},
    [float('nan')], ['x', float('nan')], [float('inf')], ['x', False], 'The',
    ['The', 'an'], ['...'], ['\u200b'], '[]', '[["x"]]', '["x", true]',
    '["x", null]', [[]], [{'answer': None}]])
def test_golden_answers_that_no_answer_can_match_are_refused(tmp_path, golds):
  with pytest.raises(ValueError, match='nq.jsonl, line 1 must '):
    read(tmp_path, json.dumps(
        {'id': 'a', 'question': 'Who?', 'golden_answers': golds}))


@pytest.mark.parametrize('value, answers', [
    ([np.float64(1994), np.float32(0.1), np.int64(3)], ('1994', '0.1', '3')),
    (np.array(['x', 'y'], object), ('x', 'y')), (np.array([3.0, 0.5]), (
        '3', '0.5')), ([decimal.Decimal('1994.00')], ('1994',)),
    ([b'Stra\xc3\x9fe'], ('Straße',)), ({'target': np.array(['x'])}, ('x',))])
def test_values_that_jsonl_cannot_hold_are_read_as_they_are_meant(
    value, answers):
  assert golds_lib.read(value) == answers


@pytest.mark.parametrize('value', [
    [np.True_], [np.float64('nan')], [b'\xff'], [datetime.date(1994, 1, 1)],
    [np.array(['x'])], np.True_, np.array([True])])
def test_values_that_no_answer_can_match_are_refused(value):
  with pytest.raises((TypeError, ValueError), match='.'):
    golds_lib.read(value)


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(st.one_of(
    st.integers(-10**17, 10**17), st.floats(-1e17, 1e17).filter(
        lambda x: abs(x) > 1e-12)))
def test_a_number_in_digits_is_the_number(value):
  digits, = golds_lib.read([value])
  assert float(digits) == pytest.approx(float(value), rel=1e-7)
  assert 'e' not in digits and not digits.endswith('.0')
  assert rewards.exact_match(digits, golds_lib.read([value])) == 1


@pytest.mark.parametrize('gold, answer', [
    ('Caf\u00e9', 'cafe\u0301'), ('cafe\u0301', 'Caf\u00e9'),
    ('Par\u00adis', 'Paris'), ('Paris', '\ufeffParis\u200b')])
def test_accents_and_invisible_characters_do_not_keep_answers_apart(
    gold, answer):
  assert rewards.exact_match(answer, golds_lib.read([gold])) == 1
  assert rewards.token_f1(answer, golds_lib.read([gold])) == 1


@pytest.mark.parametrize('golds', [[None], ['', ' '], None, [], ''])
def test_golden_answers_that_nobody_needs_may_be_blank(tmp_path, golds):
  (tmp_path / 'q.jsonl').write_text(json.dumps(
      {'id': 'a', 'question': 'Who?', 'golden_answers': golds}))
  question, = questions_lib.read(tmp_path / 'q.jsonl', needs_golds=False)
  assert question.answers == ()


@pytest.mark.parametrize('fields, names', [
    ({'metadata': {'passages': ['p2', 'p1', 'p2', '']}}, ('p2', 'p1')),
    ({'metadata': {'supporting_facts': {'title': ['A', 'B', 'A'],
                                        'sent_id': [0, 1, 2]}}}, ('A', 'B')),
    ({'supporting_facts': [['A', 0], ['B', 1]]}, ('A', 'B')),
    ({'supporting_facts': '[["A", 0], ["B", 1]]'}, ('A', 'B')),  # 2Wiki
    ({'metadata': {'passages': None, 'supporting_facts': None}}, ()), ({}, ())])
def test_gold_passages_are_read_as_data_sets_name_them(tmp_path, fields, names):
  parquet = pytest.importorskip('pyarrow.parquet')
  pyarrow = pytest.importorskip('pyarrow')
  record = json.loads(GOOD) | fields
  question, = read(tmp_path, json.dumps(record))
  assert question.gold_passages == names
  if record.get('metadata') != {'passages': None, 'supporting_facts': None}:
    file = tmp_path / 'nq.parquet'
    if 'supporting_facts' in fields:  # a list of pairs of different types
      record['supporting_facts'] = {'title': ['A', 'B'], 'sent_id': [0, 1]}
    parquet.write_table(pyarrow.Table.from_pylist([record]), file)
    assert questions_lib.read(file) == [question]


@pytest.mark.parametrize('fields', [
    '"supporting_facts": 3', '"supporting_facts": [[]]',
    '"supporting_facts": ["Paris", "Lyon"]', '"supporting_facts": "Paris"',
    '"metadata": {"passages": "city-299"}',
    '"metadata": {"supporting_facts": {"title": "Paris"}}',
    '"metadata": {"supporting_facts": {}, "passages": 3}'])
def test_gold_passages_of_another_form_are_refused(tmp_path, fields):
  with pytest.raises(ValueError, match='nq.jsonl, line 1 must be'):
    read(tmp_path, GOOD[:-1] + ', ' + fields + '}')


@pytest.mark.parametrize('name, pack', [
    ('q.jsonl', lambda text: codecs.BOM_UTF8 + text.encode()),
    ('q.jsonl.gz', lambda text: gzip.compress(text.encode()))])
def test_a_byte_order_mark_and_gzip_are_read(tmp_path, name, pack):
  (tmp_path / name).write_bytes(pack(GOOD + '\n'))
  assert questions_lib.read(tmp_path / name) == [
      Question('a', 'Who?', ('x', 'y'), 1, 'q')]


@pytest.mark.parametrize('fields', [
    {'_id': '5a7', 'context': []}, {'question_id': '5a7'}, {'qid': '5a7'}, {}])
@pytest.mark.parametrize('suffix', ['jsonl', 'parquet'])
def test_questions_without_answers_have_the_ids_of_their_benchmark(
    tmp_path, fields, suffix):
  path = tmp_path / f'test.{suffix}'
  row = {'question': 'Where?', **fields}
  if suffix == 'parquet':
    parquet = pytest.importorskip('pyarrow.parquet')
    pyarrow = pytest.importorskip('pyarrow')
    parquet.write_table(pyarrow.Table.from_pylist([row]), path)
  else:
    path.write_text(json.dumps(row) + '\n')
  question, = questions_lib.read(path, needs_golds=False)
  digest = hashlib.sha256(b'Where?').hexdigest()[:16]
  assert question.uid == ('5a7' if fields else digest)
  assert question.answers == ()
  with pytest.raises(ValueError, match='golden_answers'):
    questions_lib.read(path)


def test_a_question_that_is_not_admitted_is_named_by_its_place(tmp_path):
  seen = []
  (tmp_path / 'q.jsonl').write_text(GOOD + '\n\n' + GOOD.replace('"a"', '"b"'))
  questions_lib.read(
      tmp_path / 'q.jsonl', prefix='nq', question_mark=True,
      admit=lambda question, place: seen.append((question.uid, place)))
  assert seen == [(f'nq/{uid}', f'{tmp_path}/q.jsonl, line {line}')
                  for uid, line in (('a', 1), ('b', 3))]


def test_a_missing_or_empty_file_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match='none.jsonl is not a file'):
    questions_lib.read(tmp_path / 'none.jsonl')
  with pytest.raises(ValueError, match='nq.jsonl holds no question'):
    read(tmp_path, '', ' ')


def drawn(stream, *counts):
  """Returns the questions of some draws, one after the other."""
  position, questions = stream.start, []
  for count in counts:
    more, position = stream.draw(position, count)
    assert len(more) == count
    questions += more
  return questions


def test_every_epoch_draws_each_question_once_in_another_order():
  uids = [q.uid for q in drawn(questions_lib.stream([some(20)], seed=1), 60)]
  epochs = [uids[:20], uids[20:40], uids[40:]]
  assert all(Counter(epoch) == Counter(f'{n}' for n in range(20))
             for epoch in epochs)
  assert len(set(map(tuple, epochs))) == 3
  other = questions_lib.stream([some(20)], seed=2)
  assert [q.uid for q in drawn(other, 20)] != epochs[0]


def test_every_pool_of_a_mix_has_epochs_of_its_own():
  questions = some(30, hops=(1, 2, 2))
  dealt = drawn(questions_lib.stream([questions], seed=0, mix=(1, 1)), 40)
  one = [q.uid for q in dealt if q.hops == 1]
  two = [q.uid for q in dealt if q.hops == 2]
  assert len(one) == len(two) == 20
  assert len(set(one[:10])) == len(set(one[10:])) == 10
  assert len(set(two)) == 20


mixes = st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any)


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
@hypothesis.given(mixes, st.lists(st.integers(0, 9), max_size=8))
def test_shares_are_kept_in_every_draw(mix, counts):
  stream = questions_lib.stream([some(24, hops=(1, 2, 3, 4))], seed=0, mix=mix)
  dealt = drawn(stream, *counts)
  seen = Counter(q.hops for q in dealt)
  for hops, share in enumerate(mix, start=1):
    fair = share / sum(mix) * len(dealt)
    assert abs(seen[hops] - fair) < len(mix)
    assert share or not seen[hops]


@pytest.mark.parametrize('mix', [(), (4, 4, 2)])
def test_a_stream_goes_on_from_a_position_exactly(mix):
  questions = some(17, hops=(1, 2, 3))
  expected = drawn(questions_lib.stream([questions], seed=5, mix=mix), 100)
  position, dealt = None, []
  for count in (7, 0, 30, 1, 62):
    stream = questions_lib.stream([questions], seed=5, mix=mix)
    more, after = stream.draw(position or stream.start, count)
    position = json.loads(json.dumps(after))  # as a checkpoint does
    dealt += more
  assert dealt == expected


def test_a_mix_of_missing_hops_is_refused_where_there_are_several():
  with pytest.raises(ValueError, match='data.mix asks for 2 of 3-hop'):
    questions_lib.stream([some(4, hops=(1, 2))], seed=0, mix=(1, 0, 2))
  two = questions_lib.stream([some(4, hops=(2,))], seed=0, mix=(0, 1))
  assert two.start == (0, 0)  # a mix that can be held
  one = questions_lib.stream([some(4, hops=(1,))], seed=0, mix=(1, 0, 2))
  assert one.start == (0,)  # nothing to stratify by
  assert drawn(one, 9) == drawn(
      questions_lib.stream([some(4, hops=(1,))], seed=0), 9)
  questions_lib.stream([some(4, hops=(1, 2))], seed=0, mix=(1, 1, 0)).draw(
      (0, 0, 0), 9)


STAGES = ((0, (0, 2, 1)), (3, (1, 1, 1)), (4, (1, 0, 0)))


@pytest.mark.parametrize('common', [0, 0.4])
def test_a_mix_changes_at_its_steps(common):
  """Shares by hand: a change makes up for nothing that was drawn before."""
  few = [Question(f'c{n}', '', ('a',), hops=n % 3 + 1) for n in range(6)]
  stream = questions_lib.stream(
      [some(60, hops=(1, 2, 3)), few], seed=0, mix=STAGES, common=common)
  position, seen = stream.start, []
  for step in range(6):
    drawn_, position = stream.draw(position, 6, step)
    hops = Counter(q.hops for q in drawn_)
    seen.append((hops[1], hops[2], hops[3]))
  assert seen == [(0, 4, 2)] * 3 + [(2, 2, 2)] + [(6, 0, 0)] * 2


def test_a_mix_that_changes_goes_on_exactly_in_each_pool():
  """Each pool keeps its order over changes; a stream resumes at any step."""
  questions = some(60, hops=(1, 2, 3))
  make = lambda mix: questions_lib.stream([questions], seed=5, mix=mix)
  whole, position = [], make(STAGES).start
  for step in range(9):
    more, after = make(STAGES).draw(position, step % 5, step)
    position = json.loads(json.dumps(after))  # as a checkpoint does
    whole += more
  for pool in (1, 2, 3):
    of_pool = [q for q in whole if q.hops == pool]
    mix = [int(hops == pool) for hops in (1, 2, 3)]
    assert of_pool and of_pool == drawn(make(mix), len(of_pool))


def test_one_stage_is_a_mix_and_a_run_may_get_a_second():
  questions = some(60, hops=(1, 2, 3))
  make = lambda mix: questions_lib.stream([questions], seed=5, mix=mix)
  expected, position = make((0, 2, 1)).draw((0, 0, 0), 12)
  assert make(((0, (0, 2, 1)),)).draw((0, 0, 0), 12) == (expected, position)
  more, _ = make(STAGES[:2]).draw(position, 9, 3)
  assert Counter(q.hops for q in more) == {1: 3, 2: 3, 3: 3}
  assert not {q.uid for q in more} & {q.uid for q in expected}


@pytest.mark.parametrize('options, message', [
    (dict(own=True), 'data.mix needs a share .* has none for 4 hops'),
    (dict(weights=(1,)), 'data.mix must not change over steps where data.wei'),
    ({}, 'data.mix asks for 2 of 2-hop questions, but there is none'),
])
def test_a_mix_that_changes_is_refused_where_it_cannot_be_held(
    options, message):
  hops = (1, 4) if options else (1,)
  with pytest.raises(ValueError, match=message):
    questions_lib.stream([some(4, hops=hops)], seed=0, mix=STAGES, **options)


@pytest.mark.parametrize('hops', [(1, 2), (1, 2, 2, 3, 4), (2, 3, 4), (4,)])
def test_each_own_question_is_drawn_with_the_default_mix(hops):
  questions = some(60, hops=hops)
  stream = questions_lib.stream([questions], seed=0, mix=(1, 1, 1), own=True)
  assert {q.uid for q in drawn(stream, 60)} == {q.uid for q in questions}
  assert drawn(stream, 60) == drawn(
      questions_lib.stream([questions], seed=0), 60)


def test_a_mix_that_is_set_for_own_questions_is_kept_or_refused():
  questions = some(60, hops=(1, 2, 3))
  for mix in ((1, 1, 1), (2, 1, 1), (1, 0, 1)):
    assert drawn(questions_lib.stream(
        [questions], seed=0, mix=mix, own=True), 60) == drawn(
            questions_lib.stream([questions], seed=0, mix=mix), 60)
  with pytest.raises(ValueError, match='data.mix needs .* none for 3 hops'):
    questions_lib.stream([questions], seed=0, mix=(2, 1), own=True)
  with pytest.raises(ValueError, match='asks for 1 of 4-hop'):
    questions_lib.stream([questions], seed=0, mix=(2, 1, 1, 1), own=True)


def test_a_named_file_has_its_name_in_ids_and_sources(tmp_path):
  file = tmp_path / 'nq.jsonl'
  file.write_text(GOOD)
  question, = questions_lib.read(file, prefix='a', source='b')
  assert (question.uid, question.data_source) == ('a/a', 'b')


def test_ids_stay_bare_while_they_differ_over_sources(tmp_path):
  rows = [json.dumps({'id': i, 'question': 'q', 'golden_answers': ['x'],
                      'data_source': source})
          for i, source in (('1', 'nq'), ('2', 'hotpotqa'), ('1', 'hotpotqa'))]
  assert [q.uid for q in read(tmp_path, *rows[:2])] == ['1', '2']
  assert [q.uid for q in read(tmp_path, *rows)] == [
      'nq/1', 'hotpotqa/2', 'hotpotqa/1']


def test_a_question_mark_is_added_where_it_lacks(tmp_path):
  texts = [' who ', 'who?', 'who ?', 'who.']
  (tmp_path / 'q.jsonl').write_text('\n'.join(json.dumps(
      {'id': n, 'question': text, 'golden_answers': ['x']})
                                              for n, text in enumerate(texts)))
  read_ = [q.text for q in questions_lib.read(
      tmp_path / 'q.jsonl', question_mark=True)]
  assert read_ == ['who?', 'who?', 'who ?', 'who.?']


def test_golds_may_lack_where_the_job_allows_it(tmp_path):
  (tmp_path / 'q.jsonl').write_text('{"id": 1, "question": "who"}')
  question, = questions_lib.read(tmp_path / 'q.jsonl', needs_golds=False)
  assert question.answers == ()


def test_a_subset_is_of_the_seed_alone_and_grows_by_addition():
  questions = some(50)
  few, more = (questions_lib.subset(questions, n, seed=1) for n in (10, 20))
  assert len(few) == 10 and set(few) < set(more)
  assert questions_lib.subset(questions[::-1], 10, seed=1) == few[::-1]
  assert questions_lib.subset(questions, 10, seed=2) != few
  assert [q for q in questions if q in few] == few  # in their order
  assert questions_lib.subset(questions, 99, seed=1) == questions
  without = questions_lib.subset(
      [q for q in questions if q != few[0]], 10, seed=1)
  assert set(few[1:]) < set(without)


@pytest.mark.parametrize('weights, message', [
    ((0, 0), r'data.weights needs a share above 0'),
    ((1, 1), 'data.weights asks for 1 of questions of file 2'),
])
def test_weights_of_missing_files_are_refused(weights, message):
  with pytest.raises(ValueError, match=message):
    questions_lib.stream([some(3), []], seed=0, weights=weights)


shares_of_common = st.sampled_from([0.05, 0.25, 0.4, 0.9])


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(mixes, shares_of_common, st.integers(1, 80))
def test_the_share_of_common_knowledge_holds_in_every_hop_count(
    mix, common, count):
  fresh = some(40, hops=(1, 2, 3, 4))
  few = [Question(f'c{n}', '', ('a',), hops=n % 4 + 1) for n in range(8)]
  stream = questions_lib.stream([fresh, few], seed=0, mix=mix, common=common)
  seen = Counter((q.hops, q.uid[0] == 'c') for q in drawn(stream, count))
  for hops, share in enumerate(mix, start=1):
    for is_common, part in ((False, 1 - common), (True, common)):
      fair = share / sum(mix) * part * count
      assert abs(seen[hops, is_common] - fair) < 2 * len(mix)


def test_common_knowledge_keeps_its_share_without_a_mix():
  few = [Question('c', '', ('a',), hops=2)]
  stream = questions_lib.stream([some(9), few], seed=0, common=0.4)
  assert Counter(q.uid[0] == 'c' for q in drawn(stream, 10)) == {
      True: 4, False: 6}
  with pytest.raises(ValueError, match='data.common=0.4 needs questions of '
                     'fresh facts and .* all 9 that are drawn together are '):
    questions_lib.stream([some(9), few], seed=0, mix=(1,), common=0.4)


def test_an_old_config_draws_what_it_drew_before_common_knowledge(tmp_path):
  """The rule in plain loops, and the first step as revision 0413c11 drew it."""
  data = datasets.train_set(tmp_path, train='', corpus='', world_seed=1,
                            per_hop=(500, 500, 400, 300))
  mix, taken, expected = (4, 4, 2, 2), [0] * 4, []
  pools = [[f'train-1-0-{hops}-{n}' for n in range(1, count + 1)]
           for hops, count in enumerate((500, 500, 400, 300), start=1)]
  for total in range(1, 361):
    behind = [share / 12 * total - n for share, n in zip(mix, taken)]
    pool = behind.index(max(behind))
    order = np.random.default_rng([0, pool, 0]).permutation(len(pools[pool]))
    expected.append(pools[pool][order[taken[pool]]])
    taken[pool] += 1
  stream = questions_lib.stream(data.files, seed=0, mix=mix)
  uids = [q.uid for q in drawn(stream, 360)]
  assert data.corpus.digest.startswith('1bee5c24974d72834d34a3cde379f09b')
  assert uids == expected
  assert uids[:12] == FIRST
