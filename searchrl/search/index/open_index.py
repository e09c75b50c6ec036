# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Dense search by an index on disk: a SearchFn of a folder and a corpus.

A folder has vectors/ and the indexes that were built from them: scann/, hnsw/.
An index of another corpus or another encoder raises an error. Digests identify
both.
"""

from collections.abc import Callable
import functools
import importlib.util
import os
import pathlib
from typing import Any

from searchrl.runtime import processes
from searchrl.search.corpus import Corpus
from searchrl.search.index import approximate
from searchrl.search.index import dense
from searchrl.search.index import exact_device
from searchrl.search.index import exact_host
from searchrl.search.index import vector_store
from searchrl.trajectory import SearchFn

BACKENDS = ('auto', 'exact', 'mesh', 'numpy', 'scann', 'hnsw')
EXACT_ON_HOST = 200_000  # largest number of rows that a CPU searches exactly
_PACKAGES = {'scann': 'scann', 'hnsw': 'faiss'}
# Called with (about, path='current location'), it returns the encoder that an
# index records in `about`, and raises a ValueError if the encoder has changed
# since. Called with path alone, it returns the encoder at the path.
LoadEncoder = Callable[..., dense.Encoder]


def indexed(
    corpus: Corpus,
    folder: str | pathlib.Path,
    *,
    backend: str = 'auto',
    storage: str = 'bfloat16',
    memory_share: float = 0.3,
    min_recall: float = 0.95,
    batch: int = 64,
    visited: int = 0,
    encoder: str = '',
    load_encoder: LoadEncoder | None = None,
) -> SearchFn:
  """Returns a search by an index that configs/build_index.py built.

  Args:
    corpus: Corpus from which the index was built.
    folder: Directory of the index.
    backend: 'exact' (on the devices of this process), 'mesh' (one exact index
      on the devices of all processes, which search together), 'numpy' (exact,
      from disk), 'scann', 'hnsw', or 'auto'; see `choose`.
    storage: Type of exact rows on devices: float32, float16, bfloat16 or int8.
    memory_share: Share of the free memory that 'auto' lets exact rows take.
    min_recall: Least recall@3 of an approximate index that is accepted.
    batch: Number of queries per device call.
    visited: Number of candidates of a search (efSearch), only for 'hnsw'. Its
      recall is then not checked. 0: the number that was tuned at the build.
    encoder: Current location of the encoder. Default: the recorded one.
    load_encoder: Function that loads the encoder; not needed for hashed
      n-grams.

  Raises:
    FileNotFoundError: There is no such index.
    ValueError: The index is damaged or of another corpus or encoder, its recall
      is too low, or an option is out of range.
  """
  store = open_store(folder, corpus)
  if backend == 'auto':
    backend = choose(store, folder, storage=storage, memory_share=memory_share)
    if backend == 'numpy':
      processes.say(_from_disk(folder, _bytes_of_rows(store, storage),
                               memory_share))
  index = _index(str(folder), store.fingerprint, backend, storage, min_recall,
                 batch, visited)
  return dense.searcher(
      corpus, encoder_of(store, corpus, load_encoder, encoder), index)


@functools.lru_cache(maxsize=1)  # shared by training and evaluation
def _index(folder: str, fingerprint: str, backend: str, storage: str,
           min_recall: float, batch: int, visited: int) -> exact_host.Index:
  """Returns the index of a folder's vectors for the options of `indexed`.

  Raises:
    FileNotFoundError: The approximate index was not built.
    ValueError: The index is damaged, its recall is too low, or an option is out
      of range.
  """
  store = vector_store.open_(pathlib.Path(folder) / 'vectors')
  assert store.fingerprint == fingerprint
  if visited and backend != 'hnsw':
    raise ValueError(
        "search.options.visited must be 0 unless backend is 'hnsw', but is "
        f'{visited} with {backend!r}. Leave it out.')
  if backend in ('exact', 'mesh'):
    return exact_device.build(store, dtype=storage, batch=batch,
                              together=backend == 'mesh')
  if backend == 'numpy':
    return exact_host.on_host(store)
  if backend in approximate.KINDS:
    return approximate.open_(backend, store, pathlib.Path(folder) / backend,
                             min_recall=min_recall, **(
                                 {'visited': visited} if visited else {}))
  raise ValueError(f'search.options.backend must be one of '
                   f'{", ".join(BACKENDS)}, but is {backend!r}.')


def open_store(folder: str | pathlib.Path, corpus: Corpus
              ) -> vector_store.Store:
  """Opens the vectors of an index.

  Raises:
    FileNotFoundError: There is no such index.
    ValueError: The vectors are damaged, or of another corpus.
  """
  store = vector_store.open_(pathlib.Path(folder) / 'vectors')
  if store.recipe.corpus != corpus.digest or store.count != len(corpus):
    raise ValueError(
        f'index {folder} must be of the corpus that is searched, which has '
        f'{len(corpus)} passages and digest {corpus.digest[:16]}, but is of '
        f'one with {store.count} and {store.recipe.corpus[:16]}. Set '
        'search.corpus to the file that the index was built of, or build '
        'another index.')
  return store


def encoder_of(store: vector_store.Store, corpus: Corpus,
               load_encoder: LoadEncoder | None, path: str = ''
              ) -> dense.EncodeFn:
  """Returns the encoder of queries, which also made the passages' vectors.

  Raises:
    ValueError: `load_encoder` is missing or refuses the encoder, or a `path` is
      given for hashed n-grams.
  """
  about = store.recipe.encoder
  if about['kind'] == 'ngrams':
    if path:
      raise ValueError(
          'search.options.encoder must be left out for an index of hashed '
          f'n-grams, which has no encoder, but is {path!r}.')
    return dense.ngram_encoder(corpus, dim=about['dim'], n=about['n'])
  if load_encoder is None:
    raise ValueError(
        f'an index of encoder {about["kind"]!r} needs load_encoder, which '
        'loads it. Pass embedder.cached_loader().')
  return load_encoder(about, path=path)


def choose(store: vector_store.Store, folder: str | pathlib.Path, *,
           storage: str, memory_share: float) -> str:
  """Returns the name of the backend that suits this machine.

  It is the first of these that applies:

  1. 'exact', if there are accelerators and the rows take at most `memory_share`
     of their free memory.
  2. 'exact', if there are only CPUs and at most `EXACT_ON_HOST` rows.
  3. 'scann' or 'hnsw', if it is built in `folder` and its package is installed.
  4. 'exact', if there are only CPUs and the rows, in the type `storage`, take
     at most `memory_share` of the free memory.
  5. 'numpy', which reads the rows from disk in each search.

  Raises:
    ValueError: `memory_share` or `storage` is out of range.
  """
  if not 0 < memory_share <= 1:
    raise ValueError('search.options.memory_share must lie in (0, 1], but is '
                     f'{memory_share}.')
  vector_store.check_dtype('storage', storage)
  needed = _bytes_of_rows(store, storage)
  free = exact_device.free_bytes()
  if (store.count <= EXACT_ON_HOST if free is None else
      needed <= memory_share * free):
    return 'exact'
  for kind, package in _PACKAGES.items():
    built = (pathlib.Path(folder) / kind / 'manifest.json').is_file()
    if built and importlib.util.find_spec(package):
      return kind
  if free is None:
    pages = os.sysconf('SC_AVPHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    return 'exact' if needed <= memory_share * pages else 'numpy'
  return 'numpy'


def _bytes_of_rows(store: vector_store.Store, storage: str) -> int:
  return vector_store.Recipe(
      '', {}, store.count, store.dim, storage).disk_bytes


def _from_disk(folder: str | pathlib.Path, size: float, share: float) -> str:
  """Returns a sentence that says why rows are searched slowly, from disk."""
  return (f'The {size / 1e9:.3g} GB of rows of {folder} are searched from disk, '
          f'which is slow, because they take more than {share} of the free '
          "memory. Set search.options.memory_share, or backend='exact' for the "
          "memory all the same, or backend='mesh' to split them over all "
          'processes, or build ScaNN or HNSW over them.')


def rows_on_devices(
    memory: float, hosts: int, *, index: str | pathlib.Path,
    backend: str = 'auto', storage: str = 'bfloat16', memory_share: float = 0.3,
) -> dict[str, float]:
  """Returns the bytes of an index that are on the accelerators of a process.

  Args:
    memory: Memory in bytes of all accelerators of a process.
    hosts: Number of processes.
    index: Folder of the index, as for `indexed`.
    backend: Kind of search, as for `indexed`.
    storage: Dtype of the rows, as for `indexed`.
    memory_share: Largest share of the memory, as for `indexed`.

  Returns:
    A dictionary with one entry, from a description of the rows to their bytes.
    The number of bytes is 0 if there is no such folder, or if 'auto' finds too
    little memory; the description says so. If the backend keeps rows on the
    host, the dictionary is empty.
  """
  if not pathlib.Path(index).is_dir():
    return {f'rows of {index}, which is not here and not counted': 0.0}
  rows = _bytes_of_rows(
      vector_store.open_(pathlib.Path(index) / 'vectors'), storage)
  if backend == 'exact' or (
      backend == 'auto' and rows <= memory_share * memory):
    return {f'rows of {index}, {storage}': float(rows)}
  if backend == 'mesh':
    return {f'rows of {index}, {storage}, split over {hosts} processes':
            rows / hosts}
  if backend != 'auto':
    return {}
  return {f'rows of {index}: not on the devices, where {backend!r} would take '
          f"{memory_share} of the memory at most; backend='mesh' would split "
          f'{rows / 1e9:.3g} GB over {hosts} processes': 0.0}


def describe(folder: str | pathlib.Path) -> dict[str, Any]:
  """Returns facts about the index in a folder, for a run's record.

  They are the 'fingerprint' of the vectors, the 'corpus' digest, the number of
  'passages', and the 'encoder'. For each approximate index in the folder,
  'scann' or 'hnsw' has its recall@3, number of queries and settings.

  Raises:
    FileNotFoundError: There is no manifest.
    ValueError: The store or the manifest of an index is damaged.
  """
  store = vector_store.open_(pathlib.Path(folder) / 'vectors')
  facts = {'fingerprint': store.fingerprint, 'corpus': store.recipe.corpus,
           'passages': store.count, 'encoder': dict(store.recipe.encoder)}
  for kind in approximate.KINDS:
    built = pathlib.Path(folder) / kind
    if (built / 'manifest.json').is_file():
      manifest = approximate.read_manifest(built, store)
      facts[kind] = {key: manifest[key] for key in (
          'recall@3', 'queries', 'settings')}
  return facts
