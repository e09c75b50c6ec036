# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over packed rows with a kernel that takes no segment ids.

The rest of the network runs on packed rows. For attention, each document gets
its own row. A kernel such as cuDNN's takes the lengths of rows but no segment
ids; in this way it does no work across documents.
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
  """Returns causal attention within segments, using an `attend` without them.

  The queries, keys and values are those of `attention.causal`, and the segment
  ids those of the layout, whose longest document has T = `length` tokens.
  `attend` is a function such as `attention.causal`, which is called with
  lengths, without segment ids, and with the other options.
  """
  rows, places = layout.starts.shape
  tokens = layout.starts[..., None] + jnp.arange(length)
  tokens = jnp.minimum(tokens, q.shape[1] - 1).reshape(rows, -1)
  inside = jnp.arange(length) < layout.lengths[..., None]
  inside = inside.reshape(-1, length, 1, 1)

  def one_a_row(x):
    x = jnp.take_along_axis(x, tokens[..., None, None], axis=1)
    return jnp.where(inside, x.reshape(-1, length, *x.shape[2:]), 0)

  output = attend(one_a_row(q), one_a_row(k), one_a_row(v),
                lengths=layout.lengths.reshape(-1), **options)
  output = jnp.where(inside, output, 0)  # it may be NaN beyond a document's end
  output = output.reshape(rows, places * length, *output.shape[2:])
  back = jnp.maximum(segment_ids - 1, 0) * length + layout.positions
  output = jnp.take_along_axis(output, back[..., None, None], axis=1)
  return jnp.where(segment_ids[..., None, None] > 0, output, 0)
