# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: a router, and gated MLPs of which a token uses a few.

No token is dropped: an expert takes as many tokens as the router sends to it.
All shapes are static. On CPUs, and for few tokens on any device, every expert
computes every token, because a decode reads the weights of nearly all experts
in any case. For many tokens, the tokens are sorted by expert, so that each
token is multiplied by the matrices of its own experts only (`expert_rows`).
`grouped_tpu` and `grouped_gpu` compute these products. Without them, the
compilers would repeat rows for each expert.

Source: Qwen3MoeForCausalLM of transformers; Fedus et al. 2021,
arXiv:2101.03961, equations 4 to 6, for the balance of the load.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from searchrl.models import expert_rows
from searchrl.models import grouped_gpu
from searchrl.models import grouped_tpu

_FEW = 256  # tokens up to which all experts compute all tokens
_LEAST = 16  # sizes of matrices of the kernel for GPUs are multiples of it


@dataclasses.dataclass(frozen=True)
class Experts:
  """Settings of the mixture of experts that replaces the MLP of each layer."""

  num_experts: int
  num_experts_per_tok: int
  moe_intermediate_size: int  # inner width of an expert
  norm_topk_prob: bool  # whether a token's weights add up to 1


class Routing(NamedTuple):
  """The k experts of each of N tokens, out of E, and how they were chosen."""

  ids: Int[Array, 'N k']  # experts of each token, by falling probability
  weights: Float[Array, 'N k']  # weights of their outputs
  probs: Float[Array, 'N E']  # probabilities of all experts
  # The router's own choices, if other experts were given; else None.
  own: Int[Array, 'N k'] | None = None


class Load(NamedTuple):
  """Sums over some tokens that show how evenly they use the E experts.

  *L stands for an axis of layers, if there is one.
  """

  chosen: Float[Array, '*L E']  # number of tokens that an expert has
  probs: Float[Array, '*L E']  # sum of an expert's probabilities
  entropy: Float[Array, '*L']  # sum of the entropies of the probabilities
  tokens: Float[Array, '*L']  # number of tokens
  # Number of choices that the router would not make; None: it made them all.
  replaced: Float[Array, '*L'] | None = None


def route(logits: Float[Array, 'N E'], count: int, normalised: bool,
          given: Int[Array, 'N k'] | None = None) -> Routing:
  """Returns the experts of each token and their weights, from router logits.

  If the experts are `given`, they are used in place of the router's choices.
  Their weights are still those of this router, so that it has gradients (R3, Ma
  et al. 2025, arXiv:2510.11370).

  Args:
    logits: Unnormalised log-probs of the E experts for N tokens, float32.
    count: Number of experts per token, k.
    normalised: Flag that scales a token's weights so that they add up to 1.
    given: Experts to use, from `recorded`: numbers from 1, or 0 for a token
      whose experts are not known. Default: the most probable ones.
  """
  probs = jax.nn.softmax(logits)
  _, own = jax.lax.top_k(probs, count)
  ids = own if given is None else jnp.where(
      given > 0, given.astype(own.dtype) - 1, own)
  weights = jnp.take_along_axis(probs, ids, 1)
  if normalised:
    weights /= jnp.sum(weights, -1, keepdims=True)
  return Routing(ids, weights, probs, None if given is None else own)


def recorded(ids: Int[Array, '*N k'], count: int) -> Int[Array, '*N k']:
  """Returns expert numbers as they are stored: from 1 instead of from 0.

  A stored number has 1 byte if `count`, the number of experts, is below 256,
  and otherwise 2 bytes. A stored 0 means that the token's experts are not
  known.
  """
  return (ids + 1).astype(record_dtype(count))


def record_dtype(count: int) -> str:
  """Returns the dtype of `recorded` numbers of `count` experts."""
  return 'uint8' if count < 256 else 'uint16'


def load(routing: Routing, used: Bool[Array, 'N']) -> Load:
  """Returns sums over tokens that show how evenly they use the experts.

  Args:
    routing: Choices and probabilities of all tokens.
    used: True for the tokens that count, such as all that are not padding.
  """
  used = used.astype(jnp.float32)
  hits = jax.nn.one_hot(routing.ids, routing.probs.shape[-1]).sum(1)
  entropy = -jnp.sum(jax.scipy.special.xlogy(routing.probs, routing.probs), -1)
  replaced = None
  if routing.own is not None:
    same = routing.ids[:, :, None] == routing.own[:, None]
    replaced = used @ jnp.sum(~same.any(-1), -1).astype(jnp.float32)
  return Load(used @ hits, used @ routing.probs, used @ entropy, used.sum(),
              replaced)


