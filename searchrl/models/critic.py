# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The critic: a decoder with a scalar head, from token ids to values.

Its parameters are the decoder's, with a different head:

  embed/...   layers/...   norm/...   value/kernel [D 1]   value/bias [1]
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from searchrl.models import attention
from searchrl.models import transformer
from searchrl.models.transformer import Params, TransformerConfig


def init(params: Params) -> Params:
  """Returns a critic on a policy's backbone. Untrained, it outputs 0.

  Args:
    params: Parameters of a decoder. The critic shares their arrays.
  """
  scale = params['norm']['scale']
  backbone = {k: v for k, v in params.items() if k != 'head'}
  return {**backbone, 'value': {
      'kernel': jnp.zeros((len(scale), 1), scale.dtype),
      'bias': jnp.zeros(1, scale.dtype)}}


def logical_axes(config: TransformerConfig) -> Params:
  """Returns the logical axes of every leaf, as a tree like that of `init`."""
  axes = transformer.logical_axes(config)
  axes.pop('head', None)
  return {**axes, 'value': {'kernel': ('embed', None), 'bias': (None,)}}


def token_values(
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
) -> Float[Array, 'B T']:
  """Returns the value before each token: expected rewards, given tokens[:, :t].

  Entry t belongs to tokens[:, t], as in log-probs. The first entry of a row is
  0. In a packed row, the first entry of each document is 0.

  Args:
    params: Parameters as described at the top of this file.
    tokens: Right-padded rows of token ids.
    config: Shape of the backbone.
    segment_ids: Document of each token in packed rows.
    positions: Position of each token; restarts in each document of a packed
      row.
    remat: Choice of what the backward pass recomputes; see
      `transformer.forward`.
    dtype: Data type of activations, and of parameters in products.
    attend: Attention function, as in `transformer.forward`.
    used: Function of a layer's parameters, as in `transformer.forward`.

  Returns:
    Float32 values, in the unit of the rewards.
  """
  hidden = transformer.forward(
      params, tokens, config, segment_ids=segment_ids, positions=positions,
      remat=remat, dtype=dtype, attend=attend, used=used)[:, :-1]
  values = jnp.dot(hidden, params['value']['kernel'].astype(hidden.dtype),
                   preferred_element_type=jnp.float32)[..., 0]
  values = values + params['value']['bias'].astype(jnp.float32)
  values = jnp.pad(values, ((0, 0), (1, 0)))
  return values if positions is None else jnp.where(positions > 0, values, 0)
