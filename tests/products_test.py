# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""products: operands are rounded, sums and gradients are not; in the model."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import grpo
from configs import ppo
from searchrl.experiment import model_folders
from searchrl.experiment import policy
from searchrl.jobs import train
from searchrl.models import policy_logprobs
from searchrl.models import products
from searchrl.models import transformer
from searchrl.models.inference import engine as engines
from searchrl.models.inference import engine_weights
from searchrl.models.inference import stops
from searchrl.runtime import mesh as meshes
from searchrl.runtime import metrics
import tiny
import train_test

DEVICES = 8
OPTIMIZATION_LEVEL = 1

ROUNDED = dataclasses.replace(tiny.CONFIG, matmul_dtype='bfloat16')


def rounded(x) -> np.ndarray:
  return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)


@pytest.mark.parametrize('tokens', [(8,), (7,), (2, 3), (1,)])
def test_a_rounded_product_and_its_gradients_in_float64(tokens):
  rng = np.random.default_rng(0)
  x, kernel, cotangent = (rng.normal(size=shape).astype(np.float32)
                          for shape in ((*tokens, 16), (16, 5), (*tokens, 5)))
  y, pull = jax.vjp(
      jax.jit(lambda x, k: products.product(x, k, 'bfloat16')), x, kernel)
  of_x, of_kernel = pull(cotangent)
  assert {a.dtype for a in (y, of_x, of_kernel)} == {np.dtype('float32')}
  a, b, g = rounded(x), rounded(kernel), rounded(cotangent)
  np.testing.assert_allclose(y, a @ b, atol=1e-5)
  np.testing.assert_allclose(of_x, g @ b.T, atol=1e-5)
  np.testing.assert_allclose(
      of_kernel, np.einsum('nd,nf->df', a.reshape(-1, 16), g.reshape(-1, 5)),
      atol=1e-5)


def test_a_gradient_may_be_transposed():
  """The gradient of an embedding that is tied to the head is transposed."""
  x, kernel = np.ones((4, 8), np.float32), np.full((3, 8), 2, np.float32)
  gradient = jax.jit(jax.grad(lambda k: jnp.sum(
      products.product(x, k.T, 'bfloat16'))))(kernel)
  np.testing.assert_array_equal(gradient, np.full((3, 8), 4))


def test_what_layers_keep_is_not_written_again_by_each_layer():
  """XLA's CPU compiler would convert and copy whole stacks of bfloat16."""
  def loss(kernels, x):
    layer = lambda x, kernel: (products.product(x, kernel, 'bfloat16'), None)
    return jnp.sum(jax.lax.scan(layer, x, kernels)[0])

  kernels, x = jnp.ones((5, 16, 16)), jnp.ones((24, 16))
  text = jax.jit(jax.grad(loss)).lower(kernels, x).compile().as_text()
  assert 'u16[5,24,16]' in text and '[5,24,16]{2,1,0} convert' not in text


def test_by_default_nothing_is_rounded():
  rng = np.random.default_rng(0)
  x, kernel = jnp.asarray(rng.normal(size=(2, 8, 8)), jnp.float32)
  np.testing.assert_array_equal(products.product(x, kernel), jnp.dot(x, kernel))


def test_dtypes_of_activations_and_parameters_are_kept():
  x, kernel = jnp.ones((4, 8), jnp.bfloat16), jnp.ones((8, 3), jnp.bfloat16)
  product = lambda x, k: jnp.sum(
      products.product(x, k, 'bfloat16').astype(jnp.float32))
  gradients = jax.grad(product, (0, 1))(x, kernel)
  assert [g.dtype for g in gradients] == [jnp.bfloat16] * 2


@pytest.mark.parametrize(('flags', 'dtype'), [
    ('flags : fpu amx_bf16 amx_tile', 'bfloat16'),
    ('vendor_id : AuthenticAMD flags : fpu avx512_bf16', 'bfloat16'),
    ('vendor_id : GenuineIntel flags : fpu avx512_bf16', ''),
    ('vendor_id : AuthenticAMD flags : fpu avx512f', ''), (None, '')])
def test_the_fastest_dtype_follows_the_cpu(tmp_path, monkeypatch, flags, dtype):
  file = tmp_path / 'cpuinfo'
  if flags is not None:
    file.write_text(flags)
  monkeypatch.setattr(products, '_CPU', file)
  assert products.fastest() == dtype
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  assert products.fastest() == ''


@pytest.mark.parametrize(('asked', 'held'), [
    ('', ''), ('bfloat16', 'bfloat16'), ('auto', 'fastest here')])
def test_the_shape_of_a_model_has_the_dtype_of_its_config(
    monkeypatch, asked, held):
  monkeypatch.setattr(products, 'fastest', lambda: 'fastest here')
  assert model_folders.parts(str(policy.TINY_BASE), asked)[1].matmul_dtype == held


