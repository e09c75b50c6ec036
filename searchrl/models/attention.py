# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Attention in four implementations: a reference and three faster kernels.

  xla           the reference: float32 softmax, on every device
  cudnn         flash attention on NVIDIA GPUs since Hopper, in half precision
  cudnn_padded  the same on older GPUs, with each document in a row of its own
  splash        flash attention on TPUs, in Pallas

`causal` is for whole rows (training, scoring), `grouped` for any mask, and
`blockwise` for a cache. `resolve` chooses an implementation. It tests all but
the reference with `self_test` before a run uses them.

This file avoids two traps:
- `is_causal` of jax.nn.dot_product_attention aligns its mask top-left, which is
  wrong for a chunk against a longer cache. `causal` rejects unequal lengths.
- The log-sum-exp of that function is rounded to half precision. `blockwise`
  computes sums of its own in float32.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from searchrl.models import cudnn_attention
from searchrl.models import kernel_checks
from searchrl.models import splash_attention

IMPLEMENTATIONS = ('xla', 'cudnn', 'cudnn_padded', 'splash')
_CUDNN = ('cudnn', 'cudnn_padded')
_HALF = ('bfloat16', 'float16')
_MASKED = -1e30  # score of a hidden key; finite, so that no row becomes NaN
_LOG2_E = 1.4426950408889634
_LANES = cudnn_attention.LANES
_WAY_OUT = "Set model.attention to 'xla', or leave it 'auto'."


def visible(
    query_positions: Int[Array, '*B T'],
    key_positions: Int[Array, '*B S'],
    sliding_window: int | None,
) -> Bool[Array, '*B T S']:
  """Returns True where a query may attend to a key, [*B T S].

  A query sees the keys at its own position and before. With a sliding window of
  n positions, it sees only keys at its own and the n - 1 positions before.
  """
  distance = query_positions[..., :, None] - key_positions[..., None, :]
  mask = distance >= 0
  return mask if sliding_window is None else mask & (distance < sliding_window)


def grouped(
    q: Float[Array, 'B T H d'],
    k: Float[Array, 'B K S d'],
    v: Float[Array, 'B K S d'],
    visible: Bool[Array, 'B T S'],
) -> Float[Array, 'B T H d']:
  """Returns softmax attention with grouped queries and float32 scores.

  The shapes have B rows, T queries, S keys, H query heads, K key-value heads
  and head size d. `visible` is True where a query may attend to a key. The
  queries that share a KV head are folded into the length axis, so that every
  key is read once. A query that sees no keys gets the mean of v.
  """
  rows, length, heads, size = q.shape
  groups = heads // k.shape[1]
  q = q.reshape(rows, length, k.shape[1], groups, size)
  q = q.transpose(0, 2, 3, 1, 4).reshape(rows, k.shape[1], groups * length,
                                         size)
  scores = jnp.einsum('bkqd,bksd->bkqs', q, k,
                      preferred_element_type=jnp.float32) * size ** -0.5
  scores = scores.reshape(rows, k.shape[1], groups, length, -1)
  scores = jnp.where(visible[:, None, None], scores, _MASKED)
  weights = jax.nn.softmax(scores, -1).astype(v.dtype)
  weights = weights.reshape(rows, k.shape[1], groups * length, -1)
  output = jnp.einsum('bkqs,bksd->bkqd', weights, v)
  output = output.reshape(rows, k.shape[1], groups, length, size)
  return output.transpose(0, 3, 1, 2, 4).reshape(rows, length, heads, size)


