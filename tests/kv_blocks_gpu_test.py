# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""kv_blocks_gpu: lowered for GPUs without one; layouts_test has its numbers."""

import dataclasses
import re

import jax
from jax.sharding import AbstractDevice
import pytest
import tiny

from searchrl.models.inference import kv_blocks
from searchrl.models.inference.kv_cache import Tiles

CONFIG = dataclasses.replace(
    tiny.CONFIG, num_attention_heads=4, num_key_value_heads=2, head_dim=128)


def lowered_for_gpus(function, *shapes) -> str:
  h100 = AbstractDevice('NVIDIA H100 80GB HBM3', None, 'gpu')
  with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh(
      (), (), abstract_device=h100)):  # newer versions of jax ask for it
    return jax.jit(function).trace(*shapes).lower(
        lowering_platforms=('cuda',)).as_text()


@pytest.mark.parametrize('window', [None, 40])
@pytest.mark.parametrize('width', [1, 128])
@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_the_kernel_of_gpus_is_lowered_for_them(width, window, dtype):
  """Nothing runs without a GPU; the cache is passed in its own layout."""
  layout = kv_blocks.layout(
      slots=8, length=1024, block=128, parts=1, sliding_window=window,
      heads_outside=False, token_kernel='triton', tile_kernel='triton')
  layer = jax.eval_shape(lambda: layout.empty(CONFIG, 1, dtype))
  given = [jax.ShapeDtypeStruct((8, width, heads, 128), dtype)
           for heads in (4, 2, 2)]
  row = jax.ShapeDtypeStruct((8,), 'int32')
  lowered = lowered_for_gpus(layout.attend, layer, *given,
                             Tiles(row, row, row))
  call, = (line for line in lowered.splitlines()
           if '@__gpu$xla.gpu.triton' in line)
  writes = re.findall(r'(%\d+) = "stablehlo.scatter"', lowered)
  keys, values = re.search(r'triton\((.*?)\)', call)[1].split(', ')[-2:]
  assert [keys, values] == writes  # nothing between writing and reading


def test_a_copy_on_gpus_is_one_kernel_in_place_for_each_array():
  layout = kv_blocks.layout(
      slots=8, length=1024, block=128, parts=1, heads_outside=False,
      token_kernel='cudnn', tile_kernel='triton')
  cache = jax.eval_shape(lambda: (layout.empty(CONFIG, 1, 'bfloat16'),) * 3)
  row = jax.ShapeDtypeStruct((8,), 'int32')
  lowered = lowered_for_gpus(
      layout.copy, cache, row, row, jax.ShapeDtypeStruct((), 'int32'))
  assert 'stablehlo.while' not in lowered
  calls = [line for line in lowered.splitlines()
           if '@__gpu$xla.gpu.triton' in line]
  assert len(calls) == 3 * 2
  assert all('output_operand_alias' in line for line in calls)
