# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Cross-encoder from a BERT folder: a function from text pairs to scores."""

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

_WIDTHS = (32, 64, 128, 192, 256, 384, 512)  # tokens per row


def load(path: str, *, max_length: int = 512, batch: int = 32
        ) -> Callable[[Sequence[tuple[str, str]]], Float[np.ndarray, 'N']]:
  """Loads a cross-encoder from a directory or a hub id.

  Args:
    path: Directory or hub id with config.json, tokenizer.json and safetensors
      of a BERT with one label.
    max_length: Largest number of tokens of a pair. The longer text is
      truncated.
    batch: Number of pairs per device call. Rows have few widths, so that few
      programs are compiled.

  Returns:
    A function from (query, passage) pairs to one float32 score each. A score is
    a logit: the higher it is, the better the passage answers the query.

  Raises:
    FileNotFoundError, ValueError: The directory or an option cannot be used.
  """
  folder = pathlib.Path(weights.locate(path, 'search.options.model'))
  shape = encoder.read_config(str(folder))
  if not 8 <= max_length <= shape.max_position_embeddings or batch < 1:
    raise ValueError(
        'search.options.max_length must lie in [8, '
        f'{shape.max_position_embeddings}], the positions that the model '
        f'knows, and batch be at least 1, but they are {max_length} and '
        f'{batch}.')
  tokenizer = embedder.load_tokenizer(folder, max_length)
  embedder.check_ids(tokenizer, shape, folder, texts=2)
  params = crossencoder.load(str(folder), shape)
  run = jax.jit(functools.partial(crossencoder.score, config=shape))

  def score(pairs: Sequence[tuple[str, str]]) -> Float[np.ndarray, 'N']:
    # The tokenizer rejects half of a surrogate pair.
    encodings = tokenizer.encode_batch([
        tuple(text.encode(errors='replace').decode() for text in pair)
        for pair in pairs])
    order = sorted(range(len(encodings)), key=lambda i: -len(encodings[i].ids))
    result = np.zeros(len(encodings), np.float32)
    for start in range(0, len(order), batch):
      rows = order[start:start + batch]
      result[rows] = run(params, *_padded(
          [encodings[i] for i in rows], batch, max_length))[:len(rows)]
    return result

  return score


def _padded(encodings: Sequence[tokenizers.Encoding], rows: int, most: int
           ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns tokens, mask and segments of a batch, [rows T]. Few T occur."""
  longest = max(len(encoding.ids) for encoding in encodings)
  width = min(next((w for w in _WIDTHS if w >= longest), longest), most)
  tokens, mask, segments = np.zeros((3, rows, width), np.int32)
  for row, encoding in enumerate(encodings):
    n = len(encoding.ids)
    tokens[row, :n], mask[row, :n] = encoding.ids, 1
    segments[row, :n] = encoding.type_ids
  return tokens, mask, segments
