# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The decoder: a transformer, from token ids to logits.

Families such as Qwen2, Qwen3, Llama 3 and Mistral differ in biases, in a norm
of queries and keys, in rotary frequencies, in a sliding window and in mixtures
of experts. Each difference is a field of `TransformerConfig`; see
`families.FAMILIES`.

The modules are thin Flax Linen: a Block owns one layer's parameters and logical
axes. Attention is an argument, so that training, scoring and decoding share the
layer and differ in one function. The parameters are a plain nested dict, in
which layers are stacked on axis 0:

  embed/embedding [V D]   layers/.../... [L ...]   norm/scale [D]
  head/kernel [D V]       only if the embedding is not tied
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np

from searchrl.models import attention
from searchrl.models import experts as experts_lib
from searchrl.models.experts import Experts, Load
from searchrl.models.products import float32_product, product
from searchrl.models.rotary import Llama3Rope, rotate

Params = Any  # a nested dict of arrays
Axes = tuple[str | None, ...]  # logical axes of one array
# (q [B T H d], k [B T K d], v [B T K d]) -> (output [B T H d], a value that the
# caller keeps, such as the layer's new cache)
AttendFn = Callable[[Array, Array, Array], tuple[Array, Any]]

# Number that is added to the logits of unused ids, so that their probabilities
# are exactly 0. It is finite because the entropy and its gradient multiply
# log-probs by probabilities. It is added, as a sum's gradient costs nothing.
_UNUSED = -1e20
normal = nn.initializers.normal(0.02)  # fills all kernels and embeddings
# Policies that say what is saved for the backward pass, by the name in `remat`.
_SAVED = {
    'nothing': jax.checkpoint_policies.nothing_saveable,
    'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
  """Shape of a decoder. Fields that are in config.json have the same names."""

  vocab_size: int
  hidden_size: int
  num_hidden_layers: int
  num_attention_heads: int
  num_key_value_heads: int
  head_dim: int
  intermediate_size: int
  rope_theta: float = 10_000.0
  rms_norm_eps: float = 1e-6
  attention_bias: bool = True  # whether q, k and v have biases
  tie_word_embeddings: bool = True
  max_position_embeddings: int = 2048
  architecture: str = 'Qwen2ForCausalLM'
  qk_norm: bool = False  # whether the q and k of each head are normalised
  attention_out_bias: bool = False  # whether o has a bias
  mlp_bias: bool = False  # whether gate, up and down have biases
  sliding_window: int | None = None  # tokens that a token sees, with itself
  rope_scaling: Llama3Rope | None = None
  experts: Experts | None = None
  # Ids without a token, which `model_folders.parts` finds, not config.json.
  unused_ids: tuple[int, ...] = ()
  matmul_dtype: str = ''  # dtype of products' operands; see `products.product`


# Decorator for cheap elementwise functions, which cost memory rather than
# arithmetic. The backward pass recomputes them.
_remade = functools.partial(jax.checkpoint, prevent_cse=False)


def param(module: nn.Module, name: str, init: nn.initializers.Initializer,
          shape: tuple[int, ...], axes: Axes) -> Array:
  """Declares a module's parameter with logical axes, and returns its value."""
  value: Any = module.param(name, nn.with_logical_partitioning(init, axes),
                            shape)
  return value


class RMSNorm(nn.Module):
  """RMS norm in float32: x / rms(x) * scale."""

  eps: float
  axis: str = 'embed'  # logical axis of the scale

  @nn.compact
  def __call__(self, x: Float[Array, '*B D']) -> Float[Array, '*B D']:
    """Returns x normalised over its last axis, in the dtype of x."""
    scale = param(self, 'scale', nn.initializers.ones, x.shape[-1:],
                  (self.axis,))
    return _normed(x, scale, self.eps)


@functools.partial(_remade, static_argnums=2)
def _normed(x, scale, eps):
  x32 = x.astype(jnp.float32)
  rms = jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
  return (x32 * rms).astype(x.dtype) * scale.astype(x.dtype)


@_remade
def _gated(gate, up):
  return jax.nn.silu(gate) * up


class Projection(nn.Module):
  """A linear map of the last axis to `features`.

  If its parameters include `lora_a` and `lora_b` (see `models.lora`), the
  product x @ lora_a @ lora_b is added.
  """

  features: int
  axes: tuple[str, str]  # logical axes of the kernel
  use_bias: bool = False
  matmul_dtype: str = ''  # dtype of the product's operands, as in `product`

  @nn.compact
  def __call__(self, x: Float[Array, '*N D']) -> Float[Array, '*N F']:
    """Returns the map of x, computed in the dtype of x."""
    kernel = param(self, 'kernel', normal, (x.shape[-1], self.features),
                   self.axes)
    y = product(x, kernel, self.matmul_dtype)
    if self.has_variable('params', 'lora_a'):
      a: Any = self.get_variable('params', 'lora_a')
      b: Any = self.get_variable('params', 'lora_b')
      y = y + product(product(x, a), b)
    if self.use_bias:
      bias = param(self, 'bias', nn.initializers.zeros, (self.features,),
                   self.axes[1:])
      y = y + bias.astype(x.dtype)
    return y


class Block(nn.Module):
  """One layer: attention and a gated MLP or experts, each with a residual.

  If the caller makes the collection 'routing' mutable, the layer writes the
  `experts.Routing` of its tokens there.
  """

  config: TransformerConfig
  mixed: Callable[..., Array] = experts_lib.mixed  # or from `experts.sharded`
  flat: bool = True  # products are of [B*T D], and not of [B T D]

  @nn.compact
  def __call__(
      self,
      x: Float[Array, 'B T D'],
      positions: Int[Array, 'B T'],
      attend: AttendFn,
      experts: Int[Array, 'N k'] | None = None,
  ) -> tuple[Float[Array, 'B T D'], Any]:
    """Returns the layer's output, and the second result of `attend`.

    If there are `experts`, from `experts.recorded`, they replace the router's.
    """
    c = self.config
    rows, length, width = x.shape
    tokens = (rows * length,) if self.flat else (rows, length)

    def heads(name, count, axis):
      y = self._linear(
          name, count * c.head_dim, ('embed', axis), c.attention_bias)(flat)
      if length == 1 and not c.attention_bias:
        # A TPU's compiler would reshape the kernel instead, and copy it into
        # another layout for each decode.
        y = jax.lax.optimization_barrier(y)
      return y.reshape(rows, length, count, c.head_dim)

    def rotated(y, name):
      if c.qk_norm:
        y = RMSNorm(c.rms_norm_eps, 'head_dim', name=name)(y)
      return rotate(y, positions, c.rope_theta, c.rope_scaling)

    flat = RMSNorm(c.rms_norm_eps, name='attention_norm')(x)
    flat = flat.reshape(*tokens, width)
    q = heads('q', c.num_attention_heads, 'heads')
    k = heads('k', c.num_key_value_heads, 'kv_heads')
    v = heads('v', c.num_key_value_heads, 'kv_heads')
    output, second = attend(rotated(q, 'q_norm'), rotated(k, 'k_norm'), v)
    y = self._linear('o', width, ('heads', 'embed'), c.attention_out_bias)(
        output.reshape(*tokens, -1))
    x = x + y.reshape(x.shape)

    flat = RMSNorm(c.rms_norm_eps, name='mlp_norm')(x)
    flat = flat.reshape(*tokens, width)
    y = self._experts(flat, experts) if c.experts else self._mlp(flat)
    return x + y.reshape(x.shape), second

  def _linear(self, name: str, size: int, axes: Any, bias: bool) -> Projection:
    return Projection(size, axes, bias, self.config.matmul_dtype, name=name)

  def _mlp(self, x: Float[Array, '*N D']) -> Float[Array, '*N D']:
    size, bias = self.config.intermediate_size, self.config.mlp_bias
    gate = self._linear('gate', size, ('embed', 'mlp'), bias)(x)
    up = self._linear('up', size, ('embed', 'mlp'), bias)(x)
    return self._linear('down', x.shape[-1], ('mlp', 'embed'), bias)(
        _gated(gate, up))

  def _experts(self, x: Float[Array, 'N D'], given: Array | None
              ) -> Float[Array, 'N D']:
    c: Any = self.config.experts
    width, size = x.shape[-1], c.moe_intermediate_size
    router = Kernel((width, c.num_experts), ('embed', None), name='router')()
    routing = experts_lib.route(
        float32_product(x, router), c.num_experts_per_tok, c.norm_topk_prob,
        given)
    self.sow('routing', 'chosen', routing)
    kernels = [
        Kernel((c.num_experts, *shape), ('experts', *axes), name=name)().astype(
            x.dtype)
        for name, shape, axes in (
            ('expert_gate', (width, size), ('embed', 'mlp')),
            ('expert_up', (width, size), ('embed', 'mlp')),
            ('expert_down', (size, width), ('mlp', 'embed')))]
    return self.mixed(x, routing, *kernels)


class Kernel(nn.Module):
  """A kernel of all experts or of their router, plus the product of adapters.

  It is not known beforehand which experts a token has. So the adapters of all
  experts are multiplied, and added to the kernel. The router has no adapters.
  """

  shape: tuple[int, ...]
  axes: Axes

  @nn.compact
  def __call__(self) -> Array:
    """Returns the parameter, plus lora_a @ lora_b if it has adapters."""
    kernel = param(self, 'kernel', normal, self.shape, self.axes)
    if not self.has_variable('params', 'lora_a'):
      return kernel
    a: Any = self.get_variable('params', 'lora_a')
    b: Any = self.get_variable('params', 'lora_b')
    return kernel + a @ b


def forward(params: Params, tokens: Int[Array, 'B T'],
            config: TransformerConfig, **options: Any
           ) -> Float[Array, 'B T D']:
  """Returns hidden states [B T D]: the first result of `forward_with_load`."""
  return forward_with_load(params, tokens, config, **options)[0]


def forward_with_load(
    params: Params,
    tokens: Int[Array, 'B T'],
    config: TransformerConfig,
    *,
    segment_ids: Int[Array, 'B T'] | None = None,
    positions: Int[Array, 'B T'] | None = None,
    remat: bool | str = False,
    dtype: Any = jnp.float32,
    attend: Callable[..., Array] = attention.causal,
    used: Callable[[Params], Params] = lambda layer: layer,
    constrain: Callable[[Array, str], Array] = lambda x, place: x,
    flat: bool = True,
    mixed: Callable[..., Array] = experts_lib.mixed,
    routing: Int[Array, 'B T X'] | None = None,
) -> tuple[Float[Array, 'B T D'], Load | None]:
  """Returns hidden states of whole rows, with causal attention per segment.

  Args:
    params: Parameters as described at the top of this file.
    tokens: Rows of token ids. Padding is on the right, so that no token attends
      to it.
    config: Shape of the decoder.
    segment_ids: Number of each token's document in a packed row; 0 for padding.
    positions: Position of each token in its document. Default: 0, 1, 2, ...
    remat: Activations of a layer that the backward pass recomputes. False:
      none. True or 'nothing': all, because nothing is saved. 'dots': all except
      the results of matrix products, which are saved.
    dtype: Data type of activations, and of parameters in products. Norms and
      softmax are computed in float32.
    attend: Function with the arguments of `attention.causal`, such as a partial
      of it with an implementation.
    used: Function from one layer's stored parameters to the parameters with
      which the layer computes.
    constrain: Function from activations [B T D] and the name of their place to
      the same values, such as a partial of `activations.split_by_tokens`.
    flat: Whether rows are flattened for products. It must be False if devices
      split the positions of a row: flattening would gather them.
    mixed: Function `experts.mixed`, or a function from `experts.sharded`.
    routing: Experts of each token that replace the router's choices, as in
      `experts.recorded`: k of the first layer, then k of the next, and so on.

  Returns:
    The last layer's normalised output, in `dtype`, and the load of each layer's
    experts. With `segment_ids`, the load leaves out padding. The load is None
    if there are no experts.

  Raises:
    ValueError: `remat` has an unknown value.
  """
  rows, length = tokens.shape
  if positions is None:
    positions = jnp.broadcast_to(jnp.arange(length), (rows, length))

  def attend_rows(q, k, v):
    return attend(q, k, v, segment_ids=segment_ids,
                  sliding_window=config.sliding_window), None

  def layer(x, layer_params_and_experts):
    layer_params, experts = layer_params_and_experts
    (x, _), sown = Block(config, mixed, flat).apply(
        {'params': used(layer_params)}, constrain(x, 'layer'), positions,
        attend_rows, experts, mutable=('routing',))
    return x, load(sown['routing']['chosen'][0]) if sown else None

  def load(chosen):
    return experts_lib.load(
        chosen, jnp.ones(rows * length, bool) if segment_ids is None
        else segment_ids.ravel() > 0)

  x = constrain(params['embed']['embedding'][tokens].astype(dtype), 'embedded')
  if routing is not None:
    routing = jnp.moveaxis(routing.reshape(
        rows * length, config.num_hidden_layers, -1), 1, 0)
  x, loads = jax.lax.scan(
      recomputed(layer, remat), x, (params['layers'], routing))
  return final_norm(params, constrain(x, 'last'), config), loads


def recomputed(layer: Callable[..., Any], remat: bool | str
              ) -> Callable[..., Any]:
  """Returns the layer, with activations computed again in the backward pass.

  `remat` chooses which activations; see `forward_with_load`. Raises a
  ValueError if it has an unknown value.
  """
  if not remat:
    return layer
  name = 'nothing' if remat is True else remat
  if name not in _SAVED:
    raise ValueError(f'remat must be False, True or one of {sorted(_SAVED)}, '
                     f'but is {remat!r}.')
  return jax.checkpoint(layer, policy=_SAVED[name], prevent_cse=False)


def final_norm(params: Params, x: Float[Array, '*B D'],
               config: TransformerConfig) -> Float[Array, '*B D']:
  """Returns the last layer's output normalised, as the logits' input."""
  return _normed(x, params['norm']['scale'], config.rms_norm_eps)


def head(params: Params) -> Float[Array, 'D V']:
  """Returns the matrix that computes logits: the head's or the embedding's."""
  return (params['head']['kernel'] if 'head' in params
          else params['embed']['embedding'].T)


def logits(params: Params, hidden: Float[Array, '*B D'],
           unused_ids: Sequence[int] = (), matmul_dtype: str = ''
          ) -> Float[Array, '*B V']:
  """Returns unnormalised log-probs over the vocabulary, in float32.

  The unused ids get a probability of exactly 0 and no gradient.
  """
  scores = float32_product(hidden, head(params), matmul_dtype)
  if not unused_ids:
    return scores
  offset = np.zeros(scores.shape[-1], np.float32)
  offset[list(unused_ids)] = _UNUSED
  return scores + offset


def init(config: TransformerConfig, key: Array) -> Params:
  """Returns random float32 parameters: normal(0.02), norms 1, biases 0."""
  return nn.meta.unbox(_boxed(config, key))


@functools.cache
def abstract(config: TransformerConfig, dtype: str = 'float32') -> Params:
  """Returns all parameters as jax.ShapeDtypeStruct, in a tree like `init`'s."""
  shapes = jax.eval_shape(functools.partial(init, config), jax.random.key(0))
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), shapes)