def blockwise(
    q: Float[Array, 'B T H d'],
    block_at: Callable[[Int[Array, '']], tuple[Array, Array]],
    positions: Int[Array, 'B T'],
    blocks: Int[Array, ''],
    block: int,
    sliding_window: int | None = None,
) -> Float[Array, 'B T H d']:
  """Returns causal softmax attention over the filled blocks of a KV cache.

  Partial softmaxes are combined from the first block to the last. A block that
  a query does not see adds exact zeros. The number of blocks therefore changes
  no bit of the result.

  Args:
    q: Queries.
    block_at: Function from a block's index to its keys and values, [B K W d].
    positions: Positions of the queries. A query at -1 has no keys; its result
      is 0.
    blocks: Number of filled blocks, traced.
    block: Number of tokens in a block, W.
    sliding_window: Number of keys that a query sees, including the key at its
      own position. Default: all keys up to this position.
  """
  rows, length, heads, size = q.shape
  kv_heads = jax.eval_shape(block_at, blocks)[0].shape[1]
  groups = heads // kv_heads
  q = q.reshape(rows, length, kv_heads, groups, size).transpose(0, 2, 3, 1, 4)
  q = q.reshape(rows, kv_heads, groups * length, size)
  positions = jnp.tile(positions, (1, groups))

  def add(i, carry):
    largest, total, output = carry
    k, v = block_at(i)
    scores = jnp.einsum('bkqd,bksd->bkqs', q, k,
                        preferred_element_type=jnp.float32)
    is_visible = visible(positions, i * block + jnp.arange(block),
                    sliding_window)[:, None]
    scores = jnp.where(is_visible, scores * (_LOG2_E * size ** -0.5), _MASKED)
    # The maximum is rounded up to a whole exponent of two. Rescaling is then
    # exact, even if a compiler fuses a product and a sum into one rounding.
    larger = jnp.maximum(largest, jnp.ceil(scores.max(-1, keepdims=True)))
    weights = jnp.where(is_visible, jnp.exp((scores - larger) / _LOG2_E), 0)
    shrink = _power_of_two(largest - larger)
    return (larger, total * shrink + weights.sum(-1, keepdims=True),
            output * shrink + jnp.einsum('bkqs,bksd->bkqd', weights.astype(
                v.dtype), v, preferred_element_type=jnp.float32))

  nothing = jnp.zeros((*q.shape[:3], 1))
  _, total, output = jax.lax.fori_loop(0, blocks, add, (
      nothing + _MASKED, nothing, jnp.zeros(q.shape)))
  output = (output / jnp.where(total == 0, 1, total)).astype(q.dtype)
  output = output.reshape(rows, kv_heads, groups, length, size)
  return output.transpose(0, 3, 1, 2, 4).reshape(rows, length, heads, size)


def _power_of_two(exponent: Float[Array, '*B']) -> Float[Array, '*B']:
  """Returns exactly 2 ** max(exponent, -126), for whole exponents up to 0."""
  biased = jnp.maximum(exponent, -126.0).astype(jnp.int32) + 127
  return jax.lax.bitcast_convert_type(biased << 23, jnp.float32)


