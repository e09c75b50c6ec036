# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A cross-encoder: BERT that scores a pair of texts in one row.

Its parameters are an encoder's and those of a head with two layers:

  encoder/...                       see `encoder`
  pooler/{kernel [D D], bias [D]}
  classifier/{kernel [D 1], bias [1]}

Source: Nogueira and Cho 2019, Passage Re-ranking with BERT, arXiv:1901.04085.
"""

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from searchrl.models import encoder
from searchrl.models import tensors
from searchrl.models.encoder import EncoderConfig
from searchrl.models.transformer import Params


def score(
    params: Params,
    tokens: Int[Array, 'B T'],
    mask: Bool[Array, 'B T'],
    segments: Int[Array, 'B T'],
    config: EncoderConfig,
    *,
    dtype: Any = jnp.float32,
) -> Float[Array, 'B']:
  """Returns a score of how well each pair's second text answers the first.

    score = w . tanh(W hidden_0 + c) + b,  hidden_0: the output at [CLS]

  Args:
    params: Parameters as described at the top of this file.
    tokens: Token ids of rows [CLS] first [SEP] second [SEP], right-padded.
    mask: True, or 1, except for padding.
    segments: 0 for the first text of a pair, 1 for the second.
    config: Shape of the encoder.
    dtype: Data type of activations, and of parameters in products.

  Returns:
    The scores, float32 and unbounded. Higher is better.
  """
  hidden = encoder.forward(params['encoder'], tokens, mask, config,
                           segments=segments, dtype=dtype)
  pooled = jnp.tanh(_dense(params['pooler'], hidden[:, 0].astype(jnp.float32)))
  return _dense(params['classifier'], pooled)[:, 0]


def _dense(params: Params, x: Float[Array, 'B D']) -> Float[Array, 'B E']:
  return x @ params['kernel'].astype(x.dtype) + params['bias'].astype(x.dtype)


def init(config: EncoderConfig, key: Array) -> Params:
  """Returns random float32 parameters: normal(0.02), biases 0."""
  keys, width = jax.random.split(key, 3), config.hidden_size
  layer = lambda key, size: {
      'kernel': 0.02 * jax.random.normal(key, (width, size)),
      'bias': jnp.zeros(size)}
  return {'encoder': encoder.init(config, keys[0]),
          'pooler': layer(keys[1], width), 'classifier': layer(keys[2], 1)}


def logical_axes(config: EncoderConfig) -> Params:
  """Returns the axis names of each parameter, as a tree like that of `init`."""
  return {'encoder': encoder.logical_axes(config),
          'pooler': {'kernel': ('embed', None), 'bias': (None,)},
          'classifier': {'kernel': ('embed', None), 'bias': (None,)}}


def load(folder: str | pathlib.Path, config: EncoderConfig, **options: Any
        ) -> Params:
  """Loads the params of a cross-encoder.

  The files are those of a BertForSequenceClassification of transformers.

  Args:
    folder: Folder with safetensors.
    config: Shape of the encoder, from `encoder.read_config`.
    **options: Options of `weights.load`: sharding_of and dtype.

  Raises:
    FileNotFoundError: The folder has no safetensors.
    ValueError: A file is damaged; a tensor is missing, unexpected or has a
      wrong shape; or the model has more than one label.
  """
  leaves = jax.eval_shape(functools.partial(init, config), jax.random.key(0))
  names = {**encoder.NAMES, 'encoder': '', 'pooler': 'pooler.dense',
           'classifier': 'classifier'}
  return tensors.load(
      tensors.Folder(pathlib.Path(folder), encoder.modern), names, leaves,
      logical_axes(config), **options)
