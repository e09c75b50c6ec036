# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Causal attention of cuDNN over packed rows, for NVIDIA GPUs.

  packed    one call over all rows, given the offset of each document (Hopper)
  padded    each document in a separate row, padded to the longest

Documents are placed end to end in a row. The segment ids number the documents
of a row from 1, in their order. An id that no token has belongs to an empty
document. The id 0 marks the padding at the end of the row, where results are 0.

jax.nn.dot_product_attention has no argument for offsets. `packed` thus uses two
internal primitives of jax. Their arguments are the same in jax 0.10.2 and
0.11.2. In 0.12 they have two more, for a function that changes the scores.
jax's own function around these primitives is not used. In 0.10.2 it multiplies
the offsets of keys by the number of query heads, which is wrong for grouped
queries.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LANES = 128  # tokens; kernels are given rows of a multiple of this length


def packed(
    q: Float[Array, 'B T H d'],
    k: Float[Array, 'B T K d'],
    v: Float[Array, 'B T K d'],
    segment_ids: Int[Array, 'B T'],
    *,
    max_segments: int,
    sliding_window: int | None = None,
) -> Float[Array, 'B T H d']:
  """Returns causal attention within the documents of rows, in one cuDNN call.

  The padding of a row is one more document. All tokens are then in a document,
  so that the kernel reads and writes nothing that is undefined.

  Args:
    q: Queries, rotated but not scaled. H is a multiple of K.
    k: Keys, rotated.
    v: Values.
    segment_ids: Number of each token's document; see the top of this file.
    max_segments: Largest id of a document.
    sliding_window: Number of keys that a query sees, including the key at its
      own position. Default: all keys up to this position.
  """
  length = q.shape[1]
  q, k, v, ids = (padded_row(x) for x in (q, k, v, segment_ids))
  lengths = document_lengths(ids, max_segments)
  padding = ids.shape[1] - lengths.sum(1, keepdims=True)
  lengths = jnp.concatenate([lengths, padding], 1)
  # Without gaps, a segment begins where the one before it ends, also in the
  # next row. Offsets are numbers of elements.
  starts = jnp.pad(jnp.cumsum(lengths), (1, len(ids) - 1), mode='edge')
  starts = starts.at[0].set(0).reshape(len(ids), -1)
  output = _attend(q, k, v, lengths, *(
      starts * (x.shape[2] * x.shape[3]) for x in (q, k)), sliding_window)
  return jnp.where(ids[..., None, None] > 0, output, 0)[:, :length]


def document_lengths(segment_ids: Int[Array, 'B T'], max_segments: int
                    ) -> Int[Array, 'B S']:
  """Returns the number of tokens of each document of each row, [B, S].

  Document s of a row has the tokens with segment id s + 1. S is `max_segments`.
  An id that does not occur has 0 tokens.
  """
  numbers = jnp.arange(1, max_segments + 1)[:, None]
  return jnp.sum(segment_ids[:, None] == numbers, -1, dtype=jnp.int32)


