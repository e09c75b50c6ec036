# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Sequence packing: places documents of different lengths end to end in rows.

A document is a sequence of tokens, such as a trajectory. A batch of B documents
that are padded to T tokens, [B T], is mostly padding. Packed into R rows of L
tokens it has almost none. `first_fit` assigns documents to rows, and `to_rows`
moves arrays into those rows on the host. `unpack` moves results back to one
document per row on the device, so that losses do not depend on the packing.

A row has S places, each for one document: the first, the second, and so on.
Places that are not needed are empty.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layout:
  """Positions of documents in R rows of L tokens, at most S per row.

  *M stands for further leading axes, if any, such as that of micro-batches.
  """

  segment_ids: Int[Array, '*M R L']  # number of the place, from 1; 0: padding
  positions: Int[Array, '*M R L']  # index of the token in its document, from 0
  starts: Int[Array, '*M R S']  # index of each place's first token in the row
  lengths: Int[Array, '*M R S']  # tokens of each place; 0: no document


def first_fit(lengths: Sequence[int] | np.ndarray, length: int, places: int
             ) -> list[list[int]]:
  """Assigns documents to rows so that the rows have little padding.

  The longest document is placed first. Each document goes to the first row that
  still has enough tokens and a place, or else to a new row.

  Args:
    lengths: Lengths of the documents, in tokens. Empty documents are left out.
    length: Number L of tokens per row.
    places: Maximum number S of documents per row.

  Returns:
    A list for each row, with the indices of its documents.

  Raises:
    ValueError: A document is longer than a row.
  """
  if max(lengths, default=0) > length:
    raise ValueError(
        'learner.pack_length must be at least the length of the longest '
        f'document, {max(lengths)} tokens, but is {length}. Raise it.')
  rows: list[list[int]] = []
  room: list[int] = []  # tokens that still fit in each row; -1: no place left
  for document in np.argsort(-np.asarray(lengths), kind='stable').tolist():
    size = int(lengths[document])
    if not size:
      break
    row = next((i for i, left in enumerate(room) if left >= size), len(rows))
    if row == len(rows):
      rows.append([])
      room.append(length)
    rows[row].append(document)
    room[row] = -1 if len(rows[row]) == places else room[row] - size
  return rows


def layout(rows: Sequence[Sequence[int]],
           lengths: Sequence[int] | np.ndarray, *,
           count: int, length: int, places: int) -> Layout:
  """Returns the Layout that says where in `count` rows each document is.

  The documents of a row follow each other without gaps, from its first token.

  Args:
    rows: Indices of the documents of each row, from `first_fit`. Further rows
      are empty.
    lengths: Lengths of the documents, in tokens.
    count: Number R of rows.
    length: Number L of tokens per row.
    places: Maximum number S of documents per row.
  """
  shapes = dict(segment_ids=length, positions=length, starts=places,
                lengths=places)
  arrays: dict[str, Any] = {
      name: np.zeros((count, size), np.int32) for name, size in shapes.items()}
  for row, documents in enumerate(rows):
    end = 0
    for place, document in enumerate(documents):
      start, end = end, end + lengths[document]
      arrays['segment_ids'][row, start:end] = place + 1
      arrays['positions'][row, start:end] = np.arange(end - start)
      arrays['starts'][row, place] = start
      arrays['lengths'][row, place] = end - start
  return Layout(**arrays)


def to_rows(tree: Any, rows: Sequence[Sequence[int]], layout: Layout) -> Any:
  """Moves arrays with one entry per document into packed rows, on the host.

  Args:
    tree: Pytree of host arrays of B documents: [B] for one number per document,
      and [B T ...] for one entry per token.
    rows: Indices of the documents of each row, from `first_fit`.
    layout: Layout that `layout` made from these rows.

  Returns:
    An array [R S] for each [B], and an array [R L ...] for each [B T ...].
    Entries without a document are 0.
  """
  documents, token_documents = _documents(rows, layout)

  def move(x):
    x = np.asarray(x)
    moved, inside = (x[documents], layout.lengths) if x.ndim == 1 else (
        x[token_documents, layout.positions], layout.segment_ids)
    inside = inside.reshape(inside.shape + (1,) * (moved.ndim - 2))
    return np.where(inside > 0, moved, x.dtype.type(0))

  return jax.tree.map(move, tree)


def from_rows(x: np.ndarray, rows: Sequence[Sequence[int]], layout: Layout,
              out: np.ndarray) -> None:
  """Writes numbers per token of packed rows back to one document per row.

  It is the inverse of `to_rows`.

  Args:
    x: Numbers per token of R rows of L tokens, [R L].
    rows: Indices of the documents of each row, from `first_fit`.
    layout: Layout that `layout` made from these rows.
    out: Array that is written to, [B T]. Entries that are in no row keep their
      values.
  """
  inside = np.asarray(layout.segment_ids) > 0
  _, documents = _documents(rows, layout)
  out[documents[inside], layout.positions[inside]] = x[inside]


def _documents(rows: Sequence[Sequence[int]], layout: Layout
              ) -> tuple[np.ndarray, np.ndarray]:
  """Returns the index of the document of each place, [R S], and token, [R L].

  A row has S places for documents. Where there is no document, the index is 0.
  """
  documents = np.zeros(layout.starts.shape, np.int64)
  for row, indices in enumerate(rows):
    documents[row, :len(indices)] = indices
  return documents, np.take_along_axis(
      documents, np.maximum(layout.segment_ids - 1, 0), 1)


def unpack(tree: Any, layout: Layout, length: int) -> Any:
  """Moves arrays from packed rows to one document per row, on the device.

  The result has a row for each of the S places of each of the R packed rows.
  The row of an empty place has only zeros in arrays per token. The function can
  be jitted and differentiated.

  Args:
    tree: Pytree of arrays per token, [R L], or per place, [R S]. L must not
      equal S, because the shape decides which of the two an array is.
    layout: Layout of the rows.
    length: Number T of tokens of the longest document.

  Returns:
    An array [R*S T] for each [R L], with 0 after a document's end, and an array
    [R*S] for each [R S].
  """
  column = jnp.arange(length)
  index = jnp.minimum(layout.starts[..., None] + column,
                      layout.positions.shape[1] - 1)
  inside = column < layout.lengths[..., None]

  def move(x: Shaped[Array, 'R *X']) -> Shaped[Array, 'N *Y']:
    if x.shape == layout.starts.shape:
      return x.reshape(-1)
    x = jnp.take_along_axis(x[:, None], index, axis=2)
    return jnp.where(inside, x, jnp.zeros((), x.dtype)).reshape(-1, length)

  return jax.tree.map(move, tree)
