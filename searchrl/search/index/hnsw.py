# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""HNSW by faiss: builds the file of an index, and opens it on the host.

The default efSearch of faiss, 16, finds some 80 % of the best passages in large
corpora. Here it is always set explicitly: it is tuned when an index is built,
unless a search names another value.

Source: Malkov and Yashunin 2016, arXiv:1603.09320.
"""

import pathlib
from typing import Any

from searchrl.search.index import exact_host
from searchrl.search.index import vector_store

_FILE = 'hnsw.faiss'


def build(source: vector_store.Source, folder: pathlib.Path, *, links: int = 32,
          construction: int = 200, threads: int = 0) -> dict[str, Any]:
  """Writes the file of an index.

  It takes memory for the float32 rows and 8 * links bytes per row. With several
  threads the graph differs a little from build to build.

  Args:
    source: The rows.
    folder: Existing directory for the file.
    links: Number of links per row (M).
    construction: Number of candidates when a row is added (efConstruction).
    threads: Number of threads that add rows; 0: one per core.

  Returns:
    An empty dict: `ladder` and `open_` need nothing from a build.

  Raises:
    ValueError: The package faiss is not installed, or an option is out of
      range.
    OSError: The file cannot be written.
  """
  faiss = exact_host.package('faiss', 'hnsw', 'faiss-cpu')
  if links < 2 or construction < 2:
    raise ValueError(
        'links and construction must be at least 2, but they are '
        f'{links} and {construction}. 32 and 200 suit most corpora.')
  index = faiss.IndexHNSWFlat(source.dim, links, faiss.METRIC_INNER_PRODUCT)
  index.hnsw.efConstruction = construction
  before = faiss.omp_get_max_threads()
  faiss.omp_set_num_threads(threads or before)
  try:
    for start, rows in vector_store.blocks(source, 65_536):
      index.add(vector_store.checked(rows, start))
  finally:
    faiss.omp_set_num_threads(before)
  try:
    faiss.write_index(index, str(folder / _FILE))
  except RuntimeError as error:  # such as a full disk
    raise OSError(f'{folder / _FILE} cannot be written: {error}') from error
  return {}


def ladder(built: dict[str, Any]) -> list[dict[str, int]]:
  """Returns settings of a search to try, from fastest to most thorough.

  Each is a dict with the keyword `visited` (efSearch) of `open_`. `built` is
  not used.
  """
  del built
  return [{'visited': ef} for ef in (32, 64, 128, 256, 512, 1024, 2048)]


def open_(folder: pathlib.Path, built: dict[str, Any],
          source: vector_store.Source, *, visited: int) -> exact_host.Index:
  """Loads an index.

  Args:
    folder: Directory of the file, as in `build`.
    built: Result of `build`, which is not used.
    source: The rows. Only their number and dimension are read.
    visited: Number of candidates that a search keeps (efSearch). It is at
      least k.

  Raises:
    ValueError: The package faiss is not installed, the file is damaged, or it
      has another number of rows or another dimension.
  """
  del built
  faiss = exact_host.package('faiss', 'hnsw', 'faiss-cpu')
  try:
    index = faiss.read_index(str(folder / _FILE))
  except RuntimeError as error:
    raise ValueError(f'{folder / _FILE} must be a whole index, but: {error}. '
                     'Build it again.') from error
  if (index.ntotal, index.d) != (source.count, source.dim):
    raise ValueError(
        f'{folder / _FILE} must hold {source.count} rows of {source.dim}, but '
        f'holds {index.ntotal} of {index.d}. Build it again.')

  def find(vectors, k):
    options = faiss.SearchParametersHNSW(efSearch=max(visited, k))
    return index.search(vectors, k, params=options)

  return exact_host.Index('hnsw', source.count, source.dim, find,
                          is_approximate=True)
