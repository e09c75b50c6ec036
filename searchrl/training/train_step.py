# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Jitted, sharded scoring and update steps of a policy and its critic.

Every step takes M stacked micro-batches of R rows of L tokens, [M R L], and the
number of them that are not empty. This number is the trip count of one compiled
loop, so that the same program serves full and nearly empty batches. A row has
up to S documents (trajectories) end to end; see `packing`. The networks run on
rows, and the losses on documents. A network is the policy or the critic.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Int
import optax

from searchrl.models import attention
from searchrl.models import critic
from searchrl.models import experts
from searchrl.models import lora as loras
from searchrl.models import policy_logprobs
from searchrl.models import sequence_attention
from searchrl.models import transformer
from searchrl import packing
from searchrl.rl import algorithms
from searchrl.runtime import activations
from searchrl.runtime import dispatch
from searchrl.runtime import mesh as meshes
from searchrl.training import micro_batches
from searchrl.training import step_metrics
from searchrl.training import train_state
from searchrl.training.minibatches import Rows
from searchrl.training.train_state import State, TrainState
from searchrl.trajectory import Batch


@dataclasses.dataclass(frozen=True)
class ForwardOptions:
  """Options of the forward pass; see `transformer.forward_with_load`."""

  remat: bool | str = False
  dtype: str = 'float32'  # dtype of activations
  attend: Callable[..., Array] = attention.causal
  # Coefficient of the loss that balances the load of experts.
  router_aux_loss_coef: float = 0.0
  # Whether batches have the experts of the rollouts; see `Batch.routing`.
  router_replay: bool = False


