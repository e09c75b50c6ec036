# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""ScaNN: builds the files of an index, and opens them on the host.

The mean is subtracted from the rows. Each row is then put into two leaves,
which are clusters of rows (SOAR), and coded in 4 bits per 2 dimensions (AH). A
search finds rows by these codes, and ranks them by int8 rows and then by the
original rows, which are read from disk. More than `part_rows` rows become
several parts, which are built one after another and all searched.

Sources: Guo et al. 2020, arXiv:1908.10396 (AH); Sun et al. 2023,
  arXiv:2404.00774 (SOAR).
"""

import ctypes
import functools
import math
import os
import pathlib
from typing import Any

from jaxtyping import Float, Int
import numpy as np

from searchrl.search.index import exact_host
from searchrl.search.index import vector_store

_ROWS = 'rows.npy'  # file of the source's rows, which the last ranking reads
_RERANKED = 32  # least number of rows per query that are ranked last
_BY_ONE_THREAD = 1_000_000  # largest number of rows built by one thread
_TREE_FROM = 4096  # rows from which a part has a tree; fewer are all compared
_MOST = 1e12  # largest value: ScaNN ends the process where squares overflow
_SAMPLE = 120  # rows per leaf from which leaves and codes are learned
_FLAGS = {  # ScaNN's switches, and the CPU features that each needs
    '_ZN14research_scann14flags_internal15should_use_avx2E': {'avx2', 'fma'},
    '_ZN14research_scann14flags_internal17should_use_avx512E': {
        'avx512f', 'avx512dq', 'avx512bw'}}


def _library():
  """Imports ScaNN, which is slow to import and exists for Linux only."""
  scann = exact_host.package('scann', 'scann',
                             'scann (Linux, Python up to 3.13)')
  library = getattr(scann.scann_ops_pybind, 'scann_pybind', None)
  if library is not None:
    _use_cpu(library.__file__)
  return scann


@functools.cache
def _use_cpu(path: str, cpuinfo: str = '/proc/cpuinfo') -> tuple[str, ...]:
  """Lets ScaNN use AVX2 and AVX-512 if the CPU has them.

  In ScaNN 1.4.0 to 1.4.2 from PyPI, the function that tests for a CPU feature
  is empty and returns false, so that searches use only SSE4. The wheel exports
  the variables that hold the test's results. This function sets them to true
  for the CPU's features, and returns their names. A wheel without these
  variables is not changed.
  """
  try:
    lines = pathlib.Path(cpuinfo).read_text().splitlines()
  except OSError:
    return ()
  features = next((set(line.split()) for line in lines
                   if line.startswith('flags')), set())
  library, used = ctypes.CDLL(path), []
  for name, needed in _FLAGS.items():
    if needed <= features and hasattr(library, name):
      ctypes.c_bool.in_dll(library, name).value = True
      used.append(name)
  return tuple(used)


def available() -> bool:
  """Returns whether ScaNN can be imported here."""
  try:
    return bool(_library())
  except ValueError:
    return False


def build(
    source: vector_store.Source,
    folder: pathlib.Path,
    *,
    leaves: int = 0,
    part_rows: int = 2_500_000,
    soar: float = 1.5,
) -> dict[str, Any]:
  """Builds an index part by part, and writes its files.

  A part needs about three times the memory of its rows in float32. Parts of up
  to a million rows are built by one thread, with the same result every time.
  Larger parts are built by all threads, and the last bits of the result may
  differ on some CPUs.

  Args:
    source: Vectors of the passages.
    folder: Existing empty directory for the files.
    leaves: Number of leaves of a part. 0: three times the square root of the
      part's number of rows.
    part_rows: Largest number of rows of a part.
    soar: Lambda of SOAR, which assigns each row to a second leaf. With a larger
      value, the error of that leaf is more orthogonal to that of the first.

  Returns:
    Facts for `open_` and `ladder`, as JSON values: the 'edges' of the parts in
    row numbers, the number of 'leaves' of each part, and the dtype of 'rows'.

  Raises:
    ValueError: ScaNN is not installed, an option is out of range, or a row has
      a value too large for ScaNN.
  """
  _library()
  if leaves < 0 or part_rows < 1 or not soar > 0:
    raise ValueError(
        'leaves must be at least 0, part_rows at least 1 and soar above 0, but '
        f'they are {leaves}, {part_rows} and {soar}.')
  count = -(-source.count // part_rows)
  edges = [source.count * i // count for i in range(count + 1)]
  stored = np.lib.format.open_memmap(
      folder / _ROWS, mode='w+', dtype=source.exact_dtype,
      shape=(source.count, source.dim))
  tree_leaves = []
  for number, (start, stop) in enumerate(zip(edges, edges[1:])):
    rows = np.empty((stop - start, source.dim), np.float32)
    for first in range(start, stop, 65_536):
      last = min(first + 65_536, stop)
      block = _checked(source.read(first, last), first)
      stored[first:last] = block
      rows[first - start:last - start] = block - source.mean
    tree_leaves.append(
        _build_part(rows, folder / f'part_{number:03d}', leaves, soar))
  stored.flush()
  return {'edges': edges, 'leaves': tree_leaves, 'rows': stored.dtype.name}


def _checked(rows: Float[np.ndarray, 'N D'], first: int
            ) -> Float[np.ndarray, 'N D']:
  """Returns the rows, after a check of their values.

  Raises:
    ValueError: A row has a value that is too large for ScaNN, or not finite.
      The error names the first such row. The number of rows[0] is `first`.
  """
  rows = vector_store.checked(rows, first)
  largest = np.maximum(rows.max(1), -rows.min(1))
  if largest.max() > _MOST:
    row = int(np.argmax(largest > _MOST))
    raise ValueError(
        f'vectors must have no value beyond {_MOST:g} for ScaNN, but that of '
        f'passage {first + row}, counted from 0, has {largest[row]:.3g}. Check '
        "the encoder and its weights, or take another backend, such as 'exact'."
    )
  return rows


def _build_part(rows: Float[np.ndarray, 'N D'], folder: pathlib.Path,
                leaves: int, soar: float) -> int:
  """Builds and writes a part of the index.

  Returns:
    The number of leaves of the part. It is 0 for few rows, or fewer than 4
    dimensions: all rows are then compared.
  """
  scann = _library()
  builder = scann.scann_ops_pybind.builder(
      rows, min(_RERANKED, len(rows)), 'dot_product').set_n_training_threads(
          1 if len(rows) <= _BY_ONE_THREAD else os.cpu_count())
  if len(rows) < _TREE_FROM or rows.shape[1] < 4:
    leaves = 0  # too few values to learn a tree or codes from
    builder = builder.score_brute_force()
  else:
    leaves = min(leaves or round(3 * math.sqrt(len(rows))), len(rows) // 4)
    sample = min(_SAMPLE * leaves, len(rows))
    builder = builder.tree(
        leaves, max(leaves // 20, 1), training_sample_size=sample,
        soar_lambda=soar, random_init=False)  # True changes files every time
    builder = builder.score_ah(
        2, anisotropic_quantization_threshold=.2, training_sample_size=sample)
    builder = builder.reorder(
        100, quantize=scann.ReorderType.INT8)
  folder.mkdir()
  builder.build().serialize(str(folder), relative_path=True)
  return leaves


def ladder(built: dict[str, Any]) -> list[dict[str, float | int]]:
  """Returns settings of a search to try, from fastest to most thorough.

  Each is a dict with the keywords `share` and `candidates` of `open_`. `built`
  is the result of `build`.
  """
  if not any(built['leaves']):
    return [{'share': 1.0, 'candidates': _RERANKED}]
  return [{'share': share, 'candidates': candidates} for share, candidates in (
      (.01, 100), (.015, 150), (.02, 150), (.025, 150), (.03, 200), (.04, 200),
      (.06, 200), (.1, 300), (.2, 400), (.4, 600), (1.0, 1000))]


def open_(folder: pathlib.Path, built: dict[str, Any],
          source: vector_store.Source, *, share: float, candidates: int
          ) -> exact_host.Index:
  """Loads an index; the rows for the last ranking stay on disk.

  Args:
    folder: Directory of the files, as in `build`.
    built: Result of `build`.
    source: Source of the rows; only their number and dimension are used.
    share: Share of each part's leaves that is searched.
    candidates: Number of rows per query and part that are ranked again by their
      int8 rows. The best of these are then ranked by the rows on disk.

  Raises:
    ValueError: ScaNN is not installed, an older version built the index, or
      files are missing, truncated or not our own.
    FileNotFoundError: There is no file of the rows.
  """
  scann = _library()
  if 'rows' not in built:
    raise ValueError(f'{folder} must be an index of this version, but an older '
                     'one has built it. Build it again.')
  searchers = []
  for number in range(len(built['leaves'])):
    part = folder / f'part_{number:03d}'
    if (part / 'scann_docids.pkl').exists():
      raise ValueError(
          f'{part} must hold files of ours alone, but holds scann_docids.pkl, '
          'which could run code. Build it again.')
    try:
      searchers.append(scann.scann_ops_pybind.load_searcher(str(part)))
    except Exception as error:  # the library raises exceptions of many kinds
      raise ValueError(f'{part} must be a whole index, but: {error}. Build it '
                       'again.') from error
  rows = np.load(folder / _ROWS, mmap_mode='r')
  edges = built['edges']
  parts = list(zip(searchers, edges, edges[1:], built['leaves']))

  def find(vectors, k):
    ids = [_search(*part, vectors, max(_RERANKED, k), share, candidates)
           for part in parts]
    return _rank(rows, vectors, np.concatenate(ids, 1), k)

  return exact_host.Index('scann', source.count, source.dim, find,
                          is_approximate=True)


def _search(searcher, start: int, stop: int, leaves: int, vectors, k: int,
            share: float, candidates: int) -> Int[np.ndarray, 'B K']:
  """Returns the numbers of the best rows of a part; -1: no row was found."""
  k = min(k, stop - start)
  options = dict(final_num_neighbors=k)
  if leaves:
    options.update(pre_reorder_num_neighbors=max(candidates, k),
                   leaves_to_search=max(1, round(leaves * share)))
  ids, scores = searcher.search_batched(vectors, **options)
  return np.where(np.isfinite(scores), ids.astype(np.int64) + start, -1)


def _rank(rows: Float[np.ndarray, 'N D'], vectors: Float[np.ndarray, 'B D'],
          ids: Int[np.ndarray, 'B M'], k: int):
  """Returns float32 scores and ids of the k best of `ids`; -1 is no row."""
  scores = np.empty(ids.shape, np.float32)
  for row_scores, vector, row_ids in zip(scores, vectors, ids):
    candidates = rows[np.maximum(row_ids, 0)]
    row_scores[:] = candidates.astype(np.float32, copy=False) @ vector
  return exact_host.merge(np.where(ids >= 0, scores, -np.inf), ids, k)
