# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""experts: all ways to compute a mixture against one token at a time."""

import dataclasses
import functools

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from searchrl.models import expert_rows
from searchrl.models import experts
from searchrl.models import grouped_gpu
from searchrl.models import grouped_tpu
from searchrl.models import transformer
from searchrl.runtime import mesh as meshes

DEVICES = 8

N, D, F, E, K = 40, 16, 64, 6, 2


@pytest.fixture(autouse=True)
def fixture_kernels_are_interpreted(monkeypatch):
  monkeypatch.setattr(grouped_gpu, 'ROWS', 16)
  monkeypatch.setattr(grouped_gpu.pl, 'pallas_call', functools.partial(
      pl.pallas_call, interpret=True))


@pytest.fixture(name='inputs')
def fixture_inputs():
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  logits = draw(N, E)
  logits[:, 3] = -9  # nobody chooses this expert
  routing = experts.route(jnp.asarray(logits), K, True)
  return draw(N, D), routing, draw(E, D, F), draw(E, D, F), draw(E, F, D)


def one_by_one(x, routing, gate, up, down):
  x, gate, up, down = (a.astype(np.float64) for a in (x, gate, up, down))
  result = np.zeros_like(x)
  for n, (ids, weights) in enumerate(zip(*map(np.asarray, routing[:2]))):
    for expert, weight in zip(ids, weights):
      g = x[n] @ gate[expert]
      result[n] += weight * (g / (1 + np.exp(-g)) * (
          x[n] @ up[expert])) @ down[expert]
  return result


def by_all(x, routing, *kernels):
  return experts._by_all(x, routing.ids, routing.weights, *kernels)


def by_own(x, routing, *kernels):
  return experts._by_own(x, routing.ids, routing.weights, *kernels)


def by_blocks(x, routing, *kernels, ways=1):
  return experts._by_blocks(x, routing.ids, routing.weights, *kernels, ways)


WAYS = [by_all, by_own, by_blocks]


@pytest.mark.parametrize('way', WAYS)
def test_a_mixture_is_the_sum_over_each_tokens_experts(inputs, way):
  np.testing.assert_allclose(
      jax.jit(way)(*inputs), one_by_one(*inputs), atol=1e-4)


def test_all_ways_have_the_same_gradients(inputs):
  x, routing, *kernels = inputs

  def gradient(way):
    def loss(x, weights, *kernels):
      return jnp.sum(way(x, routing._replace(weights=weights), *kernels) ** 2)
    return jax.jit(jax.grad(loss, argnums=range(5)))(
        x, routing.weights, *kernels)

  for leaves in zip(*map(gradient, WAYS)):
    for leaf in leaves[1:]:
      np.testing.assert_allclose(leaves[0], leaf, rtol=1e-4, atol=1e-2)


def test_the_kernel_for_tpus_sums_the_rows_of_each_group(monkeypatch):
  monkeypatch.undo()  # another interpreter
  monkeypatch.setattr(grouped_tpu, 'ROWS', 16)
  rng = np.random.default_rng(0)
  x, y = (rng.normal(size=(48, n)).astype(np.float32) for n in (128, 256))
  x[40:] = np.nan  # rows after all groups
  sizes = np.array([3, 0, 20, 17], np.int32)
  edges = np.cumsum([0, *sizes])
  wanted = np.stack([
      x[a:b].T.astype(np.float64) @ y[a:b] for a, b in zip(edges, edges[1:])])
  np.testing.assert_allclose(
      grouped_tpu.sums(x, y, sizes, interpret=True), wanted, atol=1e-4)
  x = np.nan_to_num(x)
  np.testing.assert_allclose(
      grouped_tpu._transposed(np.zeros((4, 128, 256), np.float32), x, y, sizes),
      wanted, atol=1e-4)


@pytest.mark.parametrize('sizes', [
    dict(expert=2), dict(data=1, expert=2, tensor=4),
    dict(data=1, fsdp=2, expert=2, tensor=2), dict(data=2, fsdp=4)])