def padded_row(x: Array, unit: int = LANES) -> Array:
  """Returns rows [B T ...] with zeros up to a multiple of `unit` tokens."""
  spare = -x.shape[1] % unit
  return jnp.pad(x, ((0, 0), (0, spare), *[(0, 0)] * (x.ndim - 2)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attend(q, k, v, lengths, q_offsets, k_offsets, sliding_window):
  """Returns causal attention within segments: documents, and a row's padding.

  Args:
    q: Queries, [B T H d].
    k: Keys, [B T K d].
    v: Values, [B T K d].
    lengths: Number of tokens of each of the M segments of each row, [B M].
    q_offsets: Starts of all B M segments as indices of elements of q, one row
      after the other. The end of the last segment fills the array up, [B M+1].
    k_offsets: Starts of the segments as indices of elements of k, likewise.
    sliding_window: Number of keys that a query sees, as in `packed`.
  """
  return _call('fwd', q, k, v, lengths, q_offsets, k_offsets, (),
               sliding_window, is_training=False)[0]


def _forward(q, k, v, lengths, q_offsets, k_offsets, sliding_window):
  given = (q, k, v, lengths, q_offsets, k_offsets)
  output, statistics = _call('fwd', *given, (), sliding_window,
                             is_training=True)
  return output, (given, statistics, output)


def _backward(sliding_window, residuals, gradient):
  given, *results = residuals
  return *_call('bwd', *given, (*results, gradient), sliding_window), *[None] * 3


_attend.defvjp(_forward, _backward)


def _call(direction: str, q, k, v, lengths, q_offsets, k_offsets, results,
          sliding_window, **options: Any) -> list[Array]:
  """Calls cuDNN's attention, or its backward pass, and returns its results.

  `direction` is 'fwd' or 'bwd'. With 'fwd', `results` is () and the output is
  returned. If `is_training`, statistics of each query's softmax are returned,
  too. With 'bwd', `results` is (statistics, output, gradient of the output) and
  the gradients of q, k and v are returned.
  """
  from jax._src.cudnn import fused_attention_stablehlo as cudnn  # internal
  primitive = getattr(cudnn, f'_dot_product_attention_{direction}_p')
  unused = jnp.zeros(0, q.dtype)  # the bias and the tables of pages
  if jax.__version_info__ >= (0, 12):
    options |= dict(score_mod_name=None, score_mod_jaxpr=None)
  return primitive.bind(
      q, k, v, unused, lengths, lengths, q_offsets, k_offsets, unused, unused,
      *results, scale=q.shape[-1] ** -0.5, seed=0, dropout_rate=0.0,
      variadic_args=(False, False), mask_type=cudnn.MaskType.PADDING_CAUSAL,
      layout=cudnn.AttentionLayout.BTNH.value,
      sliding_window_length=sliding_window, **options)


def padded(
    q: Float[Array, 'B T H d'],
    k: Float[Array, 'B T K d'],
    v: Float[Array, 'B T K d'],
    segment_ids: Int[Array, 'B T'],
    *,
    max_segments: int,
    longest: int | None = None,
    sliding_window: int | None = None,
) -> Float[Array, 'B T H d']:
  """Returns causal attention within documents, with one row per document.

  The documents of a packed row are copied to rows of their own for cuDNN, and
  the results are copied back. The result is the same as that of `packed`, but
  this function also runs on GPUs before Hopper.

  Args:
    q: Queries, rotated but not scaled. H is a multiple of K.
    k: Keys, rotated.
    v: Values.
    segment_ids: Number of each token's document; see the top of this file.
    max_segments: Largest id of a document.
    longest: Number of tokens of the longest document. Default: T.
    sliding_window: Number of keys that a query sees, as in `packed`.
  """
  rows, row = segment_ids.shape
  longest = longest or row
  lengths = document_lengths(segment_ids, max_segments)
  starts = jnp.cumsum(lengths, 1) - lengths
  column = jnp.arange(longest)
  tokens = jnp.minimum(starts[..., None] + column, row - 1).reshape(rows, -1)
  inside = (column < lengths[..., None]).reshape(-1, longest, 1, 1)

  def one_a_row(x):
    x = jnp.take_along_axis(x, tokens[..., None, None], axis=1)
    return jnp.where(inside, x.reshape(-1, longest, *x.shape[2:]), 0)

  output = _whole(one_a_row(q), one_a_row(k), one_a_row(v), sliding_window,
                  lengths.reshape(-1))
  output = jnp.where(inside, output, 0)  # it may be NaN beyond a document's end
  output = output.reshape(rows, max_segments * longest, *output.shape[2:])
  place = jnp.maximum(segment_ids - 1, 0)
  back = place * longest + jnp.arange(row) - jnp.take_along_axis(
      starts, place, axis=1)
  # Places of padding are out of range.
  back = jnp.clip(back, 0, max_segments * longest - 1)
  output = jnp.take_along_axis(output, back[..., None, None], axis=1)
  return jnp.where(segment_ids[..., None, None] > 0, output, 0)


def _whole(q, k, v, sliding_window, lengths):
  """Returns cuDNN's causal attention on rows that have one document each.

  cuDNN does not count the token itself in the width of a window. Its gradients
  were NaN for rows of one token, and for rows of 64 tokens more than a multiple
  of 128. Rows are therefore padded to a multiple of 128, without a mask tensor.
  """
  length = q.shape[1]
  window = None if sliding_window is None else (sliding_window - 1, 0)
  return jax.nn.dot_product_attention(
      *(padded_row(x) for x in (q, k, v)), is_causal=True,
      local_window_size=window, query_seq_lengths=lengths,
      key_value_seq_lengths=lengths, implementation='cudnn')[:, :length]
