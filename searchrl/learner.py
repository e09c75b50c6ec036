# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A batch of trajectories in, an updated policy out: score, then update.

State is a plain dict {'params', 'opt_state', 'updates'}, and under 'critic'
another such where the algorithm needs values; sharded over a mesh and donated
to each update. A batch stays on the host and goes to the devices
micro-batch by micro-batch, rows of like length together and cut to the shortest
of a few lengths: few shapes, little padding. Every mean of the loss is divided
by its count over the whole mini-batch, so the split into micro-batches changes
nothing but rounding.
"""

from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
import numpy as np
import optax

from searchrl import mesh as meshes
from searchrl.models import attention
from searchrl.models import critic
from searchrl.models import policy
from searchrl.models import transformer
from searchrl.rl import algorithms
from searchrl.rl import diagnostics
from searchrl.trajectory import Batch

State = dict[str, Any]
Timer = Callable[[str], contextlib.AbstractContextManager]


def _untimed(name: str) -> contextlib.AbstractContextManager:
  del name
  return contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class Learner:
  """How a policy is trained; see `make`."""

  shape: transformer.TransformerConfig
  algorithm: algorithms.Algorithm
  optimizer: optax.GradientTransformation
  critic_optimizer: optax.GradientTransformation | None
  critic_warmup: int  # updates of the critic before the policy's first
  mesh: Mesh
  minibatches: int  # optimiser steps a batch
  microbatch_rows: int  # rows on the devices at one time
  lengths: tuple[int, ...]  # T of a micro-batch, ascending
  programs: dict[str, Any]  # jitted; see `_programs`
  guard: Callable[..., None]  # told of every program before it is dispatched

  @property
  def has_critic(self) -> bool:
    """Whether the algorithm needs values."""
    return 'values' in self.algorithm.needs

  def init(self, params: transformer.Params) -> State:
    """The state before the first update, on the mesh; a critic's, too."""
    state = self._init(
        params, transformer.logical_axes(self.shape), self.optimizer)
    if self.has_critic:
      state['critic'] = self._init(
          critic.init(params), critic.logical_axes(self.shape),
          self.critic_optimizer)
    return state

  def score(self, state: State, batch: Batch,
            ref_params: transformer.Params | None = None,
            timer: Timer = _untimed) -> Batch:
    """The batch with what the algorithm needs, as numpy arrays.

    Args:
      state: the policy before its first update on this batch.
      batch: from `trajectory.pack`.
      ref_params: the reference policy, where the algorithm needs it.
      timer: of 'old_log_prob', 'ref' and 'values'.

    Returns:
      The batch with `old_logprobs`, and `ref_logprobs` and `values` if needed.
    """
    added = {}
    with timer('old_log_prob'):
      added['old_logprobs'] = self._rowwise('logprobs', state['params'], batch)
    if 'ref_logprobs' in self.algorithm.needs:
      with timer('ref'):
        added['ref_logprobs'] = self._rowwise('logprobs', ref_params, batch)
    if self.has_critic:
      with timer('values'):
        added['values'] = self._rowwise(
            'values', state['critic']['params'], batch)
    return dataclasses.replace(batch, **added)

  def update(self, state: State, batch: Batch, timer: Timer = _untimed
            ) -> tuple[State, dict[str, float]]:
    """Every optimiser step that the batch is worth.

    Args:
      state: donated.
      batch: scored; its rows are a multiple of minibatches *
        microbatch_rows.
      timer: of 'adv' and 'update_actor', the critic's update included.

    Returns:
      The new state, and metrics averaged over the optimiser steps.
    """
    with timer('adv'):
      advantages = jax.device_get(self.programs['advantages'](batch))
    per_step = []
    with timer('update_actor'):
      for rows in np.split(np.arange(len(batch.rewards)), self.minibatches):
        part = _take((batch, advantages), rows)
        if part[0].loss_mask.any():  # else filler only: nothing to learn
          state, values = self._step(state, *part)
          per_step.append(values)
    names = dict.fromkeys(name for values in per_step for name in values)
    metrics = {n: float(np.mean([v[n] for v in per_step if n in v]))
               for n in names}
    return state, metrics | diagnostics.describe(batch, advantages)

  def _init(self, params, axes, optimizer) -> State:
    jax.tree.map(
        lambda leaf, names: meshes.check_divisible(
            self.mesh, leaf.shape, names, 'a parameter'), params, axes)
    # A copy: the state is donated, and the caller keeps what it gave.
    params = jax.tree.map(
        lambda leaf, names: meshes.copied(
            leaf, meshes.sharding(self.mesh, names)), params, axes)
    # Moments are born beside their parameters, everything else replicated.
    replicated = meshes.sharding(self.mesh, ())
    opt_state = jax.tree.map(
        lambda leaf: leaf if leaf.ndim else meshes.copied(leaf, replicated),
        optimizer.init(params))
    return {'params': params, 'opt_state': opt_state,
            'updates': meshes.place(np.int32(0), replicated)}

  def _step(self, state, batch, advantages) -> tuple[State, dict[str, float]]:
    """One optimiser step on a mini-batch."""
    params = {'policy': state['params']}
    if self.has_critic:
      params['critic'] = state['critic']['params']
    counts = jax.device_get(self.programs['counts'](batch, advantages))
    grads, sums = self.programs['zeros'](params), None
    for micro, _ in self._microbatches(batch, advantages):
      self.guard('accumulate', micro)
      grads, seen = self.programs['accumulate'](
          params, grads, counts, *self._put(micro))
      seen = jax.device_get(seen)
      sums = seen if sums is None else jax.tree.map(np.add, sums, seen)
    values = {name: float(mean.value) for name, mean in sums.items()}
    del params  # the states are donated
    fitted = state.get('critic')
    state = {key: state[key] for key in ('params', 'opt_state', 'updates')}
    if not fitted or int(fitted['updates']) >= self.critic_warmup:
      self.guard('apply')
      state, norm = self.programs['apply'](state, grads['policy'])
      values['actor/grad_norm'] = float(norm)
    if fitted:
      self.guard('apply_critic')
      fitted, norm = self.programs['apply_critic'](fitted, grads['critic'])
      values['critic/grad_norm'] = float(norm)
      state = {**state, 'critic': fitted}
    return state, values

  def _rowwise(self, program: str, params, batch: Batch) -> np.ndarray:
    """What a program says of every token of every row."""
    result = np.zeros(batch.tokens.shape, np.float32)
    for (micro, _), rows in self._microbatches(batch):
      self.guard(program, micro.tokens)
      said = self.programs[program](params, self._put(micro.tokens))
      result[rows, :micro.tokens.shape[1]] = jax.device_get(said)
    return result

  def _microbatches(self, batch: Batch, advantages: Any = None):
    """((micro-batch, its advantages), its rows), by length; no empty ones."""
    lengths = np.asarray(batch.lengths)
    order = np.argsort(-lengths, kind='stable')
    for start in range(0, len(order), self.microbatch_rows):
      rows = order[start:start + self.microbatch_rows]
      if not lengths[rows[0]]:
        return
      width = next(n for n in self.lengths if n >= lengths[rows[0]])
      yield jax.tree.map(
          lambda x: x[:, :width] if x.ndim == 2 else x,
          _take((batch, advantages), rows)), rows

  def _put(self, tree):
    return meshes.shard_batch(self.mesh, tree)


