# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Encodes the passages of a corpus into a vector store, by one process or many.

Each process encodes shards of its own on its own devices. A shard is either
finished or not there, so that a killed build continues where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import pathlib

from jaxtyping import Float
import numpy as np
import tqdm

from searchrl.runtime import processes
from searchrl.search import corpus as corpora
from searchrl.search.index import dense
from searchrl.search.index import faiss_import
from searchrl.search.index import vector_store

# [start, stop) of the passages -> their rows, in pieces.
RowsFn = Callable[[int, int], Iterator[Float[np.ndarray, 'N D']]]
BARRIER_SECS = 7 * 24 * 3600  # a process waits for the others' shards
_PIECE = 2048  # passages that are sorted by length and encoded together


def encoded_rows(corpus: corpora.Corpus, encode: dense.EncodeFn) -> RowsFn:
  """The rows that an encoder makes of passages."""

  def rows_of(start, stop):
    for first, last in _pieces(start, stop):
      texts = [corpora.text_of(corpus[i]) for i in range(first, last)]
      yield dense.encoded(encode, texts, 'passage')

  return rows_of


def imported_rows(path: str | pathlib.Path, corpus: corpora.Corpus,
                  encode: dense.EncodeFn, dim: int) -> RowsFn:
  """The rows of a file that another program has encoded.

  Args:
    path: see `faiss_import.open_`.
    corpus: the corpus that the rows were made of, with the ids 0, 1, 2, ...
    encode: the encoder that made the rows; a sample of them is checked.
    dim: D, the width of its vectors.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the rows are not those of this corpus and encoder.
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
  for first in range(start, stop, _PIECE):
    yield first, min(first + _PIECE, stop)


def fill(folder: pathlib.Path, recipe: vector_store.Recipe, rows_of: RowsFn, *,
         progress: bool = True) -> vector_store.Store:
  """Writes the shards that are missing, each process its own.

  Args:
    folder: of the vector store.
    recipe: what the vectors are made of.
    rows_of: gives the rows of passages.
    progress: whether the first process shows a progress bar.

  Returns:
    The finished store, once every process has written its shards.
  """
  processes.on_first(
      'recipe', lambda: vector_store.Writer(folder, recipe) and None)
  writer = vector_store.Writer(folder, recipe)
  missing = set(writer.missing())
  own = range(processes.index(), recipe.shards, processes.count())
  todo = [shard for shard in own if shard in missing]
  with tqdm.tqdm(
      total=_passages(recipe, own),
      initial=_passages(recipe, own) - _passages(recipe, todo),
      unit=' passages', disable=not (progress and processes.is_first())) as bar:
    for shard in todo:
      pieces = []
      for piece in rows_of(*recipe.span(shard)):
        pieces.append(piece)
        bar.update(len(piece))
      writer.write(shard, np.concatenate(pieces))
  processes.barrier('shards', BARRIER_SECS)
  processes.on_first('manifest', lambda: writer.finish() and None)
  return vector_store.open_(folder)


def _passages(recipe: vector_store.Recipe, shards) -> int:
  return sum(stop - start for start, stop in map(recipe.span, shards))
