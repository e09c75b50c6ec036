# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The mini-batches of a batch, each packed into rows on the host.

The trajectories of a mini-batch are placed end to end in rows, so that hardly
any padding is computed. The rows are stacked into micro-batches of equal shape.
A batch with B trajectories of at most T tokens, [B T], becomes [M R L]: M
micro-batches of R rows of L tokens. A row has at most S trajectories. Scores
and advantages are computed later and moved into the same rows.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

import jax
from jaxtyping import Bool
import numpy as np

from searchrl import packing
from searchrl.trajectory import Batch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
  """Micro-batches, with fields per token [M R L] and per document [M R S]."""

  layout: packing.Layout
  batch: Batch
  advantages: Any = None  # per token or document; None: not computed yet
  # Experts of the rollouts [M R L X], which replace the router's choices.
  routing: Any = None


@dataclasses.dataclass(frozen=True)
class MiniBatch:
  """Consecutive trajectories of a batch, packed into M micro-batches of R rows.

  The whole mini-batch makes one optimiser step. A row has several trajectories,
  one after the other.
  """

  members: np.ndarray  # indices of the mini-batch's trajectories in the batch
  rows: Rows  # arrays of the rows, [M R ...]
  count: np.int32  # number of the M micro-batches that are not empty
  useful: float  # fraction of the computed tokens that are not padding
  documents: Sequence[Sequence[int]]  # indices of each row's trajectories
  layout: packing.Layout  # layout of the rows, [M * R ...]

  def to_rows(self, tree: Any) -> Any:
    """Returns arrays of the batch, [B] or [B T], moved to the packed rows.

    An array [B T] becomes [M R L], and an array [B] becomes [M R S]: an entry
    for each trajectory of a row. Entries without a trajectory are 0.
    """
    size = self.rows.layout.positions.shape[:2]
    return jax.tree.map(lambda x: x.reshape(*size, *x.shape[1:]),
                        packing.to_rows(tree, self.documents, self.layout))

  def with_scores(self, scores: Mapping[str, Any]) -> 'MiniBatch':
    """Returns a copy whose packed rows have further fields, such as log-probs.

    `scores` maps the name of a field of `Batch` to its array, [B T].
    """
    batch = dataclasses.replace(self.rows.batch, **self.to_rows(dict(scores)))
    return dataclasses.replace(
        self, rows=dataclasses.replace(self.rows, batch=batch))

  def with_advantages(self, advantages: Any) -> 'MiniBatch':
    """Returns a copy whose packed rows have the given advantages.

    They are those of the whole batch: arrays [B] or [B T].
    """
    return dataclasses.replace(self, rows=dataclasses.replace(
        self.rows, advantages=self.to_rows(advantages)))


@dataclasses.dataclass(frozen=True)
class PackedBatch:
  """A batch and its packed mini-batches. Empty mini-batches are left out."""

  batch: Batch  # numpy arrays, [B T]
  minibatches: Sequence[MiniBatch]
  # True for the trajectories that are packed, [B]. The others have no gradient,
  # but count in the loss's denominators.
  trained: Bool[np.ndarray, 'B']

  def from_rows(self, per_token: Sequence[jax.Array]) -> Any:
    """Returns one number per token, in the order of the batch, [B T].

    `per_token` has the numbers of each mini-batch's packed rows, [M R L]. In
    the result, a numpy array, entries without a token in any mini-batch are 0.
    """
    result = np.zeros(self.batch.tokens.shape, np.float32)
    for minibatch, numbers in zip(self.minibatches, per_token, strict=True):
      layout = minibatch.layout
      flat = jax.device_get(numbers).reshape(layout.positions.shape)
      packing.from_rows(flat, minibatch.documents, layout, result)
    return result

  def scored_later(self, score: Callable[['PackedBatch'], np.ndarray]
                  ) -> np.ndarray:
    """Returns `score` of all mini-batches but the first, as one array [B T].

    The entries of the first mini-batch are NaN, because its optimiser step
    computes them itself. `score` maps a PackedBatch to one number per token of
    the batch, as `from_rows` returns them.
    """
    result = score(PackedBatch(self.batch, self.minibatches[1:], self.trained))
    for first in self.minibatches[:1]:
      result[first.members] = np.nan
    return result

  def with_old(self, batch: Batch, per_token: Sequence[jax.Array]) -> Batch:
    """Returns a batch whose missing `old_logprobs` are filled in.

    They are missing if the batch has no such field, or where it has NaN.

    Args:
      batch: Batch to fill in.
      per_token: Log-probs of each mini-batch's packed rows, each an array
        [M R L]: micro-batches, rows and tokens.
    """
    old = self.from_rows(per_token)
    if batch.old_logprobs is not None:
      old = np.where(np.isnan(batch.old_logprobs), old, batch.old_logprobs)
    return dataclasses.replace(batch, old_logprobs=old)

  def with_scores(self, scores: Mapping[str, Any]) -> 'PackedBatch':
    """Returns a copy with further fields in the batch and in the packed rows.

    `scores` maps the name of a field of `Batch` to its array, [B T].
    """
    return PackedBatch(
        dataclasses.replace(self.batch, **scores),
        [minibatch.with_scores(scores) for minibatch in self.minibatches],
        self.trained)


def pack(batch: Batch, count: int,
         trained: Bool[np.ndarray, 'B'] | None = None, **options: Any
        ) -> PackedBatch:
  """Cuts a batch into mini-batches of consecutive trajectories, and packs each.

  A mini-batch whose trajectories have no tokens is left out. If they have
  tokens, but none of them is `trained`, the mini-batch is kept without tokens
  in its rows, so that its optimiser step is still made.

  Args:
    batch: Batch of numpy arrays. `count` must divide its number of rows.
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
    members: Indices of the trajectories to pack. Their number divided by R and
      rounded up is the number M of micro-batches, however full these are.
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