@functools.cache
def logical_axes(config: TransformerConfig) -> Params:
  """Returns the axis names of each parameter, as a tree like that of `init`."""
  return axes_of(lambda key: _boxed(config, key))


def layer_axes(axes: Params) -> Params:
  """Returns the axis names of one layer's arrays, given those of all arrays."""
  return jax.tree.map(lambda names: names[1:], axes['layers'],
                      is_leaf=lambda x: isinstance(x, tuple))


def axes_of(boxed: Callable[[Array], Params]) -> Params:
  """Returns the axis names of each array of a tree, without computing it.

  Args:
    boxed: Function from a random key to the tree, in which each array is in
      flax's box that has the names of its axes, such as `LogicallyPartitioned`.
  """
  boxes = jax.eval_shape(boxed, jax.random.key(0))
  return jax.tree.map(lambda box: tuple(box.names), boxes,
                      is_leaf=lambda x: isinstance(x, nn.Partitioned))


def stacked_layers(layer: Callable[[Array], Params], key: Array, count: int
                  ) -> Params:
  """Returns the parameters of `count` layers, stacked along a new first axis.

  `layer` returns the parameters of one layer, given a random key of its own.
  The name of the new axis is 'layers'.
  """
  return nn.meta.add_axis(jax.vmap(layer)(jax.random.split(key, count)), 0,
                          {nn.PARTITION_NAME: 'layers'})


def _boxed(config: TransformerConfig, key: Array) -> Params:
  """Returns the tree of `init`, with each array in flax's box of axis names."""
  key_embed, key_layers, key_head = jax.random.split(key, 3)
  size, width = config.vocab_size, config.hidden_size
  layer = lambda key: Block(config).init(
      key, jnp.zeros((1, 1, width)), jnp.zeros((1, 1), jnp.int32),
      lambda q, k, v: (q, None))['params']
  params = {
      'embed': {'embedding': nn.with_logical_partitioning(
          normal, ('vocab', 'embed'))(key_embed, (size, width))},
      'layers': stacked_layers(layer, key_layers, config.num_hidden_layers),
      'norm': {'scale': nn.LogicallyPartitioned(jnp.ones(width), ('embed',))},
  }
  if not config.tie_word_embeddings:
    params['head'] = {'kernel': nn.with_logical_partitioning(
        normal, ('embed', 'vocab'))(key_head, (width, size))}
  return params
