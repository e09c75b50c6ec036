# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""bridge: a module becomes a pure function, whatever it does when called."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl import bridge

X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


class Adapter(nnx.Variable):
  """A type of our own, to be trained alone."""


class Busy(nnx.Module):
  """Normalises, drops, counts, and has an adapter: writes at every call."""

  def __init__(self):
    rngs = nnx.Rngs(0)
    self.dense = nnx.Linear(4, 3, rngs=rngs)
    self.norm = nnx.BatchNorm(3, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.adapter = Adapter(jnp.ones(3))
    self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

  def __call__(self, x, scale=1.0, rngs=None):
    self.calls[...] += 1
    hidden = self.norm(self.dense(x)) * self.adapter[...] * scale
    return self.dropout(hidden, rngs=rngs)


class Tied(nnx.Module):
  """One table, read at both ends."""

  def __init__(self):
    self.embed = nnx.Embed(5, 4, rngs=nnx.Rngs(0))

  def __call__(self, tokens):
    return self.embed.attend(self.embed(tokens))


def snapshot(module) -> list[np.ndarray]:
  def to_numpy(x):
    keys = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.array(jax.random.key_data(x) if keys else x)
  return [to_numpy(x) for x in jax.tree.leaves(nnx.state(module))]


def assert_same(tree, other):
  assert jax.tree.structure(tree) == jax.tree.structure(other)
  jax.tree.map(np.testing.assert_array_equal, tree, other)


def test_calls_change_nothing_and_repeat_themselves():
  module = Busy()
  before = snapshot(module)
  apply, params = bridge.from_nnx(module)
  kept = jax.tree.map(np.array, params)
  first = apply(params, X)
  assert (first == 0).any()  # dropout is at work
  np.testing.assert_array_equal(apply(params, X), first)
  jitted = jax.jit(apply)(params, X)
  np.testing.assert_allclose(jitted, first, rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(apply(params, X), first)
  assert_same(snapshot(module), before)
  assert_same(kept, jax.tree.map(np.array, params))
  np.testing.assert_array_equal(module(X), first)  # its first call


def test_later_changes_to_the_module_are_not_seen():
  module = Busy()
  apply, params = bridge.from_nnx(module)
  first = apply(params, X)
  module(X)
  module.dense.kernel[...] = jnp.zeros((4, 3))
  module.norm.mean[...] = jnp.ones(3)
  np.testing.assert_array_equal(apply(params, X), first)


def test_arguments_and_keys_are_passed_on():
  apply, params = bridge.from_nnx(Busy())
  np.testing.assert_allclose(
      apply(params, X, scale=2.0), 2 * apply(params, X), rtol=1e-6)
  masks = [apply(params, X, rngs=jax.random.key(n)) == 0 for n in range(4)]
  assert any((mask != masks[0]).any() for mask in masks)


@pytest.mark.parametrize('module, x', [
    (Busy, X), (Tied, np.array([[0, 1, 1], [2, 3, 0]]))])
def test_gradient_is_that_of_nnx(module, x):
  def loss(outputs):
    return jnp.sum(jnp.sin(outputs))

  apply, params = bridge.from_nnx(module())
  got = jax.jit(jax.grad(lambda params: loss(apply(params, x))))(params)
  expected = nnx.grad(lambda module: loss(module(x)))(module())
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  assert any(np.abs(leaf).max() > 0.01 for leaf in jax.tree.leaves(got))
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
      got, expected)


def test_updates_do_not_trace_again_and_can_be_written_back():
  module = Busy()
  apply, params = bridge.from_nnx(module)
  traces = []

  @jax.jit
  def descend(params):
    traces.append(1)
    grads = jax.grad(lambda params: jnp.sum(apply(params, X) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

  start = params
  for _ in range(3):
    params = descend(params)
  assert len(traces) == 1
  assert jax.tree.structure(params) == jax.tree.structure(start)
  nnx.update(module, params)
  np.testing.assert_array_equal(
      module.dense.kernel[...], params['dense']['kernel'][...])
  np.testing.assert_array_equal(module(X), apply(params, X))


def test_a_filter_parts_what_is_trained_from_what_is_frozen():
  apply, params = bridge.from_nnx(Busy(), Adapter)
  assert [x.shape for x in jax.tree.leaves(params)] == [(3,)]
  grads = jax.grad(lambda params: apply(params, X).sum())(params)
  assert any(np.any(x != 0) for x in jax.tree.leaves(grads))
  _, everything = bridge.from_nnx(Busy(), nnx.Any(nnx.Param, Adapter))
  assert len(jax.tree.leaves(everything)) == 5


def test_low_rank_adapters_are_trained_alone():
  rngs = nnx.Rngs(0)
  base = nnx.Linear(4, 3, rngs=rngs)
  module = nnx.LoRA(4, 2, 3, base_module=base, rngs=rngs)
  apply, params = bridge.from_nnx(module, nnx.LoRAParam)
  assert sorted(x.shape for x in jax.tree.leaves(params)) == [(2, 3), (4, 2)]
  zeroed = jax.tree.map(jnp.zeros_like, params)
  np.testing.assert_allclose(apply(zeroed, X), base(X), rtol=1e-6)


@pytest.mark.parametrize('trained, named', [
    (nnx.Param, 'Param'), (nnx.LoRAParam, 'LoRAParam')])
def test_a_module_with_nothing_to_train_is_refused(trained, named):
  module = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match=f'variables of {named}, but has none'):
    bridge.from_nnx(module, trained)
