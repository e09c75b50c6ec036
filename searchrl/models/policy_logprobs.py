# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Log-probs and entropies of a decoder's tokens, for the learner.

The logits of a token cost as much as several layers of a small model. Most
tokens of a search agent's trajectory are passages, which are not in the loss.
So the learner names the tokens that it reads, and no others get logits.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from searchrl.models import transformer
from searchrl.models.experts import Load
from searchrl.models.transformer import Params, TransformerConfig


def token_logprobs(params: Params, tokens: Int[Array, 'B T'],
                   config: TransformerConfig, **options: Any
                  ) -> tuple[Float[Array, 'B T'], Float[Array, 'B T']]:
  """Returns the log-prob of each token, and the entropy of its distribution.

  Both are float32, in nats, [B, T]. Entry t is the log-prob of tokens[:, t]
  given the tokens before, and the entropy of the distribution from which it is
  drawn. The first entry of a row is 0. The options are those of
  `token_outputs`.
  """
  return token_outputs(params, tokens, config, **options)[:2]


def token_outputs(
    params: Params,
    tokens: Int[Array, 'B T'],
    config: TransformerConfig,
    *,
    temperature: float = 1.0,
    positions: Int[Array, 'B T'] | None = None,
    read: Bool[Array, 'B T'] | None = None,
    chunk: int = 128,
    **options: Any,
) -> tuple[Float[Array, 'B T'], Float[Array, 'B T'], Load | None]:
  """Returns log pi(tokens[:, t] | tokens[:, :t]) and the entropy at each t.

  The third result says how much each expert was used; see `experts.Load`. It is
  None if there are no experts.

  The shift by one position happens here and nowhere else: entry t belongs to
  tokens[:, t]. The first entry of a row is 0. In a packed row, the first entry
  of each document is 0. If `read` is given, the entries at which it is False
  are also 0, and their logits are not computed.

  Log-probs and entropies are float32 and in nats. Logits are divided by the
  temperature, as in the sampler. Logits are computed for `chunk` tokens per row
  at a time, so that an array [B T V] never exists. The other arguments are
  those of `forward_with_load`.
  """
  hidden, load = transformer.forward_with_load(
      params, tokens, config, positions=positions, **options)
  targets = jnp.roll(tokens, -1, axis=1)
  name = 'head' if 'head' in params else 'embed'
  vocabulary = {name: params[name]}
  score = functools.partial(_score, config, temperature)
  chunk = min(chunk, tokens.shape[1])
  if read is None:
    scored = jax.lax.map(
        jax.checkpoint(lambda chunk: score(vocabulary, *chunk)),
        (_split(hidden, chunk), _split(targets, chunk)))
    logprobs, entropy = (_join(x, tokens.shape[1]) for x in scored)
  else:
    ahead = jnp.roll(jnp.asarray(read), -1, axis=1).at[:, -1].set(False)
    logprobs, entropy = _score_some(
        score, vocabulary, hidden, targets, ahead, chunk)

  def shift(x):
    x = jnp.pad(x[:, :-1], ((0, 0), (1, 0)))
    return x if positions is None else jnp.where(positions > 0, x, 0)

  return shift(logprobs), shift(entropy), load


def _score(config, temperature, vocabulary: Params,
           states: Float[Array, 'B c D'], targets: Int[Array, 'B c']
           ) -> tuple[Float[Array, 'B c'], Float[Array, 'B c']]:
  """Returns the log-prob of each target token, and the entropy, in nats.

  `states` has the hidden state before each target, of width D. The entropy is
  that of the distribution over the next token.
  """
  scores = transformer.logits(vocabulary, states, config.unused_ids,
                              config.matmul_dtype) / temperature
  logprobs = jax.nn.log_softmax(scores)
  entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, -1)
  # A comparison, not a gather, because it shards over the vocabulary.
  hit = targets[..., None] == jnp.arange(scores.shape[-1])
  return jnp.sum(jnp.where(hit, logprobs, 0.0), -1), entropy


def _score_some(score, vocabulary: Params, hidden: Float[Array, 'B T D'],
                targets: Int[Array, 'B T'], wanted: Bool[Array, 'B T'],
                chunk: int) -> list[Float[Array, 'B T']]:
  """Returns the results of `score` where `wanted` is True, and 0 elsewhere.

  The wanted positions of each row are moved to its front, and moved back.
  """
  first = jnp.argsort(~wanted, axis=1, stable=True)
  most = jnp.max(jnp.sum(wanted, 1))
  scored = _map_first(
      score, vocabulary, _split(_take(hidden, first), chunk),
      _split(_take(targets, first), chunk), (most + chunk - 1) // chunk)
  back = jnp.argsort(first, axis=1)
  return [jnp.where(wanted, _take(_join(x, wanted.shape[1]), back), 0)
          for x in scored]


def _split(x: Array, chunk: int) -> Array:
  """Returns an array [B T ...] as C chunks of c positions, [C B c ...].

  The last chunk is padded with 0. c is `chunk`.
  """
  rows, length = x.shape[:2]
  count = -(-length // chunk)
  x = jnp.pad(x, ((0, 0), (0, count * chunk - length),
                  *[(0, 0)] * (x.ndim - 2)))
  return x.reshape(rows, count, chunk, *x.shape[2:]).swapaxes(0, 1)


def _join(x: Float[Array, 'C B c'], length: int) -> Float[Array, 'B T']:
  """Returns chunks as rows of `length` positions: the inverse of `_split`."""
  return x.swapaxes(0, 1).reshape(x.shape[1], -1)[:, :length]


@jax.vmap
def _take(x: Array, index: Int[Array, 'T']) -> Array:
  """Returns the entries of each row in the order of its index."""
  return x.at[index].get(unique_indices=True, mode='promise_in_bounds')


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _map_first(score: Callable[..., tuple[Array, Array]], vocabulary: Params,
               states: Float[Array, 'C B c D'], targets: Int[Array, 'C B c'],
               count: Int[Array, '']
               ) -> tuple[Float[Array, 'C B c'], Float[Array, 'C B c']]:
  """Returns the results of `score` for the first `count` chunks, and 0 after.

  The gradient computes the logits of a chunk again.
  """
  def put(n, scored):
    return jax.tree.map(lambda all_, x: all_.at[n].set(x), scored,
                        score(vocabulary, states[n], targets[n]))

  zeros = jnp.zeros(targets.shape, jnp.float32)
  return jax.lax.fori_loop(0, count, put, (zeros, zeros))


def _forward(score, *inputs):
  return _map_first(score, *inputs), inputs


def _backward(score, inputs, gradients):
  vocabulary, states, targets, count = inputs

  def add(n, carry):
    of_vocabulary, of_states = carry
    _, pull = jax.vjp(
        lambda *inputs: score(*inputs, targets[n]), vocabulary, states[n])
    more, of_chunk = pull(jax.tree.map(lambda x: x[n], gradients))
    return (jax.tree.map(jnp.add, of_vocabulary, more),
            of_states.at[n].set(of_chunk))

  return *jax.lax.fori_loop(0, count, add, jax.tree.map(
      jnp.zeros_like, (vocabulary, states))), None, None


_map_first.defvjp(_forward, _backward)