def causal(
    q: Float[Array, 'B T H d'],
    k: Float[Array, 'B T K d'],
    v: Float[Array, 'B T K d'],
    *,
    segment_ids: Int[Array, 'B T'] | None = None,
    max_segments: int | None = None,
    longest: int | None = None,
    sliding_window: int | None = None,
    implementation: str = 'xla',
    block: int | None = None,
    sharding: NamedSharding | None = None,
    interpret: bool = False,
) -> Float[Array, 'B T H d']:
  """Returns causal attention over whole rows, within each row's documents.

  Padding is on the right, so that no token attends to it. Results at padding
  are undefined, except that cuDNN gives 0 if `segment_ids` marks the padding.

  Args:
    q: Queries, rotated but not scaled. H is a multiple of K.
    k: Keys, rotated.
    v: Values.
    segment_ids: Document of each token in a packed row; equal ids are one
      document. For cuDNN, ids count from 1 and 0 is padding, as in
      `packing.Layout`. None: each row is one document.
    max_segments: Maximum number of documents in a row. Only cuDNN uses it, and
      needs it if there are segment_ids.
    longest: Number of tokens of the longest document, only for 'cudnn_padded'.
      Default: T.
    sliding_window: Number of keys that a query sees, including the key at its
      own position. Default: all keys up to this position.
    implementation: One of IMPLEMENTATIONS. 'auto' is not one of them; `resolve`
      replaces it.
    block: Block size in tokens. For 'xla', it is the number of queries that are
      computed at a time, so that [B H T T] never exists. The default is 128, or
      an eighth of a row that has more than 1024 tokens. For 'splash', it is a
      multiple of 128. The default is 512, or the length of a shorter row,
      rounded up.
    sharding: Sharding of q, k and v, only for 'cudnn' and 'splash', which the
      compiler cannot partition. The axes of length and d must not be split. The
      mesh axis of the heads must divide K.
    interpret: Flag that runs 'splash' on any device, slowly, for tests.

  Returns:
    The attention's output, with the shape and the dtype of q.

  Raises:
    ValueError: An argument is invalid, or the implementation cannot do this,
      such as float32 with cuDNN. No other implementation takes over.
  """
  _check(q, k, implementation, block)
  if sliding_window is not None and sliding_window >= q.shape[1]:
    sliding_window = None
  if implementation == 'xla':
    return _xla(q, k, v, segment_ids, sliding_window, block)
  if implementation == 'splash':
    return _on_shards(functools.partial(
        splash_attention.packed, sliding_window=sliding_window, block=block,
        interpret=interpret), sharding)(q, k, v, segment_ids)
  if segment_ids is None:  # cuDNN needs ids: a row is one document
    segment_ids, max_segments = jnp.ones(q.shape[:2], jnp.int32), 1
  if max_segments is None:
    raise ValueError('cudnn needs max_segments beside segment_ids.')
  if implementation == 'cudnn_padded':
    return cudnn_attention.padded(
        q, k, v, segment_ids, max_segments=max_segments, longest=longest,
        sliding_window=sliding_window)
  return _on_shards(functools.partial(
      cudnn_attention.packed, sliding_window=sliding_window,
      max_segments=max_segments), sharding)(q, k, v, segment_ids)


def _on_shards(attend: Callable[..., Array], sharding: NamedSharding | None
              ) -> Callable[..., Array]:
  """Returns `attend`, split over devices by `sharding` unless it is None."""
  if sharding is None:
    return attend
  spec = PartitionSpec(*sharding.spec, *[None] * (4 - len(sharding.spec)))
  return jax.shard_map(
      attend, mesh=sharding.mesh, out_specs=spec, check_vma=False,
      in_specs=(spec, spec, spec, PartitionSpec(spec[0], None)))


def _check(q, k, implementation: str, block: int | None) -> None:
  """Raises a ValueError if the implementation cannot use the arguments."""
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(
        f'implementation must be one of {IMPLEMENTATIONS}, but is '
        f"{implementation!r}. `resolve` chooses one of them for 'auto'.")
  if q.shape[1] != k.shape[1]:
    raise ValueError(
        'causal attention is between a row and itself, but there are '
        f'{q.shape[1]} queries and {k.shape[1]} keys. Use `grouped` with '
        '`visible` of both positions for a chunk against a cache.')
  unit = _LANES if implementation == 'splash' else 1
  if block is not None and (block < 1 or block % unit):
    raise ValueError(f'block must be a multiple of {unit}, but is {block}.')
  size = q.shape[-1]
  if implementation in _CUDNN and (
      q.dtype.name not in _HALF or size > 256 or size % 8):
    raise ValueError(
        'cudnn needs bfloat16 or float16 and a head_dim that is a multiple of '
        f'8 up to 256, but they are {q.dtype} and {size}. {_WAY_OUT}')


