# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A model with experts: learner, engine, adapters and meshes agree."""

import dataclasses
import functools

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
from searchrl.models import policy_logprobs
from searchrl.models import sizes
from searchrl.models import transformer
from searchrl.models.inference import engine as engines
from searchrl.models.inference import stops
from searchrl.rl import algorithms
from searchrl.rollouts import weight_sync
from searchrl.runtime import mesh as meshes
from searchrl.training import learner as learners

DEVICES = 8

CONFIG = dataclasses.replace(
    learning.CONFIG, architecture='Qwen3MoeForCausalLM', attention_bias=False,
    num_key_value_heads=4, qk_norm=True, experts=experts.Experts(
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24,
        norm_topk_prob=True))
COEF = 0.1
ALGORITHM = algorithms.grpo(kl_coef=0.0)
ONE = dict(devices=jax.devices()[:1])
MESHES = [dict(expert=2), dict(data=1, expert=4, tensor=2),
          dict(data=1, fsdp=2, expert=2, tensor=2), dict(fsdp=4), dict(tensor=4)]


@pytest.fixture(scope='module', name='params')
def fixture_params():
  return jax.device_get(tiny.params(CONFIG))


def make(mesh, **options):
  options = dict(rows=learning.ROWS, length=learning.LENGTH,
                 temperature=learning.TEMPERATURE) | options
  return learners.make(CONFIG, ALGORITHM, optax.sgd(0.1), mesh, **options)


def updated(params, mesh, batch=None, **options):
  learner = make(mesh, **options)
  state = learner.init(params)
  scored = learner.score(state, batch or learning.ragged_batch(), params)
  result = learner.update(state, scored, params)
  return jax.device_get(result.state['policy'].params), result.metrics


def by_definition(params, batch=None):
  """The gradient of the loss of whole rows, and of the balance of a batch."""
  batch = batch or learning.ragged_batch()
  last = jnp.where(batch.loss_mask, jnp.arange(learning.LENGTH), -1).max(1)
  used = jnp.arange(learning.LENGTH) <= last[:, None]

  def loss(params):
    *out, load = policy_logprobs.token_outputs(
        params, batch.tokens, CONFIG, temperature=learning.TEMPERATURE,
        segment_ids=used.astype(jnp.int32), routing=batch.routing)
    old = jax.lax.stop_gradient(out[0])
    terms, _ = ALGORITHM.loss(
        algorithms.PolicyOutput(*out), dataclasses.replace(
            batch, old_logprobs=old), ALGORITHM.advantages(batch))
    balance = experts.balance(load)
    return algorithms.total(terms) + COEF * balance, (balance, load)

  grads, (balance, load) = jax.jit(jax.grad(loss, has_aux=True))(params)
  assert load.tokens.tolist() == [float(used.sum())] * 2
  return jax.tree.map(lambda x, g: x - 0.1 * g, params, grads), balance


def chosen(params, tokens, given=None, shape=CONFIG, dtype='float32'):
  """The experts of whole rows by a forward pass, [B T L*k], as recorded.

  They are those that the router would choose; layers use the given ones.
  """
  x = params['embed']['embedding'].astype(dtype)[tokens]
  layers, count = shape.num_hidden_layers, shape.experts.num_experts_per_tok
  if given is not None:
    given = given.reshape(tokens.size, layers, count)
  ids = []
  for number in range(layers):
    layer = jax.tree.map(lambda x: x[number].astype(dtype), params['layers'])
    (x, _), sown = transformer.Block(shape).apply(
        {'params': layer}, x, jnp.broadcast_to(
            jnp.arange(tokens.shape[1]), tokens.shape),
        lambda q, k, v: (attention.causal(q, k, v), None),
        None if given is None else given[:, number], mutable=('routing',))
    _, likeliest = jax.lax.top_k(sown['routing']['chosen'][0].probs, count)
    ids.append(likeliest)
  return experts.recorded(
      jnp.stack(ids, 1), shape.experts.num_experts).reshape(*tokens.shape, -1)


def forced(params, seed=0):
  """A batch whose every token has random experts, none twice."""
  rng, batch = np.random.default_rng(seed), learning.ragged_batch()
  ids = rng.random((*batch.tokens.shape, 2, 8)).argsort(-1)[..., :2]
  return dataclasses.replace(batch, routing=np.asarray(
      experts.recorded(jnp.asarray(ids), 8)).reshape(*batch.tokens.shape, 4))


