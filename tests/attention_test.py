# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""attention: the definition in float64; kernels against it; wrong ones caught.

A stand-in answers for cuDNN, splash runs interpreted, and is compiled for a TPU
where libtpu is installed. On a device: benchmarks/attention.py.
"""

import functools
import importlib.util
import re

import jax
from jax.experimental import topologies
from jax.extend import core as jax_core
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import numpy as np
import pytest

from searchrl.models import attention
from searchrl.models import cudnn_attention
from searchrl.models import kernel_checks

SHAPE = (2, 13, 4, 2, 8)  # B T H K d
SEGMENTS = np.array([[3] * 5 + [1] * 8, [0] * 1 + [7] * 9 + [2] * 3], np.int32)
MODEL = dict(heads=4, kv_heads=2, head_dim=16, dtype=jnp.bfloat16)


def arrays(shape=SHAPE, seed=0, dtype=np.float64):
  rows, length, heads, kv_heads, size = shape
  rng = np.random.default_rng(seed)
  return [np.asarray(rng.normal(size=(rows, length, n, size)), dtype)
          for n in (heads, kv_heads, kv_heads)]


def oracle(q, k, v, segment_ids=None, window=None):
  """The definition in float64: loops over rows, queries, heads and keys."""
  out = np.zeros(q.shape)
  groups = q.shape[2] // k.shape[2]
  for b, t, h in np.ndindex(q.shape[:3]):
    seen = [s for s in range(t + 1)
            if (window is None or t - s < window) and
            (segment_ids is None or segment_ids[b, s] == segment_ids[b, t])]
    scores = [float(q[b, t, h] @ k[b, s, h // groups]) / np.sqrt(q.shape[-1])
              for s in seen]
    weights = np.exp(np.array(scores) - max(scores))
    weights /= weights.sum()
    out[b, t, h] = sum(w * v[b, s, h // groups] for w, s in zip(weights, seen))
  return out


def narrow(xs):
  return [jnp.asarray(x, jnp.float32) for x in xs]


def value_and_gradients(xs, weight=None, **options):
  weight = jnp.ones(xs[0].shape) if weight is None else weight
  run = jax.jit(lambda *xs: (lambda out, back: (out, *back(
      weight.astype(out.dtype))))(*jax.vjp(
          functools.partial(attention.causal, **options), *xs)))
  return run(*xs)


cases = pytest.mark.parametrize('window', [None, 1, 4, 13, 99])
packings = pytest.mark.parametrize('segment_ids', [None, SEGMENTS],
                                   ids=['whole', 'packed'])


@packings
@cases
def test_the_reference_of_self_tests_is_the_definition(window, segment_ids):
  xs = arrays()
  ids = np.zeros(SHAPE[:2], int) if segment_ids is None else segment_ids
  for block in (4, 64):
    seen = attention.reference(*narrow(xs), jnp.asarray(ids), window, block)
    np.testing.assert_allclose(
        seen, oracle(*xs, segment_ids, window), atol=2e-6)


@packings
@cases
def test_the_reference_is_the_definition(window, segment_ids):
  xs = arrays()
  for block in (None, 4, 5, 13, 64):
    got = attention.causal(*narrow(xs), segment_ids=segment_ids, block=block,
                           sliding_window=window)
    np.testing.assert_allclose(
        got, oracle(*xs, segment_ids, window), atol=2e-6)


@pytest.mark.parametrize('heads, kv_heads', [(1, 1), (4, 4), (4, 1), (6, 3)])
def test_any_number_of_groups(heads, kv_heads):
  xs = arrays((1, 7, heads, kv_heads, 4), seed=1)
  np.testing.assert_allclose(
      attention.causal(*narrow(xs)), oracle(*xs), atol=2e-6)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_the_numbers_of_transformer_attention(dtype):
  q, k, v = arrays(dtype=dtype)
  column = jnp.arange(q.shape[1])
  seen = jnp.broadcast_to(attention.visible(column, column, 4), (2, 13, 13))
  seen &= SEGMENTS[:, :, None] == SEGMENTS[:, None, :]
  wanted = attention.grouped(q, k.swapaxes(1, 2), v.swapaxes(1, 2), seen)
  got = attention.causal(q, k, v, segment_ids=SEGMENTS, sliding_window=4)
  assert got.dtype == dtype
  np.testing.assert_array_equal(got, wanted)


@packings
def test_blocks_have_the_gradients_of_the_whole(segment_ids):
  xs = narrow(arrays())
  weight = jnp.asarray(arrays(seed=2)[0], jnp.float32)
  options = dict(segment_ids=segment_ids, sliding_window=4, weight=weight)
  whole = value_and_gradients(xs, **options)
  for block in (4, 13):
    parts = value_and_gradients(xs, **options, block=block)
    for x, y in zip(whole, parts):
      np.testing.assert_allclose(x, y, atol=2e-6)


def largest(jaxpr) -> int:
  """Elements of the largest array that a program makes, at any depth."""
  sizes = [0]
  for equation in jaxpr.eqns:
    sizes += [getattr(x.aval, 'size', 0) for x in equation.outvars]
    sizes += map(largest, jax_core.jaxprs_in_params(equation.params))
  return max(sizes)


@pytest.mark.parametrize('length', [512, 1024])
def test_blocks_never_hold_the_scores_of_a_row(length):
  rows, heads, block = 2, 4, 64
  x = jax.ShapeDtypeStruct((rows, length, heads, 8), jnp.float32)

  def of(block):
    total = lambda *xs: attention.causal(*xs, block=block).sum()
    return largest(jax.make_jaxpr(jax.grad(total, argnums=(0, 1, 2)))(
        x, x, x).jaxpr)

  assert of(length) == rows * heads * length * length
  assert of(block) == rows * heads * block * length
  assert of(None) == rows * heads * 128 * length


def test_a_query_that_sees_nothing_reads_the_mean_and_has_finite_gradients():
  q, k, v = narrow(arrays())
  seen = np.tril(np.ones((2, 13, 13), bool))
  seen[1, 6] = False

  def run(q, k, v):
    return attention.grouped(q, k.swapaxes(1, 2), v.swapaxes(1, 2), seen)

  out = run(q, k, v)
  np.testing.assert_allclose(
      out[1, 6, 0], v[1].mean(0)[0], atol=1e-6)
  for gradient in jax.grad(lambda *xs: run(*xs).sum(), (0, 1, 2))(q, k, v):
    assert np.isfinite(gradient).all()


def test_padding_changes_nothing_and_gets_no_gradient():
  end, weight = 9, np.zeros(SHAPE[:3] + SHAPE[4:])
  xs = arrays()
  weight[:, :end] = arrays(seed=3)[0][:, :end]
  loud = [x.copy() for x in xs]
  for x in loud:
    x[:, end:] = 1e4
  for block in (None, 4):
    quiet, noisy = (value_and_gradients(
        narrow(x), jnp.asarray(weight), block=block) for x in (xs, loud))
    for x, y in zip(quiet, noisy):
      np.testing.assert_array_equal(x[:, :end], y[:, :end])
    for gradient in noisy[1:]:
      np.testing.assert_array_equal(gradient[:, end:], 0)


def test_a_chunk_against_a_longer_cache_is_refused():
  q, k, v = narrow(arrays())
  whole, chunk = attention.causal(q, k, v), q[:, 9:]
  with pytest.raises(ValueError, match='4 queries and 13 keys. Use `grouped`'):
    attention.causal(chunk, k, v)
  top_left = jax.nn.dot_product_attention(chunk, k, v, is_causal=True)
  assert np.abs(top_left - whole[:, 9:]).max() > 0.1  # the trap
  seen = attention.visible(jnp.arange(9, 13), jnp.arange(13), None)
  right = attention.grouped(chunk, k.swapaxes(1, 2), v.swapaxes(1, 2),
                            jnp.broadcast_to(seen, (2, 4, 13)))
  np.testing.assert_allclose(right, whole[:, 9:], atol=1e-6)


@pytest.mark.parametrize('options, message', [
    (dict(implementation='flash'), "but is 'flash'"),
    (dict(implementation='auto'), "but is 'auto'. `resolve` chooses"),
    (dict(implementation='cudnn'), 'but they are float32 and 8'),
    (dict(implementation='cudnn_padded'), 'but they are float32 and 8'),
    (dict(implementation='cudnn', dtype=jnp.bfloat16, segment_ids=SEGMENTS),
     'max_segments beside segment_ids'),
    (dict(implementation='splash', block=64), 'a multiple of 128, but is 64'),
    (dict(block=0), 'a multiple of 1, but is 0'),
])
def test_refuses_what_it_cannot_do(options, message):
  options = dict(options)
  dtype = options.pop('dtype', jnp.float32)
  with pytest.raises(ValueError, match=message):
    attention.causal(*(x.astype(dtype) for x in narrow(arrays())), **options)


@pytest.mark.parametrize('size', [12, 264])
def test_cudnn_refuses_head_sizes_that_it_does_not_take(size):
  xs = arrays((1, 4, 1, 1, size), dtype=jnp.bfloat16)
  with pytest.raises(ValueError, match=f'bfloat16 and {size}'):
    attention.causal(*xs, implementation='cudnn')


@pytest.fixture
def as_cudnn(monkeypatch):
  """Calls of cuDNN are computed by jax's XLA, which runs on any device."""
  original, calls = jax.nn.dot_product_attention, []

  def answer(q, k, v, *, implementation, **options):
    calls.append(
        dict(options, implementation=implementation, length=q.shape[1]))
    return original(q, k, v, implementation='xla', **options)

  monkeypatch.setattr(jax.nn, 'dot_product_attention', answer)
  return calls