def _xla(q, k, v, segment_ids, sliding_window, block):
  """Computes the reference attention for one block of queries at a time.

  Keys are skipped if causality or the window hides them from all queries of a
  block. With several blocks, the backward pass computes the scores again.
  """
  rows, length = q.shape[:2]
  k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
  if segment_ids is None:
    segment_ids = jnp.zeros((rows, length), jnp.int32)
  block = block or max(_LANES, -(-length // 8))

  def attend(q, k, v, query_ids, key_ids, start, first):
    mask = visible(start + jnp.arange(q.shape[1]),
                   first + jnp.arange(k.shape[2]), sliding_window)
    mask &= query_ids[:, :, None] == key_ids[:, None, :]
    return grouped(q, k, v, mask)

  if block < length:
    attend = jax.checkpoint(attend)
  outputs = []
  for start in range(0, length, block):
    end = min(start + block, length)
    first = max(0, start + 1 - (sliding_window or length))
    outputs.append(attend(
        q[:, start:end], k[:, :, first:end], v[:, :, first:end],
        segment_ids[:, start:end], segment_ids[:, first:end], start, first))
  return jnp.concatenate(outputs, 1)


def reference(
    q: Float[Array, 'B T H d'], k: Float[Array, 'B T K d'],
    v: Float[Array, 'B T K d'], segment_ids: Int[Array, 'B T'],
    sliding_window: int | None = None, block: int = 256,
) -> Float[Array, 'B T H d']:
  """Returns causal attention within documents, to test other implementations.

  The result is the same as that of `causal` with 'xla'. It is computed in a
  loop over blocks of queries. All blocks have one shape, so that little is
  compiled. On an H100, the products of one block took 14 s to compile and tune.
  """
  length, keys = q.shape[1], jnp.arange(q.shape[1])
  blocks, ids = (cudnn_attention.padded_row(x, block) for x in (q, segment_ids))
  k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)

  def attend(start):
    queries, query_ids = (jax.lax.dynamic_slice_in_dim(x, start, block, 1)
                          for x in (blocks, ids))
    mask = visible(start + jnp.arange(block), keys, sliding_window)
    mask &= query_ids[:, :, None] == segment_ids[:, None, :]
    return grouped(queries, k, v, mask)

  outputs = jax.lax.map(jax.checkpoint(attend),
                        jnp.arange(0, blocks.shape[1], block))
  return outputs.swapaxes(0, 1).reshape(blocks.shape)[:, :length]


def choose(platform: str, dtype: Any, head_dim: int, length: int,
           is_packed: bool = True) -> tuple[str, str]:
  """Returns the implementation that 'auto' tries first, and the reason.

  Args:
    platform: Platform of the device.
    dtype: Data type of q, k and v.
    head_dim: Size of a head.
    length: Number of tokens in a row.
    is_packed: True if cuDNN on this GPU takes several documents in one row.
  """
  dtype, gpu = jnp.dtype(dtype), platform in ('gpu', 'cuda')
  rules = (
      (not gpu and platform != 'tpu', 'xla', f'{platform} has no kernel'),
      (length < _LANES, 'xla', f'{length} tokens would be padded to {_LANES}'),
      (gpu and dtype.name not in _HALF, 'xla', f'cudnn does not take {dtype}'),
      (gpu and (head_dim % 8 or head_dim > 256), 'xla',
       f'cudnn takes multiples of 8 up to 256, not {head_dim}'),
      (gpu and not is_packed, 'cudnn_padded', f'GPU before Hopper, {dtype}'),
      (gpu, 'cudnn', f'GPU, {dtype}'),
      (dtype != jnp.bfloat16, 'xla', 'splash is for bfloat16'),
      (head_dim % 64, 'xla', f'splash takes multiples of 64, not {head_dim}'),
      (True, 'splash', f'TPU, {dtype}'))
  return next((name, why) for holds, name, why in rules if holds)


def resolve(
    implementation: str, *, platform: str, dtype: Any, heads: int,
    kv_heads: int, head_dim: int, length: int, **graph: Any,
) -> tuple[str, str]:
  """Returns the implementation that a run uses, and a sentence to log.

  Any implementation but 'xla' must first pass its `self_test`.

  Args:
    implementation: Name of an implementation, or 'auto'. 'auto' begins with the
      result of `choose`, and goes to a simpler one after a failed self-test.
    platform: Platform of the devices.
    dtype: Dtype of queries, keys and values.
    heads: Number of query heads.
    kv_heads: Number of key-value heads.
    head_dim: Width of a head.
    length: Number of tokens of a row. The self-test has rows of 48, of 192 and
      of this many tokens.
    **graph: Arguments of `self_test`: sliding_window, rows and max_segments.

  Raises:
    RuntimeError: `implementation` is not 'auto' and fails its self-test.
  """
  capability = getattr(jax.local_devices()[0], 'compute_capability', '')
  is_packed = capability[:2] not in ('5.', '6.', '7.', '8.')
  return kernel_checks.resolve(
      'attention', implementation,
      lambda: choose(platform, dtype, head_dim, length, is_packed),
      lambda name: self_test(
          name, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype,
          lengths=(48, 192, length), **graph),
      simpler={'cudnn': 'cudnn_padded'})


def self_test(
    implementation: str, *, heads: int, kv_heads: int, head_dim: int,
    dtype: Any, sliding_window: int | None = None, rows: int = 2,
    max_segments: int = 3, lengths: tuple[int, ...] = (48, 192, 320),
    interpret: bool = False,
) -> None:
  """Raises a RuntimeError if an implementation is wrong on random rows.

  It compares the outputs, with and without a backward pass, and the gradients
  with the reference, for rows of each of `lengths`, of which the last is the
  longest. `differences` describes the rows. If the model has a sliding window,
  the longest rows are tested with this window and with a short one. Give the
  `rows` and `max_segments` of training on one device, so that the kernels are
  tested in the shapes of training.
  """
  *shorter, longest = lengths
  cases = [*((length, None) for length in shorter), (longest, sliding_window)]
  if sliding_window:
    cases.append((longest, min(sliding_window, 24)))
  for length, window in cases:
    kernel_checks.check(
        f'{implementation} failed its self-test at length {length}, window '
        f'{window}', _WAY_OUT, dtype,
        lambda: differences(
            (rows, length, heads, kv_heads, head_dim), dtype,
            max_segments=max_segments, sliding_window=window,
            implementation=implementation, interpret=interpret))


def differences(shape: tuple[int, ...], dtype: Any, max_segments: int,
                **options: Any) -> dict[str, float]:
  """Returns the largest differences of `causal` from the reference, by name.

  The names are 'scored' (the output without a backward pass), 'output', 'dq',
  'dk' and 'dv'. Differences are fractions of the reference's largest entry. The
  inputs are random. `shape` is (B, T, H, K, d): rows, tokens, heads, KV heads,
  head size. Each row has `max_segments` documents. All between the first and
  the last are empty. The last row ends with padding, which has large values.
  The options are arguments of `causal`.
  """
  rows, length, heads, kv_heads, size = shape
  rng = np.random.default_rng(length)
  values = [rng.normal(size=(rows, length, count, size))
            for count in (heads, kv_heads, kv_heads, heads)]
  column, end = np.arange(length), length - length // 3
  loud = np.where((np.arange(rows)[:, None] == rows - 1) & (column >= end),
                  30.0, 1.0)
  q, k, v = (jnp.asarray(x * loud[..., None, None], dtype) for x in values[:3])
  weight = jnp.asarray(values[3] * (loud == 1)[..., None, None], dtype)
  segments = jnp.asarray(np.where(
      loud > 1, 0, np.where(column >= end // 2, max_segments, 1)), jnp.int32)

  def run(attend, weight, *arrays):
    attend = functools.partial(attend, segment_ids=segments)
    output, pullback = jax.vjp(attend, *arrays)
    scored, output = (jnp.where(weight == 0, 0, x)
                      for x in (attend(*arrays), output))
    return dict(zip(('scored', 'output', 'dq', 'dk', 'dv'),
                    (scored, output, *pullback(weight))))

  arrays = (weight, q, k, v)
  actual = jax.device_get(jax.jit(functools.partial(
      run, functools.partial(causal, max_segments=max_segments, **options)))(
          *arrays))
  expect = jax.jit(
      functools.partial(run, functools.partial(
          reference, sliding_window=options.get('sliding_window'))),
      compiler_options=None if jax.default_backend() != 'gpu' else {
          'xla_gpu_autotune_level': 0})  # it is run once
  with jax.default_matmul_precision('highest'):
    expected = jax.device_get(expect(*(x.astype(jnp.float32) for x in arrays)))
  largest = lambda x: float(np.abs(x).max())  # NumPy, as XLA can drop a NaN
  return {name: largest(actual[name] - x) / max(largest(x), 0.1)
          for name, x in expected.items()}
