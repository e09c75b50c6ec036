# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""lora: adapters are a change of the kernels, and nothing else is trained."""

import json
import dataclasses
import functools

import jax
import jax.numpy as jnp
import learner_test as learning
import numpy as np
import optax
import pytest
import tiny
import train_test

from configs import grpo
from searchrl.experiment import policy as policies
from searchrl.jobs import train
from searchrl.models import lora as loras
from searchrl.models import policy_logprobs
from searchrl.models import transformer
from searchrl.models import weights
from searchrl.runtime import mesh as meshes
from searchrl.training import learner as learners

DEVICES = 8

CONFIG = learning.CONFIG
LORA = loras.Lora(rank=3, alpha=6.0)
RATE = 0.1


@pytest.fixture(scope='module')
def base():
  return jax.device_get(tiny.params(CONFIG))


def random_adapters(lora, seed=0):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
      lambda x: 0.1 * rng.normal(size=x.shape).astype(np.float32),
      loras.init(lora, CONFIG, jax.random.key(0)))


def make(lora=LORA, mesh=None, **options):
  options = dict(rows=learning.ROWS, length=learning.LENGTH,
                 temperature=learning.TEMPERATURE, seed=3) | options
  return learners.make(
      CONFIG, learning.ALGORITHM, optax.sgd(RATE),
      mesh or meshes.make(devices=jax.devices()[:1]), lora=lora, **options)


@pytest.mark.parametrize('targets', [loras.TARGETS, ('q',), ('down', 'v')])
def test_attached_and_merged_adapters_give_equal_logprobs(base, targets):
  lora = dataclasses.replace(LORA, targets=targets)
  adapters = random_adapters(lora)
  tokens = np.random.default_rng(1).integers(0, 96, (3, 12))
  run = jax.jit(functools.partial(policy_logprobs.token_logprobs, config=CONFIG))
  attached, _ = run(loras.attach(base, adapters, lora), tokens)
  merged, _ = run(loras.merge(base, adapters, lora), tokens)
  plain, _ = run(base, tokens)
  np.testing.assert_allclose(attached, merged, atol=2e-5)
  assert np.abs(attached - plain).max() > 1e-2


def test_merged_kernels_by_hand(base):
  """W + (alpha / rank) A B, float64; other leaves are the base's own."""
  adapters = random_adapters(LORA)
  merged = loras.merge(base, adapters, LORA)
  for name in loras.TARGETS:
    a, b = (adapters['layers'][name][x].astype(np.float64)
            for x in ('lora_a', 'lora_b'))
    for layer in range(CONFIG.num_hidden_layers):
      np.testing.assert_allclose(
          merged['layers'][name]['kernel'][layer],
          base['layers'][name]['kernel'][layer] + 6 / 3 * a[layer] @ b[layer],
          atol=1e-6)
  assert merged['embed'] is base['embed']
  assert jax.tree.structure(merged) == jax.tree.structure(base)


def test_a_merged_kernel_keeps_its_dtype(base):
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), base)
  merged = loras.merge(half, random_adapters(LORA), LORA)
  assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(merged))
  whole = loras.merge(half, random_adapters(LORA), LORA, 'float32')
  exact = loras.merge(jax.tree.map(lambda x: x.astype(jnp.float32), half),
                      random_adapters(LORA), LORA)
  for name in loras.TARGETS:
    np.testing.assert_array_equal(
        whole['layers'][name]['kernel'], exact['layers'][name]['kernel'])


def test_fresh_adapters_change_nothing_and_differ(base):
  adapters = loras.init(LORA, CONFIG, jax.random.key(0))
  merged = loras.merge(base, adapters, LORA)
  jax.tree.map(np.testing.assert_array_equal, merged, base)
  first = adapters['layers']['q']['lora_a']
  assert 0.9 * 32 ** -0.5 < np.abs(first).max() <= 32 ** -0.5
  assert np.abs(first - adapters['layers']['k']['lora_a']).max() > 0
  axes = loras.logical_axes(LORA, CONFIG)
  jax.tree.map(lambda x, names: x.ndim == len(names) or pytest.fail(str(names)),
               adapters, axes)
  assert axes['layers']['down']['lora_a'] == ('layers', 'mlp', None)


@jax.jit
def whole_step(adapters, base, batch):
  """One step of the adapters on a batch as it is, through merged kernels."""
  def loss(adapters):
    out = learning.algorithms.PolicyOutput(*policy_logprobs.token_logprobs(
        loras.merge(base, adapters, LORA), batch.tokens, CONFIG,
        temperature=learning.TEMPERATURE))
    terms, _ = learning.ALGORITHM.loss(
        out, batch, learning.ALGORITHM.advantages(batch))
    return learning.algorithms.total(terms)

  return jax.tree.map(
      lambda x, g: x - RATE * g, adapters, jax.grad(loss)(adapters))


