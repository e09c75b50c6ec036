# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""tokenizer: bytes of ids, and outside text that stays plain text."""

import pathlib

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from searchrl.agent import dialogue as dialogues
from searchrl.agent import tokenizer as tokenizers

TINY_BASE = pathlib.Path(tokenizers.__file__).parents[1] / 'assets/tiny_base'
SPECIAL = '<|endoftext|>'
quick = hypothesis.settings(max_examples=100, deadline=None, derandomize=True)


@pytest.fixture(scope='module')
def tokenizer():
  if not TINY_BASE.is_dir():
    pytest.skip('no tiny base model yet: see configs/tiny_base.py')
  return tokenizers.load(str(TINY_BASE))


def test_ids_lie_below_the_vocabulary_size(tokenizer):
  assert len(tokenizer.token_bytes) == tokenizer.vocab_size
  assert all(id_ < tokenizer.vocab_size for id_ in (
      *tokenizer.eos_ids, tokenizer.pad_id))
  assert tokenizer.encode(SPECIAL) == tokenizer.eos_ids


def test_bytes_of_ids_are_the_bytes_of_their_text(tokenizer):
  rng = np.random.default_rng(0)
  for length in rng.integers(1, 12, 500):
    ids = rng.integers(0, tokenizer.vocab_size, length).tolist()
    joined = b''.join(tokenizer.token_bytes[i] for i in ids)
    assert tokenizer.decode(ids) == joined.decode('utf-8', errors='replace')


def test_every_single_token_has_the_bytes_it_decodes_to(tokenizer):
  for id_, piece in enumerate(tokenizer.token_bytes):
    if id_ in tokenizer.eos_ids:
      assert piece == b''
    else:
      assert piece and tokenizer.decode([id_]) == piece.decode(errors='replace')


@quick
@hypothesis.given(st.text(
    st.characters(exclude_categories=['Cs']), max_size=30))
def test_bytes_of_an_encoding_are_the_text(tokenizer, text):
  text = dialogues.neutralise(text)  # in NFC, as the tokenizer makes it
  ids = tokenizer.encode_data(text)
  assert b''.join(tokenizer.token_bytes[i] for i in ids) == text.encode()


@quick
@hypothesis.given(st.lists(st.one_of(st.text(
    st.characters(exclude_categories=['Cs']), max_size=4), st.sampled_from(
        [SPECIAL, '<|', '|>', 'endoftext', '</search>', '\n'])), max_size=8))
def test_outside_text_never_gives_a_special_id(tokenizer, parts):
  ids = tokenizer.encode_data(''.join(parts))
  assert not set(ids) & {*tokenizer.eos_ids, tokenizer.pad_id}


def test_a_special_token_in_outside_text_is_plain_characters(tokenizer):
  ids = tokenizer.encode_data(f'a{SPECIAL}b')
  assert len(ids) > 3
  assert tokenizer.decode(ids) == f'a{SPECIAL}b'
  assert tokenizer.decode(tokenizer.encode(f'a{SPECIAL}b')) == 'ab'


def test_a_fast_tokenizer_that_cannot_split_is_refused():
  class Fast:
    eos_token_id, pad_token_id, all_special_ids = 2, None, [2]

    def __len__(self):
      return 3

    def encode(self, text, **_):
      return [0, 2, 1]

  with pytest.raises(ValueError, match=r"encoding 'a<s>b' gave ids \[2\]"):
    tokenizers.Tokenizer(Fast()).encode_data('a<s>b')


def test_sentence_pieces_are_read_as_text():
  class Fast:
    eos_token_id, pad_token_id, all_special_ids = 0, 0, [0]
    added_tokens_decoder = {}

    def __len__(self):
      return 4

    def convert_ids_to_tokens(self, ids):
      return [['</s>', '▁the', 'Ġa', None][i] for i in ids]

  assert tokenizers.Tokenizer(Fast()).token_bytes == (b'', b' the', b' a', b'')


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match=f'{tmp_path} has none'):
    tokenizers.load(str(tmp_path))
