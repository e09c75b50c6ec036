# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: a router, and gated MLPs of which a token uses a few.

No token is dropped: an expert takes as many tokens as the router sends to it.
All shapes are static. On CPUs, and for few tokens anywhere, all experts compute
all tokens: a decode reads nearly all experts in any case. For many tokens, the
tokens are sorted by expert, so that each one is multiplied by its experts only
(`expert_rows`). The products are those of `grouped_tpu` and `grouped_gpu`,
where the compilers would repeat rows for each expert.

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
  """The experts of each token, and how the router chose them."""

  ids: Int[Array, 'N k']  # experts of each token, by falling probability
  weights: Float[Array, 'N k']  # weights of their outputs
  probs: Float[Array, 'N E']  # probabilities of all experts
  # Experts that the router would choose, if others were given.
  own: Int[Array, 'N k'] | None = None


class Load(NamedTuple):
  """Sums over some tokens, from which the load of the experts is computed."""

  chosen: Float[Array, '*L E']  # number of tokens that an expert has
  probs: Float[Array, '*L E']  # sum of an expert's probabilities
  entropy: Float[Array, '*L']  # sum of the entropies of the probabilities
  tokens: Float[Array, '*L']  # number of tokens
  # Number of choices that the router would not make; None: it made them all.
  replaced: Float[Array, '*L'] | None = None


def route(logits: Float[Array, 'N E'], count: int, normalised: bool,
          given: Int[Array, 'N k'] | None = None) -> Routing:
  """Returns the routing of tokens, given float32 logits of the router.

  Given experts get the weights of this router, which has gradients (R3, Ma et
  al. 2025, arXiv:2510.11370).

  Args:
    logits: Unnormalised log-probs of the experts.
    count: Number of experts per token, k.
    normalised: Whether a token's weights add up to 1.
    given: Experts to take, as `recorded`. Default: the most probable ones.
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
  """Returns experts as they are recorded: from 1, in few bytes.

  A 0 in a record means that the token's experts are not known.
  """
  return (ids + 1).astype(record_dtype(count))


def record_dtype(count: int) -> str:
  """Returns the dtype of a record of the choices from `count` experts."""
  return 'uint8' if count < 256 else 'uint16'


def load(routing: Routing, used: Bool[Array, 'N']) -> Load:
  """Returns the sums over the tokens that `used` marks."""
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
  """Returns the auxiliary loss of all layers, which is k for a balanced load.

  It is E times a sum over the experts. The terms are the expert's fraction of
  the tokens times its mean probability; both are means over layers and tokens,
  as in transformers.
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

  Where `ways` devices share the experts, these are the tokens of all of them.
  Ids of E or more belong to experts on other devices. Their outputs are left
  out of the sum.
  """
  inputs = x, routing.ids, routing.weights, gate, up, down
  if len(x) <= _FEW:
    return _by_all(*inputs)
  return jax.lax.platform_dependent(
      *inputs, cpu=_by_all, cuda=functools.partial(_by_blocks, ways=ways),
      default=functools.partial(_by_own, ways=ways))


def sharded(shardings: Callable[[Any], Any]) -> Callable[..., Array]:
  """Returns `mixed` for tokens and experts that are split over devices.

  Each device computes its experts for the tokens of all devices along the axis
  of experts, and each token's outputs are summed there. `shardings` makes a
  NamedSharding from logical axes.
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
  """Computes all experts for all tokens; the weight is 0 if not chosen."""
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
  """Computes the experts of each token only, with tokens sorted by expert."""
  return expert_rows.mixed(grouped_tpu.product, 1, grouped_tpu.ROWS, ways, x,
                           ids, weights, (gate, up, down))


def _by_blocks(x, ids, weights, gate, up, down, ways=1):
  """Computes the same as `_by_own`, in blocks of rows with one expert.

  This is for GPUs.
  """
  if any(n % _LEAST for n in gate.shape[1:]):  # too small for the kernel
    return _by_all(x, ids, weights, gate, up, down)
  block = grouped_gpu.ROWS
  return expert_rows.mixed(grouped_gpu.product, block, block, ways, x, ids,
                           weights, (gate, up, down))
