# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The learner scores a batch of trajectories and updates the policy on it.

The state is one `TrainState` per network: 'policy' and, if the algorithm needs
values, 'critic'. It is sharded over a mesh and donated to each update. On the
host, `minibatches` cuts a batch into mini-batches and packs each into rows,
which are divided into micro-batches of equal shape. `train_step` runs these in
one compiled loop, to score a mini-batch and to make an optimiser step on it.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
import numpy as np
import optax

from searchrl.models import lora as loras
from searchrl.models import sequence_attention
from searchrl.models import transformer
from searchrl.rl import algorithms
from searchrl.rl import diagnostics
from searchrl.rl import turn_fields
from searchrl.runtime import dispatch
from searchrl.runtime import mesh as meshes
from searchrl.training import minibatches as minibatches_lib
from searchrl.training import optimizer as optimizers
from searchrl.training import step_metrics
from searchrl.training.minibatches import MiniBatch, PackedBatch
from searchrl.training.train_state import State, TrainState
from searchrl.training.train_step import ForwardOptions, TrainStep
from searchrl import trajectory
from searchrl.trajectory import Batch

# Packed rows per micro-batch per device. Larger values leave more rows empty.
_ROWS = 2
Timer = Callable[[str], contextlib.AbstractContextManager]
_untimed: Timer = lambda phase: contextlib.nullcontext()


class Updated(NamedTuple):
  """The result of an update."""

  state: State
  # Means of the optimiser steps, statistics of the batch, and the distance
  # between sampler and learner.
  metrics: dict[str, float]
  batch: Batch  # the batch with `old_logprobs`, as numpy arrays
  advantages: Any  # the batch's advantages, as numpy arrays
  trained: np.ndarray  # True for the rows with `old_logprobs` and a gradient


