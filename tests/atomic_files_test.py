# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""atomic: a reader sees the old content or the new, never a part of it."""

import json

import pytest

from searchrl.runtime import atomic_files


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path):
  file = tmp_path / 'a.json'
  atomic_files.write_json(file, {'x': 1})
  with pytest.raises(TypeError):
    atomic_files.write_json(file, {'x': 2, 'y': object()})
  assert json.loads(file.read_text()) == {'x': 1}


def test_a_folder_is_replaced_once_it_is_filled(tmp_path):
  for text in ('old', 'new'):
    with atomic_files.new_folder(tmp_path / 'i') as new:
      assert not list(new.iterdir())
      (new / text).write_text(text)
  assert [path.name for path in tmp_path.iterdir()] == ['i']
  assert [path.name for path in (tmp_path / 'i').iterdir()] == ['new']


def test_a_folder_that_is_not_finished_replaces_nothing(tmp_path):
  with atomic_files.new_folder(tmp_path / 'i') as new:
    (new / 'old').touch()
  with pytest.raises(KeyboardInterrupt):
    with atomic_files.new_folder(tmp_path / 'i') as new:
      (new / 'half').touch()
      raise KeyboardInterrupt
  assert [path.name for path in tmp_path.iterdir()] == ['i']
  assert [path.name for path in (tmp_path / 'i').iterdir()] == ['old']
  (tmp_path / '.i.unfinished').mkdir()  # left by a killed process
  (tmp_path / '.i.unfinished' / 'half').touch()
  with atomic_files.new_folder(tmp_path / 'i') as new:
    assert not list(new.iterdir())


@pytest.mark.parametrize('line', [b'', b'{"a"', b'\xff'])
def test_a_damaged_line_of_json_is_named(tmp_path, line):
  file = tmp_path / 'rollbacks.jsonl'
  assert atomic_files.read_jsonl(file) == []
  file.write_bytes(b'{"a": 1}\n' + line + b'\n')
  with pytest.raises(ValueError, match='line 2 of .*/rollbacks.jsonl must be '
                                       'JSON, .* Restore the file, or delete'):
    atomic_files.read_jsonl(file)
  file.write_bytes(b'{"a": 1}\n[2]\n')
  assert atomic_files.read_jsonl(file) == [{'a': 1}, [2]]


@pytest.mark.parametrize('content', [b'', b'{', b'\xff'])
def test_a_damaged_json_file_is_named(tmp_path, content):
  file = tmp_path / 'questions.json'
  assert atomic_files.read_json(file) is None
  file.write_bytes(content)
  with pytest.raises(ValueError, match='questions.json must be JSON, but is'):
    atomic_files.read_json(file)
