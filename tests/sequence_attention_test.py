# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rows whose positions are split over devices: the results of one device."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import learner_test as learning
import numpy as np
import optax
import pytest
import tiny

from searchrl.models import attention
from searchrl.models import experts
from searchrl.models import lora as loras
from searchrl.models import sequence_attention
from searchrl.models import transformer
from searchrl.rl import algorithms
from searchrl.rollouts import weight_sync
from searchrl.runtime import devices
from searchrl.runtime import mesh as meshes
from searchrl.training import learner as learners

DEVICES = 8

ONE = dict(devices=jax.devices()[:1])
LENGTH = 32
# Documents of 11, 14 and 4 tokens and padding; one document; padding alone.
SEGMENTS = np.stack([np.repeat([1, 2, 3, 0], [11, 14, 4, 3]),
                     np.ones(LENGTH, int), np.zeros(LENGTH, int),
                     np.repeat([1, 2], [15, 17])]).astype(np.int32)


def attended(mesh, attend):
  return sequence_attention.over_whole_rows(
      attend, functools.partial(meshes.sharding, mesh))


@pytest.mark.parametrize('window', [None, 9])
@pytest.mark.parametrize('ways, kv_heads', [
    (dict(sequence=2), 4), (dict(data=1, fsdp=2, sequence=4), 2),
    (dict(data=1, sequence=8), 2), (dict(sequence=2, tensor=2), 1)], ids=str)
def test_attention_and_its_gradients_are_those_of_one_device(
    ways, kv_heads, window):
  mesh, rng = meshes.make(**ways), np.random.default_rng(0)
  q, k, v, weight = (
      rng.normal(size=(4, LENGTH, count, 8)).astype(np.float32)
      for count in (8, kv_heads, kv_heads, 8))
  weight *= (SEGMENTS > 0)[..., None, None]

  def run(attend, q, k, v):
    output, pullback = jax.vjp(functools.partial(
        attend, segment_ids=jnp.asarray(SEGMENTS), sliding_window=window),
                               q, k, v)
    return output * (SEGMENTS > 0)[..., None, None], *pullback(weight)

  split = meshes.sharding(mesh, ('batch', 'length', None, None))
  actual = jax.jit(functools.partial(run, attended(mesh, attention.causal)))(
      *(jax.device_put(x, split) for x in (q, k, v)))
  expected = jax.jit(functools.partial(run, attention.causal))(q, k, v)
  for x, y in zip(actual, expected):
    np.testing.assert_allclose(x, y, atol=1e-5)


def updated(params, ways, shape, algorithm=learning.ALGORITHM, **options):
  """The state, log-probs and metrics after an update, and the critic's values.

  Rows have up to five documents.
  """
  learner = learners.make(
      shape, algorithm, learning.OPTIMIZER, meshes.make(**ways),
      rows=learning.ROWS, length=learning.LENGTH, pack_length=40,
      max_segments=5, temperature=learning.TEMPERATURE, **options)
  state = learner.init(params)
  packed = learner.score(state, learning.ragged_batch(), params)
  assert max(map(len, packed.minibatches[0].documents)) > 1
  result = learner.update(state, packed, params)
  trained = {name: state.params for name, state in result.state.items()}
  metrics = {name: value for name, value in result.metrics.items()
             if not name.startswith('perf/')}
  return jax.device_get((trained, result.batch.old_logprobs, metrics,
                         packed.batch.values))


SHAPES = {'': learning.CONFIG, 'window': dataclasses.replace(
    learning.CONFIG, sliding_window=7)}


@pytest.fixture(scope='module', name='expected')
def fixture_expected():
  params = jax.device_get(tiny.params(learning.CONFIG))
  return params, functools.cache(
      lambda name: updated(params, ONE, SHAPES[name]))


@pytest.mark.slow
@pytest.mark.parametrize('ways, name, remat', [
    (dict(sequence=2), '', 'nothing'),
    (dict(data=1, sequence=8), 'window', ''),
    (dict(data=1, fsdp=2, sequence=4), '', 'dots'),
    (dict(data=1, fsdp=2, sequence=2, tensor=2), 'window', 'nothing')], ids=str)
