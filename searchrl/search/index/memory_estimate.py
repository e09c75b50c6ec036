# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""An estimate, before a build, of an index's size on disk and in memory."""

from collections.abc import Sequence
import pathlib
import shutil

import numpy as np

from searchrl.search.index import vector_store

_POSTINGS = 60  # postings per passage
# Distinct terms per passage in Lucene's index of wiki-18.
_TERMS = 5_345_463 / 21_015_324
_TERM_BYTES = 120 + 8  # measured in CPython 3.11's dict, and 8 for its position


def estimate(recipe: vector_store.Recipe, kinds: Sequence[str], *,
             part_rows: int, links: int, has_vectors: bool = True) -> str:
  """Returns text with the sizes of the vectors and of each index, in GiB.

  Args:
    recipe: Recipe of the vectors.
    kinds: Kinds of index to estimate: any of 'scann', 'hnsw' and 'bm25'.
    part_rows: Number of rows that ScaNN holds in memory at once.
    links: Number of links per row of HNSW.
    has_vectors: True if vectors are written.
  """
  lines = [f'{recipe.count} passages x {recipe.dim}, {recipe.dtype}: '
           f'{_gib(recipe.disk_bytes)} on disk in {recipe.shards} shards'
          ] if has_vectors else []
  for kind in kinds:
    size = index_bytes(kind, recipe, links)
    if kind == 'bm25':
      lines.append(f'bm25: about {_gib(size)} on disk while it is built; '
                   + _bm25_in_memory(recipe.count))
      continue
    part = min(part_rows, recipe.count)
    memory = 3 * 4 * part * recipe.dim if kind == 'scann' else size
    lines.append(f'{kind}: {_gib(size)} on disk, about {_gib(memory)} of '
                 'memory while it is built')
  return '\n'.join(lines)


def _bm25_in_memory(count: int) -> str:
  """Returns a text about the memory that a search by BM25 takes.

  A process that searches holds the terms with the positions of their postings,
  and the offsets of the corpus's lines. It adds up scores in float64, and so
  does each worker. The postings are mapped, so that all processes share them.
  """
  held = _TERMS * count * _TERM_BYTES + 8 * count
  return (f'a process that searches it holds {_gib(held + 8 * count)}, each of '
          f'its workers {_gib(8 * count)}, and all of them share '
          f'{_gib(_POSTINGS * 8 * count)} of postings')


def index_bytes(kind: str, recipe: vector_store.Recipe, links: int) -> int:
  """Returns the bytes on disk of an index of a kind, without the vectors."""
  exact = np.dtype(recipe.exact_dtype).itemsize
  row_bytes = {
      # 4-bit codes for 2 dimensions, twice (SOAR); int8 rows and exact rows.
      'scann': recipe.dim * (2 * .25 + 1 + exact) + 8,
      'hnsw': recipe.dim * 4 + 8 * links + 16,  # rows and the graph
      'bm25': _POSTINGS * 20,  # in spilled blocks and in the index
  }[kind]
  return int(row_bytes * recipe.count)


def check_disk(recipe: vector_store.Recipe, kinds: Sequence[str],
               folder: pathlib.Path, *, links: int, has_vectors: bool = True
              ) -> None:
  """Raises a ValueError if the disk of `folder` is too small.

  Vectors and indexes that are already written need no further space. The
  arguments are those of `estimate`.
  """
  needed = sum(index_bytes(kind, recipe, links) for kind in kinds
               if not (folder / kind / 'manifest.json').exists())
  if has_vectors and not (folder / 'vectors' / 'manifest.json').exists():
    written = sum(file.stat().st_size for file in (
        folder / 'vectors').rglob('*') if file.is_file())
    needed += max(recipe.disk_bytes - written, 0)
  free = shutil.disk_usage(folder).free
  if needed > free:
    raise ValueError(
        f'{folder} must have room for {_gib(needed)}, but its disk has '
        f'{_gib(free)}. Free some, or take another --workdir.')


def _gib(size: float) -> str:
  return f'{size / 2**30:.2f} GiB'
