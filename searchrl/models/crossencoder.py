# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A cross-encoder: BERT that scores a pair of texts in one row.

Its parameters are those of an encoder and a head of two layers:

  encoder/...                       see `encoder`
  pooler/{kernel [D D], bias [D]}
  classifier/{kernel [D 1], bias [1]}

Source: Nogueira and Cho 2019, Passage Re-ranking with BERT, arXiv:1901.04085.
"""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from searchrl.models import encoder
from searchrl.models import tensors
from searchrl.models.encoder import EncoderConfig
from searchrl.models.tensors import ShardingOf, Source
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
  """How well the second text of each pair answers the first.

    score = w . tanh(W hidden_0 + c) + b

  Args:
    params: see the top of this file.
    tokens: [CLS] first [SEP] second [SEP], right-padded.
    mask: True, or 1, except for padding.
    segments: 0 for the first text, 1 for the second.
    config: the shape of the encoder.
    dtype: of activations.

  Returns:
    float32 scores, unbounded; higher is better.
  """
  hidden = encoder.forward(params['encoder'], tokens, mask, config,
                           segments=segments, dtype=dtype)
  pooled = jnp.tanh(_dense(params['pooler'], hidden[:, 0].astype(jnp.float32)))
  return _dense(params['classifier'], pooled)[:, 0]


def _dense(params: Params, x: Float[Array, 'B D']) -> Float[Array, 'B E']:
  return x @ params['kernel'].astype(x.dtype) + params['bias'].astype(x.dtype)


def init(config: EncoderConfig, key: Array) -> Params:
  """Random float32 parameters: normal(0.02), biases 0."""
  keys, width = jax.random.split(key, 3), config.hidden_size
  layer = lambda key, size: {
      'kernel': 0.02 * jax.random.normal(key, (width, size)),
      'bias': jnp.zeros(size)}
  return {'encoder': encoder.init(config, keys[0]),
          'pooler': layer(keys[1], width), 'classifier': layer(keys[2], 1)}


def logical_axes(config: EncoderConfig) -> Params:
  """A tree like `init`'s whose leaves are tuples of logical axis names."""
  return {'encoder': encoder.logical_axes(config),
          'pooler': {'kernel': ('embed', None), 'bias': (None,)},
          'classifier': {'kernel': ('embed', None), 'bias': (None,)}}


def load(
    folder: str,
    config: EncoderConfig,
    *,
    sharding_of: ShardingOf | None = None,
    dtype: Any = jnp.float32,
) -> Params:
  """Loads the folder of a BertForSequenceClassification of transformers.

  Args:
    folder: a local one; see `weights.locate`.
    config: of the same folder.
    sharding_of: logical axes of a leaf -> its sharding; see `weights.load`.
    dtype: of all params, whatever the files hold.

  Raises:
    FileNotFoundError: no safetensors.
    ValueError: a damaged file; or a missing, unexpected or misshapen tensor,
      as in a model with more than one label.
  """
  found = tensors.Folder(pathlib.Path(folder), _ours)
  leaves = jax.eval_shape(lambda key: init(config, key), jax.random.key(0))
  sources = {'encoder': encoder.sources(leaves['encoder'])} | {
      name: {'kernel': Source(f'{theirs}.weight', transposed=True),
             'bias': Source(f'{theirs}.bias')}
      for name, theirs in (('pooler', 'pooler.dense'),
                           ('classifier', 'classifier'))}
  found.check(tensors.shapes(sources, leaves))
  return tensors.load(found, sources, logical_axes(config),
                      sharding_of=sharding_of, dtype=dtype)


def _ours(name: str) -> str | None:
  name = name.removeprefix('bert.')
  return None if name == 'embeddings.position_ids' else encoder.modern(name)