def test_an_update_is_that_of_one_device(expected, ways, name, remat):
  params, of_one = expected
  actual = updated(params, ways, SHAPES[name], remat=remat)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(
      x, y, rtol=1e-5, atol=1e-5), actual, of_one(name))
  moved = jax.tree.map(lambda x, y: np.abs(x - y).max(),
                       actual[0]['policy'], params)
  assert max(jax.tree.leaves(moved)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize('options', [
    dict(algorithm=algorithms.ppo(), critic_optimizer=optax.sgd(0.1)),
    dict(lora=loras.Lora(rank=2, alpha=4.0))], ids=['critic', 'adapters'])
def test_a_critic_and_adapters_are_those_of_one_device(expected, options):
  params, _ = expected
  actual, of_one = (updated(params, ways, learning.CONFIG, **options)
                    for ways in (dict(data=1, fsdp=2, sequence=4), ONE))
  jax.tree.map(lambda x, y: np.testing.assert_allclose(
      x, y, rtol=1e-5, atol=1e-5), actual, of_one)
  new = of_one[0]['critic']['value'] if 'lora' not in options else of_one[0]
  assert all(x.any() for x in jax.tree.leaves(new))  # at first some were 0


def test_rows_become_a_multiple_of_the_ways():
  learner = learning.make(meshes.make(data=1, sequence=8), length=21)
  assert learner.pack_length == 24


@pytest.mark.parametrize('changes, words', [
    (dict(experts=experts.Experts(8, 2, 24, True)),
     'mesh.sequence must be 1 for a model with experts, but is 4. Give'),
    (dict(num_attention_heads=12), 'must divide the 12 query heads, but is 4'),
    (dict(pack_length=126), 'a multiple of mesh.sequence, 4, but is 126. Set '
                            'it to 128.')], ids=str)
def test_rows_that_cannot_be_split_are_refused(changes, words):
  pack_length = changes.pop('pack_length', 128)
  shape = dataclasses.replace(tiny.CONFIG, **(
      dict(num_attention_heads=16) | changes))
  sequence_attention.check(shape, sequence=1, tensor=2, pack_length=pack_length)
  with pytest.raises(ValueError, match=re.escape(words)):
    sequence_attention.check(
        shape, sequence=4, tensor=2, pack_length=pack_length)


@pytest.mark.parametrize('tensor', [1, 2])
def test_engines_are_further_copies_on_the_devices_of_a_row(tensor):
  mesh, shape = meshes.make(data=1, fsdp=2, sequence=4), tiny.CONFIG
  axes = transformer.logical_axes(shape)
  params = jax.device_get(tiny.params(shape))
  sync = weight_sync.WeightSync(
      mesh, axes, shape.num_hidden_layers, tensor=tensor)
  assert dict(sync.mesh.shape) == dict(data=8 // tensor, fsdp=1, tensor=tensor)
  weights = sync(jax.tree.map(
      meshes.place, params, meshes.shardings(mesh, axes))).weights
  for name in ('q', 'down'):
    np.testing.assert_array_equal(
        weights['layers'][1][name]['kernel'],
        params['layers'][name]['kernel'][1])


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:Error reading persistent compilation')
def test_compiles_for_gpus_with_exchanges_of_heads_alone():
  found = devices.to_compile_for(devices.KINDS['h200'], 8)
  if found is None:
    pytest.skip('needs the compiler of GPUs')
  mesh = meshes.make(data=1, fsdp=2, sequence=4, devices=found)
  split = meshes.sharding(mesh, ('batch', 'length', None, None))
  given = [jax.ShapeDtypeStruct((2, 4096, n, 128), jnp.bfloat16, sharding=split)
           for n in (16, 2, 2)]
  ids = jax.ShapeDtypeStruct(
      (2, 4096), jnp.int32, sharding=meshes.sharding(mesh, ('batch', None)))
  attend = attended(mesh, functools.partial(
      attention.causal, implementation='cudnn', max_segments=16,
      sharding=meshes.sharding(mesh, ('batch', None, 'attended', None))))

  def total(q, k, v, ids):
    return attend(q, k, v, segment_ids=ids).astype(jnp.float32).sum()

  text = jax.jit(jax.grad(total, (0, 1, 2))).lower(
      *given, ids).compile().as_text()
  assert text.count('__cudnn$fmhaSoftmax') == 2  # forward and backward
  assert ' all-to-all' in text
  for name in ('all-gather', 'all-reduce', 'scatter('):
    assert name not in text
