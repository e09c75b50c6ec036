# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The critic: a decoder with a scalar head, from token ids to values.

Its parameters are the decoder's, with a different head:

  embed/...   layers/...   norm/...   value/kernel [D 1]   value/bias [1]
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from searchrl.models import transformer
from searchrl.models.transformer import Params, TransformerConfig


def init(params: Params) -> Params:
  """Returns the parameters of a critic, made from those of a decoder.

  They share the decoder's arrays, except for the head. The new head is 0, so
  that at first all values are 0.
  """
  scale = params['norm']['scale']
  backbone = {k: v for k, v in params.items() if k != 'head'}
  return {**backbone, 'value': {
      'kernel': jnp.zeros((len(scale), 1), scale.dtype),
      'bias': jnp.zeros(1, scale.dtype)}}


def logical_axes(config: TransformerConfig) -> Params:
  """Returns the axis names of each parameter, as a tree like that of `init`."""
  axes = transformer.logical_axes(config)
  backbone = {k: v for k, v in axes.items() if k != 'head'}
  return {**backbone, 'value': {'kernel': ('embed', None), 'bias': (None,)}}


def token_values(
    params: Params,
    tokens: Int[Array, 'B T'],
    config: TransformerConfig,
    *,
    positions: Int[Array, 'B T'] | None = None,
    **options: Any,
) -> Float[Array, 'B T']:
  """Returns the value before each token, [B T], in the unit of the rewards.

  Entry t is the critic's estimate of the rewards given tokens[:, :t]. The first
  entry of a row is 0. In a packed row, the first entry of each document is 0.

  The values are float32. The arguments are those of
  `transformer.forward_with_load`, with parameters as described at the top of
  this file.
  """
  hidden = transformer.forward(
      params, tokens, config, positions=positions, **options)[:, :-1]
  values = jnp.dot(hidden, params['value']['kernel'].astype(hidden.dtype),
                   preferred_element_type=jnp.float32)[..., 0]
  values = values + params['value']['bias'].astype(jnp.float32)
  values = jnp.pad(values, ((0, 0), (1, 0)))
  return values if positions is None else jnp.where(positions > 0, values, 0)