@pytest.mark.slow
@pytest.mark.parametrize('ways', [ONE, MESHES[0]], ids=str)
def test_replaying_the_learners_own_experts_changes_nothing(params, ways):
  mesh = meshes.make(**ways)
  batch = learning.ragged_batch()
  replayed = dataclasses.replace(batch, routing=np.asarray(
      chosen(params, batch.tokens)))
  options = dict(router_aux_loss_coef=COEF, microbatch_rows=16)
  expected, metrics = updated(params, mesh, **options)
  found, again = updated(params, mesh, batch=replayed, **options)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(
      x, y, rtol=1e-6, atol=1e-7), found, expected)
  assert again.pop('actor/experts_replaced') == 0
  assert again == pytest.approx(metrics, rel=1e-5, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('ways', [ONE, dict(data=-1), MESHES[2]], ids=str)
def test_an_update_with_given_experts_is_that_of_the_definition(params, ways):
  batch = forced(params)
  ours, metrics = updated(params, meshes.make(**ways), batch=batch,
                          router_aux_loss_coef=COEF, microbatch_rows=16)
  expected, _ = by_definition(params, batch)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(
      x, y, atol=2e-5), ours, expected)
  own = np.asarray(chosen(params, batch.tokens, batch.routing)).reshape(
      *batch.tokens.shape, 2, 2)
  used = np.arange(learning.LENGTH) < np.asarray(batch.lengths)[:, None]
  given = batch.routing.reshape(*own.shape)
  missing = ~(given[..., :, None] == own[..., None, :]).any(-1)
  assert metrics['actor/experts_replaced'] == pytest.approx(
      missing[used].mean(), abs=1e-6)


@pytest.mark.slow
def test_old_log_probs_are_of_the_given_experts_and_a_reference_has_its_own(
    params):
  learner = learners.make(
      CONFIG, algorithms.grpo(kl_coef=0.1), optax.sgd(0.1), meshes.make(**ONE),
      rows=learning.ROWS, length=learning.LENGTH, minibatches=2,
      temperature=learning.TEMPERATURE)
  batch, state = forced(params), learner.init(params)
  packed = learner.score(state, batch, params)
  scored = dataclasses.replace(
      packed.batch, old_logprobs=learner.logprobs(state, packed))
  for name, routing in (('old', batch.routing), ('ref', None)):
    expected, _ = policy_logprobs.token_logprobs(
        params, batch.tokens, CONFIG, temperature=learning.TEMPERATURE,
        routing=routing)
    np.testing.assert_allclose(
        np.where(batch.loss_mask, getattr(scored, f'{name}_logprobs'), 0),
        np.where(batch.loss_mask, expected, 0), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('ways', [{}, *MESHES], ids=str)
def test_an_update_is_that_of_the_definition_on_every_mesh(params, ways):
  mesh = meshes.make(**(ways or ONE))
  ours, metrics = updated(params, mesh, router_aux_loss_coef=COEF,
                          microbatch_rows=16)
  expected, balance = by_definition(params)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(
      x, y, atol=2e-5), ours, expected)
  np.testing.assert_allclose(
      metrics['actor/experts_balance'], balance, rtol=1e-5)
  assert metrics['actor/experts_max_load'] > 1
  assert 0 < metrics['actor/experts_entropy'] < np.log(8)


def test_padding_has_no_load(params):
  tokens = np.arange(24).reshape(1, 24)
  segments = np.where(tokens < 10, 1, 0)
  _, load = transformer.forward_with_load(
      params, tokens, CONFIG, segment_ids=segments)
  assert load.tokens.tolist() == [10, 10]
  assert load.chosen.sum(-1).tolist() == [20, 20]


def engine_of(params, mesh, tensor, prompts):
  """Sampled tokens and their log-probs, for prompts of any length."""
  axes = transformer.logical_axes(CONFIG)
  sync = weight_sync.WeightSync(
      mesh, axes, CONFIG.num_hidden_layers, tensor=tensor)
  weights = sync(jax.tree.map(
      meshes.place, params, meshes.shardings(mesh, axes))).weights
  never = stops.compile_table((), ('never',), CONFIG.vocab_size)
  engine = engines.Engine(
      CONFIG, slots=len(prompts), length=64, stop_table=never, tile=16,
      shardings=functools.partial(meshes.shardings, sync.mesh))
  engine.load(weights, temperature=0.9)
  engine.append([engines.Append(slot, prompt, 12, (slot,) * 5, True)
                 for slot, prompt in enumerate(prompts)])
  outputs = {}
  while len(outputs) < len(prompts):
    outputs |= {s.slot: s for s in engine.decode()}
  return [outputs[slot] for slot in range(len(prompts))], sync


@pytest.mark.slow
@pytest.mark.parametrize('ways, tensor', [
    (ONE, 1), (dict(expert=2), 1), (dict(data=1, expert=2, tensor=4), 4),
    (dict(data=1, expert=8), 2), (dict(fsdp=4), 2)], ids=str)
