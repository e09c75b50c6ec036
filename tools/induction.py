# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""An induction circuit that is planted into random parameters.

A small model trained from random weights needs millions of tokens before it
copies from its context, and an agent without knowledge depends on copying. The
tiny base model therefore starts with the known two-layer circuit for copying:

- Layer 0 attends to the previous token, through the biases of queries and keys,
  and writes that token to the residual stream.
- Layer 1 attends to tokens whose previous token is the present one, and copies
  them.
- Layer 2, if there is one, copies what layer 0 wrote at the tokens that it
  attends to, whichever they are. A name of two tokens may be recognised by its
  second token, but the model must say its first token first.

Nothing is frozen.

Source of the circuit: Olsson et al. 2022, arXiv:2209.11895. Source of the idea
to start a transformer from structured weights: Trockman and Kolter 2023,
arXiv:2305.09828. The construction is ours.
"""

import jax
import jax.numpy as jnp
import numpy as np

from searchrl.models.transformer import Params, TransformerConfig


def plant(
    params: Params,
    config: TransformerConfig,
    *,
    seed: int,
    embed_std: float = 0.088,
    sharpness: float = 8.0,
    match: float = 1.6,
    note: float = 0.15,
    copy: float = 0.5,
) -> Params:
  """Adds the circuit to `transformer.init`'s params.

  Args:
    params: Random params of at least two layers.
    config: Shape of the params, in which
      2 * num_key_value_heads * head_dim <= hidden_size.
    seed: Seed of the random subspaces.
    embed_std: Standard deviation of the embedding.
    sharpness: Strength of layer 0's preference for the previous token.
    match: Gain of layer 1's queries and keys.
    note: Strength of what layer 0 writes.
    copy: Strength of what layers 1 and 2 write.

  Returns:
    New params.

  Raises:
    ValueError: The shape has no room for the circuit.
  """
  c = config
  size, kv_heads = c.head_dim, c.num_key_value_heads
  if (2 * kv_heads * size > c.hidden_size or c.num_hidden_layers < 2 or
      not c.attention_bias):
    raise ValueError(
        'an induction circuit needs two layers, attention biases and '
        f'hidden_size >= 2 * num_key_value_heads * head_dim = '
        f'{2 * kv_heads * size}, but the model has {c.num_hidden_layers} '
        f'layers and hidden_size {c.hidden_size}.')
  params = jax.tree.map(np.array, params)
  layers = params['layers']
  params['embed']['embedding'] *= embed_std / 0.02
  for name in ('gate', 'up', 'down'):
    kernel = layers[name]['kernel']
    kernel *= 0.5 * kernel.shape[1] ** -0.5 / 0.02
  basis = np.linalg.qr(np.random.default_rng(seed).normal(
      size=(c.hidden_size, c.hidden_size)))[0]
  read = np.split(basis, c.hidden_size // size, axis=1)  # each [D head_dim]
  query_bias, key_bias = _previous_token(size, c.rope_theta, sharpness)
  group = c.num_attention_heads // kv_heads
  for j in range(kv_heads):
    seen, noted = read[j], read[kv_heads + j]
    key_columns = slice(j * size, (j + 1) * size)
    layers['k']['bias'][0, key_columns] = key_bias
    layers['k']['kernel'][1, :, key_columns] += match * noted
    layers['v']['kernel'][:2, :, key_columns] += seen
    layers['v']['kernel'][2:3, :, key_columns] += noted
    for head in range(j * group, (j + 1) * group):
      columns = slice(head * size, (head + 1) * size)
      layers['q']['bias'][0, columns] = query_bias
      layers['q']['kernel'][1, :, columns] += match * seen
      layers['o']['kernel'][0, columns] += note / group * noted.T
      layers['o']['kernel'][1:3, columns] += copy / group * seen.T
  return jax.tree.map(jnp.asarray, params)


def _previous_token(size: int, theta: float, sharpness: float):
  """Returns query and key biases whose rotary score peaks one token back.

  score(distance) ~ sharpness * sum_i cos(w_i (distance - 1)), summed over the
  four fastest frequencies w_i.
  """
  half, fastest = size // 2, min(4, size // 2)
  frequency = theta ** (-np.arange(fastest) / half)
  scale = np.sqrt(sharpness * np.sqrt(size))
  query, key = np.zeros(size), np.zeros(size)
  query[:fastest] = scale
  key[:fastest] = scale * np.cos(frequency)
  key[half:half + fastest] = scale * np.sin(frequency)
  return query, key