def make(
    shape: transformer.TransformerConfig,
    algorithm: algorithms.Algorithm,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    rows: int,
    lengths: Sequence[int],
    minibatches: int = 1,
    microbatch_rows: int | None = None,
    temperature: float = 1.0,
    remat: bool | str = False,
    dtype: str = 'float32',
    attend: Callable[..., Any] = attention.causal,
    critic_optimizer: optax.GradientTransformation | None = None,
    critic_warmup: int = 0,
    guard: Callable[..., None] = lambda *facts: None,
) -> Learner:
  """Compiles nothing yet; checks that the shapes fit each other.

  Args:
    shape: of the decoder.
    algorithm: what to minimise.
    optimizer: how.
    mesh: where.
    rows: B of every batch.
    lengths: T that micro-batches are cut to; the longest is that of a batch.
    minibatches: optimiser steps a batch, over consecutive rows.
    microbatch_rows: default a whole mini-batch.
    temperature: of sampling; log-probs are taken at it.
    remat: what the backward pass recomputes; see `transformer.forward`.
    dtype: of activations; parameters, gradients and moments stay float32.
    attend: see `transformer.forward`.
    critic_optimizer: for an algorithm that needs values.
    critic_warmup: updates that the critic makes before the policy's first.
    guard: called before each dispatch with the program's name and what it is
      compiled for; see `processes.Guard`.

  Raises:
    ValueError: numbers that do not divide, a second optimiser step on a batch
      that is good for one, or no optimiser for a critic.
  """
  microbatch_rows = microbatch_rows or rows // minibatches
  if rows % (minibatches * microbatch_rows):
    raise ValueError(
        f'learner.minibatches * learner.microbatch_rows must divide the rows '
        f'of a batch, {rows}, but they are {minibatches} * {microbatch_rows}. '
        'Choose divisors.')
  if algorithm.one_update and minibatches > 1:
    raise ValueError(
        'learner.minibatches must be 1 for an algorithm without a ratio, but is '
        f'{minibatches}: after one optimiser step the policy is another one '
        'than that which sampled. Set it to 1, or choose a recipe with a ratio.')
  if 'values' in algorithm.needs and critic_optimizer is None:
    raise ValueError('critic_optimizer must be given for an algorithm that '
                     'needs values, but is None.')
  ways = mesh.shape['data'] * mesh.shape['fsdp']
  if microbatch_rows % ways:
    raise ValueError(
        f'learner.microbatch_rows must be a multiple of the mesh\'s data * '
        f'fsdp = {ways}, but is {microbatch_rows}.')
  return Learner(
      shape, algorithm, optimizer, critic_optimizer, critic_warmup, mesh,
      minibatches, microbatch_rows, tuple(sorted(lengths)),
      _programs(shape, algorithm, optimizer, critic_optimizer, mesh,
                temperature, dict(remat=remat, dtype=dtype, attend=attend)),
      guard)


