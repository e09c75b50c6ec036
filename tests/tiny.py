# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A decoder of 19,000 parameters and an awkward tokenizer, for all tests."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from searchrl.models import transformer
from searchrl.trajectory import Question

CONFIG = transformer.TransformerConfig(
    vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, intermediate_size=48)


def params(config: transformer.TransformerConfig = CONFIG,
           seed: int = 0) -> transformer.Params:
  """Random weights, ten times the usual: choices are far from uniform."""
  rng = np.random.default_rng(seed)
  shapes = jax.eval_shape(
      lambda key: transformer.init(config, key), jax.random.key(0))

  def draw(path, leaf):
    x = rng.normal(size=leaf.shape)
    centre, spread = {'bias': (0, 1.0), 'scale': (1, 0.3)}.get(
        path[-1].key, (0, 0.2))
    return jnp.asarray(centre + spread * x, leaf.dtype)

  return jax.tree_util.tree_map_with_path(draw, shapes)


def question(uid: str = 'q', text: str = 'where?', **fields) -> Question:
  return Question(uid, text, fields.pop('answers', ('here',)), **fields)


# Tags can be written in many ways, and decoding then encoding is no identity.
_PIECES = [
    '</', '<', '/', '>', '>\n', 'search', 'answer', 'ear', 'ch', 'ch>', 'sea',
    'se', 'arch', 'ans', 'wer', 'er>', '<search', '</search', '<answer>', 'h>',
    'h>\n', 'th', 'the', ' the', 'in', 'on', 'an', ' a', '\n', '\n\n', ' ',
    '  ',
    b'\xc3', b'\xa9', b'\xf0\x9f', b'\x98\x80', 'é', '?', '.', ':', '"', '(',
    ')', ',', '|', "'", '-', *'0123456789', *'abcdefghijklmnopqrstuvwxyz',
    *'DTN', '</information>', 'information',
]


class Tokenizer:
  """Greedy pieces of up to 14 characters; some are half a character."""

  def __init__(self):
    pieces = [p if isinstance(p, bytes) else p.encode() for p in _PIECES]
    filler = [b'%c%c' % (a, b) for a in b'xyz' for b in b'xyz']
    pieces += filler[:95 - len(pieces)]
    self.token_bytes = (*pieces, b'')  # the last is special: the end of a turn
    self.vocab_size = len(self.token_bytes)
    self.eos_ids = (self.vocab_size - 1,)
    self.pad_id = self.vocab_size - 1
    self.leading_space = ''
    self.has_chat_template = False
    self._ids = {piece: id_ for id_, piece in enumerate(pieces)}

  def encode(self, text: str) -> tuple[int, ...]:
    data, ids = text.encode(errors='replace'), []
    while data:
      length = next((n for n in range(14, 0, -1) if data[:n] in self._ids), 0)
      ids.append(self._ids[data[:length] or b'?'])
      data = data[max(length, 1):]
    return tuple(ids)

  encode_data = encode_first = encode
  start_ids, special_ids = (), frozenset()

  def with_start(self, ids):
    return ids

  def encode_passages(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
    return [*map(self.encode, texts)]

  def decode(self, ids: Sequence[int]) -> str:
    return b''.join(self.token_bytes[i] for i in ids).decode(errors='replace')
