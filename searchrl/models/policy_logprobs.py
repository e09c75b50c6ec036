# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Log-probs and entropies of a decoder's tokens, for the learner."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from searchrl.models import transformer
from searchrl.models.experts import Load
from searchrl.models.transformer import Params, TransformerConfig


def token_logprobs(params: Params, tokens: Int[Array, 'B T'],
                   config: TransformerConfig, **options: Any
                  ) -> tuple[Float[Array, 'B T'], Float[Array, 'B T']]:
  """Returns the log-prob of each token and the entropy of each position.

  They are those of `token_outputs`, whose other outputs are left out.
  """
  return token_outputs(params, tokens, config, **options)[:2]


def token_outputs(
    params: Params,
    tokens: Int[Array, 'B T'],
    config: TransformerConfig,
    *,
    temperature: float = 1.0,
    positions: Int[Array, 'B T'] | None = None,
    chunk: int = 128,
    **options: Any,
) -> tuple[Float[Array, 'B T'], Float[Array, 'B T'], Load | None]:
  """Returns log pi(tokens[:, t] | tokens[:, :t]) and the entropy at each t.

  The third result is the load of experts, of `transformer.forward_with_load`.

  The shift by one happens here and nowhere else: entry t belongs to
  tokens[:, t]. The first entry of a row is 0. In a packed row, the first entry
  of each document is 0.

  Log-probs and entropies are float32 and in nats. Logits are divided by the
  temperature, as in the sampler. They are computed for `chunk` tokens per row
  at a time, so that an array [B T V] never exists. The other arguments are
  those of `forward_with_load`.
  """
  hidden, load = transformer.forward_with_load(
      params, tokens, config, positions=positions, **options)
  rows, length, width = hidden.shape
  chunk = min(chunk, length)
  padded = -(-length // chunk) * chunk

  @jax.checkpoint
  def chunk_logprobs(states_and_targets):
    states, targets = states_and_targets
    scores = transformer.logits(
        params, states, config.unused_ids) / temperature
    logprobs = jax.nn.log_softmax(scores)
    entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, -1)
    # A comparison, not a gather, because it shards over the vocabulary.
    hit = targets[..., None] == jnp.arange(scores.shape[-1])
    return jnp.sum(jnp.where(hit, logprobs, 0.0), -1), entropy

  def split(x):
    x = jnp.pad(x, ((0, 0), (0, padded - length), *[(0, 0)] * (x.ndim - 2)))
    return x.reshape(rows, padded // chunk, chunk, *x.shape[2:]).swapaxes(0, 1)

  logprobs, entropy = jax.lax.map(
      chunk_logprobs, (split(hidden), split(jnp.roll(tokens, -1, axis=1))))

  def join(x):
    x = x.swapaxes(0, 1).reshape(rows, padded)[:, :length - 1]
    x = jnp.pad(x, ((0, 0), (1, 0)))
    return x if positions is None else jnp.where(positions > 0, x, 0)

  return join(logprobs), join(entropy), load
