# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""jsonl: lines with their places; a wrong one is named."""

import bz2
import codecs
import gzip
import lzma

import pytest

from searchrl.data import jsonl


def read(tmp_path, data, name='a.jsonl'):
  file = tmp_path / name
  file.write_bytes(data)
  return [(place.removeprefix(f'{file}, '), text.strip())
          for place, text in jsonl.lines(file)]


@pytest.mark.parametrize('data', [
    'é\n\n \nb'.encode(), codecs.BOM_UTF8 + 'é\r\n\n\r\nb\n'.encode()])
def test_lines_are_numbered_and_blank_ones_left_out(tmp_path, data):
  expected = [('line 1', 'é'), ('line 4', 'b')]
  assert read(tmp_path, data) == expected
  assert read(tmp_path, gzip.compress(data, mtime=0), 'a.jsonl.gz') == expected


def test_a_line_ends_at_a_line_feed_alone(tmp_path):
  assert len(read(tmp_path, 'a\u2028b\x0cc\x85\n'.encode())) == 1


@pytest.mark.parametrize('data, message', [
    (b'a\n\xe9t\xe9\n', 'line 2 is not: .* of another encoding, so convert it'),
    ('a\n'.encode('utf-16'), 'line 1 is not: .*another encoding'),
    (gzip.compress(b'a\n', mtime=0), 'line 1 is not: .* so give it a name in .gz'),
    (bz2.compress(b'a\n'), 'line 1 is not: .* bzip2, .* by gzip, or unpack it'),
    (lzma.compress(b'a\n'), 'line 1 is not: .* by xz, .* or unpack it'),
    (b'\x28\xb5\x2f\xfd\x04', 'line 1 is not: .* by zstd, .* or unpack')])
def test_what_is_no_utf_8_is_named(tmp_path, data, message):
  with pytest.raises(ValueError, match=f'a.jsonl, {message}'):
    read(tmp_path, data)


@pytest.mark.parametrize('data', [b'plain', gzip.compress(b'a\n' * 99, mtime=0)[:-5]])
def test_a_torn_gzip_is_named(tmp_path, data):
  with pytest.raises(ValueError, match='whole gzip file, but .*a.jsonl.gz is '):
    read(tmp_path, data, 'a.jsonl.gz')


@pytest.mark.parametrize('text, kind', [
    ('{', 'JSONDecodeError'), ('[' * 10**5, 'RecursionError')])
def test_what_is_no_json_is_named_and_cut(text, kind):
  with pytest.raises(ValueError) as error:
    jsonl.loads(text, 'a thing', 'here')
  assert str(error.value).startswith('here must be a thing, but ')
  assert kind in str(error.value) and len(str(error.value)) < 300
