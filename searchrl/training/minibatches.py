# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The mini-batches of a batch, each packed into rows on the host.

The trajectories of a mini-batch are placed end to end in rows, so that hardly
any padding is computed. The rows are stacked into micro-batches of equal shape:
a batch [B T] becomes [M R L]. Scores and advantages are computed later and
moved into the same rows.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import jax
from jaxtyping import Bool
import numpy as np

from searchrl import packing
from searchrl.training.train_step import Rows
from searchrl.trajectory import Batch


@dataclasses.dataclass(frozen=True)
class MiniBatch:
  """Consecutive trajectories of a batch, packed into stacked micro-batches."""

  members: np.ndarray  # indices of the mini-batch's trajectories in the batch
  rows: Rows  # arrays of the rows, [M R ...]
  count: np.int32  # number of the M micro-batches that are not empty
  useful: float  # fraction of the computed tokens that are not padding
  documents: Sequence[Sequence[int]]  # indices of each row's trajectories
  layout: packing.Layout  # layout of the rows, [M * R ...]

  def to_rows(self, tree: Any) -> Any:
    """Moves arrays of the batch, [B] or [B T], to rows, [M R ...]."""
    size = self.rows.layout.positions.shape[:2]
    return jax.tree.map(lambda x: x.reshape(*size, *x.shape[1:]),
                        packing.to_rows(tree, self.documents, self.layout))

  def from_rows(self, per_token: jax.Array, out: np.ndarray) -> None:
    """Writes numbers per token of the rows, [M R L], into `out`, [B T]."""
    flat = jax.device_get(per_token).reshape(self.layout.positions.shape)
    packing.from_rows(flat, self.documents, self.layout, out)

  def with_scores(self, scores: Mapping[str, Any]) -> 'MiniBatch':
    """Returns a copy with further fields of the batch, [B T] each."""
    batch = dataclasses.replace(self.rows.batch, **self.to_rows(dict(scores)))
    return dataclasses.replace(
        self, rows=dataclasses.replace(self.rows, batch=batch))

  def with_advantages(self, advantages: Any) -> 'MiniBatch':
    """Returns a copy with the advantages of the batch."""
    return dataclasses.replace(self, rows=dataclasses.replace(
        self.rows, advantages=self.to_rows(advantages)))


@dataclasses.dataclass(frozen=True)
class PackedBatch:
  """A batch and its mini-batches that are not empty."""

  batch: Batch  # numpy arrays, [B T]
  minibatches: Sequence[MiniBatch]
  # True for the trajectories that are packed, [B]. The others have no gradient,
  # but count in the loss's denominators.
  trained: Bool[np.ndarray, 'B']

  def from_rows(self, per_token: Sequence[jax.Array]) -> Any:
    """Returns the mini-batches' numbers per token as one numpy array, [B T].

    Entries without a token in any mini-batch are 0.
    """
    result = np.zeros(self.batch.tokens.shape, np.float32)
    for minibatch, numbers in zip(self.minibatches, per_token, strict=True):
      minibatch.from_rows(numbers, result)
    return result

  def with_scores(self, scores: Mapping[str, Any]) -> 'PackedBatch':
    """Returns a copy with further fields, [B T] each, in batch and rows."""
    return PackedBatch(
        dataclasses.replace(self.batch, **scores),
        [minibatch.with_scores(scores) for minibatch in self.minibatches],
        self.trained)


def pack(batch: Batch, count: int,
         trained: Bool[np.ndarray, 'B'] | None = None, **options: Any
        ) -> PackedBatch:
  """Cuts a batch into mini-batches of consecutive trajectories.

  A mini-batch without tokens is left out. A mini-batch of trajectories with
  tokens that are not trained on has no rows, but is kept: its update is made,
  too.

  Args:
    batch: Batch of numpy arrays. Its rows must be a multiple of `count`.
    count: Number of mini-batches.
    trained: True for the trajectories to pack, [B]. The default is all.
    **options: Options of `pack_one`.
  """
  lengths = np.asarray(batch.lengths)
  if trained is None:
    trained = np.ones(len(lengths), bool)
  packed = np.where(trained, lengths, 0)
  minibatches = [pack_one(batch, packed, members, **options)
                 for members in np.split(np.arange(len(lengths)), count)
                 if lengths[members].any()]
  return PackedBatch(batch, minibatches, trained)


def pack_one(batch: Batch, lengths: np.ndarray, members: np.ndarray, *,
             microbatch_rows: int, pack_length: int, max_segments: int,
             fit_segments: bool = False) -> MiniBatch:
  """Packs some of a batch's trajectories into the rows of one mini-batch.

  Args:
    batch: Batch of numpy arrays.
    lengths: Lengths of all trajectories of the batch, in tokens, [B].
      Trajectories of length 0 are left out.
    members: Indices of the trajectories to pack. Only their number decides M.
    microbatch_rows: Number R of rows per micro-batch.
    pack_length: Number L of tokens that a row holds.
    max_segments: Maximum number S of trajectories in a row.
    fit_segments: Flag that lowers S to the least power of two that is enough.
  """
  documents = [members[row].tolist() for row in packing.first_fit(
      lengths[members], pack_length, max_segments)]
  if fit_segments:
    most = max(map(len, documents), default=1)
    max_segments = min(max_segments, 1 << (most - 1).bit_length())
  size = (-(-len(members) // microbatch_rows), microbatch_rows)
  layout = packing.layout(
      documents, lengths.tolist(), count=size[0] * size[1], length=pack_length,
      places=max_segments)
  to_rows = lambda tree: packing.to_rows(tree, documents, layout)
  rows = Rows(layout, to_rows(dataclasses.replace(batch, routing=None)),
              routing=to_rows(batch.routing))
  count = -(-len(documents) // microbatch_rows)
  computed = count * microbatch_rows * pack_length
  return MiniBatch(
      members=members,
      rows=jax.tree.map(lambda x: x.reshape(*size, *x.shape[1:]), rows),
      count=np.int32(count), documents=documents, layout=layout,
      useful=float(lengths[members].sum() / max(computed, 1)))
