# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""cudnn_attention: its arithmetic on any device, its kernels on a GPU.

On a CPU, an emulation reads and writes the elements that the offsets name. The
tests that need a GPU are skipped without one: `JAX_PLATFORMS=cuda python -m
pytest tests/cudnn_attention_test.py -n 0`.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl import packing
from searchrl.models import attention
from searchrl.models import cudnn_attention
from searchrl.models import kernel_checks
from searchrl.runtime import devices
from searchrl.runtime import mesh as meshes

needs_gpu = pytest.mark.skipif(jax.default_backend() != 'gpu',
                               reason='runs cuDNN on a GPU')


def layout_of(lengths, length, places) -> packing.Layout:
  """Rows of documents with these lengths, and a row without documents."""
  rows = packing.first_fit(lengths, length, places)
  return packing.layout(rows, lengths, count=len(rows) + 1, length=length,
                        places=places)


def arrays(shape, dtype=jnp.float32):
  """Queries, keys, values and a gradient of the output."""
  rows, length, heads, kv_heads, size = shape
  rng = np.random.default_rng(0)
  return [jnp.asarray(rng.normal(size=(rows, length, n, size)), dtype)
          for n in (heads, kv_heads, kv_heads, heads)]


def output_and_gradients(attend, xs, ids):
  """Results at documents; those of the reference at padding are undefined."""
  inside = (ids > 0)[..., None, None]

  def run(q, k, v, weight):
    output, pullback = jax.vjp(attend, q, k, v)
    return output, *pullback(weight * inside)

  output, *gradients = jax.device_get(jax.jit(run)(*xs))
  return output, np.where(inside, output, 0), *gradients


def emulated(q, k, v, lengths, q_offsets, k_offsets, sliding_window):
  """Plain jax that reads and writes elements, as cuDNN's packed layout does."""
  inside = jnp.arange(q.shape[1]) < lengths.reshape(-1, 1)  # [B*M T]

  def elements(starts, x):
    step = x.shape[2] * x.shape[3]
    index = starts.reshape(-1)[:lengths.size, None] + jnp.arange(
        x.shape[1] * step)
    return jnp.where(jnp.repeat(inside, step, 1), index, x.size)

  def segments(starts, x):
    flat = x.reshape(-1).at[elements(starts, x)].get(mode='fill', fill_value=0)
    return flat.reshape(-1, *x.shape[1:])

  output = attention.causal(
      segments(q_offsets, q), segments(k_offsets, k), segments(k_offsets, v),
      sliding_window=sliding_window)
  return jnp.full(q.size, jnp.nan, q.dtype).at[elements(q_offsets, q)].set(
      output.reshape(len(inside), -1), mode='drop').reshape(q.shape)


LENGTHS = [7, 5, 9, 1, 2, 3]


@pytest.mark.parametrize('way', ['cudnn', 'cudnn_padded'])
@pytest.mark.parametrize('heads, window, places', [
    ((4, 2), None, 3), ((4, 4), None, 2), ((6, 1), 4, 5)])
def test_rows_of_documents_are_read_as_by_the_reference(
    monkeypatch, way, heads, window, places):
  """An empty document is between others, and a row has no document."""
  layout = layout_of(LENGTHS, 14, places)
  ids = np.where(layout.segment_ids > 1, layout.segment_ids + 1,
                 layout.segment_ids)  # no token has id 2
  monkeypatch.setattr(cudnn_attention, '_attend', emulated)
  monkeypatch.setattr(cudnn_attention, '_whole', loud_behind)
  xs = arrays((*ids.shape, *heads, 8))
  _, *wanted = output_and_gradients(functools.partial(
      attention.causal, segment_ids=ids, sliding_window=window), xs, ids)
  raw, *actual = output_and_gradients(functools.partial(
      attention.causal, segment_ids=ids, sliding_window=window, longest=9,
      max_segments=places + 1, implementation=way), narrowed(xs, monkeypatch),
                                      ids)
  for x, y in zip(actual, wanted):
    np.testing.assert_allclose(x, y, atol=2e-6)
  padding = ids == 0
  for x in (raw, *actual):
    assert padding.any() and not x[padding].any()


def narrowed(xs, monkeypatch):
  """Lets cuDNN's paths take float32, as what runs here is not cuDNN."""
  monkeypatch.setattr(attention, '_HALF', ('float32',))
  return xs


def loud_behind(q, k, v, sliding_window, lengths):
  """Values that a kernel may leave beyond the end of a row."""
  output = attention.causal(q, k, v, sliding_window=sliding_window)
  behind = jnp.arange(q.shape[1]) >= lengths[:, None]
  return jnp.where(behind[..., None, None], jnp.nan, output)


def test_offsets_count_elements_of_queries_and_of_keys(monkeypatch):
  """Worked out by hand: rows of 128 tokens, 4 query heads and 2 KV heads."""
  found = []

  def noted(q, k, v, *segments):
    found.extend(np.asarray(x) for x in segments[:3])
    return q

  monkeypatch.setattr(cudnn_attention, '_attend', noted)
  ids = np.zeros((2, 100), int)
  ids[0, :30], ids[0, 30:70], ids[1, :5] = 1, 3, 2
  q, k, v, _ = arrays((2, 100, 4, 2, 8))
  cudnn_attention.packed(q, k, v, jnp.asarray(ids), max_segments=3)
  lengths, of_q, of_k = found
  starts = np.array([[0, 30, 30, 70, 128], [128, 133, 133, 256, 256]])
  assert lengths.tolist() == [[30, 0, 40, 58], [0, 5, 0, 123]]
  assert of_q.tolist() == (starts * 4 * 8).tolist()
  assert of_k.tolist() == (starts * 2 * 8).tolist()
  assert {x.dtype.name for x in found} == {'int32'}


