# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""layouts: attention of the engine, each implementation against float64.

Kernels of GPUs and TPUs run as plain XLA here; on them `resolve` tests them.
"""

import dataclasses
import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pallas
import pytest
import tiny

from searchrl.models.inference import kv_blocks
from searchrl.models.inference import kv_blocks_gpu
from searchrl.models.inference import kv_pages
from searchrl.models.inference import layouts

CONFIG = dataclasses.replace(
    tiny.CONFIG, num_attention_heads=4, num_key_value_heads=2, head_dim=128)
SLOTS, LENGTH, BLOCK = 5, 96, 16
BLOCKS = functools.partial(
    kv_blocks.layout, slots=SLOTS, length=LENGTH, block=BLOCK)
MAKE = {
    'blocks, heads outside': functools.partial(BLOCKS, parts=1),
    'blocks, positions outside': functools.partial(
        BLOCKS, parts=1, heads_outside=False),
    'blocks, fused': functools.partial(
        BLOCKS, parts=1, heads_outside=False, token_kernel='xla'),
    'blocks, kernel': functools.partial(
        BLOCKS, parts=1, heads_outside=False, token_kernel='triton',
        tile_kernel='triton'),
    'blocks, kernel and fused': functools.partial(
        BLOCKS, parts=1, heads_outside=False, token_kernel='xla',
        tile_kernel='triton'),
    'blocks, in parts': functools.partial(BLOCKS, parts=2),
    'pages': functools.partial(
        kv_pages.layout, slots=SLOTS, pages=SLOTS * LENGTH // BLOCK,
        page=BLOCK),
}


@pytest.fixture(autouse=True)
def interpreted():
  with pallas.interpreted():
    yield


class Contexts:
  """The tokens of every slot in float64, and attention by its definition."""

  def __init__(self, window=None):
    self.keys = np.zeros((SLOTS, LENGTH, 2, 128))
    self.values, self.window = self.keys.copy(), window

  def attend(self, q, k, v, slot, start, length):
    seen = np.zeros(q.shape)
    tiles = [tile for tile in zip(range(len(slot)), slot, start, length)
             if tile[1] < SLOTS]
    for i, s, first, count in tiles:
      self.keys[s, first:first + count] = k[i, :count]
      self.values[s, first:first + count] = v[i, :count]
    for i, s, first, count in tiles:
      for t in range(count):
        end = first + t + 1
        begin = max(0, end - (self.window or end))
        for head in range(4):
          scores = self.keys[s, begin:end, head // 2] @ q[i, t, head]
          weights = np.exp(scores / 128 ** .5 - scores.max() / 128 ** .5)
          seen[i, t, head] = weights / weights.sum() @ self.values[
              s, begin:end, head // 2]
    return seen


def random(rng, rows, width):
  return [jnp.asarray(rng.normal(size=(rows, width, heads, 128)), jnp.float32)
          for heads in (4, 2, 2)]


@pytest.mark.parametrize('window', [None, 21])
@pytest.mark.parametrize('name', MAKE)
def test_tokens_see_their_slot_up_to_themselves(name, window):
  if 'fused' in name and window:
    pytest.skip('has no window')
  layout = MAKE[name](sliding_window=window)
  layer = layout.empty(CONFIG, 1, 'float32')
  contexts, rng = Contexts(window), np.random.default_rng(1)
  attend = jax.jit(layout.attend, donate_argnums=0)
  # pylint: disable-next=protected-access
  for slot, start, length, width in layouts._SCRIPT:
    qkv = random(rng, len(slot), width)
    seen, layer = attend(layer, *qkv, layouts.script_tiles(slot, start, length))
    expected = contexts.attend(*qkv, slot, start, length)
    assert np.isfinite(seen).all()
    kept = np.arange(width) < np.array(length)[:, None]
    np.testing.assert_allclose(
        np.asarray(seen)[kept], expected[kept], atol=2e-6)
    if width == 1:  # what idle rows give stays out of their slots
      assert not np.asarray(seen)[~kept].any()


@pytest.mark.slow
@pytest.mark.parametrize('name', [
    'blocks, in parts', 'blocks, kernel', 'pages'])
def test_rows_may_be_any_slots_in_any_order(name):
  layout = MAKE[name]()
  assert layout.any_rows
  layer = layout.empty(CONFIG, 1, 'float32')
  contexts, rng = Contexts(), np.random.default_rng(2)
  for slot, start, length in [([2, 0, 4], [0] * 3, [9, 17, 3]),
                              ([4, 0, 2], [3, 17, 9], [1] * 3),
                              ([5, 2, 0], [0, 10, 18], [0, 1, 1])]:
    qkv = random(rng, 3, max(length))
    seen, layer = layout.attend(layer, *qkv, layouts.script_tiles(slot, start, length))
    expected = contexts.attend(*qkv, slot, start, length)
    kept = np.arange(max(length)) < np.array(length)[:, None]
    np.testing.assert_allclose(
        np.asarray(seen)[kept], expected[kept], atol=2e-6)


@pytest.mark.parametrize('name', [n for n in MAKE if n != 'pages'])
def test_a_copied_prefix_is_read_like_the_source(name):
  layout, rng = MAKE[name](), np.random.default_rng(3)
  layer = layout.empty(CONFIG, 1, 'float32')
  q, k, v = random(rng, 1, 40)
  _, layer = layout.attend(layer, q, k, v,
                           layouts.script_tiles([3], [0], [40]))
  none = [SLOTS] * 3  # out of range
  layer = layout.copy(layer, jnp.array([3, 3, *none]), jnp.array([1, 4, *none]),
                      jnp.int32(3))  # 40 tokens, in blocks of 16
  token = [jnp.repeat(x, SLOTS, 0) for x in random(rng, 1, 1)]
  seen, _ = jax.jit(layout.attend)(layer, *token, layouts.script_tiles(
      [0, 1, 2, 3, 4], [0, 40, 0, 40, 40], [0, 1, 0, 1, 1]))
  seen = np.asarray(seen)
  np.testing.assert_array_equal(seen[1], seen[3])
  np.testing.assert_array_equal(seen[4], seen[3])
  assert seen[3].any() and not seen[0].any() and not seen[2].any()


def test_pages_are_copied_one_by_one():
  layout, rng = MAKE['pages'](), np.random.default_rng(3)
  layer = jnp.asarray(rng.normal(size=layout.empty(CONFIG, 1, 'float32').shape))
  none = 2**30
  copied = layout.copy(layer, jnp.array([3, 7, none]), jnp.array([5, 0, none]),
                       jnp.int32(1))
  expected = np.array(layer)
  expected[5], expected[0] = expected[3], expected[7]
  np.testing.assert_array_equal(copied, expected)
  np.testing.assert_array_equal(layout.copy(
      layer, jnp.array([3]), jnp.array([5]), jnp.int32(0)), layer)


@pytest.mark.parametrize('kernel', ['ragged', 'triton'])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_kernel_passes_its_self_test(kernel, dtype):
  layouts.self_test(kernel, config=CONFIG, dtype=dtype)
  name, note = layouts.resolve(
      kernel, platform='cpu', dtype=dtype, config=CONFIG, tensor=2)
  assert (name, note) == (
      kernel, f'attention of rollouts: {kernel} (as configured)')


def broken(how):
  """The ragged attention with a fault in what the kernel is given."""
  whole = kv_pages._ragged  # pylint: disable=protected-access

  def ragged(q, pages, lengths, table, starts, *, sliding_window):
    if how == 'a token too far':
      lengths = lengths + 1
    elif how == 'other pages':
      table = table[:, ::-1]
    elif how == 'raises':
      raise NotImplementedError('no such block size')
    return whole(q, pages, lengths, table, starts,
                 sliding_window=sliding_window)

  return mock.patch.object(kv_pages, '_ragged', ragged)


@pytest.mark.slow
@pytest.mark.parametrize('how, said', [
    ('a token too far', 'off by'), ('other pages', 'off by'),
    ('raises', 'NotImplementedError: no such block size')])
def test_a_kernel_that_is_wrong_is_not_used(how, said):
  with broken(how):
    with pytest.raises(RuntimeError, match=f'ragged failed .*{said}.*'
                                           "Set rollout.attention to 'xla'"):
      layouts.self_test('ragged', config=CONFIG, dtype='float32')
    name, note = layouts.resolve('auto', platform='tpu', dtype='float32',
                                 config=CONFIG)
  assert name == 'xla' and note.startswith('Warning: attention of rollouts')


def test_the_self_test_sees_blocks_that_are_not_copied():
  with mock.patch.object(kv_blocks_gpu, 'copied', lambda cache, *moves: cache):
    with pytest.raises(RuntimeError, match='triton failed .*off by'):
      layouts.self_test('triton', config=CONFIG, dtype='float32')


@pytest.mark.parametrize('broken_ones, name, said', [
    ((), 'cudnn+triton', '^attention of rollouts: .*GPU, bfloat16'),
    (['cudnn+triton'], 'cudnn', r'^Warning: .* back to cudnn. \+triton is off'),
    (['cudnn', 'cudnn+triton'], 'xla', 'back to xla. .*triton is off. cudnn is'),
])
def test_a_gpu_does_without_the_kernel_that_fails(broken_ones, name, said):
  def self_test(name, **_):
    if name in broken_ones:
      raise RuntimeError(f'{name} is off.'.removeprefix('cudnn+').replace(
          'triton', '+triton'))

  with mock.patch.object(layouts, 'self_test', self_test):
    found, note = layouts.resolve('auto', platform='gpu', dtype='bfloat16',
                                  config=CONFIG)
    assert found == name and re.search(said, note)
    if broken_ones:
      with pytest.raises(RuntimeError, match='is off'):
        layouts.resolve(broken_ones[0], platform='gpu', dtype='bfloat16',
                        config=CONFIG)


@pytest.mark.parametrize('platform, dtype, shape, name, why', [
    ('cpu', 'float32', {}, 'xla', 'cpu has no kernel'),
    ('cuda', 'bfloat16', {}, 'cudnn+triton', 'GPU, bfloat16'),
    ('cuda', 'float32', {}, 'triton', 'cudnn does not take float32'),
    ('cuda', 'bfloat16', dict(head_dim=12), 'xla',
     'cudnn takes multiples of 8 up to 256, not 12; triton takes powers of 2 '
     'from 16 to 256, not 12'),
    ('cuda', 'bfloat16', dict(head_dim=80), 'cudnn',
     'triton takes powers of 2 from 16 to 256, not 80'),
    ('gpu', 'bfloat16', dict(sliding_window=9), 'triton',
     'cudnn is given no window'),
    ('tpu', 'bfloat16', {}, 'ragged', 'TPU, bfloat16'),
    ('tpu', 'float16', {}, 'xla', 'the kernel does not take float16'),
    ('tpu', 'bfloat16', dict(head_dim=64), 'xla',
     'the kernel takes multiples of 128, not 64'),
    ('tpu', 'bfloat16', dict(num_key_value_heads=3), 'xla',
     'the kernel does not take 3 KV heads a device'),
    ('tpu', 'bfloat16', dict(num_key_value_heads=1), 'ragged',
     'TPU, bfloat16'),
])
def test_auto_asks_for_what_a_device_has(platform, dtype, shape, name, why):
  config = dataclasses.replace(CONFIG, **shape)
  assert layouts.choose(platform, dtype, config) == (name, why)


def test_what_an_implementation_cannot_do_is_refused():
  with pytest.raises(ValueError, match="must be auto or one of .*'fast'"):
    layouts.make('fast', CONFIG, slots=1, length=16, block=16, parts=1)
  windowed = dataclasses.replace(CONFIG, sliding_window=4096)
  with pytest.raises(RuntimeError, match='no sliding window.* one of 24'):
    layouts.resolve('cudnn', platform='gpu', dtype='bfloat16', config=windowed)
  with pytest.raises(ValueError, match='a multiple of 16 tokens, not 24'):
    layouts.make('triton', CONFIG, slots=1, length=48, block=24, parts=1)


@pytest.mark.slow
def test_the_self_test_sees_a_window_that_is_not_kept():
  windowed = dataclasses.replace(CONFIG, sliding_window=4096)
  layouts.self_test('ragged', config=windowed, dtype='float32')
  layouts.self_test('triton', config=windowed, dtype='float32')
  whole, attend = kv_pages.layout, kv_blocks_gpu.attend
  with mock.patch.object(kv_pages, 'layout', lambda **options: whole(
      **options | dict(sliding_window=None))):
    with pytest.raises(RuntimeError, match='ragged .* off by'):
      layouts.self_test('ragged', config=windowed, dtype='float32')
  with mock.patch.object(kv_blocks_gpu, 'attend',
                         lambda *given: attend(*given[:-1])):
    with pytest.raises(RuntimeError, match='triton .* off by'):
      layouts.self_test('triton', config=windowed, dtype='float32')
