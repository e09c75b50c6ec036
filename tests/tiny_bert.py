# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The golden BERT of 96 words, with a tokenizer for it, as a folder."""

import pathlib
import shutil

import tokenizers

GOLDEN = pathlib.Path(__file__).parent / 'golden' / 'bert'
_WORDS = ('[PAD]', '[UNK]', '[CLS]', '[SEP]', 'query', 'passage', ':',
          *'abcdefghijklmnopqrstuvwxyz0123456789',
          *(f'##{letter}' for letter in 'abcdefghijklmnopqrstuvwxyz0123456789'))


def make(folder: pathlib.Path) -> pathlib.Path:
  """Copies the weights, and writes tokenizer.json beside them."""
  shutil.copytree(GOLDEN, folder)
  vocabulary = {word: i for i, word in enumerate(_WORDS)}
  assert len(vocabulary) <= 96
  found = tokenizers.Tokenizer(
      tokenizers.models.WordPiece(vocabulary, unk_token='[UNK]'))
  found.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
  found.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
  found.post_processor = tokenizers.processors.BertProcessing(
      ('[SEP]', 3), ('[CLS]', 2))
  found.save(str(folder / 'tokenizer.json'))
  return folder
