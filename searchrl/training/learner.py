# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A batch of trajectories in, an updated policy out: score, then update.

State is a `TrainState` of each network, 'policy' and, where the algorithm needs
values, 'critic', sharded over a mesh and donated to each update. On the host a batch is laid end to end into
rows, so that hardly any padding is computed, and cut into micro-batches of
equal shape; `programs` runs them in one compiled loop.
"""

from collections.abc import Callable
import contextlib
import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh
import numpy as np
import optax

from searchrl.models import critic
from searchrl.models import lora as loras
from searchrl.models import transformer
from searchrl import packing
from searchrl.rl import algorithms
from searchrl.rl import diagnostics
from searchrl.runtime import mesh as meshes
from searchrl.training import train_step as train_steps
from searchrl.training.train_step import Rows, State, TrainState
from searchrl import trajectory
from searchrl.trajectory import Batch

_ROWS = 2  # of a device; more are fuller of filling
Timer = Callable[[str], contextlib.AbstractContextManager]


def _untimed(name: str) -> contextlib.AbstractContextManager:
  del name
  return contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class Learner:
  """How a policy is trained; see `make`."""

  programs: train_steps.TrainStep
  critic_warmup: int  # updates of the critic before the policy's first
  minibatches: int  # optimiser steps a batch
  microbatch_rows: int  # rows on the devices at one time
  row_length: int  # tokens a row
  row_places: int  # documents a row, at most
  seed: int  # of adapters
  lockstep: Callable[..., None]  # told of every program before it is dispatched

  @property
  def needs_base(self) -> bool:
    """Whether the policy that training starts from is asked for later."""
    return (self.programs.lora is not None
            or 'ref_logprobs' in self.programs.algorithm.needs)

  @property
  def scores_old(self) -> bool:
    """Whether `old_logprobs` take a pass of their own.

    The only optimiser step on a batch begins with them.
    """
    return (self.minibatches > 1
            or 'old_logprobs' in self.programs.algorithm.needs)

  def init(self, params: transformer.Params) -> State:
    """The state before the first update, on the mesh.

    Args:
      params: of the policy that training starts from; kept as they are.

    Raises:
      ValueError: an array does not split evenly over the mesh.
    """
    run, shape = self.programs, self.programs.shape
    started = {'policy': params}
    if run.lora:
      started['policy'] = loras.init(
          run.lora, shape, jax.random.key(self.seed))
    if 'critic' in run.axes:
      started['critic'] = critic.init(params)
    return {network: self._on_mesh(network, leaves)
            for network, leaves in started.items()}

  def updates(self, state: State) -> dict[str, int]:
    """Optimiser steps that each network has made."""
    return {network: int(trained.updates) for network, trained in state.items()}

  def policy(self, state: State, base: transformer.Params
            ) -> transformer.Params:
    """Params of the whole policy, as an engine or an export takes them.

    Args:
      state: of the policy.
      base: what `init` was given.
    """
    if self.programs.lora is None:
      return state['policy'].params
    return loras.merge(base, state['policy'].params, self.programs.lora)

  def score(self, state: State, batch: Batch,
            base: transformer.Params | None = None,
            timer: Timer = _untimed) -> Batch:
    """The batch with what the algorithm needs, as numpy arrays.

    Args:
      state: the policy before its first update on this batch.
      batch: from `trajectory.pack`.
      base: the reference policy, where the algorithm needs it; also what
        adapters adapt.
      timer: of 'old_log_prob', 'ref' and 'values'.

    Returns:
      The batch with `old_logprobs` if the update needs them beforehand, and
      `ref_logprobs` and `values` if the algorithm does.

    Raises:
      ValueError: no base where one is needed.
    """
    if self.needs_base and base is None:
      raise ValueError(
          'base must be given where the loss has a KL to a reference policy, or '
          'adapters are trained, but is None. Give the params that `init` got.')
    run, packed, added = self.programs, self._packed(batch), {}
    needs = run.algorithm.needs
    if self.scores_old:
      with timer('old_log_prob'):
        added['old_logprobs'] = self._per_token(
            'logprobs', run.logprobs, packed, state['policy'].params,
            self._frozen(base))
    if 'ref_logprobs' in needs:
      with timer('ref'):
        added['ref_logprobs'] = self._per_token(
            'logprobs', run.logprobs, packed, base)
    if 'values' in needs:
      with timer('values'):
        added['values'] = self._per_token(
            'values', run.values, packed, state['critic'].params)
    return dataclasses.replace(batch, **added)

  def update(self, state: State, batch: Batch,
             base: transformer.Params | None = None, timer: Timer = _untimed
            ) -> tuple[State, dict[str, float]]:
    """Every optimiser step that the batch is worth.

    Args:
      state: donated.
      batch: scored.
      base: what adapters adapt; else not used.
      timer: of 'adv' and 'update_actor', the critic's update included.

    Returns:
      The new state, and metrics averaged over the optimiser steps, with those
      of the batch and of how far sampler and learner are apart.
    """
    with timer('adv'):
      advantages = jax.device_get(self.programs.advantages(batch))
    per_step, old = [], None
    with timer('update_actor'):
      for rows in np.split(np.arange(len(batch.rewards)), self.minibatches):
        part = _take((batch, advantages), rows)
        if part[0].loss_mask.any():  # else filler only: nothing to learn
          state, values, old = self._step(state, base, *part)
          per_step.append(values)
    if batch.old_logprobs is None:
      batch = dataclasses.replace(batch, old_logprobs=(
          np.zeros(batch.tokens.shape, np.float32) if old is None else old))
    names = dict.fromkeys(name for values in per_step for name in values)
    metrics = {n: float(np.mean([v[n] for v in per_step if n in v]))
               for n in names}
    return state, (metrics | diagnostics.describe(batch, advantages)
                   | diagnostics.mismatch(batch))

  def abstract_update(self, rows: int, base_dtype: str = 'float32') -> tuple:
    """What `programs.update` is compiled for: shapes, dtypes and shardings.

    Args:
      rows: B of a whole batch.
      base_dtype: of what adapters adapt.
    """
    needs = self.programs.algorithm.needs
    empty = trajectory.pack(
        [], group_ids=[], policy_step=0, length=self.programs.length,
        rows=rows // self.minibatches)
    empty = dataclasses.replace(empty, **{
        field: np.zeros(empty.tokens.shape, np.float32)
        for field in needs | ({'old_logprobs'} if self.scores_old else set())})
    advantages = jax.tree.map(
        lambda x: np.zeros(x.shape, x.dtype),
        jax.eval_shape(self.programs.algorithm.advantages, empty))
    mesh = self.programs.mesh

    def describe(x, axes):
      return jax.ShapeDtypeStruct(
          x.shape, x.dtype, sharding=meshes.sharding(mesh, axes))

    base = jax.tree.map(
        describe, transformer.abstract(self.programs.shape, base_dtype),
        transformer.logical_axes(self.programs.shape))
    stacked = jax.tree.map(
        lambda x: describe(x, (None, 'batch') + (None,) * (x.ndim - 2)),
        self._packed(empty, advantages).rows)
    return (True, self.programs.abstract_state(), self._frozen(base), stacked,
            jax.ShapeDtypeStruct((), np.int32))

  def _step(self, state, base, batch, advantages):
    """One optimiser step on a mini-batch."""
    packed = self._packed(batch, advantages)
    train_policy = 'critic' not in state or (
        int(state['critic'].updates) >= self.critic_warmup)
    self.lockstep('update', int(packed.count), train_policy,
               packed.rows.batch.tokens)
    state, values, old = self.programs.update(
        train_policy, state, self._frozen(base), self._put(packed.rows),
        packed.count)
    values = {name: float(x) for name, x in jax.device_get(values).items()}
    values['perf/useful_tokens'] = packed.useful
    return state, values, None if old is None else packed.of_batch(old)

  def _frozen(self, base):
    return base if self.programs.lora else None

  def _on_mesh(self, network: str, params) -> TrainState:
    """A network's state; parameters are float32, whatever they were."""
    mesh, axes = self.programs.mesh, self.programs.axes[network]
    jax.tree.map(
        lambda leaf, names: meshes.check_divisible(
            mesh, leaf.shape, names, 'a parameter'), params, axes)
    # A copy: the state is donated, and the caller keeps what it gave.
    params = jax.tree.map(
        lambda leaf, names: meshes.copied(
            leaf, meshes.sharding(mesh, names), np.float32), params, axes)
    return self.programs.init(network, params)

  def _packed(self, batch: Batch, advantages: Any = None) -> '_Packed':
    """A batch as stacked micro-batches; B alone decides their shape."""
    lengths = np.asarray(batch.lengths)
    rows = packing.first_fit(lengths, self.row_length, self.row_places)
    size = self.microbatch_rows
    stacked = -(-len(lengths) // size)
    where = packing.layout(
        rows, lengths, count=stacked * size, length=self.row_length,
        places=self.row_places)
    flat = Rows(where, *packing.lay((batch, advantages), rows, where))
    count = -(-len(rows) // size)
    return _Packed(
        shape=batch.tokens.shape, rows=jax.tree.map(
            lambda x: x.reshape(stacked, size, *x.shape[1:]), flat),
        count=np.int32(count), documents=rows, where=where,
        useful=float(lengths.sum() / max(count * size * self.row_length, 1)))

  def _per_token(self, name: str, program: Callable[..., jax.Array],
                 packed: '_Packed', params, frozen=None) -> np.ndarray:
    """A program's numbers of every token of a batch, [B T]."""
    rows = packed.rows
    self.lockstep(name, int(packed.count), rows.batch.tokens)
    per_token = program(
        params, frozen, *self._put((rows.where, rows.batch.tokens)),
        packed.count)
    return packed.of_batch(per_token)

  def _put(self, tree):
    return meshes.shard_batch(self.programs.mesh, tree, axis=1)


@dataclasses.dataclass(frozen=True)
class _Packed:
  """A batch laid into micro-batches."""

  shape: tuple[int, int]  # B, T
  rows: Rows  # [M R ...]
  count: np.int32  # of the M, those that hold anything
  documents: list[list[int]]  # the batch's rows that lie in each row
  where: packing.Layout  # [M * R ...]
  useful: float  # tokens of documents over tokens computed

  def of_batch(self, said: jax.Array) -> np.ndarray:
    """Numbers of the rows' tokens, [M R L], as those of the batch's, [B T]."""
    said = jax.device_get(said).reshape(self.where.positions.shape)
    result = np.zeros(self.shape, np.float32)
    packing.unlay(said, self.documents, self.where, result)
    return result


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
    row_length: int | None = None,
    row_places: int = 16,
    temperature: float = 1.0,
    lora: loras.Lora | None = None,
    seed: int = 0,
    critic_optimizer: optax.GradientTransformation | None = None,
    critic_warmup: int = 0,
    lockstep: Callable[..., None] = lambda *facts: None,
    **forward: Any,
) -> Learner:
  """Compiles nothing yet; checks that the shapes fit each other.

  Args:
    shape: of the decoder.
    algorithm: what to minimise.
    optimizer: how.
    mesh: where.
    rows: B of every batch.
    length: T of every batch.
    minibatches: optimiser steps a batch, over consecutive rows of it.
    microbatch_rows: packed rows on the devices at one time; default: 2, or
      the next multiple of the mesh's data * fsdp.
    row_length: tokens of a packed row; default: T.
    row_places: trajectories a packed row holds at most.
    temperature: of sampling; log-probs are taken at it.
    lora: trains adapters of a frozen policy instead of all its parameters. A
      critic is trained whole all the same.
    seed: of the adapters' first values.
    critic_optimizer: for an algorithm that needs values.
    critic_warmup: updates that the critic makes before the policy's first.
    guard: called before each dispatch with the program's name and what it is
      compiled for; see `processes.Guard`.
    **forward: fields of `programs.Forward`: remat, dtype, attend, by_document.

  Raises:
    ValueError: numbers that do not fit, a second optimiser step on a batch
      that is good for one, or no optimiser for a critic.
  """
  ways = mesh.shape['data'] * mesh.shape['fsdp']
  microbatch_rows = microbatch_rows or -(-_ROWS // ways) * ways
  row_length = row_length or length
  _check_rows(rows, minibatches, microbatch_rows, ways)
  if row_length < length or not 0 < row_places < row_length:
    raise ValueError(
        f'learner.row_length must be at least rollout.length, {length}, and '
        'more than learner.row_places, which must be at least 1, but they are '
        f'{row_length} and {row_places}.')
  _check_recipe(algorithm, minibatches, critic_optimizer)
  programs = train_steps.TrainStep(
      shape, algorithm, optimizer, critic_optimizer, lora, mesh, length,
      temperature, train_steps.Forward(**forward))
  return Learner(programs, critic_warmup, minibatches, microbatch_rows,
                 row_length, row_places, seed, lockstep)


def _check_rows(rows: int, minibatches: int, microbatch_rows: int, ways: int
               ) -> None:
  if minibatches < 1 or rows % minibatches:
    raise ValueError(
        'learner.minibatches must divide the rows of a batch, '
        f'{rows}, but is {minibatches}.')
  if microbatch_rows % ways:
    raise ValueError(
        f'learner.microbatch_rows must be a multiple of the mesh\'s data * '
        f'fsdp = {ways}, but is {microbatch_rows}.')


def _check_recipe(algorithm: algorithms.Algorithm, minibatches: int,
                  critic_optimizer: Any) -> None:
  if algorithm.one_update and minibatches > 1:
    raise ValueError(
        'learner.minibatches must be 1 for an algorithm without a ratio, but is '
        f'{minibatches}: after one optimiser step the policy is another one '
        'than that which sampled. Set it to 1, or choose a recipe with a ratio.')
  if 'values' in algorithm.needs and critic_optimizer is None:
    raise ValueError('critic_optimizer must be given for an algorithm that '
                     'needs values, but is None.')


def _take(tree: Any, rows: np.ndarray) -> Any:
  """Some rows, on the host."""
  return jax.tree.map(lambda x: np.asarray(x)[rows], tree)
