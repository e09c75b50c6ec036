# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""corpus: what is read is what was written, and errors name their line."""

import bz2
import gzip
import hashlib
import json
import lzma

import pytest

from searchrl.experiment import model_defaults
from searchrl.search import corpus
from searchrl.search import mapped_corpus
from searchrl.trajectory import Passage

PASSAGES = (
    Passage('0', 'Tarn', 'A river.\nIt is long.'),
    Passage('seven', 'The "Gorges"', 'Über 50 km \u2028 \ud800 "quoted"'),
    Passage('2', '', ''),
    Passage('3', '"', '\n\n'),
)


def write_lines(path, *lines):
  path.write_text('\n'.join(lines) + '\n', encoding='utf-8')
  return path


@pytest.mark.parametrize('name', ['corpus.jsonl', 'corpus.jsonl.gz'])
def test_reads_back_exactly_what_was_written(tmp_path, name):
  corpus.write(tmp_path / name, PASSAGES)
  read = corpus.read(tmp_path / name)
  assert read.passages == PASSAGES
  assert tuple(read) == PASSAGES
  assert len(read) == 4 and read[1] == PASSAGES[1]
  assert read.digest == corpus.Corpus(PASSAGES).digest


def test_the_written_form_has_an_id_and_a_quoted_title(tmp_path):
  corpus.write(tmp_path / 'c.jsonl', PASSAGES[:1])
  record = json.loads((tmp_path / 'c.jsonl').read_text())
  assert record == {'id': '0', 'contents': '"Tarn"\nA river.\nIt is long.'}


def test_reads_both_forms_integer_ids_and_empty_lines(tmp_path):
  path = write_lines(
      tmp_path / 'c.jsonl',
      '{"id": 0, "contents": "\\"Tarn\\"\\nA river."}', '',
      '{"id": "a", "title": "Lot", "text": "Another."}',
      '{"id": "b", "contents": "Bare title\\ntext"}',
      '{"id": "c", "contents": "no second line"}')
  assert corpus.read(path).passages == (
      Passage('0', 'Tarn', 'A river.'), Passage('a', 'Lot', 'Another.'),
      Passage('b', 'Bare title', 'text'), Passage('c', 'no second line', ''))


@pytest.mark.parametrize('load', [corpus.read, mapped_corpus.open_])
def test_passages_without_any_text_are_counted(tmp_path, monkeypatch, load):
  said = []
  monkeypatch.setattr(corpus.processes, 'say', said.append)
  path = write_lines(
      tmp_path / 'c.jsonl', '{"id": 0, "contents": "Tarn"}',
      '', '{"id": 1, "contents": " \\n "}',
      '{"id": 2, "title": "", "text": ""}')
  assert len(load(path)) == 3
  assert said == [
      f'Warning: 2 of the 3 passages of {path} have neither title nor text, '
      'such as line 3. An engine may return them. Drop these lines.']


@pytest.mark.parametrize('contents, title, text', [
    ('A port.\nIn the south.', 'Nice', 'A port.\nIn the south.'),
    ('Nice\nA port.', 'Nice', 'A port.'),
    ('"Nizza"\nA port.', 'Nizza', 'A port.'),
    ('A port.', 'Nice', 'A port.')])
def test_a_title_beside_contents_is_kept(contents, title, text):
  line = json.dumps({'id': 1, 'title': 'Nice', 'contents': contents}).encode()
  assert corpus.parse(line, 'line 1') == Passage('1', title, text)


def test_texts_are_title_and_text():
  assert corpus.Corpus(PASSAGES).texts[0] == 'Tarn\nA river.\nIt is long.'


def test_digest_is_that_of_the_plain_file_and_sees_every_part(tmp_path):
  whole = corpus.Corpus(PASSAGES)
  corpus.write(tmp_path / 'c.jsonl', whole)
  data = (tmp_path / 'c.jsonl').read_bytes()
  assert whole.digest == hashlib.sha256(data).hexdigest()
  others = [PASSAGES[::-1], PASSAGES[:3],
            (Passage('9', 'Tarn', PASSAGES[0].text),) + PASSAGES[1:]]
  digests = {corpus.Corpus(other).digest for other in others}
  assert len(digests | {whole.digest}) == 4


