# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Encodes a corpus into a vector store, with one process or several.

Each process encodes its own shards on its own devices. A shard is either
complete or does not exist, so that a killed build continues where it stopped.
"""

from collections.abc import Callable, Iterator
import pathlib

from jaxtyping import Float
import numpy as np
from searchrl.runtime import processes
from searchrl.runtime import progress as progress_lib
from searchrl.search import corpus as corpora
from searchrl.search.index import dense
from searchrl.search.index import faiss_import
from searchrl.search.index import vector_store

# Maps a range [start, stop) of passages to their vectors, in pieces.
RowsFn = Callable[[int, int], Iterator[Float[np.ndarray, 'N D']]]
BARRIER_SECS = 7 * 24 * 3600  # longest wait for other processes' shards
_PIECE = 2048  # passages that are sorted by length and encoded together


def encoded_rows(corpus: corpora.Corpus, encode: dense.EncodeFn) -> RowsFn:
  """Returns a function from a range of passages to their vectors.

  The function gets start and stop, encodes the passages in pieces, and yields
  the vectors of each piece.
  """

  def rows_of(start, stop):
    for first, last in _pieces(start, stop):
      texts = [corpora.text_of(corpus[i]) for i in range(first, last)]
      yield dense.encoded(encode, texts, 'passage')

  return rows_of


def imported_rows(path: str | pathlib.Path, corpus: corpora.Corpus,
                  encode: dense.EncodeFn, dim: int) -> RowsFn:
  """Returns a function that reads vectors which another program made.

  Args:
    path: File of the vectors; see `faiss_import.open_`.
    corpus: Corpus from which the vectors were made. Its ids are 0, 1, 2, ...
    encode: Encoder that made the vectors. A sample of them is checked.
    dim: Dimension D of the encoder's vectors.

  Raises:
    FileNotFoundError: There is no such file.
    ValueError: The vectors are not those of this corpus and encoder.
  """
  if not corpus.ids_are_positions:
    raise ValueError(
        'a corpus whose vectors are imported must have the ids 0, 1, 2, ... '
        'line by line, for row i is passage i, but this one has others. Give '
        f'the corpus that {path} was made of.')
  imported = faiss_import.open_(path, count=len(corpus), dim=dim)
  faiss_import.check_encoder(imported, corpus, encode)
  return lambda start, stop: (
      imported.read(first, last) for first, last in _pieces(start, stop))


def _pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
  """Yields ranges of at most _PIECE passages that cover [start, stop)."""
  for first in range(start, stop, _PIECE):
    yield first, min(first + _PIECE, stop)


def fill(folder: pathlib.Path, recipe: vector_store.Recipe, rows_of: RowsFn, *,
         progress: bool = True) -> vector_store.Store:
  """Encodes all passages, and writes their vectors to a store on disk.

  The store has shards of some rows each. Each process writes its own shards,
  and skips those that an earlier run has finished.

  Args:
    folder: Directory of the vector store.
    recipe: Origin of the vectors and format of their storage.
    rows_of: Function from a range of passages to their vectors.
    progress: Flag that shows a progress bar in the first process.

  Returns:
    The finished store, once every process has written its shards.
  """
  processes.on_first(
      'recipe', lambda: vector_store.Writer(folder, recipe) and None)
  writer = vector_store.Writer(folder, recipe)
  assigned = range(processes.index(), recipe.shards, processes.count())
  missing = sorted({*assigned}.intersection(writer.missing()))
  left = sum(stop - start for start, stop in map(recipe.span, missing))
  done = 0
  with progress_lib.phase('Encoding', total=left if progress else 0,
                          unit='passage') as reach:
    for shard in missing:
      pieces = []
      for piece in rows_of(*recipe.span(shard)):
        pieces.append(piece)
        done += len(piece)
        reach(done)
      writer.write(shard, np.concatenate(pieces))
  processes.barrier('shards', BARRIER_SECS)
  processes.on_first('manifest', lambda: writer.finish() and None)
  return vector_store.open_(folder)
