# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A batch of trajectories in, an updated policy out: score, then update.

State is a plain dict {'params', 'opt_state', 'updates'} sharded over a mesh
and donated to each update. A batch stays on the host and goes to the devices
micro-batch by micro-batch, rows of like length together and cut to the shortest
of a few lengths: few shapes, little padding. Every mean of the loss is divided
by its count over the whole mini-batch, so the split into micro-batches changes
nothing but rounding.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np
import optax

from searchrl import mesh as meshes
from searchrl.models import policy
from searchrl.models import transformer
from searchrl.rl import algorithms
from searchrl.trajectory import Batch

State = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Learner:
  """How a policy is trained; see `make`."""

  shape: transformer.TransformerConfig
  algorithm: algorithms.Algorithm
  optimizer: optax.GradientTransformation
  mesh: Mesh
  minibatches: int  # optimiser steps a batch
  microbatch_rows: int  # rows on the devices at one time
  lengths: tuple[int, ...]  # T of a micro-batch, ascending
  programs: dict[str, Any]  # jitted; see `_programs`

  def init(self, params: transformer.Params) -> State:
    """The state before the first update, on the mesh."""
    axes = transformer.logical_axes(self.shape)
    jax.tree.map(
        lambda leaf, names: meshes.check_divisible(
            self.mesh, leaf.shape, names, 'a parameter'), params, axes)
    # A copy: the state is donated, and the caller keeps what it gave.
    params = jax.tree.map(
        lambda leaf, names: jax.device_put(
            np.asarray(leaf), meshes.sharding(self.mesh, names)), params, axes)
    # Moments are born beside their parameters, everything else replicated.
    replicated = meshes.sharding(self.mesh, ())
    opt_state = jax.tree.map(
        lambda leaf: leaf if leaf.ndim else jax.device_put(leaf, replicated),
        self.optimizer.init(params))
    return {'params': params, 'opt_state': opt_state,
            'updates': jax.device_put(jnp.int32(0), replicated)}

  def score(self, state: State, batch: Batch,
            ref_params: transformer.Params | None = None) -> Batch:
    """The batch with what the algorithm needs, as numpy arrays.

    Args:
      state: the policy before its first update on this batch.
      batch: from `trajectory.pack`.
      ref_params: the reference policy, where the algorithm needs it.

    Returns:
      The batch with `old_logprobs`, and `ref_logprobs` if needed.
    """
    batch = dataclasses.replace(
        batch, old_logprobs=self._logprobs(state['params'], batch))
    if 'ref_logprobs' in self.algorithm.needs:
      batch = dataclasses.replace(
          batch, ref_logprobs=self._logprobs(ref_params, batch))
    return batch

  def update(self, state: State, batch: Batch) -> tuple[State, dict[str, float]]:
    """Every optimiser step that the batch is worth.

    Args:
      state: donated.
      batch: scored; its rows are a multiple of minibatches *
        microbatch_rows.

    Returns:
      The new state, and metrics averaged over the optimiser steps.
    """
    advantages = jax.device_get(self.programs['advantages'](batch))
    per_step = []
    for rows in np.split(np.arange(len(batch.rewards)), self.minibatches):
      part = _take(batch, rows)
      if not part.loss_mask.any():
        continue  # nothing to learn from: filler only
      counts = self.programs['counts'](part, advantages[rows])
      grads = self.programs['zeros'](state['params'])
      sums = None
      for micro, micro_rows in self._microbatches(part):
        grads, seen = self.programs['accumulate'](
            state['params'], grads, counts, self._put(micro),
            self._put(advantages[rows][micro_rows]))
        seen = jax.device_get(seen)
        sums = seen if sums is None else jax.tree.map(np.add, sums, seen)
      state, norm = self.programs['apply'](state, grads)
      values = {name: float(mean.value) for name, mean in sums.items()}
      per_step.append(values | {'actor/grad_norm': float(norm)})
    names = per_step[0] if per_step else ()
    return state, {n: float(np.mean([v[n] for v in per_step])) for n in names}

  def _logprobs(self, params, batch: Batch) -> np.ndarray:
    result = np.zeros(batch.tokens.shape, np.float32)
    for micro, rows in self._microbatches(batch):
      logprobs = self.programs['logprobs'](params, self._put(micro.tokens))
      result[rows, :micro.tokens.shape[1]] = jax.device_get(logprobs)
    return result

  def _microbatches(self, batch: Batch):
    """(micro-batch, its rows), sorted by length; rows of nothing are left out."""
    lengths = np.asarray(batch.lengths)
    order = np.argsort(-lengths, kind='stable')
    for start in range(0, len(order), self.microbatch_rows):
      rows = order[start:start + self.microbatch_rows]
      if not lengths[rows[0]]:
        return
      width = next(n for n in self.lengths if n >= lengths[rows[0]])
      micro = _take(batch, rows)
      yield jax.tree.map(
          lambda x: x[:, :width] if x.ndim == 2 else x, micro), rows

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
    remat: bool = False,
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
    remat: recompute activations in the backward pass.

  Raises:
    ValueError: numbers that do not divide.
  """
  microbatch_rows = microbatch_rows or rows // minibatches
  if rows % (minibatches * microbatch_rows):
    raise ValueError(
        f'learner.minibatches * learner.microbatch_rows must divide the rows '
        f'of a batch, {rows}, but they are {minibatches} * {microbatch_rows}. '
        'Choose divisors.')
  ways = mesh.shape['data'] * mesh.shape['fsdp']
  if microbatch_rows % ways:
    raise ValueError(
        f'learner.microbatch_rows must be a multiple of the mesh\'s data * '
        f'fsdp = {ways}, but is {microbatch_rows}.')
  return Learner(
      shape, algorithm, optimizer, mesh, minibatches, microbatch_rows,
      tuple(sorted(lengths)),
      _programs(shape, algorithm, optimizer, temperature, remat))


def _programs(shape, algorithm, optimizer, temperature, remat) -> dict[str, Any]:
  """Everything that runs on the devices, jitted."""
  logprobs_of = functools.partial(
      policy.token_logprobs, config=shape, temperature=temperature)

  def counts(batch, advs):
    """Each term's global denominator; it depends on masks alone."""
    blank = algorithms.PolicyOutput(
        logprobs=batch.old_logprobs, entropy=jnp.zeros(batch.tokens.shape))
    terms, _ = algorithm.loss(blank, batch, advs)
    return {name: mean.count for name, (_, mean) in terms.items()}

  def accumulate(params, grads, counts, batch, advs):
    def loss(params):
      logprobs, entropy = logprobs_of(params, batch.tokens, remat=remat)
      out = algorithms.PolicyOutput(logprobs, entropy)
      terms, metrics = algorithm.loss(out, batch, advs)
      return algorithms.total(terms, counts), metrics

    more, metrics = jax.grad(loss, has_aux=True)(params)
    return jax.tree.map(jnp.add, grads, more), metrics

  def apply(state, grads):
    updates, opt_state = optimizer.update(
        grads, state['opt_state'], state['params'])
    return {'params': optax.apply_updates(state['params'], updates),
            'opt_state': opt_state,
            'updates': state['updates'] + 1}, optax.tree.norm(grads)

  return dict(
      advantages=jax.jit(lambda batch: algorithm.advantages(batch)),
      counts=jax.jit(counts),
      logprobs=jax.jit(lambda params, tokens: logprobs_of(params, tokens)[0]),
      zeros=jax.jit(lambda params: jax.tree.map(jnp.zeros_like, params)),
      accumulate=jax.jit(accumulate, donate_argnums=1),
      apply=jax.jit(apply, donate_argnums=0))


def _take(batch: Batch, rows: Sequence[int]) -> Batch:
  """Some rows, on the host."""
  return jax.tree.map(lambda x: np.asarray(x)[rows], batch)


def mismatch(batch: Batch) -> dict[str, float]:
  """How far the sampler's log-probs are from the learner's, on policy."""
  where = batch.loss_mask & batch.on_policy[:, None]
  if not where.any():
    return {}
  gap = np.abs(batch.behavior_logprobs - batch.old_logprobs)[where]
  probs = np.abs(np.exp(batch.behavior_logprobs)
                 - np.exp(batch.old_logprobs))[where]
  return {'training/rollout_logprobs_diff_mean': gap.mean(),
          'training/rollout_logprobs_diff_max': gap.max(),
          'training/rollout_probs_diff_mean': probs.mean(),
          'training/rollout_probs_diff_max': probs.max()}