def test_jax_lowers_its_primitives_to_calls_of_the_packed_layout():
  """This tests the installed version of jax; the calls are not compiled."""
  rows, length, heads, kv_heads, size, places = 2, 256, 4, 2, 64, 3
  given = [jax.ShapeDtypeStruct((rows, length, n, size), jnp.bfloat16)
           for n in (heads, kv_heads, kv_heads)]
  ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)

  def total(q, k, v, ids):
    return attention.causal(
        q, k, v, segment_ids=ids, max_segments=places, sliding_window=99,
        implementation='cudnn').astype(jnp.float32).sum()

  lowered = jax.jit(jax.grad(total, (0, 1, 2))).trace(*given, ids).lower(
      lowering_platforms=('cuda',)).as_text()
  calls = [line.replace('\\22', '') for line in lowered.splitlines()
           if '__cudnn$fmha' in line]
  assert len(calls) == 2
  for call, name in zip(calls, ('Softmax', 'SoftmaxBackward')):
    assert f'@__cudnn$fmha{name}(' in call
    for key, value in dict(
        max_seg_per_batch=places + 1, sliding_window_length=99,
        mask_type='PADDING_CAUSAL', fmha_scale=size ** -0.5).items():
      assert re.search(rf'{key}\W+{value}\b', call), key
    # Lengths and offsets of queries and of keys.
    operands = call[call.rindex(' : ('):call.rindex(') -> ')].split(', ')
    assert [x.removeprefix('tensor<') for x in operands[-4:]] == [
        '2x4xi32>', '2x4xi32>', '2x5xi32>', '2x5xi32>']


@needs_gpu
@pytest.mark.parametrize('way', ['cudnn', 'cudnn_padded'])
@pytest.mark.parametrize('rows, length, heads, size, window', [
    (2, 4096, (16, 2), 128, None), (1, 4096, (14, 2), 64, None),
    (3, 1000, (4, 4), 128, None), (2, 4096, (8, 2), 64, 100),
    (1, 32768, (4, 1), 128, None)])
def test_kernels_are_the_reference(way, rows, length, heads, size, window):
  """Rows of 16 documents at most, some of them empty, and padding."""
  places, rng = 16, np.random.default_rng(rows)
  ids = np.zeros((rows, length), np.int32)
  for row in ids[:-1] if rows > 1 else ids:
    ends = np.sort(rng.integers(0, length - 70, places))
    ends[3], ends[7:9] = ends[2], ends[6]
    row[:ends[-1]] = 1 + np.searchsorted(ends, np.arange(ends[-1]), 'right')
  xs = arrays((rows, length, *heads, size), jnp.bfloat16)
  attend = functools.partial(attention.causal, segment_ids=ids,
                             sliding_window=window)
  with jax.default_matmul_precision('highest'):
    _, *wanted = output_and_gradients(
        functools.partial(attend, block=1024),
        [x.astype(jnp.float32) for x in xs], ids)
  raw, *actual = output_and_gradients(functools.partial(
      attend, max_segments=places, implementation=way), xs, ids)
  for x, y in zip(actual, wanted):
    np.testing.assert_allclose(
        np.float32(x) / abs(y).max(), y / abs(y).max(),
        atol=kernel_checks.TOLERANCE['bfloat16'])
  assert (ids == 0).any()
  for x in (raw, *actual):
    assert not x[ids == 0].any()


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:Error reading persistent compilation')
@pytest.mark.parametrize('size, tensor, window', [
    (128, 1, None), (64, 2, None), (128, 1, 512)])
def test_compiles_for_gpus_without_collectives_or_scatters(
    size, tensor, window):
  """The calls are the compiler's; cuDNN itself is not asked."""
  found = devices.to_compile_for(devices.KINDS['h200'], 8)
  if found is None:
    pytest.skip('needs the compiler of GPUs')
  mesh = meshes.make(data=1, fsdp=8 // tensor, tensor=tensor, devices=found)
  split = meshes.sharding(mesh, ('batch', None, 'heads', None))
  rows, length, heads, kv_heads, places = 8, 4096, 16, 2, 16
  given = [jax.ShapeDtypeStruct((rows, length, n, size), jnp.bfloat16,
                                sharding=split)
           for n in (heads, kv_heads, kv_heads)]
  ids = jax.ShapeDtypeStruct(
      (rows, length), jnp.int32, sharding=meshes.sharding(mesh, ('batch', None)))

  def total(q, k, v, ids):
    return attention.causal(
        q, k, v, segment_ids=ids, max_segments=places, sliding_window=window,
        implementation='cudnn', sharding=split).astype(jnp.float32).sum()

  compiled = jax.jit(jax.grad(total, (0, 1, 2))).lower(*given, ids).compile()
  text = compiled.as_text()
  assert text.count('__cudnn$fmhaSoftmax') == 2  # forward and backward
  assert len(re.findall(rf'max_seg_per_batch\W+{places + 1}\b', text)) == 2
  for name in ('all-gather', 'all-reduce', 'all-to-all', 'scatter('):
    assert name not in text
  row = length * heads * size * 2 * rows // len(found)  # bytes of queries
  statistics = 4 * (places + 1) * heads * length * rows // len(found)
  assert (compiled.memory_analysis().temp_size_in_bytes
          < 2 * row + 2 * statistics)