@dataclasses.dataclass(frozen=True)
class TrainStep:
  """The jitted steps of one recipe, and the shardings of their state.

  In the signatures below, `trained` has all parameters of the policy, and
  `frozen` is None. If adapters are trained, `trained` has these alone, and
  `frozen` has the other parameters.
  """

  shape: transformer.TransformerConfig
  algorithm: algorithms.Algorithm
  optimizer: optax.GradientTransformation
  critic_optimizer: optax.GradientTransformation | None
  lora: loras.Lora | None
  mesh: Mesh
  length: int  # number T of tokens of the longest document
  temperature: float
  forward_options: ForwardOptions
  # True: the optimisers' moments are in the host's memory between updates.
  offload_optimizer: bool = False

  @property
  def axes(self) -> dict[str, Any]:
    """Axis names of the trained parameters, by network, for their shardings."""
    axes = {'policy': transformer.logical_axes(self.shape)}
    if self.lora:
      axes['policy'] = loras.logical_axes(self.lora, self.shape)
    if 'values' in self.algorithm.needs:
      axes['critic'] = critic.logical_axes(self.shape)
    return axes

  @functools.cached_property
  def advantages(self) -> Callable[[Batch], Any]:
    """Jitted function from an unpacked batch of arrays [B T] to advantages."""
    return dispatch.Ordered(
        jax.jit(lambda batch: self.algorithm.advantages(batch)), self.mesh)

  @functools.cached_property
  def denominators(self) -> Callable[[Batch, Any], dict[str, Array]]:
    """Jitted function that returns the divisor of each term of a loss, by name.

    The arguments are a mini-batch with one trajectory per row, and its
    advantages. All rows count, also those that are not packed. The counts
    depend on masks only, so that no network has to run.
    """
    def count(batch, advantages):
      zeros = jnp.zeros(batch.tokens.shape)
      batch = _with_old(batch, zeros)
      output = algorithms.PolicyOutput(zeros, entropy=zeros, values=zeros)
      terms, _ = self.algorithm.loss(output, batch, advantages)
      return {name: mean.count for name, (_, mean) in terms.items()}

    return dispatch.Ordered(jax.jit(count), self.mesh)

  @functools.cached_property
  def logprobs(self) -> Callable[..., Array]:
    """Jitted function that returns each token's log-prob in nats, [M R L].

    The arguments are (trained, frozen, layout, tokens [M R L], count, routing,
    sampled [M R L]). `trained` and `frozen` are parameters, as in `TrainStep`.
    `layout` says where documents are in rows. `count` is the number of
    micro-batches with tokens. `routing` is that of `Rows`. `sampled` is True
    for the tokens to score; others get 0. The last two may be left out.
    """
    return self._jit_scoring(lambda trained, frozen, *rows: self._logprobs(
        self._policy_params(trained, frozen), *rows)[0])

  @functools.cached_property
  def values(self) -> Callable[..., Array]:
    """Jitted function that returns the critic's value of every token, [M R L].

    The arguments are (critic's params, None, layout, tokens [M R L], count), as
    in `logprobs`. Values of micro-batches without tokens are 0.
    """
    return self._jit_scoring(lambda params, frozen, layout, tokens, *_: (
        self._values(params, layout, tokens)))

  @functools.cached_property
  def update(self) -> Callable[..., tuple[State, dict[str, Any], Array]]:
    """Function that makes one optimiser step on a mini-batch.

    It maps (train_policy, state, frozen, rows, denominators, count) to (state,
    metrics, old). `frozen` has the base params of adapters. `rows` has M
    micro-batches of R packed rows. Only the first `count` micro-batches have
    tokens. The state is donated. `train_policy` is a static argument; if it is
    False, only the critic is trained. Some metrics are Means over the rows.
    `old`, [M R L], has the `old_logprobs` of `rows`. Where these are NaN or not
    given, `old` has the log-probs of the policy before this step.

    It is one program, or with `offload_optimizer` those of `update_parts`.
    """
    if self.offload_optimizer:
      return functools.partial(self._update, self.update_parts)
    replicated = meshes.sharding(self.mesh, ())
    parts = {network: (functools.partial(self._gradient, network),
                       functools.partial(self._apply, network))
             for network in self.axes}
    return dispatch.Ordered(jax.jit(
        functools.partial(self._update, parts), static_argnums=0,
        donate_argnums=1,
        out_shardings=(self.state_shardings(), replicated, replicated)),
                            self.mesh)

  @functools.cached_property
  def update_parts(self) -> dict[str, tuple[dispatch.Ordered, ...]]:
    """Programs of an update with moments in the hosts' memory, by network.

    The first computes the gradient: (alone, params, frozen, rows, denominators,
    count) to (gradient, metrics, old). `params` are those of all networks, and
    `alone` is static: True if no other network is trained. The second makes the
    optimiser step: (state of the network, gradient) to (state, metrics). The
    state is donated. Only the second program has the moments on the devices.
    """
    parts: dict[str, tuple[dispatch.Ordered, ...]] = {}
    replicated = meshes.sharding(self.mesh, ())
    for network, state in self.state_shardings().items():
      gradient = jax.jit(
          functools.partial(self._gradient, network), static_argnums=0,
          out_shardings=(state.params, replicated, replicated))
      apply = jax.jit(
          functools.partial(self._apply, network), donate_argnums=0,
          out_shardings=(state, replicated))
      parts[network] = (dispatch.Ordered(gradient, self.mesh),
                        dispatch.Ordered(apply, self.mesh))
    return parts

  def sampled(self, batch: Batch) -> Array | None:
    """Returns a mask of the tokens whose log-probs are needed; None: all."""
    return batch.loss_mask if self.algorithm.skips_unsampled else None

  def first_params(self, base: Any, key: Array) -> dict[str, Any]:
    """Returns the first trained parameters by network, from the policy's."""
    params = {'policy': base}
    if self.lora:
      params['policy'] = loras.init(self.lora, self.shape, key)
    if 'values' in self.algorithm.needs:
      params['critic'] = critic.init(base)
    return params

  def init(self, network: str, params: Any) -> TrainState:
    """Returns the first state of 'policy' or 'critic', given its parameters."""
    optimizer = self._optimizer(network)
    opt_state = jax.jit(
        optimizer.init,
        out_shardings=self.state_shardings()[network].opt_state)(params)
    return TrainState(params, opt_state,
                      meshes.place(0, meshes.sharding(self.mesh, ())))

  def abstract_state(self) -> State:
    """Returns shapes, dtypes and shardings of the state, by network."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding),
        self._shapes, self.state_shardings())

  def abstract_routing(self, rows: Rows) -> jax.ShapeDtypeStruct | None:
    """Returns shape and dtype of `Rows.routing`; None if none is replayed."""
    options = self.shape.experts
    if not self.forward_options.router_replay or options is None:
      return None
    width = self.shape.num_hidden_layers * options.num_experts_per_tok
    return jax.ShapeDtypeStruct((*rows.batch.tokens.shape, width),
                                experts.record_dtype(options.num_experts))

  def state_shardings(self, on_host: bool | None = None) -> State:
    """Returns the shardings of the state, by network.

    Args:
      on_host: Flag: the moments are in the hosts' memory. The default is
        `offload_optimizer`, as between updates.
    """
    on_host = self.offload_optimizer if on_host is None else on_host
    return {network: train_state.shardings(
        self.mesh, axes, self._optimizer(network),
        self._shapes[network].opt_state, on_host=on_host)
            for network, axes in self.axes.items()}

  @functools.cached_property
  def _shapes(self) -> State:
    """Shapes and dtypes of the state, by network, as jax.ShapeDtypeStructs."""
    params = jax.eval_shape(
        self.first_params, transformer.abstract(self.shape), jax.random.key(0))
    return {
        network: TrainState(
            leaves, jax.eval_shape(self._optimizer(network).init, leaves),
            updates=jax.ShapeDtypeStruct((), jnp.int32))
        for network, leaves in params.items()}

  def _optimizer(self, network: str) -> optax.GradientTransformation:
    return {'policy': self.optimizer, 'critic': self.critic_optimizer}[network]

  def _policy_params(self, trained, frozen):
    return loras.attach(frozen, trained, self.lora) if (
        self.lora and frozen is not None) else trained

  def _logprobs(self, params, layout: packing.Layout, tokens, routing, sampled):
    # Sampled tokens of a row that is split over devices stay where they are.
    read = None if self._splits_rows else sampled
    *per_token, load = policy_logprobs.token_outputs(
        self._split_by_words(params), tokens, self.shape,
        temperature=self.temperature, routing=routing, read=read,
        **self._row_options(layout))
    if sampled is not None and read is None:
      per_token = [jnp.where(sampled, x, 0) for x in per_token]
    return *per_token, load

  def _split_by_words(self, params):
    """Returns the parameters with the logits' matrix split over words only.

    In the state, the matrix is also split over its width. With that split, all
    of it would be gathered for each chunk of tokens, and its gradient summed
    over devices. Here, only the chunk's hidden states are gathered, and their
    gradients and the maxima and sums of the logits are combined. The
    matrix is sent in the dtype in which it is multiplied. Its gradient is
    summed over chunks in its own dtype and rounded once.
    """
    if meshes.ways(self.mesh, 'embed') == 1:  # the width is not split
      return params
    head = transformer.head(params)
    kernel = meshes.resharded(
        self.mesh, head.astype(self.forward_options.dtype),
        ('embed', 'vocab'), (None, 'scored'))
    return {**params, 'head': {'kernel': kernel.astype(head.dtype)}}

  def _values(self, params, layout: packing.Layout, tokens):
    return critic.token_values(
        params, tokens, self.shape, **self._row_options(layout))

  def _row_options(self, layout: packing.Layout) -> dict[str, Any]:
    """Returns the keyword arguments with which a network reads packed rows."""
    options, mesh = self.forward_options, self.mesh
    attend: Callable[..., Array] = functools.partial(
        options.attend, max_segments=layout.starts.shape[-1],
        longest=self.length)
    if self._splits_rows:
      attend = sequence_attention.over_whole_rows(
          attend, functools.partial(meshes.sharding, mesh))
    return dict(segment_ids=layout.segment_ids, positions=layout.positions,
                remat=options.remat, dtype=options.dtype, attend=attend,
                used=self._used_layer, flat=not self._splits_rows,
                mixed=self._mixed,
                constrain=functools.partial(activations.split_by_tokens, mesh))

  @property
  def _splits_rows(self) -> bool:
    """True if the positions of a row are split over devices."""
    return meshes.ways(self.mesh, 'length') > 1

  @property
  def _mixed(self) -> Callable[..., Array]:
    """Function from tokens to their experts' outputs; see `experts.mixed`."""
    if self.mesh.size == 1 or self._sums_need_order:
      return experts.mixed
    return experts.sharded(functools.partial(meshes.sharding, self.mesh))

  def _used_layer(self, layer):
    """Returns a layer's parameters, whose gradients are summed axis by axis.

    The axes are those of a torus of chips. Without a torus, and for adapters,
    which are small, the layer is returned as it is.
    """
    torus = meshes.torus(self.mesh)
    if self.lora or torus is None:
      return layer
    return meshes.summed_by_axis(torus, layer, transformer.layer_axes(
        self.axes['policy']))

  def _jit_scoring(self, score: Callable[..., Array]) -> Callable[..., Array]:
    """Returns a jitted function that scores micro-batches one by one."""
    def score_all(params, frozen, layout, tokens, count: Int[Array, ''],
                  routing=None, sampled=None):
      return micro_batches.accumulate(
          lambda micro: ((), score(params, frozen, *micro)),
          (layout, tokens, routing, sampled), count)[1]

    return dispatch.Ordered(jax.jit(
        score_all, out_shardings=meshes.sharding(self.mesh, ())), self.mesh)

  def _update(self, parts, train_policy, state, frozen, rows: Rows,
              denominators, count):
    """Trains the critic and then the policy, one in memory at a time."""
    networks = [name for name in ('critic', 'policy')
                if name in state and (train_policy or name != 'policy')]
    metrics: dict[str, Any] = {}
    state = dict(state)
    for network in networks:
      gradient_of, apply = parts[network]
      gradient, measured, old = gradient_of(
          len(networks) == 1, {name: x.params for name, x in state.items()},
          frozen, rows, denominators, count)
      state[network], applied = apply(state[network], gradient)
      metrics |= measured | applied
    return state, metrics, old

  def _gradient(self, network, alone, params, frozen, rows: Rows, denominators,
                count):
    """Returns the gradient of a network, metrics, and `old` as of `update`.

    Unless `alone`, results that only the other network determines are left out,
    so that it need not run. `alone` says that no other network is trained.
    """
    trained = {network: params[network]}
    fixed = {name: x for name, x in params.items() if name not in trained}
    (gradients, metrics), old = self._sum(
        trained, fixed, frozen, rows, denominators, count)
    if not alone:
      is_critic = network == 'critic'
      metrics = {name: mean for name, mean in metrics.items()
                 if name.startswith('critic/') == is_critic}
      old = None if is_critic else old
    return gradients[network], metrics, old

  def _apply(self, network, trained: TrainState, gradient):
    """Returns a network's state after an optimiser step, and metrics."""
    if self.offload_optimizer:
      trained = jax.device_put(
          trained, self.state_shardings(on_host=False)[network])
    trained, made = trained.apply_gradient(self._optimizer(network), gradient)
    name = 'actor' if network == 'policy' else network
    return trained, {
        f'{name}/grad_norm': optax.tree.norm(gradient),
        f'{name}/updates_left_out': 1 - made.astype(jnp.float32)}

  def _sum(self, params, fixed, frozen, rows: Rows, denominators, count):
    """Returns the gradient of the loss over all micro-batches, and metrics.

    A loop sums over micro-batches. Each term is divided by its denominator over
    all of them, so that the split into micro-batches changes only the rounding.
    """
    def of_micro(params, fixed, frozen, counts, micro):
      grads, (sums, old) = jax.grad(self._loss, has_aux=True)(
          params, fixed, frozen, counts, micro)
      return (grads, sums), old

    if self.shape.experts:
      denominators = denominators | {'experts': jnp.sum(rows.layout.lengths)}
    # The balance of experts is that of the rows of all devices.
    balances = self.shape.experts and self.forward_options.router_aux_loss_coef
    if self._sums_need_order and not balances:
      of_micro = micro_batches.summed_in_order(of_micro, self.mesh)
    shardings = meshes.shardings(
        self.mesh, {network: self.axes[network] for network in params})

    def constrain(carry):
      grads, sums = carry
      return jax.lax.with_sharding_constraint(grads, shardings), sums

    return micro_batches.accumulate(
        functools.partial(of_micro, params, fixed, frozen, denominators), rows,
        count, constrain)

  def _loss(self, params, fixed, frozen, counts, micro: Rows):
    params = {**fixed, **params}
    tokens, layout = micro.batch.tokens, micro.layout
    *per_token, load = self._logprobs(
        self._policy_params(params['policy'], frozen), layout, tokens,
        micro.routing, self.sampled(micro.batch))
    values = None
    if 'critic' in params:
      values = self._values(params['critic'], layout, tokens)
    output = algorithms.PolicyOutput(
        *packing.unpack((*per_token, values), layout, self.length))
    micro = dataclasses.replace(micro, batch=_with_old(
        micro.batch, jax.lax.stop_gradient(per_token[0])))
    batch, advantages = packing.unpack(
        (micro.batch, micro.advantages), layout, self.length)
    terms, metrics = self.algorithm.loss(output, batch, advantages)
    step_metrics.check(metrics)
    if load is not None:
      balance = step_metrics.of_experts(load)
      metrics = metrics | balance
      terms = terms | {'experts': (
          self.forward_options.router_aux_loss_coef,
          balance['actor/experts_balance'])}
    return algorithms.total(terms, counts), (
        metrics, micro.batch.old_logprobs)

  @property
  def _sums_need_order(self) -> bool:
    """True if sums over devices must be made in one fixed order.

    XLA sums over CPU devices in one order within a process and in another
    between processes. If the terms are gathered first, there is only one order,
    and the digest of the result is always the same.
    """
    return self.mesh.devices.flat[0].platform == 'cpu' and (
        self.mesh.shape['data'] == self.mesh.size > 1)


def _with_old(batch: Batch, old: Array) -> Batch:
  """Returns the batch with `old` as its `old_logprobs` where it has none."""
  given = batch.old_logprobs
  if given is not None:
    old = jnp.where(jnp.isnan(given), old, given)
  return dataclasses.replace(batch, old_logprobs=old)
