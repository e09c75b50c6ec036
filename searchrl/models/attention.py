# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Attention in three implementations, each tested before it is used.

  xla      the reference: float32 softmax, on every device, with all options
  cudnn    flash attention on NVIDIA GPUs: half precision, no segment ids
  splash   flash attention on TPUs, in Pallas: segment ids and windows

`causal` is for whole rows (training, scoring), `grouped` for any mask, and
`blockwise` for a cache. `resolve` chooses an implementation and runs its
`self_test`.

This file avoids three traps:
- `is_causal` of jax.nn.dot_product_attention aligns its mask top-left, which is
  wrong for a chunk against a longer cache. `causal` rejects unequal lengths.
- Its log-sum-exp is rounded to half precision. `blockwise` computes its own in
  float32.
- cuDNN had NaN gradients at one query and at 64 past a multiple of 128. It gets
  multiples of 128 and no mask tensor.
"""

from collections.abc import Callable, Mapping
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int
import numpy as np

IMPLEMENTATIONS = ('xla', 'cudnn', 'splash')
_HALF = ('bfloat16', 'float16')
_MASKED = -1e30  # score of a hidden key; finite, so that no row becomes NaN
_LOG2_E = 1.4426950408889634
_LANES = 128  # tokens; both kernels need rows of a multiple of this length
_WAY_OUT = "Set model.attention to 'xla', or leave it 'auto'."
_PACKED = ('cudnn takes no segment ids, but the rows are packed. Use '
           f'models.documents.causal. Else: {_WAY_OUT}')
# Largest allowed difference from the float32 reference, relative to the
# reference's largest entry. It is several times the rounding error. A mask or
# a context that is wrong by one token exceeds 0.1.
TOLERANCE = {'float32': 1e-4, 'float16': 4e-3, 'bfloat16': 3e-2}


def visible(
    query_positions: Int[Array, '*B T'],
    key_positions: Int[Array, '*B S'],
    sliding_window: int | None,
) -> Bool[Array, '*B T S']:
  """Returns which keys a query sees: its own and earlier, within the window."""
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

  The queries that share a KV head are folded into the length axis, so that
  every key is read once. A query that sees no keys gets the mean of v.
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
  """Returns `grouped` attention over the filled blocks of a cache.

  Partial softmaxes are combined from the first block to the last. A block that
  a query does not see adds exact zeros, so that the number of blocks changes no
  bit of the result.

  Args:
    q: Queries.
    block_at: Function from a block's index to its keys and values, [B K W d].
    positions: Positions of the queries. A query at -1 has no keys; its result
      is 0.
    blocks: Number of filled blocks, traced.
    block: Number of tokens in a block, W.
    sliding_window: Number of keys that a query sees, itself included.
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
  """Returns 2 ** exponent, exactly, for whole exponents cut to [-126, 0]."""
  biased = jnp.maximum(exponent, -126.0).astype(jnp.int32) + 127
  return jax.lax.bitcast_convert_type(biased << 23, jnp.float32)


def causal(
    q: Float[Array, 'B T H d'],
    k: Float[Array, 'B T K d'],
    v: Float[Array, 'B T K d'],
    *,
    segment_ids: Int[Array, 'B T'] | None = None,
    lengths: Int[Array, 'B'] | None = None,
    sliding_window: int | None = None,
    implementation: str = 'xla',
    block: int | None = None,
    sharding: NamedSharding | None = None,
    interpret: bool = False,
) -> Float[Array, 'B T H d']:
  """Returns causal attention over whole rows, each token within its segment.

  Padding is on the right, so that no token attends to it. Results at padding
  are undefined.

  Args:
    q: Queries, rotated but not scaled. H is a multiple of K.
    k: Keys, rotated.
    v: Values.
    segment_ids: Document of each token in a packed row; equal ids are one
      document.
    lengths: Number of tokens in each row, with which 'cudnn' skips the padding.
      Results there may be NaN.
    sliding_window: Number of keys that a query sees, itself included.
    implementation: Name 'xla', 'cudnn' or 'splash'; see `resolve` for 'auto'.
    block: Block size in tokens. For 'xla', the number of queries at a time, so
      that [B H T T] never exists; default: 128, or an eighth of a row above
      1024. For 'splash', a multiple of 128; default: 512, or the row if it is
      shorter.
    sharding: Sharding of q, k and v, only for 'splash', which the compiler
      cannot partition. The axes of length and d are not split. The mesh axis of
      the heads must divide K.
    interpret: Flag that runs 'splash' on any device, slowly, for tests.

  Returns:
    The attention's output, with the shape and the dtype of q.

  Raises:
    ValueError: The implementation cannot do this, such as segment ids with
      'cudnn'. Raised while tracing; there is no silent fallback.
  """
  _check(q, k, segment_ids, implementation, block)
  if sliding_window is not None and sliding_window >= q.shape[1]:
    sliding_window = None
  if implementation == 'cudnn':
    return _cudnn(q, k, v, sliding_window, lengths)
  if implementation == 'xla':
    return _xla(q, k, v, segment_ids, sliding_window, block)
  run = functools.partial(_splash, sliding_window=sliding_window, block=block,
                          interpret=interpret)
  if sharding is not None:
    spec = PartitionSpec(*sharding.spec, *[None] * (4 - len(sharding.spec)))
    run = jax.shard_map(
        run, mesh=sharding.mesh, out_specs=spec, check_vma=False,
        in_specs=(spec, spec, spec, PartitionSpec(spec[0], None)))
  return run(q, k, v, segment_ids)


