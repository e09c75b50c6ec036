# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A cross-encoder's folder in, a function out: pairs of texts to scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
import pathlib

import jax
from jaxtyping import Float
import numpy as np
import tokenizers

from searchrl.encoders import embedder
from searchrl.models import crossencoder
from searchrl.models import encoder
from searchrl.models import weights

_WIDTHS = (32, 64, 128, 192, 256, 384, 512)  # tokens a row


def load(path: str, *, max_length: int = 512, batch: int = 32
        ) -> Callable[[Sequence[tuple[str, str]]], Float[np.ndarray, 'N']]:
  """The judge of pairs in a folder, or of a hub id.

  Args:
    path: holds config.json, tokenizer.json and safetensors of a BERT with one
      label.
    max_length: tokens of a pair; the longer text is cut.
    batch: pairs a device call; rows of few widths, so that few are compiled.

  Raises:
    FileNotFoundError, ValueError: the folder or an option cannot be used.
  """
  folder = pathlib.Path(weights.locate(path))
  shape = encoder.read_config(str(folder))
  if not 8 <= max_length <= shape.max_position_embeddings or batch < 1:
    raise ValueError(
        'search.options.max_length must lie in [8, '
        f'{shape.max_position_embeddings}], the positions that the model '
        f'knows, and batch be at least 1, but they are {max_length} and '
        f'{batch}.')
  tokenizer = embedder.load_tokenizer(folder, max_length)
  params = crossencoder.load(str(folder), shape)
  judge = jax.jit(functools.partial(crossencoder.score, config=shape))

  def score(pairs: Sequence[tuple[str, str]]) -> Float[np.ndarray, 'N']:
    coded = tokenizer.encode_batch([tuple(map(_plain, p)) for p in pairs])
    order = sorted(range(len(coded)), key=lambda i: -len(coded[i].ids))
    result = np.zeros(len(coded), np.float32)
    for start in range(0, len(order), batch):
      rows = order[start:start + batch]
      result[rows] = judge(params, *_padded(
          [coded[i] for i in rows], batch, max_length))[:len(rows)]
    return result

  return score


def _padded(coded: Sequence[tokenizers.Encoding], size: int, most: int):
  """Tokens, mask and segments of a batch of one of few shapes."""
  longest = max(len(c.ids) for c in coded)
  width = min(next((w for w in _WIDTHS if w >= longest), longest), most)
  tokens, mask, segments = np.zeros((3, size, width), np.int32)
  for row, c in enumerate(coded):
    n = len(c.ids)
    tokens[row, :n], mask[row, :n], segments[row, :n] = c.ids, 1, c.type_ids
  return tokens, mask, segments


def _plain(text: str) -> str:
  """Half a surrogate pair is no character, and the tokenizer refuses it."""
  return text.encode(errors='replace').decode()