@pytest.mark.parametrize('line, message', [
    ('{"id": 1,', 'must be a JSON object'),
    ('["id"]', 'holds list'),
    ('{"id": "1"}', 'must have contents'),
    ('{"id": "1", "contents": 3}', 'must have contents'),
    ('{"id": "1", "title": "a", "text": null}', 'must have contents.* has id: '
     'str, text: NoneType, title: str'),
    ('{"id": "1", "contents": null, "title": "", "text": ""}', 'have contents'),
    ('{"id": "1", "title": "a"}', 'must have contents'),
    ('{"id": "1", "title": "a\\nb", "text": ""}', 'title must be one line'),
    ('{"contents": "a"}', 'id must be a string'),
    ('{"id": true, "contents": "a"}', 'id must be a string'),
    ('{"id": 7, "contents": "a"}', "is '7', as in line 1"),
    ('{"id": 8, "title": "a\\nb", "text": ""}', 'title must be one line'),
    ('[' * 100_000, 'is not: RecursionError'),
    ('{"id": 1, "contents": ' + '[' * 100_000, 'is not: RecursionError'),
])
def test_a_bad_line_is_named(tmp_path, line, message):
  path = write_lines(tmp_path / 'c.jsonl', '{"id": "7", "contents": "x"}', line)
  with pytest.raises(ValueError, match=message) as caught:
    corpus.read(path)
  assert f'line 2 of {path}' in str(caught.value)


@pytest.mark.parametrize('line', [
    {'id': ['x'] * 10_000, 'contents': 'a'}, {'id': 1} | {
        str(n): n for n in range(10_000)}])
def test_an_error_is_short_however_long_the_line(tmp_path, line):
  path = write_lines(tmp_path / 'c.jsonl', json.dumps(line))
  with pytest.raises(ValueError, match='line 1 of') as caught:
    corpus.read(path)
  assert len(str(caught.value)) < 500 + len(str(path))


def test_bytes_that_are_not_utf8_are_named(tmp_path):
  (tmp_path / 'c.jsonl').write_bytes(b'{"id": "1", "contents": "\xff"}\n')
  with pytest.raises(ValueError, match='line 1 of'):
    corpus.read(tmp_path / 'c.jsonl')


def test_an_empty_corpus_is_refused(tmp_path):
  with pytest.raises(ValueError, match='a corpus with no passages'):
    corpus.read(write_lines(tmp_path / 'c.jsonl', '', ' '))
  with pytest.raises(ValueError, match='a corpus with no passages'):
    corpus.Corpus(())


@pytest.mark.parametrize('load', [corpus.read, mapped_corpus.load])
def test_an_address_in_a_store_is_refused(load):
  with pytest.raises(ValueError, match=(
      "^corpus must be a path on this machine, but is 's3://b/c.jsonl'. Copy")):
    load('s3://b/c.jsonl')


def test_a_missing_file_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match='nowhere.jsonl'):
    corpus.read(tmp_path / 'nowhere.jsonl')


@pytest.mark.parametrize('name', ['c.tsv', 'c.csv', 'c.parquet', 'c.tsv.gz'])
@pytest.mark.parametrize('read', [corpus.read, mapped_corpus.load])
def test_a_table_is_refused_with_the_form_to_write(tmp_path, read, name):
  path = tmp_path / name
  path.write_bytes(b'id\ttext\ttitle\n1\ta\tT\n')
  with pytest.raises(ValueError, match='is a table. Write each row') as caught:
    read(path)
  assert str(path) in str(caught.value)


def test_a_broken_gzip_file_is_refused(tmp_path):
  line = b'{"id": "1", "contents": "a"}\n'
  for data in (gzip.compress(line)[:-9], line):
    (tmp_path / 'c.jsonl.gz').write_bytes(data)
    with pytest.raises(ValueError, match='a whole gzip file'):
      corpus.read(tmp_path / 'c.jsonl.gz')


@pytest.mark.parametrize('name, pack, program', [
    ('c.jsonl', gzip.compress, 'gzip'), ('c.bz2', bz2.compress, 'bzip2'),
    ('c.jsonl', lzma.compress, 'xz'), ('c.jsonl.gz', lambda text: gzip.compress(
        lzma.compress(text)), 'xz')])
