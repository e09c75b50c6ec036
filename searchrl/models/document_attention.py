# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Attention of packed rows by a kernel without segment ids.

The rest of the network runs on packed rows. For attention each document gets a
row of its own, so that a kernel such as cuDNN's, which takes the lengths of
rows but no segment ids, does no work across documents.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from searchrl.packing import Layout


def causal(
    q: Float[Array, 'R L H d'],
    k: Float[Array, 'R L K d'],
    v: Float[Array, 'R L K d'],
    *,
    segment_ids: Int[Array, 'R L'],
    layout: Layout,
    length: int,
    attend: Callable[..., Array],
    **options,
) -> Float[Array, 'R L H d']:
  """`attention.causal` with segments, by an `attend` without them.

  Args:
    q, k, v: as in `attention.causal`.
    segment_ids: those of the layout.
    layout: of the documents in the rows.
    length: T, tokens of the longest document.
    attend: `attention.causal`; called without segment ids, with lengths.
    **options: further arguments of `attend`.
  """
  rows, places = layout.starts.shape
  tokens = layout.starts[..., None] + jnp.arange(length)
  tokens = jnp.minimum(tokens, q.shape[1] - 1).reshape(rows, -1)
  inside = jnp.arange(length) < layout.lengths[..., None]
  inside = inside.reshape(-1, length, 1, 1)

  def one_a_row(x):
    x = jnp.take_along_axis(x, tokens[..., None, None], axis=1)
    return jnp.where(inside, x.reshape(-1, length, *x.shape[2:]), 0)

  seen = attend(one_a_row(q), one_a_row(k), one_a_row(v),
                lengths=layout.lengths.reshape(-1), **options)
  seen = jnp.where(inside, seen, 0)  # beyond a document's end may be NaN
  seen = seen.reshape(rows, places * length, *seen.shape[2:])
  back = jnp.maximum(segment_ids - 1, 0) * length + layout.positions
  seen = jnp.take_along_axis(seen, back[..., None, None], axis=1)
  return jnp.where(segment_ids[..., None, None] > 0, seen, 0)
