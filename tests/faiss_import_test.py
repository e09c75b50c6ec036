# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""faiss_import: vectors of other programs, read without faiss, or refused."""

import struct

import numpy as np
import pytest

from searchrl.search.index import faiss_import

ROWS = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)


def flat(path, kind=b'IxFI', metric=0, rows=ROWS, floats=None):
  """A flat index by its layout; see `test_faiss_writes_this_layout`."""
  floats = rows.size if floats is None else floats
  path.write_bytes(struct.pack(
      '<4siqqq?iQ', kind, rows.shape[1], len(rows), 1 << 20, 1 << 20, True,
      metric, floats) + rows.tobytes())
  return path


def plain(path, rows=ROWS):
  path.write_bytes(rows.tobytes())
  return path


@pytest.mark.parametrize('write, name', [
    (flat, 'e5_Flat.index'), (plain, 'emb_e5.memmap')])
def test_rows_are_read_in_any_blocks(tmp_path, write, name):
  found = faiss_import.open_(write(tmp_path / name), count=7, dim=5)
  for start, stop in ((0, 7), (2, 5), (6, 9), (3, 4)):
    np.testing.assert_array_equal(found.read(start, stop), ROWS[start:stop])


def test_faiss_writes_this_layout(tmp_path):
  faiss = pytest.importorskip('faiss')
  for number, index in enumerate((
      faiss.IndexFlatIP(5), faiss.index_factory(
          5, 'Flat', faiss.METRIC_INNER_PRODUCT))):
    index.add(ROWS)
    faiss.write_index(index, str(tmp_path / str(number)))
    ours = flat(tmp_path / 'ours').read_bytes()
    assert (tmp_path / str(number)).read_bytes() == ours


@pytest.mark.parametrize('make, name, message', [
    (lambda p: flat(p, b'IxF2', 1), 'a', 'must be an index by inner product'),
    (lambda p: flat(p, metric=1), 'a', 'must be an index by inner product'),
    (lambda p: flat(p, b'IHNf'), 'a', r"begins with b'IHNf'.*\('hnsw',\)"),
    (lambda p: flat(p, floats=30), 'a', r'must have .* bytes'),
    (lambda p: flat(p).write_bytes(p.read_bytes()[:-1]), 'a', 'split file'),
    (lambda p: p.write_bytes(b'IxFI'), 'a', 'must be a flat index'),
    (lambda p: p.write_bytes(b''), 'a', 'must be a flat index'),
    (lambda p: flat(p, rows=ROWS[:6]), 'a', 'each of 7 .* holds 6 of 5'),
    (lambda p: flat(p, rows=ROWS[:, :4]), 'a', 'holds 7 of 4'),
    (lambda p: plain(p, ROWS[:6]), 'a.memmap', 'holds 6 of 5'),
    (lambda p: plain(p, ROWS[:, :4]), 'a.memmap', 'has 112 bytes'),
    (lambda p: p.write_bytes(b''), 'a.memmap', 'has 0 bytes')])
def test_other_files_are_refused(tmp_path, make, name, message):
  make(tmp_path / name)
  with pytest.raises(ValueError, match=message):
    faiss_import.open_(tmp_path / name, count=7, dim=5)


def test_a_missing_file_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match='config.imports'):
    faiss_import.open_(tmp_path / 'none', count=7, dim=5)