@pytest.mark.slow
@pytest.mark.parametrize('layout', [(1, 1, 1), (2, 2, 2)])
def test_an_update_is_the_gradient_of_the_adapters_alone(layout, base):
  count = int(np.prod(layout))
  mesh = meshes.make(**dict(zip(meshes.AXES, layout)),
                     devices=jax.devices()[:count])
  learner = make(mesh=mesh)
  state = learner.init(base)
  start = random_adapters(LORA)
  state['policy'] = dataclasses.replace(state['policy'], params=jax.tree.map(
      lambda x, like: jax.device_put(np.array(x), like.sharding), start,
      state['policy'].params))
  before = jax.tree.map(np.array, base)
  scored = learning.scored_whole(learner, state, learning.ragged_batch(), base)
  mask = scored.loss_mask
  assert np.abs(scored.old_logprobs - scored.ref_logprobs)[mask].max() > 1e-2
  expected = whole_step(start, base, jax.tree.map(
      lambda x: x[:-learning.FILLER], scored))
  state, metrics = learning.update(learner, state, scored, base=base)
  assert jax.tree.structure(state['policy'].params) == (
      jax.tree.structure(expected))
  jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5),
      jax.device_get(state['policy'].params), jax.device_get(expected))
  assert metrics['actor/grad_norm'] > 0
  jax.tree.map(np.testing.assert_array_equal, base, before)


def test_the_frozen_policy_is_the_reference_and_the_start(base):
  learner = make()
  state = learner.init(base)
  assert learner.needs_base
  scored = learning.scored_whole(learner, state, learning.ragged_batch(), base)
  np.testing.assert_allclose(
      scored.old_logprobs, scored.ref_logprobs, atol=1e-6)
  sampled = learner.policy(state, base)
  jax.tree.map(np.testing.assert_array_equal, loras.merged(sampled), base)
  assert sampled['layers']['q']['kernel'] is base['layers']['q']['kernel']
  trained = sum(x.size for x in jax.tree.leaves(state))
  assert trained < 0.5 * sum(x.size for x in jax.tree.leaves(base))


def test_seeds_give_other_adapters(base):
  one, two, again = (make(seed=s).init(base)['policy'].params['layers']['q'][
      'lora_a'] for s in (0, 1, 0))
  np.testing.assert_array_equal(one, again)
  assert np.abs(one - two).max() > 0


@pytest.mark.parametrize('options, message', [
    (dict(rank=0), 'lora.rank must be at least 1 .* they are 0 and 6.0'),
    (dict(alpha=0.0), 'lora.alpha above 0'),
    (dict(targets=('q', 'query')), r"must be some of .* but is \('q', 'query'"),
    (dict(targets=()), 'must be some of'),
])
def test_bad_adapters_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(LORA, **options)


def test_a_model_without_adapters_has_none_of_their_parameters():
  assert 'lora_a' not in str(jax.tree.structure(
      transformer.init(CONFIG, jax.random.key(0))))


@pytest.mark.slow
def test_a_run_trains_adapters_and_exports_those_of_its_checkpoint(tmp_path):
  config = train_test.tiny(grpo)
  config.seed = 1  # has a mixed group in its first step
  config.evaluate.worlds.kinds = ()
  config.model.lora.update(rank=4, targets=('q', 'v', 'down'))
  config.algorithm.kl_coef = 0.01
  config.optimizer.learning_rate = 1e-2
  train.run(config, str(tmp_path / 'run'))
  noted = tmp_path / 'run' / f'{policies.BASE}.json'
  assert json.loads(noted.read_text()) == policies.base_of('')
  base = weights.load(str(policies.TINY_BASE),
                      weights.read_config(str(policies.TINY_BASE)))
  shape = weights.read_config(str(tmp_path / 'run' / 'model'))
  exported = weights.load(str(tmp_path / 'run' / 'model'), shape)
  trained = policies.trained(tmp_path / 'run', base, shape)
  jax.tree.map(np.testing.assert_array_equal, trained, exported)
  for name in transformer.abstract(shape)['layers']:
    changed = any(np.any(x != y) for x, y in zip(
        jax.tree.leaves(exported['layers'][name]),
        jax.tree.leaves(base['layers'][name])))
    assert changed == (name in ('q', 'v', 'down')), name
  step = train_test.lines(tmp_path / 'run')[-1]
  assert step['actor/kl_loss'] > 0 and step['actor/grad_norm'] > 0
