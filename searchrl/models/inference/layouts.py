# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The engine's attention in five implementations, and the choice of one.

  xla           loops over blocks of the cache; the reference, on every device
  cudnn         flash attention on NVIDIA GPUs for single tokens, else loops
  triton        a Pallas kernel on GPUs for single tokens and for tiles
  cudnn+triton  cudnn for single tokens and triton for tiles
  ragged        ragged paged attention on TPUs in Pallas, which reads pages

Each implementation has the cache layout that it reads. `resolve` chooses an
implementation, and tests it with `self_test` unless it is 'xla'.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from searchrl.models import kernel_checks
from searchrl.models.inference import kv_blocks
from searchrl.models.inference import kv_cache
from searchrl.models.inference import kv_pages
from searchrl.models.inference.kv_cache import Layout, Tiles
from searchrl.models.transformer import TransformerConfig

IMPLEMENTATIONS = ('xla', 'cudnn', 'triton', 'cudnn+triton', 'ragged')
_WAY_OUT = "Set rollout.attention to 'xla', or leave it 'auto'."


def make(implementation: str, config: TransformerConfig, *, slots: int,
         length: int, block: int, parts: int, pages: int = 0,
         platform: str = '') -> Layout:
  """Returns the cache layout that an implementation of attention reads.

  It is for the slots of one device. A slot is the room for one sequence.

  Args:
    implementation: One of IMPLEMENTATIONS.
    config: Shape of the decoder.
    slots: Number of slots.
    length: Number of tokens that a slot must be able to hold.
    block: Number of tokens in a block, or in a page.
    parts: Number of groups of slots of similar length whose attention 'xla'
      computes separately.
    pages: Number of pages that the slots share, for 'ragged'. 0: all slots can
      be full at once.
    platform: Platform of the device. Default: that of the first device.

  Raises:
    ValueError: There is no such implementation, or the implementation does not
      take the model's sliding window or blocks of this size.
  """
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(
        f'rollout.attention must be auto or one of {IMPLEMENTATIONS}, but is '
        f'{implementation!r}.')
  window = config.sliding_window
  if implementation == 'ragged':
    return kv_pages.layout(
        slots=slots, pages=pages or slots * -(-length // block), page=block,
        sliding_window=window)
  options: dict[str, Any] = dict(
      slots=slots, length=length, block=block, sliding_window=window)
  if implementation == 'xla':
    # CPUs multiply fastest if positions are inside heads. On other devices,
    # writing a token in this order would copy the whole cache.
    platform = platform or jax.devices()[0].platform
    return kv_blocks.layout(
        **options, parts=parts, heads_outside=platform == 'cpu')
  if 'triton' in implementation and block % 16:
    raise ValueError('triton attention of rollouts takes blocks of a multiple '
                     f'of 16 tokens, not {block}. {_WAY_OUT}')
  if 'cudnn' in implementation and window:
    raise ValueError('cudnn attention of rollouts is given no sliding window, '
                     f'but the model has one of {window}. {_WAY_OUT}')
  return kv_blocks.layout(
      **options, parts=1, heads_outside=False,
      token_kernel=implementation.split('+')[0],
      tile_kernel='triton' if 'triton' in implementation else '')


def over_devices(
    implementation: str, config: TransformerConfig, *, slots: int, length: int,
    block: int, parts: int, cache_tokens: int,
    shardings: Callable[[Any], Any] | None,
) -> Layout:
  """Returns the cache layout of an engine with one or several devices.

  Args:
    implementation: One of IMPLEMENTATIONS.
    config: Shape of the decoder.
    slots: Number of slots on all devices together. A slot is the room for one
      sequence.
    length: Number of tokens that a slot can hold.
    block: Number of tokens of the cache that are read at a time. A slot with no
      more than twice as many tokens is read whole.
    parts: Number of groups of slots of similar length whose attention 'xla'
      computes separately.
    cache_tokens: Number of tokens that all slots can hold together, if the
      cache has pages. 0: all slots can be full at once.
    shardings: Function from a tree of logical axes to a tree of shardings.
      None: one device.

  Raises:
    ValueError: cache_tokens is set for a layout without pages.
  """
  # A slot of at most two blocks is cheaper to read whole. The tokens of a
  # kernel's block are a multiple of 16.
  whole = length if implementation == 'xla' else -(-length // 16) * 16
  block = block if length > 2 * block else whole
  copies = kv_cache.copies(shardings)
  layout = make(
      implementation, config, slots=slots // copies, length=length, block=block,
      parts=min(parts, slots // copies) if block < length else 1,
      pages=cache_tokens // copies // block, platform=platform_of(shardings))
  if cache_tokens and not layout.has_pages:
    raise ValueError(
        "rollout.cache_tokens must be 0 unless rollout.attention is 'ragged', "
        f'on TPUs, but is {cache_tokens} with {implementation!r}. Set it to 0.')
  return kv_cache.sharded(layout, shardings) if shardings else layout


def platform_of(shardings: Callable[[Any], Any] | None) -> str:
  """Returns the platform of an engine's devices."""
  return shardings(()).mesh.devices.flat[0].platform if shardings else (
      jax.default_backend())


def choose(platform: str, dtype: Any, config: TransformerConfig
          ) -> tuple[str, str]:
  """Returns the implementation that 'auto' tries first, and the reason.

  Args:
    platform: Platform of the devices.
    dtype: Data type of the cache.
    config: Shape of the decoder, with the number of heads on one device.
  """
  dtype, heads = jnp.dtype(dtype), config.num_key_value_heads
  size, gpu = config.head_dim, platform in ('gpu', 'cuda')
  packed = 2 * heads * dtype.itemsize / 4  # rows of 32 bits per token
  no_cudnn = (f'cudnn does not take {dtype}' if dtype.itemsize != 2 else
              f'cudnn takes multiples of 8 up to 256, not {size}'
              if size % 8 or size > 256 else
              'cudnn is given no window' if config.sliding_window else '')
  no_triton = ('' if size in (16, 32, 64, 128, 256) else
               f'triton takes powers of 2 from 16 to 256, not {size}')
  rules = (
      (not gpu and platform != 'tpu', 'xla', f'{platform} has no kernel'),
      (gpu and no_cudnn and no_triton, 'xla', f'{no_cudnn}; {no_triton}'),
      (gpu and no_cudnn, 'triton', no_cudnn),
      (gpu and no_triton, 'cudnn', no_triton),
      (gpu, 'cudnn+triton', f'GPU, {dtype}'),
      (dtype.name not in ('float32', 'bfloat16'), 'xla',
       f'the kernel does not take {dtype}'),
      (size % 128, 'xla', f'the kernel takes multiples of 128, not {size}'),
      (packed not in (1, 2, 4) and packed % 8, 'xla',
       f'the kernel does not take {heads} KV heads a device'),
      (True, 'ragged', f'TPU, {dtype}'))
  return next((name, why) for holds, name, why in rules if holds)


def resolve(implementation: str, *, platform: str, dtype: Any,
            config: TransformerConfig, tensor: int = 1) -> tuple[str, str]:
  """Returns the implementation that a run uses, and a sentence to log.

  Any implementation but 'xla' must first pass its `self_test`.

  Args:
    implementation: One of IMPLEMENTATIONS, or 'auto'. 'auto' begins with the
      result of `choose`, and goes to a simpler one after a failed self-test.
    platform: Platform of the devices.
    dtype: Data type of the cache.
    config: Shape of the decoder.
    tensor: Number of devices over which the heads are split.

  Raises:
    RuntimeError: `implementation` is not 'auto' and fails its self-test.
  """
  config = dataclasses.replace(
      config, num_attention_heads=config.num_attention_heads // tensor,
      num_key_value_heads=config.num_key_value_heads // tensor)
  return kernel_checks.resolve(
      'attention of rollouts', implementation,
      lambda: choose(platform, dtype, config),
      lambda name: self_test(name, config=config, dtype=dtype),
      simpler={'cudnn+triton': 'cudnn'})


# Calls of the self-test: (slots, starts, lengths, width of a tile). They have
# several tiles of one slot in one call, idle rows among others, tiles that
# cross pages, and ends within a page.
_SCRIPT = (
    ((0, 0, 3, 5), (0, 24, 0, 0), (24, 9, 20, 0), 24),
    ((0, 1, 2, 3, 4), (33, 0, 0, 20, 0), (1, 0, 0, 1, 1), 1),
    ((0, 1, 2, 3, 4), (34, 0, 0, 21, 1), (1, 0, 0, 1, 1), 1),
    ((3, 0), (22, 35), (40, 33), 40),
    ((0, 1, 2, 3, 4), (68, 0, 0, 62, 2), (1, 0, 1, 1, 1), 1))
# The last call, after the first two blocks of slot 0 were copied into slot 2.
_AFTER_COPY = ((2, 0), (32, 69), (9, 3), 9)
_SLOTS, _LENGTH, _PAGE = 5, 96, 16


def script_tiles(slot, start, length) -> Tiles:
  """Returns tiles to test attention with: ranges of tokens in slots.

  The arguments have a number for each tile: its slot, its first position and
  its number of tokens. The slots' pages are in a shuffled order.
  """
  slot, start, length = (np.array(x, np.int32) for x in (slot, start, length))
  each = _LENGTH // _PAGE
  table = np.random.default_rng(0).permutation(_SLOTS * each).reshape(-1, each)
  return Tiles(*map(jnp.asarray, (
      slot, start, length,
      table[np.minimum(slot, _SLOTS - 1)].astype(np.int32))))


def _with_copy(layout: Layout, layer: Any) -> Any:
  """Returns a test's cache, with two blocks of slot 0 copied into slot 2."""
  source, target, blocks = np.array([0]), np.array([2]), 2
  if layout.has_pages:
    pages = script_tiles([0, 2], [0, 0], [0, 0]).pages
    source, target, blocks = *np.asarray(pages)[:, :2], 1
  return jax.jit(layout.copy)(layer, source, target, np.int32(blocks))


def self_test(implementation: str, *, config: TransformerConfig, dtype: Any
             ) -> None:
  """Raises a RuntimeError if an implementation is wrong on random tokens."""
  if config.sliding_window:  # shortened, so that the test's contexts exceed it
    config = dataclasses.replace(
        config, sliding_window=min(config.sliding_window, 24))
  kernel_checks.check(
      f'{implementation} failed its self-test', _WAY_OUT, dtype,
      lambda: {'the output': difference(implementation, config, dtype)})


def difference(implementation: str, config: TransformerConfig, dtype: Any
              ) -> float:
  """Returns the largest error of an implementation's attention outputs.

  The reference is 'xla' in float32. Both attend to random tokens in several
  calls, the last of which reads a slot whose blocks were copied from another
  one. An error is relative to the reference's largest entry of the same call.
  """
  options: dict[str, Any] = dict(
      slots=_SLOTS, length=_LENGTH, block=_PAGE, parts=1)
  tested = make(implementation, config, **options)
  reference = kv_blocks.layout(**options, sliding_window=config.sliding_window)
  rng, worst = np.random.default_rng(0), 0.0
  layers = [layout.empty(config, 1, kind) for layout, kind in (
      (tested, dtype), (reference, 'float32'))]
  counts = (config.num_attention_heads, *[config.num_key_value_heads] * 2)
  attend = [jax.jit(layout.attend) for layout in (tested, reference)]
  for slot, start, length, width in (*_SCRIPT, _AFTER_COPY):
    if (slot, start, length, width) == _AFTER_COPY:
      layers = [*map(_with_copy, (tested, reference), layers)]
    tiles = script_tiles(slot, start, length)
    qkv = [jnp.asarray(rng.normal(size=(len(slot), width, n, config.head_dim)),
                       dtype) for n in counts]
    outputs = []
    for i, kind in enumerate((dtype, 'float32')):
      with jax.default_matmul_precision('highest' if i else 'default'):
        output, layers[i] = attend[i](
            layers[i], *(x.astype(kind) for x in qkv), tiles)
      outputs.append(np.asarray(output, np.float32))
    inside = (np.arange(width) < np.array(length)[:, None])[..., None, None]
    actual, expected = (np.where(inside, x, 0) for x in outputs)
    worst = max(worst, np.nan_to_num(
        abs(actual - expected).max() / abs(expected).max(), nan=9))
  return float(worst)
