# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Approximate indexes (ScaNN, HNSW) of vectors, with their measured recall.

A build ends with a measurement against exact search, and keeps the fastest
settings that reach the target recall. An index without that measurement, or
with less recall than is required, is not opened.
"""

from collections.abc import Callable, Mapping, Sequence
import pathlib
import tempfile
from typing import Any

from jaxtyping import Float
import numpy as np

from searchrl.runtime import atomic_files
from searchrl.search.index import exact_host
from searchrl.search.index import hnsw
from searchrl.search.index import manifests
from searchrl.search.index import scann as scann_index
from searchrl.search.index import vector_store

KINDS = {'scann': scann_index, 'hnsw': hnsw}
_K = 3  # k of the recall@k that is measured; 3 is also a usual top_k


def build(
    kind: str,
    store: vector_store.Store,
    folder: pathlib.Path,
    queries: Float[np.ndarray, 'Q D'],
    *,
    recall: float = 0.99,
    asked: str = '',
    say: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> dict[str, Any]:
  """Builds an approximate index of stored vectors, and writes it to a folder.

  It tries search settings from the fastest to the most thorough, and keeps the
  first that reach the target recall. An interrupted build leaves the folder
  unchanged.

  Args:
    kind: Kind of index, 'scann' or 'hnsw'.
    store: The vectors.
    folder: Directory of the index; a new one, or an earlier index, which is
      replaced.
    queries: Query vectors with which recall is measured; a thousand are enough.
    recall: Target recall@3: share of the 3 best rows of exact search that the
      index finds. If no settings reach it, the most thorough ones are kept,
      with the recall that they have.
    asked: Digest of the queries' texts, for the manifest.
    say: Function that receives a line of text for each setting that is tried.
    **options: Options of `scann.build` or `hnsw.build`.

  Returns:
    The content of the folder's manifest.json: the settings, their recall@3, all
    trials, the options and the checksums of all files.

  Raises:
    ValueError: There is no such kind, its package is missing, the target or an
      option is out of range, or there is no query.
  """
  module = _module(kind)
  if not 0 < recall <= 1 or not len(queries):
    raise ValueError(
        'recall must lie in (0, 1] and be measured by at least one query, but '
        f'is {recall}, and there are {len(queries)}.')
  with atomic_files.new_folder(folder) as new:
    built = module.build(store, new, **options)
    _, tuned = _tuned(
        kind, built, new, store, queries, recall=recall, say=say)
    return manifests.write(new, {
        'kind': kind, 'of': store.fingerprint, 'built': built, **tuned,
        'tuned_for': [recall, asked], 'options': options})


def build_if_changed(
    kind: str,
    store: vector_store.Store,
    folder: pathlib.Path,
    queries: Float[np.ndarray, 'Q D'],
    *,
    recall: float,
    say: Callable[[str], None],
    asked: str = '',
    **options: Any,
) -> None:
  """Builds and writes an approximate index, unless the folder has it already.

  The existing index is kept if its vectors and options are the same and its
  files are undamaged. Its search is tuned again if the target recall or the
  queries have changed. `say` receives a warning if the index misses its target.
  Errors are those of `build`.

  Args:
    kind: Kind of index, 'scann' or 'hnsw'.
    store: The vectors.
    folder: Directory of the index.
    queries: Query vectors with which recall is measured.
    recall: Target recall@3: share of the 3 best rows that a search finds.
    say: Function that receives a line of text about what is done.
    asked: Digest of the queries' texts.
    **options: Options of `scann.build` or `hnsw.build`.
  """
  manifest = _existing(kind, store, folder, options, say)
  if manifest is None:
    manifest = build(kind, store, folder, queries, recall=recall, asked=asked,
                     say=say, **options)
  elif manifest.get('tuned_for') == [recall, asked] or (
      'tuned_for' not in manifest and manifest['recall@3'] >= recall):  # older
    say(f'{kind}: already built, recall@3 {manifest["recall@3"]:.4f}')
  else:
    say(f'{kind}: already built, and tuned again for recall.target={recall} '
        f'and {len(queries)} queries')
    _, tuned = _tuned(kind, manifest['built'], folder, store, queries,
                      recall=recall, say=say)
    manifest |= tuned | {'tuned_for': [recall, asked]}
    manifests.rewrite(folder, manifest)
  if manifest['recall@3'] < recall:
    say(f'Warning: {kind} reaches recall@3 {manifest["recall@3"]:.4f}, below '
        f'recall.target={recall}.')


def _existing(kind: str, store: vector_store.Store, folder: pathlib.Path,
              options: Mapping[str, Any], say: Callable[[str], None]
             ) -> dict[str, Any] | None:
  """Returns the manifest of an undamaged index with these options, or None."""
  if not (folder / 'manifest.json').exists():
    return None
  try:
    manifest = read_manifest(folder, store)
    if manifest['options'] != options:
      return None
    manifests.check(folder, manifest)
    return manifest
  except ValueError as error:
    say(f'{kind} is built again: {error}')
    return None


def in_memory(
    kind: str,
    source: vector_store.Source,
    queries: Float[np.ndarray, 'Q D'],
    *,
    min_recall: float,
    settings: Mapping[str, int] | None = None,
    **options: Any,
) -> tuple[exact_host.Index, float]:
  """Builds an index in memory.

  Args:
    kind: Kind of index, 'scann' or 'hnsw'.
    source: The rows.
    queries: Query vectors with which recall is measured.
    min_recall: Least recall@3 that is accepted.
    settings: Settings of the search; None: tuned to a recall@3 of .99.
    **options: Options of `scann.build` or `hnsw.build`.

  Returns:
    The index and its recall@3.

  Raises:
    ValueError: The build fails as in `build`, or the recall is below
      `min_recall`.
  """
  module = _module(kind)
  with tempfile.TemporaryDirectory(prefix='searchrl_') as name:
    folder = pathlib.Path(name)  # the loaded index does not need it
    index, tuned = _tuned(
        kind, module.build(source, folder, **options), folder, source, queries,
        recall=0.99, ladder=[settings] if settings else None)
  _check_recall(kind, tuned['recall@3'], min_recall)
  return index, tuned['recall@3']


def _tuned(kind: str, built: dict[str, Any], folder: pathlib.Path,
           source: vector_store.Source, queries: Float[np.ndarray, 'Q D'], *,
           recall: float, say: Callable[[str], None] = lambda text: None,
           ladder: Sequence[Mapping[str, int]] | None = None
          ) -> tuple[exact_host.Index, dict[str, Any]]:
  """Returns an index with the first settings that reach a recall, and facts.

  The settings of `ladder`, or else of the kind, are tried in order. If none of
  them reaches the recall, the last are used. The facts are the 'settings',
  their 'recall@3', the number of 'queries', and all 'measured' settings.
  """
  module, measured = _module(kind), []
  recall_of = exact_host.recall_of(source, queries, min(_K, source.count))
  for settings in ladder or module.ladder(built):
    index = module.open_(folder, built, source, **settings)
    _, ids = index(queries, _K)
    measured.append({**settings, 'recall@3': recall_of(ids)})
    say(f'{kind} {settings}: recall@3 {measured[-1]["recall@3"]:.4f}')
    if measured[-1]['recall@3'] >= recall:
      break
  return index, {'settings': settings, 'recall@3': measured[-1]['recall@3'],
                 'queries': len(queries), 'measured': measured}


def read_manifest(folder: pathlib.Path, store: vector_store.Store
                 ) -> dict[str, Any]:
  """Returns the manifest of an index of the store's vectors.

  The manifest is written last, so an index that has one was built to its end.

  Raises:
    FileNotFoundError: There is no manifest.
    ValueError: The manifest is damaged, has no recall, or is of other vectors
      than the store's, or a file is missing or truncated.
  """
  manifest = manifests.read(folder)
  recall, fingerprint = manifest.get('recall@3'), manifest.get('of')
  if not (isinstance(recall, float) and
          isinstance(manifest.get('settings'), dict)):
    raise ValueError(f'{folder} must have a measured recall@3, but has '
                     f'{recall!r}. Build it again.')
  if fingerprint != store.fingerprint:
    raise ValueError(
        f'{folder} must be built of the vectors beside it, whose fingerprint '
        f'is {store.fingerprint[:16]}, but is of {str(fingerprint)[:16]}. '
        'Build it again.')
  return manifest


def open_(kind: str, store: vector_store.Store, folder: pathlib.Path, *,
          min_recall: float, **settings: int) -> exact_host.Index:
  """Loads an index with the settings to which it was tuned.

  Args:
    kind: Kind of index, 'scann' or 'hnsw'.
    store: The vectors.
    folder: Directory of the index.
    min_recall: Least recall@3 that the tuned settings must have had.
    **settings: Settings that replace the tuned ones. Their recall has not been
      measured, and none is required.

  Raises:
    FileNotFoundError: There is no manifest.
    ValueError: The manifest is not valid (see `read_manifest`), a file has
      changed since it was written, the recall is below `min_recall`, or scann
      or faiss is not installed.
  """
  module = _module(kind)
  manifest = read_manifest(folder, store)
  manifests.check(folder, manifest)
  if not settings:
    _check_recall(str(folder), manifest['recall@3'], min_recall)
  return module.open_(
      folder, manifest['built'], store, **manifest['settings'] | settings)


def _check_recall(name: str, recall: float, least: float) -> None:
  if not recall >= least:
    raise ValueError(
        f'recall@3 of {name} must be at least min_recall={least}, but was '
        f'measured as {recall:.4f}. Build it with more leaves or links, take '
        "backend='exact', or lower search.options.min_recall.")


def _module(kind: str):
  if kind not in KINDS:
    raise ValueError(f'an approximate index must be one of {", ".join(KINDS)}, '
                     f'but is {kind!r}.')
  return KINDS[kind]