@pytest.mark.parametrize('tied', [True, False])
def test_logprobs_and_gradients_are_near_those_of_float32(tied):
  tokens = np.random.default_rng(0).integers(0, 96, (2, 16), np.int32)

  def outputs(config):
    config = dataclasses.replace(config, tie_word_embeddings=tied)
    params = tiny.params(config)

    def loss(params):
      logprobs = policy_logprobs.token_logprobs(params, tokens, config)[0]
      return jnp.mean(logprobs), logprobs

    gradient, logprobs = jax.jit(jax.grad(loss, has_aux=True))(params)
    return np.asarray(logprobs), np.concatenate(
        [np.ravel(x) for x in jax.tree.leaves(gradient)])

  (exact, slope), (near, near_slope) = outputs(tiny.CONFIG), outputs(ROUNDED)
  assert 0 < np.abs(near - exact).max() < 0.3
  angle = near_slope @ slope / np.sqrt(slope @ slope * near_slope @ near_slope)
  assert 0.99 < angle < 1 - 1e-9


@pytest.mark.parametrize('tied', [True, False])
def test_the_sampler_rounds_as_the_learner_does(tied):
  config = dataclasses.replace(ROUNDED, tie_word_embeddings=tied)
  params = tiny.params(config)
  engine = engines.Engine(
      config, slots=2, length=32,
      stop_table=stops.compile_table([b''], ['never said'], 96))
  engine.load(params, 1.0)
  engine.append([engines.Append(
      0, [5, 9, 2], 12, engines.row_ids(0, 'q', 0, 0), True)])
  turn, = engine.decode()
  tokens = np.array([[5, 9, 2, *turn.tokens]])
  off = {name: np.abs(np.asarray(policy_logprobs.token_logprobs(
      params, tokens, shape)[0])[0, 3:] - turn.logprobs).max()
         for name, shape in (('rounded', config), ('float32', dataclasses.replace(
             config, matmul_dtype='')))}
  assert off['rounded'] < 0.2 * off['float32'], off


def test_an_engine_holds_kernels_in_the_dtype_of_their_products():
  config = dataclasses.replace(ROUNDED, attention_bias=True)
  held = jax.eval_shape(lambda: engine_weights.rounded(engine_weights.unstacked(
      tiny.params(config), 'float32'), 'bfloat16'))
  kinds = {'/'.join(key.key for key in path if hasattr(key, 'key')): x.dtype.name
           for path, x in jax.tree_util.tree_leaves_with_path(held)}
  assert {name for name, kind in kinds.items() if kind == 'bfloat16'} == {
      'head/kernel', *(f'layers/{name}/kernel' for name in (
          'q', 'k', 'v', 'o', 'gate', 'up', 'down'))}
  assert transformer.head(held).shape == (32, 96)


@pytest.mark.parametrize('sizes', [
    dict(data=1, fsdp=8), dict(data=2, fsdp=2, tensor=2)])
def test_devices_round_as_one_does(sizes):
  """Sums over devices have another order, after which few operands differ."""
  tokens = np.random.default_rng(0).integers(0, 96, (8, 16), np.int32)
  params = tiny.params(ROUNDED)

  def loss(params, tokens):
    return jnp.mean(policy_logprobs.token_logprobs(params, tokens, ROUNDED)[0])

  def outputs(params, tokens):
    return jax.device_get(jax.jit(jax.value_and_grad(loss))(params, tokens))

  mesh = meshes.make(**sizes)
  split = jax.device_put(params, meshes.shardings(
      mesh, transformer.logical_axes(ROUNDED)))
  value, gradient = outputs(params, tokens)
  near, slope = outputs(split, jax.device_put(
      tokens, meshes.shardings(mesh, ('batch', None))))
  assert near == pytest.approx(value, abs=2e-3)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(
      x, y, atol=0.02 * np.abs(y).max()), slope, gradient)


_WAYS: dict[str, Any] = {
    'a critic': dict(recipe=ppo),
    'devices': dict(recipe=grpo, mesh=dict(data=2, fsdp=2, tensor=2),
                    rollout=dict(tensor=2)),
    'adapters': dict(recipe=grpo, model=dict(lora=dict(rank=4)))}


@pytest.mark.slow
@pytest.mark.parametrize('way', _WAYS)
def test_a_run_rounds_in_the_learner_and_in_the_sampler(
    tmp_path, monkeypatch, capsys, way):
  """The log-probs of both agree."""
  if way != 'devices':  # one trains twice as fast as eight
    monkeypatch.setattr(meshes, 'all_devices', lambda: jax.devices()[:1])
  changes = dict(_WAYS[way])
  config = train_test.tiny(changes.pop('recipe'), steps=2)
  config.evaluate.worlds.kinds = ()
  config.update(changes)
  config.model.matmul_dtype = 'bfloat16'
  train.run(config, tmp_path)
  assert 'rounded to bfloat16 (model.matmul_dtype)' in capsys.readouterr().err
  rows = [json.loads(row) for row in (tmp_path / metrics.FILE).open()]
  rows = [row for row in rows if 'actor/pg_loss' in row]
  assert [row['training/global_step'] for row in rows] == [1, 2]
  for row in rows:
    assert row['training/rollout_logprobs_diff_max'] < 0.1
    norms = [row[name] for name in row if name.endswith('/grad_norm')]
    assert norms and min(norms) > 0