@dataclasses.dataclass(frozen=True)
class Learner:
  """A recipe for training a policy, made by `make`."""

  train_step: TrainStep
  critic_warmup: int  # updates of the critic before the policy's first
  minibatches: int  # optimiser steps per batch
  microbatch_rows: int  # packed rows on all devices at one time
  pack_length: int  # tokens per packed row
  max_segments: int  # largest number of trajectories per packed row
  fit_segments: bool  # fewer places per row if the rows need no more
  seed: int  # seed of the adapters' first values
  lockstep: Callable[..., None]  # function called before each dispatch

  @property
  def needs_base(self) -> bool:
    """True if scores or updates need the policy from which training started."""
    return (self.train_step.lora is not None
            or 'ref_logprobs' in self.train_step.algorithm.needs)

  @property
  def scores_old(self) -> bool:
    """True if `score` computes `old_logprobs`, of some or all mini-batches."""
    return (self.minibatches > 1
            or 'old_logprobs' in self.train_step.algorithm.needs)

  def init(self, params: transformer.Params) -> State:
    """Returns the state before the first update of a policy, on the mesh.

    The parameters are copied.

    Raises:
      ValueError: An array does not split evenly over the mesh.
    """
    trained = self.train_step.first_params(params, jax.random.key(self.seed))
    return {network: self._on_mesh(network, leaves)
            for network, leaves in trained.items()}

  def with_lr_scale(self, factor: float) -> Learner:
    """Returns the same learner with its learning rates times `factor`.

    A state of either learner is valid for the other.
    """
    if factor == 1:
      return self
    step = self.train_step
    return dataclasses.replace(self, train_step=dataclasses.replace(
        step, optimizer=optimizers.scaled(step.optimizer, factor),
        critic_optimizer=step.critic_optimizer and optimizers.scaled(
            step.critic_optimizer, factor)))

  def updates(self, state: State) -> dict[str, int]:
    """Returns the number of optimiser steps so far, by network."""
    return {network: int(trained.updates) for network, trained in state.items()}

  def policy(self, state: State, base: transformer.Params
            ) -> transformer.Params:
    """Returns the parameters to sample from.

    `base` is what `init` received. If adapters are trained, `lora.attach` puts
    them beside its matrices. `lora.merged` makes plain parameters of both.
    """
    if self.train_step.lora is None:
      return state['policy'].params
    return dispatch.Ordered(loras.attach, self.train_step.mesh)(
        base, state['policy'].params, self.train_step.lora)

  def pack(self, batch: Batch, trained: np.ndarray | None = None
          ) -> PackedBatch:
    """Cuts a batch into mini-batches and packs each of them, for `update`.

    In a packed row, several trajectories follow each other.

    Args:
      batch: Batch of numpy arrays.
      trained: True for the trajectories to pack, [B]. The default is all.
    """
    return minibatches_lib.pack(
        batch, self.minibatches, trained, **self._row_shape)

  def score(self, state: State, batch: Batch,
            base: transformer.Params | None = None,
            timer: Timer = _untimed) -> PackedBatch:
    """Packs a batch of numpy arrays and adds the fields that the update needs.

    These are `old_logprobs` of all mini-batches but the first, or of all if the
    algorithm needs them, and `ref_logprobs` and `values` if it needs them. If
    it needs none of them, trajectories without a gradient are left out.

    Args:
      state: State before the first update on this batch.
      batch: Batch from `trajectory.collate`.
      base: Parameters that `init` received, if `needs_base`.
      timer: Function that times 'old_log_prob', 'ref' and 'values'.

    Raises:
      ValueError: `base` is None, but needed.
    """
    if self.needs_base and base is None:
      raise ValueError(
          'base must be given where the loss has a KL to a reference policy '
          'or adapters are trained, but is None. Give what `init` received.')
    step, scores = self.train_step, {}
    needs, trained = step.algorithm.needs, None
    if not needs:
      trained = self._trained(batch, self._advantages(batch))
    packed = self.pack(batch, trained)
    if self.scores_old:
      with timer('old_log_prob'):
        score = functools.partial(self.logprobs, state, base=base)
        scores['old_logprobs'] = (score(packed) if 'old_logprobs' in needs
                                  else packed.scored_later(score))
    if 'ref_logprobs' in needs:
      with timer('ref'):
        scores['ref_logprobs'] = self._per_token(
            'logprobs', step.logprobs, packed, base)
    if 'values' in needs:
      with timer('values'):
        scores['values'] = self._per_token(
            'values', step.values, packed, state['critic'].params)
    return packed.with_scores(scores)

  def logprobs(self, state: State, packed: PackedBatch,
               base: transformer.Params | None = None) -> np.ndarray:
    """Returns log pi of the tokens of a batch, in nats, [B T].

    They are 0 for tokens that were not sampled, if the algorithm skips these.
    """
    return self._per_token(
        'logprobs', self.train_step.logprobs, packed, state['policy'].params,
        self._frozen(base), replay=True)

  def update(self, state: State, packed: PackedBatch,
             base: transformer.Params | None = None, timer: Timer = _untimed
            ) -> Updated:
    """Makes an optimiser step on each mini-batch.

    Args:
      state: State before the update; it is donated.
      packed: Packed batch from `score`.
      base: Parameters that `init` received, if adapters are trained.
      timer: Timer of 'adv', and of 'update_actor', which includes the critic's
        update.
    """
    batch, per_step, old_per_step = packed.batch, [], []
    with timer('adv'):
      advantages = self._advantages(batch)
      trained = self._trained(batch, advantages)
      if (trained != packed.trained).any():
        packed = self.pack(batch, trained)
    with timer('update_actor'):
      for minibatch in packed.minibatches:
        state, metrics, old = self._step(
            state, base, minibatch.with_advantages(advantages),
            self._denominators(batch, advantages, minibatch.members))
        per_step.append(metrics)
        old_per_step.append(old)
    batch = packed.with_old(batch, old_per_step)
    metrics = (step_metrics.means(per_step)
               | diagnostics.describe(batch, advantages, packed.trained)
               | diagnostics.mismatch(batch, packed.trained))
    return Updated(state, metrics, batch, advantages, packed.trained)

  def abstract_update(self, rows: int) -> tuple:
    """Returns arguments of `train_step.update` without values, to compile it.

    They are shapes, dtypes and shardings for one mini-batch of a batch with
    `rows` rows.
    """
    step = self.train_step
    batch = trajectory.collate(
        [], group_ids=[], policy_step=0, length=step.length,
        rows=rows // self.minibatches)
    if step.algorithm.reads_turns:
      batch = turn_fields.with_turns(batch, [])
    scores: dict[str, Any] = dict.fromkeys(
        (*step.algorithm.needs, *['old_logprobs'] * self.scores_old),
        np.zeros(batch.tokens.shape, np.float32))
    batch = dataclasses.replace(batch, **scores)
    advantages = jax.tree.map(
        lambda x: np.zeros(x.shape, x.dtype),
        jax.eval_shape(step.algorithm.advantages, batch))
    denominators = jax.eval_shape(step.denominators, batch, advantages)
    minibatch = minibatches_lib.pack_one(
        batch, np.asarray(batch.lengths), np.arange(len(batch.rewards)),
        **self._row_shape).with_advantages(advantages)

    def describe(x, axes):
      return jax.ShapeDtypeStruct(
          x.shape, x.dtype, sharding=meshes.sharding(step.mesh, axes))

    base = jax.tree.map(describe, transformer.abstract(step.shape),
                        transformer.logical_axes(step.shape))
    stacked = jax.tree.map(
        lambda x: describe(x, (None, 'batch') + (None,) * (x.ndim - 2)),
        dataclasses.replace(
            minibatch.rows, routing=step.abstract_routing(minibatch.rows)))
    return (True, step.abstract_state(), self._frozen(base), stacked,
            denominators, jax.ShapeDtypeStruct((), np.int32))

  def _advantages(self, batch: Batch) -> Any:
    result = jax.device_get(self.train_step.advantages(
        dataclasses.replace(batch, routing=None)))
    if not hasattr(getattr(result, 'advantages', result), 'ndim'):
      raise ValueError('advantages of an algorithm must return an array or an '
                       f'Estimate, but returned {type(result).__name__}.')
    return result

  def _trained(self, batch: Batch, advantages: Any) -> np.ndarray:
    """Returns a mask [B]: False for rows with tokens but surely no gradient."""
    empty = ~batch.loss_mask.any(1)
    if not self.train_step.algorithm.skips_zero:
      return np.ones_like(empty)
    advantages = getattr(advantages, 'advantages', advantages)
    return empty | batch.in_loss & (
        advantages.reshape(len(empty), -1) != 0).any(1)

  def _denominators(self, batch: Batch, advantages: Any, members: np.ndarray
                   ) -> dict[str, np.ndarray]:
    """Returns the divisor of each term of a mini-batch's loss, by name."""
    return jax.device_get(self.train_step.denominators(*jax.tree.map(
        lambda x: np.asarray(x)[members],
        (dataclasses.replace(batch, routing=None), advantages))))

  def _step(self, state: State, base, minibatch: MiniBatch,
            denominators: dict[str, np.ndarray]
           ) -> tuple[State, dict[str, float], Any]:
    """Makes one optimiser step on a mini-batch.

    Returns:
      The new state, the step's metrics as numbers, and `old_logprobs` of the
      packed tokens.
    """
    train_policy = 'critic' not in state or (
        int(state['critic'].updates) >= self.critic_warmup)
    self.lockstep('update', int(minibatch.count), train_policy,
                  minibatch.rows.batch.tokens)
    state, measured, old = self.train_step.update(
        train_policy, state, self._frozen(base), self._put(minibatch.rows),
        denominators, minibatch.count)
    metrics = step_metrics.numbers(jax.device_get(measured))
    if minibatch.count:
      metrics['perf/useful_tokens'] = minibatch.useful
    return state, metrics, old

  def _per_token(self, name: str, step: Callable[..., jax.Array],
                 packed: PackedBatch, params, frozen=None,
                 replay: bool = False) -> np.ndarray:
    """Returns one number per token of a batch, [B T], as `step` computes it."""
    per_token = []
    for minibatch in packed.minibatches:
      rows = minibatch.rows
      self.lockstep(name, int(minibatch.count), rows.batch.tokens)
      layout, tokens, routing, sampled = self._put((
          rows.layout, rows.batch.tokens, rows.routing if replay else None,
          None if name == 'values' else self.train_step.sampled(rows.batch)))
      per_token.append(step(
          params, frozen, layout, tokens, minibatch.count, routing, sampled))
    return packed.from_rows(per_token)

  def _frozen(self, base):
    return base if self.train_step.lora else None

  def _on_mesh(self, network: str, params) -> TrainState:
    """Returns a network's state on the mesh, with parameters in float32."""
    mesh, axes = self.train_step.mesh, self.train_step.axes[network]
    jax.tree.map(
        lambda leaf, names: meshes.check_divisible(
            mesh, leaf.shape, names, 'a parameter'), params, axes)
    # A copy, because the state is donated and the caller keeps its arrays.
    params = jax.tree.map(
        lambda leaf, names: meshes.copied(
            leaf, meshes.sharding(mesh, names), np.float32), params, axes)
    return self.train_step.init(network, params)

  @property
  def _row_shape(self) -> dict[str, Any]:
    return dict(microbatch_rows=self.microbatch_rows,
                pack_length=self.pack_length, max_segments=self.max_segments,
                fit_segments=self.fit_segments)

  def _put(self, tree):
    return meshes.shard_batch(self.train_step.mesh, tree, axis=1)


def make(
    shape: transformer.TransformerConfig,
    algorithm: algorithms.Algorithm,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    rows: int,
    length: int,
    minibatches: int = 1,
    microbatch_rows: int | None = None,
    pack_length: int | None = None,
    max_segments: int = 16,
    fit_segments: bool = False,
    temperature: float = 1.0,
    lora: loras.Lora | None = None,
    seed: int = 0,
    critic_optimizer: optax.GradientTransformation | None = None,
    critic_warmup: int = 0,
    offload_optimizer: bool = False,
    lockstep: Callable[..., None] = lambda *facts: None,
    **forward_options: Any,
) -> Learner:
  """Checks options and makes a learner from them. Nothing is compiled yet.

  Args:
    shape: Shape of the decoder.
    algorithm: Algorithm to train with.
    optimizer: Optimiser of the policy.
    mesh: Mesh of the devices.
    rows: Number B of rows of every batch.
    length: Number T of tokens of every row of a batch.
    minibatches: Number of optimiser steps per batch, each on consecutive rows.
    microbatch_rows: Number of packed rows per micro-batch, over all devices.
      Default: 2, rounded up to a multiple of the mesh's parts of a batch.
    pack_length: Number of tokens of a packed row. The default is T, rounded up
      to a multiple of the number of parts into which the mesh splits positions.
    max_segments: Maximum number of trajectories in a packed row.
    fit_segments: Flag that lowers the places per row of a mini-batch to the
      least power of two that is enough. It suits an attention that computes all
      places. Steps are compiled for each number of places that occurs.
    temperature: Temperature of sampling, at which log-probs are computed.
    lora: Adapters that are trained on a frozen policy. None: all parameters of
      the policy are trained. A critic is always trained as a whole.
    seed: Seed of the adapters' first values.
    critic_optimizer: Optimiser of the critic, if the algorithm needs values.
    critic_warmup: Number of the critic's updates before the policy's first.
    offload_optimizer: Whether the optimisers' moments are in the hosts' memory
      between updates.
    lockstep: Function that is called before each dispatch. It gets the name of
      the step and the arguments for which the step is compiled; see
      `runtime.lockstep.LockstepCheck`.
    **forward_options: Fields of `train_step.ForwardOptions`: remat, dtype,
      attend, router_aux_loss_coef, router_replay.

  Raises:
    ValueError: The numbers do not match, a critic has no optimiser, or the
      algorithm allows one optimiser step per batch but `minibatches` more.
  """
  ways = meshes.ways(mesh, 'batch')
  microbatch_rows = microbatch_rows or _multiple(_ROWS, ways)
  pack_length = pack_length or _multiple(length, meshes.ways(mesh, 'length'))
  sequence_attention.check(
      shape, sequence=meshes.ways(mesh, 'length'), tensor=mesh.shape['tensor'],
      pack_length=pack_length)
  _check_rows(rows, minibatches, microbatch_rows, ways)
  if pack_length < length or not 0 < max_segments < pack_length:
    raise ValueError(
        f'learner.pack_length must be at least rollout.max_length={length} and '
        'above learner.max_segments, which must be 1 or more, but they are '
        f'{pack_length} and {max_segments}. Raise it, or lower max_segments.')
  _check_algorithm(algorithm, minibatches, critic_optimizer)
  train_step = TrainStep(
      shape, algorithm, optimizer, critic_optimizer, lora, mesh, length,
      temperature, ForwardOptions(**forward_options), offload_optimizer)
  return Learner(train_step, critic_warmup, minibatches, microbatch_rows,
                 pack_length, max_segments, fit_segments, seed, lockstep)


def _multiple(number: int, ways: int) -> int:
  """Returns the least multiple of `ways` that is at least `number`."""
  return -(-number // ways) * ways


def _check_rows(rows: int, minibatches: int, microbatch_rows: int, ways: int
               ) -> None:
  if minibatches < 1 or rows % minibatches:
    raise ValueError(f'learner.minibatches must divide the rows of a batch, '
                     f'{rows}, but is {minibatches}.')
  if microbatch_rows % ways:
    raise ValueError("learner.microbatch_rows must be a multiple of the mesh's "
                     f'data * fsdp * expert = {ways}, but is {microbatch_rows}'
                     '. Set it to such a number.')


def _check_algorithm(algorithm: algorithms.Algorithm, minibatches: int,
                     critic_optimizer: Any) -> None:
  if algorithm.one_update and minibatches > 1:
    raise ValueError(
        'learner.minibatches must be 1 for an algorithm without a ratio, but '
        f'is {minibatches}: after one optimiser step the policy is no longer '
        'the one that sampled. Set it to 1, or choose a recipe with a ratio.')
  if 'values' in algorithm.needs and critic_optimizer is None:
    raise ValueError('critic_optimizer must be given for an algorithm that '
                     'needs values, but is None.')
