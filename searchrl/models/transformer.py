# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Token ids and positions in, hidden states out: the Qwen2 decoder.

Thin Linen: a Block owns one layer's parameters and logical axes, and asks its
caller to attend, so that training, scoring and decoding share one layer and
differ in one function. Parameters are a plain nested dict, layers stacked on
axis 0:

  embed/embedding [V D]   layers/.../... [L ...]   norm/scale [D]
  head/kernel [D V]       only where the embedding is not tied
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Params = Any  # a nested dict of arrays
# (q [B T H d], k [B T K d], v [B T K d]) -> ([B T H d], whatever is kept)
AttendFn = Callable[[Array, Array, Array], tuple[Array, Any]]

_MASKED = -1e30  # finite, so that a row that sees nothing gives no NaN


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
  """The shape of a decoder; field names follow config.json."""

  vocab_size: int
  hidden_size: int
  num_hidden_layers: int
  num_attention_heads: int
  num_key_value_heads: int
  head_dim: int
  intermediate_size: int
  rope_theta: float = 10_000.0
  rms_norm_eps: float = 1e-6
  attention_bias: bool = True
  tie_word_embeddings: bool = True
  max_position_embeddings: int = 2048


class RMSNorm(nn.Module):
  """x / rms(x) * scale, in float32."""

  eps: float

  @nn.compact
  def __call__(self, x: Float[Array, '*B D']) -> Float[Array, '*B D']:
    scale = self.param('scale', nn.with_logical_partitioning(
        nn.initializers.ones, ('embed',)), (x.shape[-1],))
    x32 = x.astype(jnp.float32)
    rms = jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + self.eps)
    return (x32 * rms).astype(x.dtype) * scale.astype(x.dtype)


class Projection(nn.Module):
  """A linear map between the last axis and `features`, over flat tokens."""

  features: int
  axes: tuple[str, str]  # logical axes of the kernel
  use_bias: bool = False

  @nn.compact
  def __call__(self, x: Float[Array, 'N D']) -> Float[Array, 'N F']:
    kernel = self.param('kernel', nn.with_logical_partitioning(
        nn.initializers.normal(0.02), self.axes), (x.shape[-1], self.features))
    y = x @ kernel.astype(x.dtype)
    if self.use_bias:
      bias = self.param('bias', nn.with_logical_partitioning(
          nn.initializers.zeros, self.axes[1:]), (self.features,))
      y = y + bias.astype(x.dtype)
    return y


class Block(nn.Module):
  """One layer: attention and a gated feed-forward, each with a residual."""

  config: TransformerConfig

  @nn.compact
  def __call__(
      self,
      x: Float[Array, 'B T D'],
      positions: Int[Array, 'B T'],
      attend: AttendFn,
  ) -> tuple[Float[Array, 'B T D'], Any]:
    c = self.config
    rows, length, width = x.shape
    project = functools.partial(Projection, use_bias=c.attention_bias)

    def heads(y, count):
      return y.reshape(rows, length, count, c.head_dim)

    flat = RMSNorm(c.rms_norm_eps, name='attention_norm')(x)
    flat = flat.reshape(rows * length, width)
    q = project(c.num_attention_heads * c.head_dim, ('embed', 'heads'),
                name='q')(flat)
    k = project(c.num_key_value_heads * c.head_dim, ('embed', 'kv_heads'),
                name='k')(flat)
    v = project(c.num_key_value_heads * c.head_dim, ('embed', 'kv_heads'),
                name='v')(flat)
    seen, kept = attend(
        rotate(heads(q, c.num_attention_heads), positions, c.rope_theta),
        rotate(heads(k, c.num_key_value_heads), positions, c.rope_theta),
        heads(v, c.num_key_value_heads))
    y = Projection(width, ('heads', 'embed'), name='o')(
        seen.reshape(rows * length, -1))
    x = x + y.reshape(x.shape)

    flat = RMSNorm(c.rms_norm_eps, name='mlp_norm')(x)
    flat = flat.reshape(rows * length, width)
    gate = Projection(c.intermediate_size, ('embed', 'mlp'), name='gate')(flat)
    up = Projection(c.intermediate_size, ('embed', 'mlp'), name='up')(flat)
    y = Projection(width, ('mlp', 'embed'), name='down')(jax.nn.silu(gate) * up)
    return x + y.reshape(x.shape), kept


def rotate(x: Float[Array, 'B T H d'], positions: Int[Array, 'B T'],
           theta: float) -> Float[Array, 'B T H d']:
  """Rotary position embedding, halves rotated against each other.

  Source: Su et al. 2021, arXiv:2104.09864, in the layout of Hugging Face.
  """
  half = x.shape[-1] // 2
  frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle = positions[..., None].astype(jnp.float32) * frequency
  cos = jnp.cos(angle)[:, :, None].astype(x.dtype)
  sin = jnp.sin(angle)[:, :, None].astype(x.dtype)
  left, right = x[..., :half], x[..., half:]
  return jnp.concatenate(
      [left * cos - right * sin, right * cos + left * sin], -1)


