# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A BM25 index on disk: written block by block, loaded memory-mapped.

The postings of each block are written to disk, so that a build needs memory for
the terms and one block only. A loaded index equals the index of `bm25.build`.
"""

import hashlib
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from searchrl.runtime import atomic_files
from searchrl.search.corpus import Corpus
from searchrl.search.index import bm25
from searchrl.search.index import manifests
from searchrl.search.index import maxscore
from searchrl.trajectory import SearchFn

_FORMAT = 3  # increased whenever files or the terms of `bm25.analyze` change
_BLOCK = 65_536  # texts per block


def build(texts: Sequence[str], folder: pathlib.Path, *, corpus: str,
          k1: float = 0.9, b: float = 0.4) -> dict[str, Any]:
  """Builds a BM25 index of texts, and writes it to a folder.

  An interrupted build leaves the folder unchanged.

  Args:
    texts: Texts of the passages, in the order of the corpus.
    folder: Directory of the index; a new one, or an earlier index, which is
      replaced.
    corpus: Digest of the corpus.
    k1: Parameter of how slowly repeated terms saturate, at least 0.
    b: Weight of a text's length, in [0, 1].

  Returns:
    The content of the folder's manifest.json: the arguments, the numbers of
    texts and of terms, and the checksums of all files.

  Raises:
    ValueError: k1 or b is out of range.
  """
  bm25.check(k1, b)
  with atomic_files.new_folder(folder) as new:
    terms, lengths = _count(texts, new)
    _weigh(new, len(terms), lengths, k1, b)
    (new / 'terms.txt').write_text('\n'.join(terms), encoding='utf-8')
    return manifests.write(new, {
        'format': _FORMAT, 'corpus': corpus, 'k1': k1, 'b': b,
        'count': len(texts), 'terms': len(terms)})


def build_if_changed(corpus: Corpus, folder: pathlib.Path, *,
                     say: Callable[[str], None], **options: float) -> None:
  """Builds the index of a corpus, unless the same one exists.

  Args:
    corpus: Corpus whose texts are indexed.
    folder: Directory of the index; a new one, or an earlier index.
    say: Function that receives a line of text about what was done.
    **options: The k1 and b of `bm25.bm25`.

  Raises:
    ValueError: k1 or b is out of range.
  """
  if (folder / 'manifest.json').exists():
    try:
      load(folder, corpus)
      manifest = manifests.read(folder)
      if all(manifest[name] == value for name, value in options.items()):
        say('bm25: already built')
        return
    except ValueError as error:
      say(f'bm25 is built again: {error}')
  manifest = build(corpus.texts, folder, corpus=corpus.digest, **options)
  say(f'bm25: {manifest["terms"]} terms')


def _count(texts: Sequence[str], folder: pathlib.Path):
  """Writes each block's postings to disk.

  Returns:
    The number of each term, and the length of each text in terms.
  """
  terms: dict[str, int] = {}
  lengths = np.zeros(len(texts), np.int64)
  for start in range(0, len(texts), _BLOCK):
    stop = start + _BLOCK
    rows, passages, counts, lengths[start:stop] = bm25.count_terms(
        texts[start:stop], terms)
    np.savez(folder / f'block_{start:012d}.npz', rows=rows.astype(np.int32),
             passages=(start + passages).astype(np.int32),
             counts=counts.astype(np.int32))
  return terms, lengths


def _weigh(folder: pathlib.Path, size: int, lengths: np.ndarray, k1: float,
           b: float) -> None:
  """Merges the postings of the blocks by term, and computes their impacts."""
  blocks = sorted(folder.glob('block_*.npz'))
  df = np.zeros(size, np.int64)
  for block in blocks:
    df += np.bincount(np.load(block)['rows'], minlength=size)
  starts = np.concatenate([[0], np.cumsum(df)])
  np.save(folder / 'starts.npy', starts)
  out = {name: np.lib.format.open_memmap(
      folder / f'{name}.npy', mode='w+', dtype=dtype, shape=(int(starts[-1]),))
         for name, dtype in (('passages', np.int32), ('impacts', np.float32))}
  idf, norms = bm25.weights(df, lengths, k1, b)
  free = starts[:-1].copy()  # positions of each term's next posting
  for block in blocks:
    part = np.load(block)
    rows, passages, counts = (part[n] for n in ('rows', 'passages', 'counts'))
    first = np.searchsorted(rows, rows)  # the term's first, in the block
    places = free[rows] + np.arange(len(rows)) - first
    out['passages'][places] = passages
    out['impacts'][places] = idf[rows] * counts / (counts + norms[passages])
    free += np.bincount(rows, minlength=size)
    block.unlink()
  for array in out.values():
    array.flush()


def load(folder: str | pathlib.Path, corpus: Corpus) -> bm25.Index:
  """Loads the index of a corpus; checks the postings, which stay on disk.

  Raises:
    FileNotFoundError: There is no index.
    ValueError: The index is damaged, of an older format, or of another corpus.
  """
  folder = pathlib.Path(folder)
  manifest = manifests.read(folder)
  if manifest.get('format') != _FORMAT:
    raise ValueError(f'{folder} must be an index of format {_FORMAT}, but is '
                     f'of {manifest.get("format")}. Build it again.')
  count, digest = manifest['count'], manifest['corpus']
  if digest != corpus.digest or count != len(corpus):
    raise ValueError(
        f'{folder} must be of the corpus that is searched, of digest '
        f'{corpus.digest[:16]}, but is of {digest[:16]}. Build it from this '
        'corpus.')
  manifests.check(folder, manifest)
  terms = (folder / 'terms.txt').read_text(encoding='utf-8')
  files = [(folder / f'{name}.npy').open('rb')
           for name in ('passages', 'impacts')]
  return bm25.Index(
      {term: i for i, term in enumerate(terms.split('\n'))},
      np.asarray(np.load(folder / 'starts.npy', mmap_mode='r')),
      maxscore.Postings.mapped(files, count))


def seal(folder: str | pathlib.Path) -> str:
  """Returns a string that changes when the index in <folder>/bm25 changes.

  It is the index's absolute path with its digest; see `digest` for the errors.
  """
  return f'{pathlib.Path(folder).resolve()} {digest(folder)}'


def digest(folder: str | pathlib.Path) -> str:
  """Returns a digest of the index in <folder>/bm25, wherever that is.

  Raises:
    FileNotFoundError: There is no index.
    ValueError: The manifest is damaged, or a file is missing or truncated.
  """
  manifest = json.dumps(
      manifests.read(pathlib.Path(folder) / 'bm25'), sort_keys=True)
  return hashlib.sha256(manifest.encode()).hexdigest()


def indexed(corpus: Corpus, folder: str | pathlib.Path, *, workers: int = 0
           ) -> SearchFn:
  """Returns a search by the index in <folder>/bm25, with the index's k1 and b.

  Args:
    corpus: Corpus from which the index was built.
    folder: Directory that contains bm25/.
    workers: Number of processes; see `bm25.searcher`.

  Raises:
    FileNotFoundError, ValueError: See `load`; or `workers` is negative.
  """
  index = load(pathlib.Path(folder) / 'bm25', corpus)
  return bm25.searcher(corpus, index, workers=workers)
