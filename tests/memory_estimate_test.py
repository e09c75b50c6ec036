# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""footprint: sizes of an index at full scale, and a disk that is too full."""

import dataclasses
import types

import pytest

from searchrl.search.index import memory_estimate
from searchrl.search.index import vector_store

WIKIPEDIA = vector_store.Recipe('c', {}, 21_015_324, 768, 'bfloat16')


def test_the_estimate_of_wikipedia():
  lines = memory_estimate.estimate(WIKIPEDIA, ('scann', 'hnsw', 'bm25'),
                             part_rows=2_500_000, links=32).split('\n')
  assert lines == [
      '21015324 passages x 768, bfloat16: 30.06 GiB on disk in 321 shards',
      'scann: 82.83 GiB on disk, about 21.46 GiB of memory while it is built',
      'hnsw: 65.45 GiB on disk, about 65.45 GiB of memory while it is built',
      'bm25: about 23.49 GiB on disk while it is built; a process that searches '
      'it holds 0.95 GiB, each of its workers 0.16 GiB, and all of them share '
      '9.39 GiB of postings']


def test_a_disk_must_have_room_for_what_is_not_there_yet(tmp_path, monkeypatch):
  recipe = dataclasses.replace(WIKIPEDIA, count=1000)  # 1,536,000 bytes
  free = [0]
  monkeypatch.setattr(memory_estimate.shutil, 'disk_usage', lambda folder:
                      types.SimpleNamespace(free=free[0]))
  check = lambda *kinds: memory_estimate.check_disk(
      recipe, kinds, tmp_path, links=32)
  free[0] = 1_536_000
  check()
  with pytest.raises(ValueError, match='must have room for 0.00 GiB'):
    check('bm25')
  (tmp_path / 'bm25').mkdir()
  (tmp_path / 'bm25' / 'manifest.json').touch()
  check('bm25')
  free[0] -= 10
  with pytest.raises(ValueError, match='Free some, or take another'):
    check('bm25')
  (tmp_path / 'vectors').mkdir()
  (tmp_path / 'vectors' / 'rows').write_bytes(b'0' * 10)
  check('bm25')