def _programs(shape, algorithm, optimizer, critic_optimizer, mesh, temperature,
              forward) -> dict[str, Any]:
  """Everything that runs on the devices, jitted."""
  everywhere = meshes.sharding(mesh, ())
  sharded = {'policy': meshes.shardings(mesh, transformer.logical_axes(shape))}
  if 'values' in algorithm.needs:
    sharded['critic'] = meshes.shardings(mesh, critic.logical_axes(shape))
  logprobs_of = functools.partial(
      policy.token_logprobs, config=shape, temperature=temperature,
      **forward)
  values_of = functools.partial(critic.token_values, config=shape, **forward)

  def counts(batch, advs):
    """Each term's global denominator; it depends on masks alone."""
    nothing = jnp.zeros(batch.tokens.shape)
    blank = algorithms.PolicyOutput(nothing, entropy=nothing, values=nothing)
    terms, _ = algorithm.loss(blank, batch, advs)
    return {name: mean.count for name, (_, mean) in terms.items()}

  # XLA adds up over CPU devices in one order within a process and in another
  # between processes; gathered first, there is one order, and one digest.
  ordered = mesh.devices.flat[0].platform == 'cpu' and (
      mesh.shape['data'] == mesh.size > 1)

  def accumulate(params, grads, counts, batch, advs):
    def loss(params, batch, advs):
      logprobs, entropy = logprobs_of(params['policy'], batch.tokens)
      values = None
      if 'critic' in params:
        values = values_of(params['critic'], batch.tokens)
      out = algorithms.PolicyOutput(logprobs, entropy, values)
      terms, metrics = algorithm.loss(out, batch, advs)
      return algorithms.total(terms, counts), metrics

    gradient = jax.grad(loss, has_aux=True)
    if ordered:
      gradient = _ordered(gradient, mesh)
    more, metrics = gradient(params, batch, advs)
    return jax.tree.map(jnp.add, grads, more), metrics

  def apply(optimizer, state, grads):
    updates, opt_state = optimizer.update(
        grads, state['opt_state'], state['params'])
    return {'params': optax.apply_updates(state['params'], updates),
            'opt_state': opt_state,
            'updates': state['updates'] + 1}, optax.tree.norm(grads)

  return dict(
      advantages=jax.jit(lambda batch: algorithm.advantages(batch)),
      counts=jax.jit(counts),
      logprobs=jax.jit(lambda params, tokens: logprobs_of(params, tokens)[0],
                       out_shardings=everywhere),
      values=jax.jit(lambda params, tokens: values_of(params, tokens),
                     out_shardings=everywhere),
      zeros=jax.jit(lambda params: jax.tree.map(jnp.zeros_like, params),
                    out_shardings=sharded),
      accumulate=jax.jit(accumulate, donate_argnums=1,
                         out_shardings=(sharded, everywhere)),
      apply=jax.jit(functools.partial(apply, optimizer), donate_argnums=0),
      apply_critic=jax.jit(
          functools.partial(apply, critic_optimizer), donate_argnums=0))


def _ordered(gradient: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
  """The same sums over the devices of a data-parallel mesh, in one order."""
  def of_device(params, batch, advs):
    return jax.tree.map(lambda x: x[None], gradient(params, batch, advs))

  rows = PartitionSpec('data')
  of_devices = jax.shard_map(
      of_device, mesh=mesh, in_specs=(PartitionSpec(), rows, rows),
      out_specs=rows, check_vma=False)

  def summed(*args):
    gathered = jax.lax.with_sharding_constraint(
        of_devices(*args), meshes.sharding(mesh, ()))
    return jax.tree.map(lambda x: jnp.sum(x, 0), gathered)

  return summed


def _take(tree: Any, rows: Sequence[int]) -> Any:
  """Some rows, on the host."""
  return jax.tree.map(lambda x: np.asarray(x)[rows], tree)
