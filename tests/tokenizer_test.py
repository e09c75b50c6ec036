# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""tokenizer: bytes of ids, and outside text that stays plain text."""

import json
import os
import pathlib

import chats
import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
import tokenizers as raw_tokenizers
import transformers

from searchrl.agent import dialogue as dialogues
from searchrl.agent import tokenizer as tokenizers
from searchrl.models.inference import stops

TINY_BASE = pathlib.Path(tokenizers.__file__).parents[1] / 'assets/tiny_base'
SPECIAL = '<|endoftext|>'
quick = hypothesis.settings(max_examples=100, deadline=None, derandomize=True)


@pytest.fixture(scope='module')
def tokenizer():
  if not TINY_BASE.is_dir():
    pytest.skip('no tiny base model yet: see tools/tiny_base.py')
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
    assert tokenizer.decode(ids) == tokenizer._fast.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


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


def test_half_a_character_is_read_as_a_question_mark(tokenizer):
  """A search server may send one, '\\ud83d' in JSON; no tokenizer takes it."""
  for read in (tokenizer.encode, tokenizer.encode_data):
    assert tokenizer.decode(read('a\ud83d, b')) == 'a?, b'
    assert tokenizer.decode(read('\U0001f600')) == '\U0001f600'


KINDS = {
    'byte level': chats.byte_level(added=('日本', ' a ')),
    'byte level, space': chats.byte_level(prefix=True),
    'sentence piece': chats.sentence_piece(),
    'sentence piece, legacy': chats.sentence_piece(legacy=True),
    'word piece': chats.word_piece(),
}
kinds = pytest.mark.parametrize('kind', KINDS)
words = st.lists(st.one_of(
    st.text(st.characters(exclude_categories=['Cs']), max_size=4),
    st.sampled_from([
        'the search', ' goes on', "isn't", " 's", '.', ' ', '  ', '\n', '▁',
        'Ġ', '##ing', '<0x0A>', '<é>', '日本', 'question', '</search>', '</s>',
        '<|im_end|>', '[SEP]'])), max_size=8).map(''.join)


def joined(tokenizer, ids):
  return b''.join(tokenizer.token_bytes[i] for i in ids)


@kinds
def test_bytes_of_random_ids_are_the_decoded_text(kind):
  tokenizer = KINDS[kind]
  rng, whole = np.random.default_rng(1), 0
  for length in rng.integers(1, 8, 1000):
    ids = rng.integers(0, tokenizer.vocab_size, length).tolist()
    if kind == 'word piece':  # whose ## goes on with a word
      ids = [*tokenizer.encode('the'), *ids]
    data, text = joined(tokenizer, ids), tokenizer.decode(ids)
    if kind.startswith('byte'):
      assert data.decode(errors='replace') == text
      whole += 1
      continue
    try:  # decoders differ in how they show bytes that are no text
      assert data.decode() in (text, ' ' + text)
      whole += 1
    except UnicodeDecodeError:
      assert '\ufffd' in text
  assert whole > 100


@kinds
@quick
@hypothesis.given(text=words)
def test_bytes_of_a_text_are_its_bytes(kind, text):
  tokenizer = KINDS[kind]
  text = dialogues.neutralise(text)
  ids = tokenizer.encode_data(text)
  data = joined(tokenizer, ids).decode()
  assert tokenizer.decode(ids) in (data, data.removeprefix(' '))
  assert not tokenizer.special_ids.intersection(ids) or kind == 'word piece'
  if kind == 'byte level':
    assert data == text
  elif kind.startswith('sentence'):  # ▁ is how they write a space
    assert data == text.replace('▁', ' ')


@pytest.mark.parametrize('kind', [k for k in KINDS if k != 'word piece'])
def test_a_text_goes_on_without_a_space(kind):
  tokenizer = KINDS[kind]
  assert tokenizer.leading_space == ('' if kind == 'byte level' else ' ')
  ids = [*tokenizer.encode('sea'), *tokenizer.encode('rch'),
         *tokenizer.encode_data(' for'), *tokenizer.encode('')]
  assert joined(tokenizer, ids) == b'search for'
  first = tokenizer.encode(tokenizer.leading_space + 'the search')
  raw = tokenizer._fast.encode('the search', add_special_tokens=False)
  assert list(first) == raw  # as at the start of a text


def test_pieces_by_hand():
  pieces = KINDS['sentence piece']
  ids = {pieces.token(i): i for i in range(pieces.vocab_size)}
  assert pieces.token_bytes[ids['<0x0A>']] == b'\n'
  assert pieces.token_bytes[ids['<0xC3>']] == b'\xc3'
  assert pieces.token_bytes[ids['▁the']] == b' the'
  assert pieces.token_bytes[ids['</s>']] == b''
  words = KINDS['word piece']
  ids = {words.token(i): i for i in range(words.vocab_size)}
  assert words.token_bytes[ids['the']] == b' the'
  assert words.token_bytes[ids['##o']] == b'o'
  assert words.token_bytes[ids['!']] == b'!'  # decoding puts it to the word
  assert words.token_bytes[ids['[SEP]']] == b''
  levels = chats.byte_level(added=('<é>', '日'))
  ids = {levels.token(i): i for i in range(levels.vocab_size)}
  assert levels.token_bytes[ids['Ġthe']] == b' the'
  assert levels.token_bytes[ids['<é>']] == b'<\xe9>'  # as it is decoded
  assert levels.token_bytes[ids['日']] == '日'.encode()
  assert levels.token_bytes[ids['<|eot_id|>']] == b''  # special without a role