@pytest.mark.parametrize('way', ['_by_all', '_by_own', '_by_blocks'])
def test_devices_share_a_mixture(inputs, sizes, way, monkeypatch):
  mesh = meshes.make(**sizes)
  if way != '_by_all':
    monkeypatch.setattr(experts, '_by_all', functools.partial(
        getattr(experts, way), ways=mesh.shape.get('expert', 1)))
  shared = experts.sharded(functools.partial(meshes.sharding, mesh))

  def gradient(mixed):
    def loss(x, weights, *kernels):
      y = mixed(x, inputs[1]._replace(weights=weights), *kernels)
      return jnp.sum(y ** 2), y
    return jax.jit(jax.value_and_grad(
        loss, argnums=range(5), has_aux=True))

  x, routing, *kernels = inputs
  inputs_ = x, routing.weights, *kernels
  (_, ours), gradients = gradient(shared)(*inputs_)
  np.testing.assert_allclose(ours, one_by_one(*inputs), atol=1e-4)
  _, expected = gradient(by_own)(*inputs_)
  for leaf, other in zip(gradients, expected):
    np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize('way', ['_by_own', '_by_blocks'])
@pytest.mark.parametrize('chosen', [0, 1, 5, 9])
def test_what_has_no_room_is_computed_in_another_pass(
    inputs, way, chosen, monkeypatch):
  """One of 8 devices: two of its six experts are chosen by many tokens."""
  x, routing, *kernels = inputs
  ids = jnp.where(jnp.arange(N)[:, None] % 10 < chosen, jnp.array([[1, 4]]),
                  jnp.array([[E, E + 3]]))
  monkeypatch.setattr(grouped_gpu, 'ROWS', 4)
  monkeypatch.setattr(grouped_tpu, 'ROWS', 2)
  passes, count = [], expert_rows._passes
  monkeypatch.setattr(expert_rows, '_passes', lambda rows, room: (
      passes.append((int(count(rows, room)), room)), count(rows, room))[1])

  def gradient(function):
    def loss(x, weights, *kernels):
      y = function(x, ids, weights, *kernels)
      return jnp.sum(y ** 2), y
    return jax.value_and_grad(loss, argnums=range(5), has_aux=True)(
        x, routing.weights, *kernels)

  (_, ours), gradients = gradient(functools.partial(
      getattr(experts, way), ways=8))
  (_, expected), wanted = gradient(experts._by_all)
  np.testing.assert_allclose(ours, expected, atol=1e-4)
  for leaf, other in zip(gradients, wanted):
    np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=1e-2)
  # Of the 2 N choices, 2 N / 8 * 2 = 20 have room, and a block of each expert.
  room, used = {'_by_own': (20 + E, 8 * chosen), '_by_blocks': (
      20 + 4 * E, 8 * chosen)}[way]
  assert passes == [(-(-used // room), room)] * 2


def test_rows_of_no_expert_are_never_read(inputs):
  """Six experts have 8 blocks of 16 rows, of which a pass takes 7."""
  x, routing, *kernels = inputs
  ids = jnp.array([0] * 17 + [1] * 17 + [2, 3, 4, 5] + [E] * (2 * N - 38))
  ids = jax.random.permutation(jax.random.key(0), ids).reshape(N, 2)

  def product(rows, kernel, starts):
    inside = jnp.arange(len(rows))[:, None] < starts[-1] * 16
    return jnp.where(
        inside, grouped_gpu.product(rows, kernel, starts), jnp.nan)

  def gradient(function):
    def loss(x, weights, *kernels):
      y = function(x, weights, *kernels)
      return jnp.sum(y ** 2), y
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(
        x, routing.weights, *kernels)

  (_, ours), gradients = gradient(lambda x, weights, *kernels: (
      expert_rows.mixed(product, 16, 16, 8, x, ids, weights, kernels)))
  (_, expected), wanted = gradient(lambda x, weights, *kernels: (
      experts._by_all(x, ids, weights, *kernels)))
  np.testing.assert_allclose(ours, expected, atol=1e-4)
  for leaf, other in zip(gradients, wanted):
    np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=1e-2)


def test_no_token_is_dropped_if_all_choose_one_expert(inputs):
  x, _, *kernels = inputs
  routing = experts.route(jnp.zeros((N, E)).at[:, 4].set(9.0), 1, True)
  for way in WAYS:
    np.testing.assert_allclose(way(x, routing, *kernels), one_by_one(
        x, routing, *kernels), atol=1e-4)


def test_a_given_routing_keeps_its_experts():
  logits = jnp.array([[0., 1, 2, 3, 4, 1]] * 3)
  given = experts.recorded(jnp.array([[5, 0], [3, 4], [0, 0]]), 6)
  given = given.at[2].set(0)  # not known
  routing = experts.route(logits, 2, True, given)
  assert routing.ids.tolist() == [[5, 0], [3, 4], [4, 3]]
  likely = np.e / (1 + np.e)
  np.testing.assert_allclose(
      routing.weights, [[likely, 1 - likely], [1 - likely, likely],
                        [likely, 1 - likely]], rtol=1e-6)
  load = experts.load(routing, jnp.array([True, True, True]))
  assert load.replaced == 2
  assert experts.load(routing, jnp.array([False, True, True])).replaced == 0
  assert experts.load(experts.route(logits, 2, True), load.chosen[:3] >= 0
                      ).replaced is None


@pytest.mark.parametrize('count, dtype', [
    (128, 'uint8'), (255, 'uint8'), (256, 'uint16')])
def test_a_record_holds_every_expert_and_none(count, dtype):
  record = experts.recorded(jnp.array([0, count - 1]), count)
  assert record.dtype == dtype and record.tolist() == [1, count]


@pytest.mark.parametrize('normalised', [True, False])
def test_a_layer_with_given_experts_is_that_of_the_definition(normalised):
  shape = dataclasses.replace(
      tiny.CONFIG, attention_bias=False, qk_norm=True, num_hidden_layers=1,
      experts=experts.Experts(E, K, 24, normalised))
  params = tiny.params(shape)
  layer = jax.tree.map(lambda x: x[0], params['layers'])
  rng = np.random.default_rng(1)
  x = rng.normal(size=(1, N, shape.hidden_size)).astype(np.float32)
  given = np.stack([rng.permutation(E)[:K] for _ in range(N)])

  def run(ids):  # attention adds nothing
    return transformer.Block(shape).apply(
        {'params': layer}, x, jnp.arange(N)[None],
        lambda q, k, v: (jnp.zeros_like(q), None), ids)[0]

  wide = jax.tree.map(lambda x: np.asarray(x, np.float64), layer)
  flat = x[0].astype(np.float64)
  flat = flat / np.sqrt(np.mean(flat ** 2, -1, keepdims=True) + 1e-6)
  flat = flat * wide['mlp_norm']['scale']
  probs = np.exp(flat @ wide['router']['kernel'])
  probs /= probs.sum(-1, keepdims=True)
  weights = np.take_along_axis(probs, given, 1)
  if normalised:
    weights /= weights.sum(-1, keepdims=True)
  mixture = one_by_one(flat, (given, weights), *(
      wide[f'expert_{name}']['kernel'] for name in ('gate', 'up', 'down')))
  np.testing.assert_allclose(
      run(experts.recorded(jnp.asarray(given), E))[0], x[0] + mixture,
      rtol=1e-5, atol=1e-4)


def test_the_load_counts_used_tokens_only():
  logits = jnp.log(jnp.array([[.7, .2, .1], [.1, .3, .6], [.1, .1, .8]]))
  load = experts.load(experts.route(logits, 2, False),
                      jnp.array([True, True, False]))
  np.testing.assert_array_equal(load.chosen, [1, 2, 1])
  np.testing.assert_allclose(load.probs, [.8, .5, .7], rtol=1e-6)
  entropies = [-sum(p * np.log(p) for p in row)
               for row in ([.7, .2, .1], [.1, .3, .6])]
  np.testing.assert_allclose(load.entropy, sum(entropies), rtol=1e-6)
  assert load.tokens == 2
  # 3 experts x the sum of shares x mean probabilities
  np.testing.assert_allclose(
      experts.balance(jax.tree.map(lambda x: x[None], load)),
      3 * (.5 * .4 + 1 * .25 + .5 * .35), rtol=1e-6)