def test_the_engine_samples_at_the_learners_log_probs(params, ways, tensor):
  rng = np.random.default_rng(0)
  prompts = [tuple(rng.integers(0, 96, n).tolist())
             for n in (3, 20, 9, 30, 17, 1, 5, 40)]
  sampled, sync = engine_of(params, meshes.make(**ways), tensor, prompts)
  assert sync.mesh.shape['tensor'] == tensor
  for prompt, turn in zip(prompts, sampled):
    tokens = np.array([[*prompt, *turn.tokens]])
    logprobs, _ = policy_logprobs.token_logprobs(
        params, tokens, CONFIG, temperature=0.9)
    np.testing.assert_allclose(
        logprobs[0, len(prompt):], turn.logprobs, atol=2e-5)


def test_engines_split_experts_as_far_as_devices_allow(params):
  mesh = meshes.make(data=1, expert=8)
  sync = weight_sync.WeightSync(mesh, transformer.logical_axes(CONFIG),
                                CONFIG.num_hidden_layers, tensor=4)
  assert dict(sync.mesh.shape) == dict(data=1, fsdp=1, expert=2, tensor=4)


@pytest.mark.slow
@pytest.mark.parametrize('targets', [loras.TARGETS, ('q', 'o'), ('up',)])
def test_merged_adapters_are_the_attached_ones(params, targets):
  lora = loras.Lora(rank=2, alpha=4.0, targets=targets)
  rng = np.random.default_rng(2)
  adapters = jax.tree.map(
      lambda x: 0.1 * rng.normal(size=x.shape).astype(np.float32),
      loras.init(lora, CONFIG, jax.random.key(0)))
  tokens = np.random.default_rng(1).integers(0, 96, (3, 12))
  run = jax.jit(functools.partial(policy_logprobs.token_logprobs,
                                  config=CONFIG))
  np.testing.assert_allclose(
      run(loras.attach(params, adapters, lora), tokens)[0],
      run(loras.merge(params, adapters, lora), tokens)[0], atol=1e-4)


def test_every_expert_has_an_adapter_of_its_own(params):
  lora = loras.Lora(rank=2, alpha=4.0, targets=('down',))
  adapters = loras.init(lora, CONFIG, jax.random.key(0))
  adapter = adapters['layers']['expert_down']
  assert adapter['lora_a'].shape == (2, 8, 24, 2)
  adapter['lora_b'] = jnp.ones((2, 8, 2, 32)).at[:, 1:].set(0)
  before = params['layers']['expert_down']['kernel']
  merged = loras.merge(params, adapters, lora)['layers']['expert_down']['kernel']
  np.testing.assert_allclose(
      merged[:, 0] - before[:, 0], np.broadcast_to(2 * np.asarray(
          adapter['lora_a'][:, 0].sum(-1, keepdims=True)), (2, 24, 32)),
      atol=1e-6)
  np.testing.assert_array_equal(merged[:, 1:], before[:, 1:])


@pytest.mark.slow
@pytest.mark.parametrize('ways', [ONE, MESHES[2]], ids=str)
def test_an_update_of_adapters_is_that_of_merged_weights(params, ways):
  """The chain rule says: with A fixed, the gradient of B is scale A' dW."""
  lora = loras.Lora(rank=2, alpha=4.0, targets=('up',))
  learner = make(meshes.make(**ways), lora=lora, microbatch_rows=16)
  state = learner.init(params)
  before = jax.device_get(state['policy'].params)['layers']['expert_up']
  batch = learning.ragged_batch()
  result = learner.update(state, learner.score(state, batch, params), params)
  after = jax.device_get(result.state['policy'].params)['layers']['expert_up']
  whole, _ = updated(params, meshes.make(**ONE), microbatch_rows=16)
  dw = (params['layers']['expert_up']['kernel']
        - whole['layers']['expert_up']['kernel']) / 0.1
  np.testing.assert_array_equal(after['lora_a'], before['lora_a'])  # as B is 0
  np.testing.assert_allclose(
      after['lora_b'], -0.1 * lora.scale * np.einsum(
          'ledr,ledf->lerf', before['lora_a'], dw), atol=2e-5)


def test_a_token_uses_the_parameters_of_its_experts():
  shape = dataclasses.replace(CONFIG, tie_word_embeddings=True)
  everything, used = sizes.parameters(shape)
  assert everything == sum(x.size for x in jax.tree.leaves(
      transformer.abstract(shape)))
  assert everything - used == 2 * 6 * 3 * 32 * 24  # layers, experts, matrices