def balance(load: Load) -> Float[Array, '']:
  """Returns the auxiliary loss that makes the router use all experts alike.

  It is E times the sum, over experts, of the fraction of tokens that have the
  expert times its mean probability. Both are means over tokens and the layers
  of `load`, as in transformers. A balanced load gives k, the experts per token.
  """
  tokens = jnp.maximum(load.tokens.sum(), 1)
  shares, probs = load.chosen.sum(0) / tokens, load.probs.sum(0) / tokens
  return shares.shape[0] * jnp.sum(jax.lax.stop_gradient(shares) * probs)


def mixed(
    x: Float[Array, 'N D'],
    routing: Routing,
    gate: Float[Array, 'E D F'],
    up: Float[Array, 'E D F'],
    down: Float[Array, 'E F D'],
    ways: int = 1,
) -> Float[Array, 'N D']:
  """Returns the weighted sum of the outputs of each token's experts.

  Where devices share the experts, each has E of them and computes these for the
  tokens of all devices. Ids of E or more belong to experts on other devices.
  Their outputs are left out of the sum.

  Args:
    x: Tokens, of width D.
    routing: Experts of each token and their weights.
    gate: Matrices of the experts' gates.
    up: Matrices of the upward projections.
    down: Matrices of the downward projections.
    ways: Number of devices that share the experts.
  """
  inputs = x, routing.ids, routing.weights, gate, up, down
  if len(x) <= _FEW:
    return _by_all(*inputs)
  return jax.lax.platform_dependent(
      *inputs, cpu=_by_all, cuda=functools.partial(_by_blocks, ways=ways),
      default=functools.partial(_by_own, ways=ways))


def sharded(shardings: Callable[[Any], Any]) -> Callable[..., Array]:
  """Returns a function like `mixed` for tokens and experts split over devices.

  It has the arguments (x, routing, gate, up, down). Each device gets the tokens
  of all devices that share the experts, and computes its own experts for them.
  The outputs of a token are then summed over devices and sent to its device.
  `shardings` makes a NamedSharding from a tuple of names of axes.
  """
  mesh = shardings(('batch',)).mesh
  rows = shardings(('batch', None)).spec
  experts, *_ = shardings(('experts',)).spec
  width, *_ = shardings(('mlp',)).spec
  inward = PartitionSpec(experts, None, width)
  outward = PartitionSpec(experts, width, None)

  def local(x, ids, weights, gate, up, down):
    ways = 1
    if experts is not None:
      ways = jax.lax.axis_size(experts)
      x, ids, weights = (jax.lax.all_gather(y, experts, tiled=True)
                         for y in (x, ids, weights))
      ids = ids - jax.lax.axis_index(experts) * len(gate)
      ids = jnp.where(ids < 0, len(gate), ids)
    y = mixed(x, Routing(ids, weights, weights), gate, up, down, ways)
    if width is not None:
      y = jax.lax.psum(y, width)
    if experts is None:
      return y
    return jax.lax.psum_scatter(y, experts, tiled=True)

  split = jax.shard_map(
      local, mesh=mesh, in_specs=(rows, rows, rows, inward, inward, outward),
      out_specs=rows, check_vma=False)
  return lambda x, routing, *kernels: split(
      x, routing.ids, routing.weights, *kernels)


def _by_all(x, ids, weights, gate, up, down):
  """Returns the same as `mixed`, by computing all experts for all tokens.

  The weight of an expert that a token did not choose is 0.
  """
  count = len(gate)
  share = jnp.sum(jax.nn.one_hot(ids, count) * weights[..., None], 1).astype(
      x.dtype)
  # Tokens are repeated, because a product without this axis would transpose the
  # weights.
  every = jnp.broadcast_to(x, (count, *x.shape))
  product = lambda kernel: jnp.einsum('end,edf->enf', every, kernel)
  hidden = jax.nn.silu(product(gate)) * product(up) * share.T[..., None]
  return jnp.einsum('enf,efd->nd', hidden, down)


def _by_own(x, ids, weights, gate, up, down, ways=1):
  """Returns the same as `mixed`, by computing only each token's experts.

  The tokens are sorted by expert. This is for TPUs.
  """
  return expert_rows.mixed(grouped_tpu.product, 1, grouped_tpu.ROWS, ways, x,
                           ids, weights, (gate, up, down))


def _by_blocks(x, ids, weights, gate, up, down, ways=1):
  """Returns the same as `mixed`, in blocks of rows that have one expert each.

  Only each token's experts are computed. This is for GPUs.
  """
  if any(n % _LEAST for n in gate.shape[1:]):  # too small for the kernel
    return _by_all(x, ids, weights, gate, up, down)
  block = grouped_gpu.ROWS
  return expert_rows.mixed(grouped_gpu.product, block, block, ways, x, ids,
                           weights, (gate, up, down))