def attention(
    q: Float[Array, 'B T H d'],
    k: Float[Array, 'B K S d'],
    v: Float[Array, 'B K S d'],
    visible: Bool[Array, 'B T S'],
) -> Float[Array, 'B T H d']:
  """Softmax attention with grouped queries; scores in float32.

  The queries of one KV head are folded into the length, so that every key is
  read once. A query that sees nothing gets the mean of v; ignore it.
  """
  rows, length, heads, size = q.shape
  groups = heads // k.shape[1]
  q = q.reshape(rows, length, k.shape[1], groups, size)
  q = q.transpose(0, 2, 3, 1, 4).reshape(rows, k.shape[1], groups * length,
                                         size)
  scores = jnp.einsum('bkqd,bksd->bkqs', q, k,
                      preferred_element_type=jnp.float32) * size ** -0.5
  scores = scores.reshape(rows, k.shape[1], groups, length, -1)
  scores = jnp.where(visible[:, None, None], scores, _MASKED)
  weights = jax.nn.softmax(scores, -1).astype(v.dtype)
  weights = weights.reshape(rows, k.shape[1], groups * length, -1)
  seen = jnp.einsum('bkqs,bksd->bkqd', weights, v)
  seen = seen.reshape(rows, k.shape[1], groups, length, size)
  return seen.transpose(0, 3, 1, 2, 4).reshape(rows, length, heads, size)


def forward(
    params: Params,
    tokens: Int[Array, 'B T'],
    config: TransformerConfig,
    *,
    segment_ids: Int[Array, 'B T'] | None = None,
    positions: Int[Array, 'B T'] | None = None,
    remat: bool = False,
) -> Float[Array, 'B T D']:
  """Hidden states of whole rows; a token sees its segment's earlier tokens.

  Args:
    params: see the top of this file.
    tokens: right-padded; padding is later than everything, so it is unseen.
    config: the shape.
    segment_ids: equal for tokens of one document of a packed row.
    positions: restart in each document; default 0, 1, 2, ...
    remat: recompute each layer in the backward pass.

  Returns:
    The last layer's normalised output.
  """
  rows, length = tokens.shape
  if positions is None:
    positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
  visible = jnp.broadcast_to(
      jnp.tril(jnp.ones((length, length), bool)), (rows, length, length))
  if segment_ids is not None:
    visible &= segment_ids[:, :, None] == segment_ids[:, None, :]

  def attend(q, k, v):
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    return attention(q, k, v, visible), None

  def layer(x, layer_params):
    return Block(config).apply({'params': layer_params}, x, positions, attend)

  x = params['embed']['embedding'][tokens]
  body = jax.checkpoint(layer) if remat else layer
  x, _ = jax.lax.scan(body, x, params['layers'])
  return final_norm(params, x, config)


def final_norm(params: Params, x: Float[Array, '*B D'],
               config: TransformerConfig) -> Float[Array, '*B D']:
  """The norm between the last layer and the vocabulary."""
  return RMSNorm(config.rms_norm_eps).apply({'params': params['norm']}, x)


def logits(params: Params, hidden: Float[Array, '*B D']) -> Float[
    Array, '*B V']:
  """Unnormalised log-probabilities over the vocabulary, in float32."""
  kernel = (params['head']['kernel'] if 'head' in params
            else params['embed']['embedding'].T)
  return jnp.dot(hidden, kernel.astype(hidden.dtype),
                 preferred_element_type=jnp.float32)


def init(config: TransformerConfig, key: Array) -> Params:
  """Random float32 parameters: normal(0.02), norms 1, biases 0."""
  return nn.meta.unbox(_boxed(config, key))


def logical_axes(config: TransformerConfig) -> Params:
  """A tree like `init`'s whose leaves are tuples of logical axis names."""
  boxes = jax.eval_shape(lambda key: _boxed(config, key), jax.random.key(0))
  return jax.tree.map(lambda box: tuple(box.names), boxes,
                      is_leaf=lambda x: isinstance(x, nn.Partitioned))


def _boxed(config: TransformerConfig, key: Array) -> Params:
  """`init` with every leaf in a box that names its logical axes."""
  key_embed, key_layers, key_head = jax.random.split(key, 3)
  x = jnp.zeros((1, 1, config.hidden_size))
  positions = jnp.zeros((1, 1), jnp.int32)
  attend = lambda q, k, v: (q, None)

  def layer(key):
    return Block(config).init(key, x, positions, attend)['params']

  normal = nn.initializers.normal(0.02)
  size, width = config.vocab_size, config.hidden_size
  box = lambda names, value: nn.LogicallyPartitioned(value, names)
  params = {
      'embed': {'embedding': box(('vocab', 'embed'),
                                 normal(key_embed, (size, width)))},
      'layers': jax.tree.map(
          lambda b: box(('layers', *b.names), b.value),
          jax.vmap(layer)(jax.random.split(
              key_layers, config.num_hidden_layers)),
          is_leaf=lambda b: isinstance(b, nn.Partitioned)),
      'norm': {'scale': box(('embed',), jnp.ones(width))},
  }
  if not config.tie_word_embeddings:
    params['head'] = {'kernel': box(('embed', 'vocab'),
                                    normal(key_head, (width, size)))}
  return params
