# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Splash attention (flash attention in Pallas) over packed rows, for TPUs."""

import jax

from searchrl.models.cudnn_attention import LANES, padded_row


def packed(q, k, v, segment_ids, *, sliding_window, block, interpret):
  """Returns causal attention within documents, [B T H d].

  Blocks of keys that causality or a window hides are skipped. Blocks that only
  the limits of documents hide are computed and then masked.

  Args:
    q: Queries, rotated but not scaled, [B T H d].
    k: Keys, rotated, [B T K d].
    v: Values, [B T K d].
    segment_ids: Number of each token's document, [B T]; None: one document.
    sliding_window: Number of keys that a query sees, including the key at its
      own position. None: all keys up to this position.
    block: Number of tokens in a block. None: 512, or the row's length rounded
      up to a multiple of 128 if this is less.
    interpret: Flag that runs the kernel on any device, slowly, for tests.
  """
  # Slow to import.
  from jax.experimental.pallas.ops.tpu import splash_attention as splash
  length, heads, size = q.shape[1:]
  block = block or min(512, -(-length // LANES) * LANES)
  q, k, v = (padded_row(x, block).swapaxes(1, 2) for x in (q, k, v))
  shape = (q.shape[2],) * 2
  mask = (splash.CausalMask(shape) if sliding_window is None else
          splash.LocalMask(shape, (sliding_window - 1, 0), 0))
  sizes = dict.fromkeys((
      'block_q', 'block_kv', 'block_kv_compute', 'block_q_dkv', 'block_kv_dkv',
      'block_kv_dkv_compute', 'block_q_dq', 'block_kv_dq'), block)
  kernel = splash.make_splash_mha_single_device(
      splash.MultiHeadMask([mask] * heads),
      block_sizes=splash.BlockSizes(**sizes), interpret=interpret)
  if segment_ids is not None:
    segment_ids = splash.SegmentIds(*[padded_row(segment_ids, block)] * 2)
  out = jax.vmap(kernel)(q * size ** -0.5, k, v, segment_ids)
  return out.swapaxes(1, 2)[:, :length]
