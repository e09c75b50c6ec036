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


@pytest.mark.parametrize('window', [None, 40])
@pytest.mark.parametrize('width', [1, 128])
@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_the_kernel_of_gpus_is_lowered_for_them(width, window, dtype):
  """As far as goes without a GPU; its cache is passed as it lies."""
  layout = kv_blocks.layout(
      slots=8, length=1024, block=128, parts=1, sliding_window=window,
      heads_outside=False, token_kernel='triton', tile_kernel='triton')
  layer = jax.eval_shape(lambda: layout.empty(CONFIG, 1, dtype))
  given = [jax.ShapeDtypeStruct((8, width, heads, 128), dtype)
           for heads in (4, 2, 2)]
  row = jax.ShapeDtypeStruct((8,), 'int32')
  h100 = AbstractDevice('NVIDIA H100 80GB HBM3', None, 'gpu')
  with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh(
      (), (), abstract_device=h100)):  # newer versions of jax ask for it
    lowered = jax.jit(layout.attend).trace(
        layer, *given, Tiles(row, row, row)).lower(
            lowering_platforms=('cuda',)).as_text()
  call, = (line for line in lowered.splitlines()
           if '@__gpu$xla.gpu.triton' in line)
  writes = re.findall(r'(%\d+) = "stablehlo.scatter"', lowered)
  keys, values = re.search(r'triton\((.*?)\)', call)[1].split(', ')[-2:]
  assert [keys, values] == writes  # nothing between writing and reading