@pytest.mark.parametrize('window', [None, 1, 5])
def test_the_arguments_of_cudnn_mean_the_same(as_cudnn, window):
  xs = arrays((2, 13, 4, 2, 8), dtype=jnp.bfloat16)
  got = attention.causal(*xs, implementation='cudnn_padded',
                         sliding_window=window)
  wanted = oracle(*(np.float64(x) for x in xs), window=window)
  np.testing.assert_allclose(np.float64(got), wanted, atol=0.03)
  call, = as_cudnn
  assert call['implementation'] == 'cudnn' and call['length'] == 128
  # Its windows exclude the token itself: (before it, after it).
  assert call['local_window_size'] == (window and (window - 1, 0))


def test_a_right_kernel_passes_its_test(as_cudnn):
  attention.self_test('cudnn_padded', **MODEL, sliding_window=30,
                      lengths=(48, 192))
  assert {call['length'] for call in as_cudnn} == {128, 256}
  assert {call['local_window_size'] for call in as_cudnn} == {
      None, (29, 0), (23, 0)}


def one_place_late(q, k, v, sliding_window, _):
  return attention._xla(q, *(jnp.roll(x, 1, 1) for x in (k, v)), None,
                        sliding_window, None)


def no_mask(q, k, v, sliding_window, lengths):
  del sliding_window, lengths
  return jax.nn.dot_product_attention(q, k, v)


