# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""What the learner runs on the devices: score rows, and update on them; jitted.

Every program takes micro-batches stacked, [M R ...], and how many of them are
filled: one compiled loop, whose trip count is an argument, serves full and
nearly empty batches. Documents lie end to end in rows (see `packing`); the
decoder runs on rows, losses on documents.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int
import optax

from searchrl.models import attention
from searchrl.models import critic
from searchrl.models import documents
from searchrl.models import lora as loras
from searchrl.models import policy
from searchrl.models import transformer
from searchrl import packing
from searchrl.rl import algorithms
from searchrl.runtime import mesh as meshes
from searchrl.trajectory import Batch



@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """What training changes about one network, on the mesh.

  A checkpoint names its leaves by these fields: policy/params/..., and so on.
  """

  params: Any  # float32
  opt_state: optax.OptState
  updates: Int[Array, '']  # optimiser steps so far

  def apply_gradient(self, optimizer: optax.GradientTransformation,
                     gradient: Any) -> 'TrainState':
    """The state after one optimiser step."""
    changes, opt_state = optimizer.update(
        gradient, self.opt_state, self.params)
    return TrainState(optax.apply_updates(self.params, changes), opt_state,
                      self.updates + 1)


State = dict[str, TrainState]  # by network: 'policy', and there may be 'critic'


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
  """Micro-batches; per-token fields are [M R L], others [M R S]."""

  where: packing.Layout
  batch: Batch
  advantages: Any = None


@dataclasses.dataclass(frozen=True)
class Forward:
  """How the networks are run; see `transformer.forward`."""

  remat: bool | str = False
  dtype: str = 'float32'  # of activations
  attend: Callable[..., Array] = attention.causal
  by_document: bool = False  # for kernels without segments; models.documents