def test_a_stop_string_is_found_in_every_kind_of_pieces():
  for kind, tokenizer in KINDS.items():
    if kind == 'word piece':
      continue  # which writes no tags
    table = stops.compile_table(tokenizer.token_bytes, ['</search>'])
    state, hits = 0, []
    for id_ in tokenizer.encode('a </search>'):
      hits.append(table.hit[state, id_])
      state = table.next_state[state, id_]
    assert hits[-1] and not any(hits[:-1])


def test_a_fast_tokenizer_that_cannot_split_gets_a_name_in_two(monkeypatch):
  tokenizer = chats.sentence_piece()
  plain = type(tokenizer._fast).__call__
  monkeypatch.setattr(
      type(tokenizer._fast), '__call__',
      lambda self, texts, split_special_tokens=False, **options: plain(
          self, texts, **options))
  ids = tokenizer.encode_data('a</s>b</s></s>')
  assert not tokenizer.special_ids & {*ids}
  assert tokenizer.decode(ids) == 'a</s>b</s></s>'


def test_the_name_of_a_special_piece_of_unigram_is_plain_text():
  names = ['<unk>', '<s>', '</s>']  # pieces, too, as converters write them
  made = raw_tokenizers.Tokenizer(raw_tokenizers.models.Unigram(
      [(name, 0.0) for name in names] + [
          (letter, -2.0) for letter in ' </s>ab'], unk_id=0))
  made.add_special_tokens(names)
  tokenizer = tokenizers.Tokenizer(transformers.PreTrainedTokenizerFast(
      tokenizer_object=made, unk_token='<unk>', bos_token='<s>',
      eos_token='</s>'))
  ids = tokenizer.encode_data('a </s> b<s>')
  assert not {1, 2} & {*ids}
  assert ''.join(map(tokenizer.token, ids)) == 'a </s> b<s>'
  assert tokenizer.encode('a</s>')[-1] == 2  # in a text of our own


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match=f'{tmp_path} has none'):
    tokenizers.load(str(tmp_path))


@pytest.fixture
def folder(tmp_path):
  chats.byte_level()._fast.save_pretrained(tmp_path)
  return tmp_path


def test_a_tokenizer_is_loaded_once_unless_a_file_changes(folder):
  own = folder / 'generation_config.json'
  own.write_text('{"eos_token_id": 1}')
  first = tokenizers.load(str(folder))
  assert tokenizers.load(str(folder)) is first
  own.write_text('{"eos_token_id": 2}')
  os.utime(own, ns=(0, 0))  # two writes may get the same time
  assert tokenizers.load(str(folder)).eos_ids == (2,)
  assert first.eos_ids == (1,)


def test_a_named_chat_template_that_changes_is_read_again(folder):
  asked = [{'role': 'user', 'content': 'x'}]
  (folder / 'chat_template.jinja').write_text('default')
  file = folder / 'additional_chat_templates' / 'tool_use.jinja'
  file.parent.mkdir()
  for text in ('before', 'after'):
    file.write_text(text)
    os.utime(file, ns=(0, len(text)))  # two writes may get the same time
    assert tokenizers.load(str(folder)).render(asked, tools=[{}]) == text


def test_words_are_split_as_the_file_says_whatever_class_is_named(folder):
  """transformers' GPT2Tokenizer splits digits by a rule of its own."""
  for name, change in (
      ('tokenizer_config.json', {'tokenizer_class': 'GPT2Tokenizer'}),
      ('tokenizer.json', {'pre_tokenizer': {
          'type': 'Sequence', 'pretokenizers': [
              {'type': 'Digits', 'individual_digits': True},
              {'type': 'ByteLevel', 'add_prefix_space': False,
               'trim_offsets': True, 'use_regex': True}]}})):
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
  raw = raw_tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json'))
  text = 'the search  7 goes on 12\u00bd'
  assert list(tokenizers.load(str(folder)).encode(text)) == raw.encode(text).ids


def ids_of(tokenizer, *names):
  return tuple(tokenizer.encode(name)[0] for name in names)


def test_what_ends_a_turn_is_in_the_generation_config(folder):
  path = folder / 'generation_config.json'
  tokenizer = tokenizers.load(str(folder))
  assert tokenizer.eos_ids == ids_of(tokenizer, '<|im_end|>')
  two = ids_of(tokenizer, '<|im_end|>', '<|endoftext|>')
  for written, read in (
      (list(two), two), (two[1], two[1:]), ([two[1]], two[1:]),
      (None, two[:1]), ([], two[:1])):
    path.write_text(json.dumps({'eos_token_id': written, 'top_p': 0.8}))
    assert tokenizers.load(str(folder)).eos_ids == read
  path.write_text('{}')
  assert tokenizers.load(str(folder)).eos_ids == two[:1]


@pytest.mark.parametrize('text, message', [
    ('{"eos_token_id": "</s>"}', "eos_token_id is '</s>'"),
    ('{"eos_token_id": [1, true]}', 'eos_token_id is'),
    ('{"eos_token_id": 9999}', r'eos_token_id must be .* but is \(9999,\)'),
    ('{"eos_token_id": [-1]}', r'but is \(-1,\)'),
    ('[1]', 'AttributeError'), ('{', 'generation_config.json must hold')])
def test_a_wrong_generation_config_is_refused(folder, text, message):
  (folder / 'generation_config.json').write_text(text)
  with pytest.raises(ValueError, match=message):
    tokenizers.load(str(folder))


def test_a_tokenizer_that_ends_nothing_is_refused():
  fast = chats.byte_level()._fast
  fast.eos_token = None
  with pytest.raises(ValueError, match=r'eos_token_id must be .* is \(\)'):
    tokenizers.Tokenizer(fast)