@pytest.mark.parametrize('read', [
    corpus.read, mapped_corpus.load, lambda path: [
        *model_defaults.sample(str(path), 3)]])
def test_a_compressed_corpus_is_named(tmp_path, name, pack, program, read):
  (tmp_path / name).write_bytes(pack(b'{"id": "1", "contents": "a"}\n'))
  with pytest.raises(ValueError, match=f'compressed by {program}, so give it a'):
    read(tmp_path / name)


def test_what_would_not_read_back_is_not_written(tmp_path):
  with pytest.raises(ValueError, match='title must be one line'):
    corpus.write(tmp_path / 'c.jsonl', [Passage('0', 'a\nb', 'c')])
  with pytest.raises(ValueError, match="'0' occurs 2 times"):
    corpus.write(tmp_path / 'c.jsonl', [Passage('0', 'a', 'b')] * 2)
  assert not (tmp_path / 'c.jsonl').exists()


@pytest.mark.parametrize('contents, title, text', [
    ('"T"\r\na\r\nb', 'T', 'a\nb'), ('"T"\ra\rb', 'T', 'a\nb'),
    ('"T"\n\ra', 'T', '\ra'), ('T\r\na', 'T', 'a'), (' "T" \r\na', 'T', 'a'),
    ('\ufeff"T"\na', 'T', 'a'), ('\ufeff"T"\r\na "b"', 'T', 'a "b"'),
    ('"T"\ra "b"', 'T', 'a "b"'), ('"a "b" c"\r\nd', 'a "b" c', 'd'),
    ('"T"\r\n', 'T', ''), ('"T"\r', 'T', '')])
def test_line_breaks_and_marks_of_other_systems_are_read(
    contents, title, text, tmp_path):
  path = write_lines(tmp_path / 'c.jsonl', json.dumps(
      {'id': '0', 'contents': contents}), json.dumps(
          {'id': '1', 'title': 'T', 'text': 'a'}))
  path.write_bytes(b'\xef\xbb\xbf\r\n' + path.read_bytes().replace(
      b'\n', b'\r\n'))
  assert [(p.title, p.text) for p in corpus.read(path)] == [
      (title, text), ('T', 'a')]


@pytest.mark.parametrize('row, passage', [
    ({'_id': 'MED-10', 'title': 'T', 'text': 'a', 'metadata': {}},
     Passage('MED-10', 'T', 'a')),
    ({'_id': '4983', 'title': '', 'text': 'a'}, Passage('4983', '', 'a')),
    ({'_id': 7.0, 'text': 'a'}, Passage('7', '', 'a')),
    ({'id': 7.0, 'title': None, 'text': 'a'}, Passage('7', '', 'a')),
    ({'id': '7', 'title': float('nan'), 'text': 'a'}, Passage('7', '', 'a')),
    ({'docid': 'd1', 'title': 'T', 'text': 'a'}, Passage('d1', 'T', 'a')),
    ({'id': '0', 'contents': '"T"\na', 'title': 'x'}, Passage('0', 'T', 'a')),
    ({'id': '0', 'contents': 'a b', 'title': 'x'}, Passage('0', 'x', 'a b')),
    ({'id': '0', 'contents': '"x"', 'title': 'x'}, Passage('0', 'x', '')),
    ({'id': '0', 'title': 'T\r\n', 'text': 'a'}, Passage('0', 'T', 'a')),
    ({'_id': '12', 'wikipedia_id': '12', 'wikipedia_title': 'T', 'text': [
        'T\n', 'a\n', 'Section::::B.\n'], 'anchors': [], 'categories': ''},
     Passage('12', 'T', 'T\na\nSection::::B.')),
    ({'kilt_id': '12', 'wikipedia_id': '12', 'wikipedia_title': 'T', 'text': {
        'paragraph_id': [0, 1], 'paragraph': ['T\n', 'a\n']}},
     Passage('12', 'T', 'T\na')),
])
def test_passages_as_they_are_published_are_read(row, passage, tmp_path):
  path = write_lines(tmp_path / 'c.jsonl', json.dumps(row))
  assert corpus.read(path).passages == (passage,)