@dataclasses.dataclass(frozen=True)
class TrainStep:
  """One policy's programs, and how its state lies on the mesh.

  What is trained is `trained`: all parameters of the policy, or adapters of a
  frozen one; `frozen` is None, or that.
  """

  shape: transformer.TransformerConfig
  algorithm: algorithms.Algorithm
  optimizer: optax.GradientTransformation
  critic_optimizer: optax.GradientTransformation | None
  lora: loras.Lora | None
  mesh: Mesh
  length: int  # T, tokens of the longest document
  temperature: float
  forward: Forward

  @property
  def axes(self) -> dict[str, Any]:
    """Logical axes of what is trained, by network."""
    axes = {'policy': transformer.logical_axes(self.shape)}
    if self.lora:
      axes['policy'] = loras.logical_axes(self.lora, self.shape)
    if 'values' in self.algorithm.needs:
      axes['critic'] = critic.logical_axes(self.shape)
    return axes

  @functools.cached_property
  def advantages(self) -> Callable[[Batch], Any]:
    """batch [B T] -> advantages; over the whole batch."""
    return jax.jit(lambda batch: self.algorithm.advantages(batch))

  @functools.cached_property
  def logprobs(self) -> Callable[..., Array]:
    """(trained, frozen, where, tokens [M R L], count) -> nats [M R L]."""
    def of_rows(trained, frozen, where, tokens):
      return self._logprobs(self._policy(trained, frozen), where, tokens)[0]

    return self._rowwise(of_rows)

  @functools.cached_property
  def values(self) -> Callable[..., Array]:
    """(critic's params, None, where, tokens [M R L], count) -> [M R L]."""
    def of_rows(params, _, where, tokens):
      return self._values(params, where, tokens)

    return self._rowwise(of_rows)

  @functools.cached_property
  def update(self) -> Callable[..., tuple[State, dict[str, Array]]]:
    """(train_policy, state, frozen, rows, count) -> state, metrics, old.

    One optimiser step on a mini-batch. The state is donated; `train_policy`
    is static: without it, the critic alone is trained. A batch without
    `old_logprobs` has those that this step begins with; they are returned,
    [M R L], else None.
    """
    replicated = meshes.sharding(self.mesh, ())
    return jax.jit(
        self._update, static_argnums=0, donate_argnums=1,
        out_shardings=(self.state_shardings(), replicated, replicated))

  def init(self, network: str, params: Any) -> TrainState:
    """A network's state before its first update, given its parameters."""
    optimizer = self._optimizer(network)
    opt_state = jax.jit(
        optimizer.init,
        out_shardings=self.state_shardings()[network].opt_state)(params)
    return TrainState(params, opt_state,
                      meshes.place(0, meshes.sharding(self.mesh, ())))

  def abstract_state(self) -> State:
    """Shapes, dtypes and shardings of the whole state; by network."""
    def describe(leaf, sharding):
      return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(describe, self._shapes, self.state_shardings())

  def state_shardings(self) -> State:
    """Moments lie as their parameters do, everything else is replicated."""
    replicated = meshes.sharding(self.mesh, ())
    result = {}
    for network, axes in self.axes.items():
      params = meshes.shardings(self.mesh, axes)
      opt_state = optax.tree.map_params(
          self._optimizer(network), lambda _, sharding: sharding,
          self._shapes[network].opt_state, params,
          transform_non_params=lambda _: replicated)
      result[network] = TrainState(params, opt_state, updates=replicated)
    return result

  @functools.cached_property
  def _shapes(self) -> State:
    """Shapes and dtypes of the whole state."""
    key = jax.random.key(0)
    whole = transformer.abstract(self.shape)
    params = {'policy': whole}
    if self.lora:
      params['policy'] = jax.eval_shape(
          functools.partial(loras.init, self.lora, self.shape), key)
    if 'critic' in self.axes:
      params['critic'] = jax.eval_shape(critic.init, whole)
    return {
        network: TrainState(
            leaves, jax.eval_shape(self._optimizer(network).init, leaves),
            updates=jax.ShapeDtypeStruct((), jnp.int32))
        for network, leaves in params.items()}

  def _optimizer(self, network: str) -> optax.GradientTransformation:
    return {'policy': self.optimizer, 'critic': self.critic_optimizer}[network]

  def _policy(self, trained, frozen):
    return loras.attach(frozen, trained, self.lora) if (
        self.lora and frozen is not None) else trained

  def _logprobs(self, params, where: packing.Layout, tokens):
    return policy.token_logprobs(
        params, tokens, self.shape, temperature=self.temperature,
        **self._of_rows(where))

  def _values(self, params, where: packing.Layout, tokens):
    return critic.token_values(
        params, tokens, self.shape, **self._of_rows(where))

  def _of_rows(self, where: packing.Layout) -> dict[str, Any]:
    """How a network reads packed rows."""
    attend = self.forward.attend
    if self.forward.by_document:
      attend = functools.partial(documents.causal, layout=where, attend=attend,
                                 length=self.length)
    return dict(segment_ids=where.segment_ids, positions=where.positions,
                remat=self.forward.remat, dtype=self.forward.dtype,
                attend=attend)

  def _rowwise(self, of_rows: Callable[..., Array]) -> Callable[..., Array]:
    """What a network says of every token, micro-batch by micro-batch."""
    def run(params, frozen, where, tokens, count: Int[Array, '']):
      return _folded(lambda micro: ((), of_rows(params, frozen, *micro)),
                     (where, tokens), count)[1]

    return jax.jit(run, out_shardings=meshes.sharding(self.mesh, ()))

  def _update(self, train_policy, state, frozen, rows: Rows, count):
    params = {network: old.params for network, old in state.items()}
    fixed = {} if train_policy else {'policy': params.pop('policy')}
    (grads, sums), old = self._gradient(params, fixed, frozen, rows, count)
    metrics = {name: mean.value for name, mean in sums.items()}
    state = dict(state)
    for network, gradient in grads.items():
      state[network] = state[network].apply_gradient(
          self._optimizer(network), gradient)
      norm = optax.tree.norm(gradient)
      metrics['actor/grad_norm' if network == 'policy' else
              f'{network}/grad_norm'] = norm
    return state, metrics, old

  def _gradient(self, params, fixed, frozen, rows: Rows, count):
    """Of the loss of all micro-batches, and its metrics; summed in a loop.

    Each term is divided by its count over all of them, which masks alone
    decide, so that the split changes nothing but rounding.
    """
    counts, _ = _folded(
        lambda micro: (self._counts(micro), None), rows, count)

    def of_micro(params, fixed, frozen, counts, micro):
      grads, (sums, old) = jax.grad(self._loss, has_aux=True)(
          params, fixed, frozen, counts, micro)
      return (grads, sums), old

    if self._ordered:
      of_micro = _ordered(of_micro, self.mesh)
    layout = meshes.shardings(
        self.mesh, {network: self.axes[network] for network in params})

    def laid_out(summed):
      grads, sums = summed
      return jax.lax.with_sharding_constraint(grads, layout), sums

    return _folded(
        functools.partial(of_micro, params, fixed, frozen, counts), rows, count,
        laid_out)

  def _counts(self, micro: Rows) -> dict[str, Array]:
    """Each term's denominator; it depends on masks alone."""
    batch, advantages = self._documents(micro)
    nothing = jnp.zeros(batch.tokens.shape)
    batch = _with_old(batch, nothing)
    blank = algorithms.PolicyOutput(nothing, entropy=nothing, values=nothing)
    terms, _ = self.algorithm.loss(blank, batch, advantages)
    return {name: mean.count for name, (_, mean) in terms.items()}

  def _loss(self, params, fixed, frozen, counts, micro: Rows):
    params = {**fixed, **params}
    tokens, where = micro.batch.tokens, micro.where
    said = self._logprobs(
        self._policy(params['policy'], frozen), where, tokens)
    values = None
    if 'critic' in params:
      values = self._values(params['critic'], where, tokens)
    old = said[0] if micro.batch.old_logprobs is None else None
    said = algorithms.PolicyOutput(
        *packing.unpack((*said, values), where, self.length))
    batch, advantages = self._documents(micro)
    batch = _with_old(batch, jax.lax.stop_gradient(said.logprobs))
    terms, metrics = self.algorithm.loss(said, batch, advantages)
    return algorithms.total(terms, counts), (metrics, old)

  def _documents(self, micro: Rows) -> tuple[Batch, Any]:
    return packing.unpack(
        (micro.batch, micro.advantages), micro.where, self.length)

  @property
  def _ordered(self) -> bool:
    """Whether sums over devices are made in one order.

    XLA adds up over CPU devices in one order within a process and in another
    between processes; gathered first, there is one order, and one digest.
    """
    return self.mesh.devices.flat[0].platform == 'cpu' and (
        self.mesh.shape['data'] == self.mesh.size > 1)


