# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Fuzzing: files of corpora, questions, conversations, recordings, records.

A reader gives the value of every line, or one error of one line that names the
file and the line.
"""

import functools
import json
import pathlib
import tempfile

import pytest
import strategies
from strategies import Dice, fuzzed
import text_oracles

from searchrl.data import conversations
from searchrl.data import questions
from searchrl.rollouts import records
from searchrl.search import corpus as corpora
from searchrl.search import mapped_corpus
from searchrl.search.remote import web
from searchrl.trajectory import (
    STOP_REASONS, Action, Passage, Question, SearchError, Trajectory, Turn)

KINDS = (ValueError, FileNotFoundError)


@functools.cache
def folder() -> pathlib.Path:
  """A folder in memory, where there is one."""
  shared = pathlib.Path('/dev/shm')
  made = tempfile.TemporaryDirectory(
      dir=shared if shared.is_dir() else None, prefix='fuzz')
  folder.keep = made
  return pathlib.Path(made.name)


def file_of(name: str, lines, dice: Dice) -> pathlib.Path:
  path = folder() / name
  path.write_bytes(b'\n'.join(lines) + b'\n' * dice.below(2))
  return path


def read_or_refused(read, path, lines):
  """Returns what is read, or None and the line number that an error names."""
  try:
    return read(path), None
  except KINDS as error:
    message = str(error)
    assert '\n' not in message and len(message) < 1000, message
    assert str(path) in message, message
    named = [number for number in range(1, len(lines) + 1)
             if f'line {number} ' in f'{message} '.replace(',', ' ').replace(
                 ':', ' ').replace('.', ' ')]
    return None, (named, message)


def lines_of(dice: Dice, names, own):
  """Returns up to four lines of JSON, most of them valid.

  Args:
    dice: Source of the decisions.
    names: Names of the objects' fields.
    own: Function from a line's number and the dice to the line's valid record.
  """
  lines = []
  for number in range(1 + dice.below(4)):
    if dice.chance(6):
      lines.append(dice.one_of([b'', b' ', b'\t \r']))
      continue
    data = strategies.body(dice, strategies.mutated(
        dice, own(number, dice), names, 2 * dice.below(2)), ('utf-8-sig',))
    lines.append(data.replace(b'\n', b' '))
  return lines


PASSAGE_NAMES = ['id', 'contents', 'title', 'text', 'x']


def own_passage(number, dice):
  if dice.below(2):
    return {'id': dice.below(6), 'contents': (
        f'"{strategies.text(dice, 3)}"\n{strategies.text(dice, 5)}')}
  return {'id': f'{number}', 'title': 'T', 'text': strategies.text(dice, 4)}


def passage_by_hand(line):
  """The passage of a line; None if it has none."""
  try:
    record = json.loads(line)
  except ValueError:
    return None
  if not isinstance(record, dict):
    return None
  uid = record.get('id')
  if isinstance(uid, float) and uid.is_integer():
    uid = int(uid)
  if isinstance(uid, bool) or not isinstance(uid, str | int):
    return None
  contents = record.get('contents', '')
  if not isinstance(contents, str):
    return None
  title, text = text_oracles.title_and_text(contents, record.get('title'))
  if 'contents' not in record:
    title, text = record.get('title'), record.get('text')
    missing = title is None or title != title  # null, or pandas' NaN
    title = '' if missing and 'title' in record else title
    if isinstance(text, list) and all(isinstance(part, str) for part in text):
      text = '\n'.join(map(str.strip, text))
    title = title.strip('\r\n') if isinstance(title, str) else title
    if isinstance(text, dict):
      return None
  if not isinstance(title, str) or not isinstance(text, str):
    return None
  return Passage(str(uid), title, text)


@fuzzed()
def test_a_corpus_is_read_or_the_line_is_named(dice: Dice):
  lines = lines_of(dice, PASSAGE_NAMES, own_passage)
  path = file_of('corpus.jsonl', lines, dice)
  found, error = read_or_refused(corpora.read, path, lines)
  wanted, bad, ids = [], None, set()
  for number, line in enumerate(path.open('rb'), start=1):
    if line.strip() and bad is None:
      passage = passage_by_hand(line)
      if passage is None or passage.id in ids or '\n' in passage.title:
        bad = number
      else:
        wanted.append(passage)
        ids.add(passage.id)
  if bad is None and wanted:
    assert found is not None and found.passages == tuple(wanted), error
  else:
    assert found is None
    assert bad is None or bad in error[0], error


@fuzzed(short=60, share=0.1)
def test_a_mapped_corpus_is_the_corpus_that_is_read(dice: Dice):
  lines = lines_of(dice, PASSAGE_NAMES, own_passage)
  for old in folder().glob('mapped*'):
    old.unlink()
  path = file_of('mapped.jsonl', lines, dice)
  (found, error), (mapped, other) = (
      read_or_refused(read, path, lines) for read in (
          corpora.read, mapped_corpus.open_))
  assert (found is None) == (mapped is None), (error, other)
  if found is not None:
    assert tuple(mapped) == found.passages and mapped.digest == found.digest
    assert mapped.ids_are_positions == found.ids_are_positions
    assert list(mapped.texts) == found.texts


@fuzzed()
def test_a_corpus_that_is_written_is_read_again(dice: Dice):
  passages = {}
  for number in range(1 + dice.below(4)):
    one = strategies.passage(dice)
    passages[one.id] = Passage(one.id, one.title, one.text)
  corpora.write(folder() / 'again.jsonl', passages.values())
  assert corpora.read(folder() / 'again.jsonl').passages == tuple(
      passages.values())


QUESTION_NAMES = ['id', 'question', 'golden_answers', 'metadata', 'hops',
                  'data_source', 'prompt', 'problem', 'answer', 'title', 'text',
                  'ambiguous_question', 'annotations', 'answers', 'q_id']


def own_question(number, dice):
  return {'id': dice.one_of([number, f'q{number}', 'a/b', 'b']),
          'question': strategies.text(dice, 3) or 'who?',
          'golden_answers': dice.one_of([['x'], 'x', ['x', 'y']]),
          'metadata': dice.one_of([{}, {'hops': 2}, {'data_source': 'a'},
                                   {'data_source': 'nq'}])}


@fuzzed()
def test_questions_are_read_or_the_line_is_named(dice: Dice):
  lines = lines_of(dice, QUESTION_NAMES, own_question)
  path = file_of('questions.jsonl', lines, dice)
  found, error = read_or_refused(questions.read, path, lines)
  if found is None:
    assert error[0] or 'holds no question' in error[1] or b'\xff' in b''.join(
        lines), error
    return
  asked = [json.loads(line) for line in lines if line.decode().strip()]
  assert len({q.uid for q in found}) == len(found)
  for q, record in zip(found, asked, strict=True):
    if isinstance(record.get('question'), str):
      assert q.text == record['question'].strip()
      uid = record['id']
      whole = isinstance(uid, float) and uid.is_integer()
      assert q.uid.endswith(str(int(uid) if whole else uid))
    golds = record.get('golden_answers')
    if isinstance(golds, list) and all(
        isinstance(gold, str) and gold.strip() for gold in golds):
      assert list(q.answers) == golds or 'question' not in record
    assert q.text == q.text.strip() != '' and q.answers and q.data_source
    assert all(isinstance(answer, str) for answer in q.answers)
    assert isinstance(q.hops, int)
  questions.write(folder() / 'again.jsonl', found)
  assert questions.read(folder() / 'again.jsonl') == found


@fuzzed(short=40, share=0.05)
def test_a_parquet_of_questions_is_read_or_the_row_is_named(dice: Dice):
  parquet = pytest.importorskip('pyarrow.parquet')
  import pyarrow
  form = dice.below(2)
  rows = [strategies.mutated(dice, own_question(number, dice) if form else {
      'data_source': 'nq', 'prompt': [{'role': 'user', 'content': (
          f'Question: {strategies.text(dice, 3)} who?')}],
      'reward_model': {'style': 'rule', 'ground_truth': {'target': ['x']}},
      'extra_info': {'split': 'train', 'index': number}},
                             QUESTION_NAMES, dice.below(2))
          for number in range(1 + dice.below(3))]
  path = folder() / 'questions.parquet'
  try:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
  except (pyarrow.ArrowException, UnicodeEncodeError, OverflowError):
    return  # columns are of one type
  try:
    found = questions.read(path)
  except ValueError as error:
    assert str(path) in str(error) and len(str(error)) < 1500
    assert '\n' not in str(error), error
    return
  assert len(found) == len(rows) == len({q.uid for q in found})
  assert all(q.text and q.answers for q in found)


@fuzzed()
def test_conversations_are_read_or_the_line_is_named(dice: Dice):
  forms = [{'prompt': 'a', 'completion': 'b'},
           {'messages': [{'role': 'user', 'content': 'a'},
                         {'role': 'assistant', 'content': 'b'}]},
           {'segments': [{'text': 'a', 'trained': False},
                         {'text': 'b', 'trained': True}]}]
  lines = lines_of(dice, [
      'prompt', 'completion', 'messages', 'segments', 'role', 'content', 'text',
      'trained'], lambda number, d: d.one_of(forms))
  path = file_of('talks.jsonl', lines, dice)
  found, error = read_or_refused(
      lambda file: conversations.read(str(file)), path, lines)
  if found is None:
    assert error[0] or 'is empty' in error[1], error
    return
  said = [json.loads(line) for line in lines if line.decode().strip()]
  for one, record in zip(found, said, strict=True):
    assert ''.join(segment.text for segment in one.segments) == (
        record['prompt'] + record['completion'] if 'prompt' in record else
        ''.join(part['text'] for part in record.get('segments', ())))
    assert list(one.messages) == record.get('messages', [])
    assert all(isinstance(segment.text, str)
               and isinstance(segment.trained, bool)
               for segment in one.segments)
    assert any(s.text for s in one.segments if s.trained) or any(
        message['role'] == 'assistant' for message in one.messages[1:])


@fuzzed()
def test_a_recorded_web_search_is_read_or_the_line_is_named(dice: Dice):
  record = {'query': 'who?', 'top_k': 2, 'passages': [
      {'id': 'a', 'title': 'T', 'text': 'x', 'score': 0.0}]}
  lines = lines_of(dice, ['query', 'top_k', 'passages', 'id', 'title',
                              'text', 'score'], lambda number, d: record)
  path = folder() / 'tape.jsonl'
  path.write_bytes(b''.join(line + b'\n' for line in lines) + b'{"query')
  found, error = read_or_refused(web.Tape, path, lines)
  if found is None:
    assert error[0], error
    return
  for (text, top_k), passages in found.known.items():
    assert isinstance(text, str) and isinstance(top_k, int)
    for passage in passages:
      assert all(isinstance(field, str) for field in (
          passage.id, passage.title, passage.text))
      assert isinstance(passage.score, int | float)


@fuzzed()
def test_what_is_recorded_of_a_web_search_is_replayed(dice: Dice):
  path = folder() / 'recorded.jsonl'
  path.unlink(missing_ok=True)
  tape, wanted = web.Tape(path), {}
  for _ in range(dice.below(4)):
    key = strategies.text(dice, 3), 1 + dice.below(3)
    wanted[key] = tuple(dice.many(2, strategies.passage))
    tape.add(key, wanted[key])
  assert web.Tape(path).known == wanted


def trajectory(dice: Dice) -> Trajectory:
  turns = tuple(Turn(
      tuple(dice.many(3, lambda d: d.below(99))), (-0.5,) * dice.below(3),
      Action(dice.one_of(['search', 'answer', 'invalid']),
             tuple(dice.many(2, lambda d: strategies.text(d, 2)))),
      tuple(dice.many(2, lambda d: d.below(99))),
      tuple(dice.many(2, strategies.passage)), dice.below(3),
      strategies.text(dice, 3), strategies.text(dice, 3))
                for _ in range(dice.below(3)))
  return Trajectory(
      Question(strategies.text(dice, 2), strategies.text(dice, 3),
               tuple(dice.many(2, lambda d: strategies.text(d, 2)))),
      dice.below(5), dice.below(5), (1, 2), turns, dice.one_of(STOP_REASONS),
      dice.below(4) / 3, None, search_error=SearchError(
          'timeout', strategies.text(dice, 2)) if dice.below(2) else None,
      parts={'gate': dice.below(4) / 3})


@fuzzed(share=0.5)
def test_trajectories_that_are_written_are_read_again(dice: Dice):
  found = dice.many(2, trajectory)
  records.write(folder() / 'round.jsonl.gz', found)
  assert records.read(folder() / 'round.jsonl.gz') == found
