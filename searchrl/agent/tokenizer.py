# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face folder in, a Tokenizer out: text to ids, ids to text, ids to bytes.

What a policy sampled is only ever decoded, to be read; it is never encoded
again. What the environment inserts is encoded once, as plain data.
"""

from collections.abc import Sequence
import functools
import os
import pathlib

os.environ.setdefault('TRANSFORMERS_VERBOSITY', 'error')


class Tokenizer:
  """The few things that the library asks of a tokenizer.

  Attributes:
    vocab_size: ids lie in [0, vocab_size).
    eos_ids: any of them ends a turn.
    pad_id: fills arrays; carries no meaning.
  """

  def __init__(self, fast):
    self._fast = fast
    self.vocab_size = len(fast)
    self.eos_ids = (fast.eos_token_id,)
    self.pad_id = (fast.eos_token_id if fast.pad_token_id is None
                   else fast.pad_token_id)

  def encode(self, text: str) -> tuple[int, ...]:
    """Ids of text that we wrote ourselves; special tokens are honoured."""
    return tuple(self._fast.encode(text, add_special_tokens=False))

  def encode_data(self, text: str) -> tuple[int, ...]:
    """Ids of text from outside; '<|im_end|>' in it is seven characters.

    Raises:
      ValueError: a special id came out all the same.
    """
    ids = tuple(self._fast.encode(
        text, add_special_tokens=False, split_special_tokens=True))
    special = self._special_ids.intersection(ids)
    if special:
      raise ValueError(
          f'text from outside may hold no special token, but encoding '
          f'{text[:60]!r} gave ids {sorted(special)}. This tokenizer cannot '
          'split special tokens; use its fast version.')
    return ids

  def decode(self, ids: Sequence[int]) -> str:
    """Text of ids, special tokens left out."""
    return self._fast.decode(
        list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

  @functools.cached_property
  def _special_ids(self) -> frozenset[int]:
    return frozenset(self._fast.all_special_ids)

  @functools.cached_property
  def token_bytes(self) -> tuple[bytes, ...]:
    """UTF-8 bytes that each id adds to a text; empty for special tokens.

    The stop automaton is compiled from these, so that a stop string is found
    however it was tokenised.
    """
    unicode_to_byte = {c: b for b, c in _byte_characters().items()}
    added = self._fast.added_tokens_decoder
    pieces = self._fast.convert_ids_to_tokens(list(range(self.vocab_size)))
    result = []
    for id_, piece in enumerate(pieces):
      if id_ in self._special_ids:
        result.append(b'')
      elif id_ in added:
        result.append(added[id_].content.encode())
      elif piece is not None and all(c in unicode_to_byte for c in piece):
        result.append(bytes(unicode_to_byte[c] for c in piece))
      else:
        result.append((piece or '').replace('▁', ' ').encode())
    return tuple(result)


def _byte_characters() -> dict[int, str]:
  """The printable stand-in that byte-level BPE gives to each byte (GPT-2)."""
  printable = [*range(ord('!'), ord('~') + 1), *range(0xA1, 0xAD),
               *range(0xAE, 0x100)]
  table = {b: chr(b) for b in printable}
  spare = (b for b in range(256) if b not in table)
  return table | {b: chr(256 + n) for n, b in enumerate(spare)}


def load(folder: str) -> Tokenizer:
  """Reads the tokenizer of a model folder or hub id.

  Raises:
    FileNotFoundError: a local folder without tokenizer.json.
  """
  path = pathlib.Path(folder)
  if path.exists() and not (path / 'tokenizer.json').is_file():
    raise FileNotFoundError(
        f'model.path must hold a tokenizer.json, but {path} has none. Save the '
        "model's tokenizer beside its weights.")
  from transformers import AutoTokenizer  # slow to import
  return Tokenizer(AutoTokenizer.from_pretrained(
      folder, use_fast=True, trust_remote_code=False))
