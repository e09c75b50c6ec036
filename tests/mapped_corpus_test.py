# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""mapped_corpus: the corpora of `corpus.read`, with little in memory."""

import json
import tracemalloc

import pytest

from searchrl.search import corpus as corpora
from searchrl.search.index import bm25
from searchrl.search import mapped_corpus
from searchrl.trajectory import Passage, Query, Question

PASSAGES = (
    Passage('0', 'Tarn', 'A river.\nIt is long.'),
    Passage('seven', 'The "Gorges"', 'Über 50 km \u2028 \ud800 "quoted"'),
    Passage('2', '', ''),
    Passage('3', '"', '\n\n'),
)


@pytest.fixture
def path(tmp_path):
  corpora.write(tmp_path / 'c.jsonl', PASSAGES)
  return tmp_path / 'c.jsonl'


def lines(path, *texts):
  path.write_text('\n'.join(texts) + '\n', encoding='utf-8')
  return path


def numbered(path, size, words=40):
  with path.open('w') as file:
    for i in range(size):
      file.write(json.dumps({
          'id': str(i), 'contents': f'"t{i}"\n' + 'w ' * words}) + '\n')
  return path


def test_is_the_corpus_that_is_read_into_memory(path):
  whole, found = corpora.read(path), mapped_corpus.open_(path)
  assert tuple(found) == whole.passages and len(found) == 4
  assert found[-1] == PASSAGES[-1] and found[1] == PASSAGES[1]
  assert found.digest == whole.digest
  assert list(found.texts) == whole.texts
  assert found.texts[1:3] == whole.texts[1:3]
  for i in (4, -5):
    with pytest.raises(IndexError, match=r'lie in \[0, 4\)'):
      found[i]  # pylint: disable=pointless-statement


def test_empty_lines_and_no_last_line_break(tmp_path):
  path = tmp_path / 'c.jsonl'
  path.write_text('\n{"id": 5, "contents": "a"}\n \n'
                  '{"id": "b", "title": "x", "text": "y"}')
  assert tuple(mapped_corpus.open_(path)) == corpora.read(path).passages
  assert not mapped_corpus.open_(path).ids_are_positions


@pytest.mark.parametrize('ids, expected', [
    ((0, 1, 2), True), (('0', '1'), True), ((1, 2), False), ((0, 2), False),
    ((1, 0), False), (('00', '01'), False)])
def test_whether_ids_are_positions(tmp_path, ids, expected):
  path = lines(tmp_path / 'c.jsonl', *(
      json.dumps({'id': i, 'contents': 'a'}) for i in ids))
  assert mapped_corpus.open_(path).ids_are_positions is expected
  assert corpora.read(path).ids_are_positions is expected


def test_a_file_is_scanned_once_and_again_when_it_changed(path, monkeypatch):
  mapped_corpus.open_(path)
  scans, scan = [], mapped_corpus._scan
  monkeypatch.setattr(
      mapped_corpus, '_scan', lambda path: scans.append(path) or scan(path))
  assert tuple(mapped_corpus.open_(path)) == PASSAGES
  assert not scans
  corpora.write(path, PASSAGES[:2])
  assert tuple(mapped_corpus.open_(path)) == PASSAGES[:2]
  assert len(scans) == 1


@pytest.mark.parametrize('damage', [
    lambda npy, facts: npy.write_bytes(npy.read_bytes()[:-5]),
    lambda npy, facts: npy.unlink(),
    lambda npy, facts: facts.unlink(),
    lambda npy, facts: facts.write_text('{'),
    lambda npy, facts: facts.write_text('[]')])
def test_damaged_offsets_are_made_again(path, damage):
  mapped_corpus.open_(path)
  damage(*(path.with_name(f'c.jsonl.starts.{kind}')
           for kind in ('npy', 'json')))
  assert tuple(mapped_corpus.open_(path)) == PASSAGES


@pytest.mark.parametrize('line, message', [
    ('{"id": 1,', 'line 3 of .*is not'), ('{"id": "1"}', 'line 3 of .*has'),
    ('{"contents": "a"}', 'id must be a string'),
    ('{"id": "1", "title": "a\\nb", "text": ""}', 'title .* of line 3 of'),
    ('{"id": 7, "contents": "a"}', "that of line 3 of .* is '7', as in line 1"),
    ('[' * 100_000, 'line 3 of .* is not: RecursionError'),
])
def test_a_bad_line_is_named_and_nothing_is_written(tmp_path, line, message):
  path = lines(tmp_path / 'c.jsonl', '{"id": "7", "contents": "x"}', '', line)
  with pytest.raises(ValueError, match=message):
    mapped_corpus.open_(path)
  assert [p.name for p in tmp_path.iterdir()] == ['c.jsonl']


def test_offsets_of_an_older_version_are_made_again(path, monkeypatch):
  monkeypatch.setattr(mapped_corpus, '_FORMAT', mapped_corpus._FORMAT - 1)
  lines(path, '{"id": 8, "title": "a", "text": ""}')
  mapped_corpus.open_(path)
  monkeypatch.undo()
  scans, scan = [], mapped_corpus._scan
  monkeypatch.setattr(
      mapped_corpus, '_scan', lambda path: scans.append(path) or scan(path))
  mapped_corpus.open_(path)
  assert scans == [path]


def test_ids_that_share_a_hash_are_distinguished(path, monkeypatch):
  monkeypatch.setattr(mapped_corpus, '_hash', lambda uid: 1)
  assert tuple(mapped_corpus.open_(path)) == PASSAGES


def test_what_cannot_be_mapped_is_refused(tmp_path):
  with pytest.raises(ValueError, match='gunzip -k'):
    corpora.write(tmp_path / 'c.jsonl.gz', PASSAGES)
    mapped_corpus.open_(tmp_path / 'c.jsonl.gz')
  with pytest.raises(FileNotFoundError, match='nowhere'):
    mapped_corpus.open_(tmp_path / 'nowhere.jsonl')
  with pytest.raises(ValueError, match='a corpus with no passages'):
    mapped_corpus.open_(lines(tmp_path / 'e.jsonl', '', ' '))


def test_memory_is_bytes_a_passage_whatever_their_length(tmp_path):
  """16 bytes a passage to scan, some more to sort; none to open again."""
  size = 20_000
  path = numbered(tmp_path / 'c.jsonl', size, words=400)  # 16 MB
  tracemalloc.start()
  found = mapped_corpus.open_(path)
  scan = tracemalloc.get_traced_memory()[1]
  del found
  tracemalloc.reset_peak()
  base = tracemalloc.get_traced_memory()[0]
  found = mapped_corpus.open_(path)
  assert found[size - 1].id == str(size - 1)
  reopened = tracemalloc.get_traced_memory()[1] - base
  tracemalloc.stop()
  assert scan < 64 * size + 2**21
  assert reopened < 2**17


def test_load_maps_what_is_large(path, monkeypatch):
  assert isinstance(mapped_corpus.load(path), corpora.Corpus)
  monkeypatch.setattr(mapped_corpus, 'IN_MEMORY_BYTES', 10)
  assert isinstance(mapped_corpus.load(path), mapped_corpus.MappedCorpus)
  with pytest.raises(FileNotFoundError):
    mapped_corpus.load(path.with_name('nowhere'))


def test_an_engine_finds_the_same_in_both(path):
  query = Query('long river', 3, Question('q', '?', ('a',)))
  first, second = (bm25.bm25(c)([query]) for c in (
      corpora.read(path), mapped_corpus.open_(path)))
  assert first == second and first[0]