def _with_old(batch: Batch, old: Array) -> Batch:
  """The batch, these its `old_logprobs` if it was not scored."""
  if batch.old_logprobs is None:
    batch = dataclasses.replace(batch, old_logprobs=old)
  return batch


def _folded(of_one: Callable[[Any], tuple[Any, Any]], stack: Any,
            count: Int[Array, ''], lay: Callable[[Any], Any] = lambda x: x
           ) -> tuple[Any, Any]:
  """Over the first `count` of a stack: sums of the first of two, all second."""
  def one(n):
    return of_one(jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, n, keepdims=False), stack))

  def add_one(n, carry):
    summed, kept = carry
    more, item = one(n)
    return (lay(jax.tree.map(jnp.add, summed, more)),
            jax.tree.map(lambda whole, its: whole.at[n].set(its), kept, item))

  size = jax.tree.leaves(stack)[0].shape[0]
  zeros = lambda x, *more: jnp.zeros((*more, *x.shape), x.dtype)
  summed, item = jax.eval_shape(one, 0)
  return jax.lax.fori_loop(0, count, add_one, (
      jax.tree.map(zeros, summed),
      jax.tree.map(lambda x: zeros(x, size), item)))


def _ordered(of_micro: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
  """The same sums over the devices of a data-parallel mesh, in one order."""
  def of_device(*args):
    summed, rows = of_micro(*args)
    return jax.tree.map(lambda x: x[None], summed), rows

  whole, rows = PartitionSpec(), PartitionSpec('data')
  of_devices = jax.shard_map(
      of_device, mesh=mesh, in_specs=(whole, whole, whole, whole, rows),
      out_specs=rows, check_vma=False)

  def in_order(*args):
    summed, rows = of_devices(*args)
    gathered = jax.lax.with_sharding_constraint(
        summed, meshes.sharding(mesh, ()))
    return jax.tree.map(lambda x: jnp.sum(x, 0), gathered), rows

  return in_order
