# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The mini-batches of a batch, each laid into rows once, on the host.

The trajectories of a mini-batch lie end to end in rows, so that hardly any
padding is computed, and the rows are stacked into micro-batches of equal shape:
a batch [B T] becomes [M R L]. What is computed later, scores and advantages, is
laid into the same rows.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import numpy as np

from searchrl import packing
from searchrl.training.train_step import Rows
from searchrl.trajectory import Batch


@dataclasses.dataclass(frozen=True)
class MiniBatch:
  """Consecutive trajectories of a batch, laid into stacked micro-batches."""

  rows: Rows  # [M R ...]
  count: np.int32  # of the M, those that hold anything
  useful: float  # tokens of trajectories over tokens computed
  documents: Sequence[Sequence[int]]  # the batch's trajectories in each row
  layout: packing.Layout  # of the rows, [M * R ...]

  def lay(self, tree: Any) -> Any:
    """Arrays of the whole batch, [B] or [B T], in these rows, [M R ...]."""
    size = self.rows.layout.positions.shape[:2]
    return jax.tree.map(lambda x: x.reshape(*size, *x.shape[1:]),
                        packing.lay(tree, self.documents, self.layout))

  def unlay(self, per_token: jax.Array, out: np.ndarray) -> None:
    """Writes numbers of the rows' tokens, [M R L], into the batch's, [B T]."""
    flat = jax.device_get(per_token).reshape(self.layout.positions.shape)
    packing.unlay(flat, self.documents, self.layout, out)

  def with_batch(self, **fields: np.ndarray) -> 'MiniBatch':
    """With further fields of the batch, [B T] each."""
    batch = dataclasses.replace(self.rows.batch, **self.lay(fields))
    return dataclasses.replace(
        self, rows=dataclasses.replace(self.rows, batch=batch))

  def with_advantages(self, advantages: Any) -> 'MiniBatch':
    """With the advantages of the whole batch."""
    return dataclasses.replace(self, rows=dataclasses.replace(
        self.rows, advantages=self.lay(advantages)))


@dataclasses.dataclass(frozen=True)
class PackedBatch:
  """A batch, and its mini-batches that hold anything."""

  batch: Batch  # [B T], numpy arrays
  minibatches: Sequence[MiniBatch]

  def unlay(self, per_token: Sequence[jax.Array]) -> np.ndarray:
    """Numbers of all mini-batches' tokens as the batch's, [B T]; else 0."""
    result = np.zeros(self.batch.tokens.shape, np.float32)
    for minibatch, numbers in zip(self.minibatches, per_token, strict=True):
      minibatch.unlay(numbers, result)
    return result

  def with_scores(self, scores: dict[str, np.ndarray]) -> 'PackedBatch':
    """With further fields of the batch, [B T] each, here and in the rows."""
    return PackedBatch(
        dataclasses.replace(self.batch, **scores),
        [minibatch.with_batch(**scores) for minibatch in self.minibatches])


def pack(batch: Batch, count: int, **options: int) -> PackedBatch:
  """Cuts a batch into mini-batches of consecutive trajectories.

  Args:
    batch: of numpy arrays; its rows are a multiple of `count`.
    count: mini-batches.
    **options: of `pack_one`.
  """
  lengths = np.asarray(batch.lengths)
  minibatches = [pack_one(batch, lengths, members, **options)
                 for members in np.split(np.arange(len(lengths)), count)]
  return PackedBatch(batch, [m for m in minibatches if m.count])


def pack_one(batch: Batch, lengths: np.ndarray, members: np.ndarray, *,
             microbatch_rows: int, row_length: int, row_places: int
            ) -> MiniBatch:
  """Lays some of a batch's trajectories into rows.

  Args:
    batch: of numpy arrays.
    lengths: of all its trajectories, in tokens.
    members: the indices of those to lay; their number alone decides M.
    microbatch_rows: R.
    row_length: L, tokens a row holds.
    row_places: S, trajectories a row holds.
  """
  documents = [members[row].tolist() for row in packing.first_fit(
      lengths[members], row_length, row_places)]
  size = (-(-len(members) // microbatch_rows), microbatch_rows)
  layout = packing.layout(
      documents, lengths, count=size[0] * size[1], length=row_length,
      places=row_places)
  rows = Rows(layout, packing.lay(batch, documents, layout))
  count = -(-len(documents) // microbatch_rows)
  computed = count * microbatch_rows * row_length
  return MiniBatch(
      rows=jax.tree.map(lambda x: x.reshape(*size, *x.shape[1:]), rows),
      count=np.int32(count), documents=documents, layout=layout,
      useful=float(lengths[members].sum() / max(computed, 1)))