def _check(q, k, segment_ids, implementation: str, block: int | None) -> None:
  """Raises a ValueError if the implementation cannot do what is asked."""
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
  if implementation == 'cudnn' and segment_ids is not None:
    raise ValueError(_PACKED)
  size = q.shape[-1]
  if implementation == 'cudnn' and (
      q.dtype.name not in _HALF or size > 256 or size % 8):
    raise ValueError(
        'cudnn needs bfloat16 or float16 and a head_dim that is a multiple of '
        f'8 up to 256, but they are {q.dtype} and {size}. {_WAY_OUT}')


def _xla(q, k, v, segment_ids, sliding_window, block):
  """Returns the reference: one block of queries at a time, with its keys.

  Keys that causality or the window hides from the whole block are not
  multiplied. With several blocks, the backward pass recomputes the scores.
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


def _cudnn(q, k, v, sliding_window, lengths=None):
  """Runs cuDNN on padded rows. Its windows do not count the token itself."""
  length = q.shape[1]
  window = None if sliding_window is None else (sliding_window - 1, 0)
  return jax.nn.dot_product_attention(
      *(_padded(x, -length % _LANES) for x in (q, k, v)), is_causal=True,
      local_window_size=window, query_seq_lengths=lengths,
      key_value_seq_lengths=lengths, implementation='cudnn')[:, :length]


def _splash(q, k, v, segment_ids, *, sliding_window, block, interpret):
  """Runs splash attention, which skips blocks that causality or a window hides.

  Segments only mask: their hidden blocks are computed.
  """
  # Slow to import.
  from jax.experimental.pallas.ops.tpu import splash_attention as splash
  length, heads, size = q.shape[1:]
  block = block or min(512, -(-length // _LANES) * _LANES)
  spare = -length % block
  q, k, v = (_padded(x, spare).swapaxes(1, 2) for x in (q, k, v))
  shape = (length + spare,) * 2
  mask = (splash.CausalMask(shape) if sliding_window is None else
          splash.LocalMask(shape, (sliding_window - 1, 0), 0))
  sizes = dict.fromkeys((
      'block_q', 'block_kv', 'block_kv_compute', 'block_q_dkv', 'block_kv_dkv',
      'block_kv_dkv_compute', 'block_q_dq', 'block_kv_dq'), block)
  kernel = splash.make_splash_mha_single_device(
      splash.MultiHeadMask([mask] * heads),
      block_sizes=splash.BlockSizes(**sizes), interpret=interpret)
  if segment_ids is not None:
    segment_ids = splash.SegmentIds(*[_padded(segment_ids, spare)] * 2)
  out = jax.vmap(kernel)(q * size ** -0.5, k, v, segment_ids)
  return out.swapaxes(1, 2)[:, :length]


def _padded(x: Array, spare: int) -> Array:
  return jnp.pad(x, ((0, 0), (0, spare), *[(0, 0)] * (x.ndim - 2)))


def choose(platform: str, dtype: Any, head_dim: int, length: int
          ) -> tuple[str, str]:
  """Returns the implementation that 'auto' tries for this length, and why."""
  dtype, gpu = jnp.dtype(dtype), platform in ('gpu', 'cuda')
  rules = (
      (not gpu and platform != 'tpu', 'xla', f'{platform} has no kernel'),
      (length < _LANES, 'xla', f'{length} tokens would be padded to {_LANES}'),
      (gpu and dtype.name not in _HALF, 'xla', f'cudnn does not take {dtype}'),
      (gpu and (head_dim % 8 or head_dim > 256), 'xla',
       f'cudnn takes multiples of 8 up to 256, not {head_dim}'),
      (gpu, 'cudnn', f'GPU, {dtype}'),
      (dtype != jnp.bfloat16, 'xla', 'splash is for bfloat16'),
      (head_dim % 64, 'xla', f'splash takes multiples of 64, not {head_dim}'),
      (True, 'splash', f'TPU, {dtype}'))
  return next((name, why) for holds, name, why in rules if holds)


def resolve(
    implementation: str, *, platform: str, dtype: Any, heads: int,
    kv_heads: int, head_dim: int, length: int,
    sliding_window: int | None = None,
) -> tuple[str, str]:
  """Returns the tested implementation that a run uses, and a sentence to log.

  See `resolve_tested`. The test is `self_test`, up to rows of this length.
  """
  return resolve_tested(
      'attention', implementation,
      lambda: choose(platform, dtype, head_dim, length),
      lambda name: self_test(
          name, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype,
          sliding_window=sliding_window, lengths=(48, 192, length)))


def resolve_tested(
    title: str, implementation: str, choose: Callable[[], tuple[str, str]],
    test: Callable[[str], None], simpler: Mapping[str, str] = {},
) -> tuple[str, str]:
  """Returns the tested implementation that a run uses, and a sentence to log.

  'auto' takes the one that `choose` returns. If its test fails, it takes the
  simpler one, or else 'xla', with a warning. An implementation that is named
  must pass its test. Let one process resolve and broadcast the result.

  Raises:
    RuntimeError: The named implementation fails its test.
  """
  is_auto, warnings = implementation == 'auto', ''
  name, why = choose() if is_auto else (implementation, 'as configured')
  while name != 'xla':
    try:
      test(name)
      break
    except RuntimeError as error:
      if not is_auto:
        raise
      name, warnings = simpler.get(name, 'xla'), f'{warnings} {error}'
  if warnings:
    return name, f'Warning: {title} falls back to {name}.{warnings}'
  return name, f'{title}: {name} ({why})'


def self_test(
    implementation: str, *, heads: int, kv_heads: int, head_dim: int,
    dtype: Any, sliding_window: int | None = None,
    lengths: tuple[int, ...] = (48, 192, 320), interpret: bool = False,
) -> None:
  """Raises a RuntimeError if numbers of random rows differ from the reference.

  These are outputs and gradients. One row ends early and has large values in
  its padding. The test is repeated with segments if the implementation takes
  them, and with a short window if the model has a window.
  """
  windows = (None, min(sliding_window, 24)) if sliding_window else (None,)
  packings = (False,) if implementation == 'cudnn' else (False, True)
  cases: list[tuple[int, int | None, bool]] = [
      (length, None, False) for length in lengths[:-1]]
  cases += itertools.product(lengths[-1:], windows, packings)
  for length, window, packed in cases:
    check_differences(
        f'{implementation} failed its self-test at length {length}, window '
        f'{window}, packed {packed}', _WAY_OUT, dtype,
        lambda: differences(
            (2, length, heads, kv_heads, head_dim), dtype, packed,
            sliding_window=window, implementation=implementation,
            interpret=interpret))


def check_differences(failed: str, way_out: str, dtype: Any,
                      run: Callable[[], Mapping[str, float]]) -> None:
  """Raises a RuntimeError if `run` fails, or returns too large differences."""
  limit = TOLERANCE[jnp.dtype(dtype).name]
  try:
    errors = run()
  except Exception as error:  # kernels raise errors of any kind
    raise RuntimeError(
        f'{failed}: {type(error).__name__}: {error} {way_out}') from error
  worst = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=9))
  if not errors[worst] <= limit:
    raise RuntimeError(
        f'{failed}: {worst} is off by {errors[worst]:.2g} of its largest '
        f'entry, more than {limit}. {way_out}')


def differences(shape: tuple[int, ...], dtype: Any, packed: bool, **options
               ) -> dict[str, float]:
  """Returns relative differences from the reference, for output and gradients.

  The shape is (B, T, H, K, d), and the options are arguments of `causal`. If
  `packed`, rows have two segments or more.
  """
  rows, length, heads, kv_heads, size = shape
  rng = np.random.default_rng(length)
  values = [rng.normal(size=(rows, length, count, size))
            for count in (heads, kv_heads, kv_heads, heads)]
  column, end = np.arange(length), length - length // 3
  loud = np.where((np.arange(rows)[:, None] == 1) & (column >= end), 30.0, 1.0)
  q, k, v = (jnp.asarray(x * loud[..., None, None], dtype) for x in values[:3])
  weight = jnp.asarray(values[3] * (loud == 1)[..., None, None], dtype)
  segments = jnp.asarray((column >= end // 2) + (loud > 1), jnp.int32)

  def run(options, weight, *arrays):
    output, pullback = jax.vjp(functools.partial(
        causal, segment_ids=segments if packed else None, **options), *arrays)
    output = jnp.where(weight == 0, 0, output)
    return dict(zip(('output', 'dq', 'dk', 'dv'), (output, *pullback(weight))))

  arrays = (weight, q, k, v)
  actual = jax.device_get(jax.jit(functools.partial(run, options))(*arrays))
  options |= dict(implementation='xla', block=256)
  with jax.default_matmul_precision('highest'):
    expected = jax.device_get(jax.jit(functools.partial(run, options))(
        *(x.astype(jnp.float32) for x in arrays)))
  largest = lambda x: float(np.abs(x).max())  # NumPy, as XLA can drop a NaN
  return {name: largest(actual[name] - x) / max(largest(x), 0.1)
          for name, x in expected.items()}