def window_of_one_more(q, k, v, sliding_window, _):
  return attention._xla(q, k, v, None, sliding_window and sliding_window + 1,
                        None)


def ungrouped(q, k, v, sliding_window, _):
  k, v = (jnp.tile(x, (1, 1, q.shape[2] // x.shape[2], 1)) for x in (k, v))
  return attention._xla(q, k, v, None, sliding_window, None)


def unscaled(q, k, v, sliding_window, _):
  return attention._xla(q * 1.1, k, v, None, sliding_window, None)


def nothing(q, k, v, sliding_window, _):
  return attention._xla(q, k, v, None, sliding_window, None) * jnp.nan


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def same(x, backward):
  del backward
  return x


same.defvjp(lambda x, backward: (x, None),
            lambda backward, _, gradient: (backward(gradient),))


def wrong_gradient(q, k, v, sliding_window, _):
  k = same(k, lambda gradient: gradient.at[:, 0].set(0))
  return attention._xla(q, k, v, None, sliding_window, None)


def nan_gradient_at_some_lengths(q, k, v, sliding_window, _):
  bad = jnp.nan if q.shape[1] % 128 == 64 else 1.0
  k = same(k, lambda gradient: gradient * bad)
  return attention._xla(q, k, v, None, sliding_window, None)


@pytest.mark.parametrize('kernel, off', [
    (one_place_late, 'off by'), (no_mask, 'off by'),
    (window_of_one_more, 'window 24: .* off by'),
    (ungrouped, 'off by'), (unscaled, 'off by'), (nothing, 'off by nan'),
    (wrong_gradient, 'dk is off by'),
    (nan_gradient_at_some_lengths, 'length 192, .* dk is off by nan')])
def test_a_wrong_kernel_is_caught(monkeypatch, kernel, off):
  monkeypatch.setattr(cudnn_attention, '_whole', kernel)
  message = f'cudnn_padded failed its self-test at .*{off}'
  with pytest.raises(RuntimeError, match=message) as caught:
    attention.self_test('cudnn_padded', **MODEL, sliding_window=1000)
  assert "Set model.attention to 'xla'" in str(caught.value)


def test_the_smallest_of_wrong_masks_is_far_beyond_the_tolerance(monkeypatch):
  monkeypatch.setattr(cudnn_attention, '_whole', window_of_one_more)
  found = attention.differences(
      (2, 320, 4, 2, 64), jnp.bfloat16, 3, sliding_window=24,
      implementation='cudnn_padded')
  assert max(found.values()) > 3 * kernel_checks.TOLERANCE['bfloat16']


GPU, TPU = dict(platform='gpu'), dict(platform='tpu')


@pytest.mark.parametrize('changes, expected, why', [
    (dict(platform='cpu'), 'xla', 'cpu has no kernel'),
    (dict(platform='METAL'), 'xla', 'METAL has no kernel'),
    (GPU, 'cudnn', 'GPU, bfloat16'),
    (dict(platform='cuda'), 'cudnn', 'GPU, bfloat16'),
    (GPU | dict(dtype=jnp.float16), 'cudnn', 'GPU, float16'),
    (GPU | dict(dtype=jnp.float32), 'xla', 'cudnn does not take float32'),
    (GPU | dict(head_dim=256), 'cudnn', 'GPU'),
    (GPU | dict(head_dim=260), 'xla', 'up to 256, not 260'),
    (GPU | dict(head_dim=20), 'xla', 'multiples of 8'),
    (GPU | dict(length=127), 'xla', '127 tokens would be padded to 128'),
    (GPU | dict(is_packed=False), 'cudnn_padded', 'before Hopper'),
    (TPU, 'splash', 'TPU, bfloat16'),
    (TPU | dict(head_dim=64), 'splash', 'TPU'),
    (TPU | dict(head_dim=80), 'xla', 'multiples of 64, not 80'),
    (TPU | dict(dtype=jnp.float32), 'xla', 'splash is for bfloat16'),
    (TPU | dict(length=64), 'xla', '64 tokens'),
])
def test_what_auto_means(changes, expected, why):
  usual = dict(dtype=jnp.bfloat16, head_dim=128, length=4096)
  name, reason = attention.choose(**{**usual, **changes})
  assert name == expected and why in reason


RUN = dict(MODEL, length=160)


def test_auto_falls_back_with_a_warning_and_a_name_does_not(monkeypatch):
  monkeypatch.setattr(cudnn_attention, '_whole', no_mask)
  name, warning = attention.resolve('auto', platform='gpu', **RUN)
  assert name == 'xla'
  assert re.match('Warning: attention falls back to xla. cudnn failed .* '
                  'cudnn_padded failed', warning)
  with pytest.raises(RuntimeError, match='cudnn failed its self-test'):
    attention.resolve('cudnn', platform='gpu', **RUN)


def test_a_kernel_that_is_not_there_is_no_crash():
  name, warning = attention.resolve('auto', platform='gpu', **RUN)
  assert name == 'xla' and 'cuDNN' in warning
  with pytest.raises(RuntimeError, match='splash failed .*interpret mode'):
    attention.resolve('splash', platform='tpu', **RUN)


def test_a_kernel_that_passes_is_used_and_tested_at_the_length_of_the_run(
    as_cudnn):
  name, warning = attention.resolve(
      'auto', platform='gpu', **RUN | {'length': 300})
  assert name == 'cudnn_padded' and 'back to cudnn_padded. cudnn' in warning
  assert attention.resolve('cudnn_padded', platform='gpu', **RUN) == (
      'cudnn_padded', 'attention: cudnn_padded (as configured)')
  assert max(call['length'] for call in as_cudnn) == 384


def test_xla_needs_no_test():
  for platform in ('cpu', 'gpu', 'tpu'):
    assert attention.resolve('xla', platform=platform, **RUN) == (
        'xla', 'attention: xla (as configured)')


@pytest.mark.parametrize('length, window, documents, block', [
    (150, None, 1, None),
    pytest.param(300, 24, 3, 128, marks=pytest.mark.slow),
    pytest.param(130, 1, 3, None, marks=pytest.mark.slow),
    pytest.param(300, None, 3, 128, marks=pytest.mark.slow),
])
def test_splash_is_the_reference(length, window, documents, block):
  found = attention.differences(
      (2, length, 4, 2, 16), jnp.float32, documents, sliding_window=window,
      implementation='splash', block=block, interpret=True)
  assert max(found.values()) < 2e-5, found


@pytest.mark.slow
def test_splash_passes_its_own_test(monkeypatch):
  seen, differences = [], attention.differences

  def noted(shape, dtype, **options):
    found = differences(shape, dtype, **options)
    seen.append((shape[:2], options['sliding_window'],
                 options['max_segments'], found))
    return found

  monkeypatch.setattr(attention, 'differences', noted)
  attention.self_test('splash', **MODEL, sliding_window=30, interpret=True,
                      lengths=(40, 200), rows=1, max_segments=5)
  assert [case[:3] for case in seen] == [
      ((1, 40), None, 5), ((1, 200), 30, 5), ((1, 200), 24, 5)]
  limit = kernel_checks.TOLERANCE[jnp.dtype(MODEL['dtype']).name]
  assert max(max(found.values()) for *_, found in seen) <= limit


@pytest.mark.slow
def test_splash_over_a_mesh_is_splash():
  xs = narrow(arrays((4, 20, 4, 2, 8)))
  segment_ids = np.tile(np.arange(20) // 7, (4, 1))
  mesh = jax.make_mesh(
      (2, 2), ('data', 'tensor'), axis_types=(AxisType.Auto,) * 2,
      devices=jax.devices()[:4])
  sharding = NamedSharding(mesh, PartitionSpec('data', None, 'tensor'))
  wanted = value_and_gradients(xs, segment_ids=segment_ids)
  got = value_and_gradients(
      jax.device_put(xs, sharding), segment_ids=segment_ids, interpret=True,
      implementation='splash', sharding=sharding)
  for x, y in zip(wanted, got):
    np.testing.assert_allclose(x, y, atol=5e-6)
  assert got[0].sharding.is_equivalent_to(sharding, 4)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec('libtpu') is None,
                    reason="needs libtpu: pip install 'jax[tpu]'")
@pytest.mark.filterwarnings('ignore:Error reading persistent compilation')
@pytest.mark.parametrize('head_dim, window', [(128, None), (64, 512)])
def test_splash_compiles_for_a_tpu_and_holds_no_scores(
    monkeypatch, head_dim, window):
  for name, value in dict(
      TPU_ACCELERATOR_TYPE='v5litepod-8', TPU_WORKER_HOSTNAMES='localhost',
      TPU_SKIP_MDS_QUERY='1', ALLOW_MULTIPLE_LIBTPU_LOAD='1').items():
    monkeypatch.setenv(name, value)
  devices = topologies.get_topology_desc(
      platform='tpu', topology_name='v5e:2x4').devices
  mesh = Mesh(np.array(devices).reshape(4, 2), ('data', 'tensor'))
  rows, length, heads, kv_heads = 4, 2048, 8, 2
  split = NamedSharding(mesh, PartitionSpec('data', None, 'tensor'))
  like = lambda n: jax.ShapeDtypeStruct(
      (rows, length, n, head_dim), jnp.bfloat16, sharding=split)
  segment_ids = jax.ShapeDtypeStruct(
      (rows, length), jnp.int32,
      sharding=NamedSharding(mesh, PartitionSpec('data')))

  def total(q, k, v, segment_ids):
    return attention.causal(
        q, k, v, segment_ids=segment_ids, sliding_window=window,
        implementation='splash', sharding=split).astype(jnp.float32).sum()

  compiled = jax.jit(jax.grad(total, (0, 1, 2))).trace(
      like(heads), like(kv_heads), like(kv_heads), segment_ids).lower(
          lowering_platforms=('tpu',)).compile()
  text = compiled.as_text()
  assert text.count('tpu_custom_call') >= 3  # forward, dq, dk and dv
  assert 'all-gather' not in text and 'all-reduce' not in text
  scores = rows * heads * length * length * 4 // len(devices)
  assert compiled.memory_analysis().temp_size_in_bytes < scores // 4
