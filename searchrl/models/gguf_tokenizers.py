# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of GGUF files: rebuilds byte-level BPE as tokenizer.json."""

from collections.abc import Mapping
import json
import pathlib
import re
from typing import Any

import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers
from tokenizers import processors

_CONTROL, _USER_DEFINED = 3, 4  # kinds of tokens that are not merged
_UNUSED = 5  # the kind of an id that only fills up the embedding
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}"
    r'\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+')
_LLAMA3 = _QWEN2.replace(r'|\p{N}|', r'|\p{N}{1,3}|')
_TEMPLATE = 'tokenizer.chat_template'  # key; before a named one's .NAME
_ROLES = {'bos_token': 'bos_token_id', 'eos_token': 'eos_token_id',
          'pad_token': 'padding_token_id', 'unk_token': 'unknown_token_id'}
# Ends of a text, of a turn, and of a message that calls a tool.
_ENDS = ('eos_token_id', 'eot_token_id', 'eom_token_id')


def write(fields: Mapping[str, Any], folder: pathlib.Path, file: pathlib.Path
         ) -> None:
  """Writes tokenizer.json, tokenizer_config.json and generation_config.json.

  Args:
    fields: Contents of the GGUF's fields by their names.
    folder: Existing folder.
    file: Path of the GGUF, for errors.

  Raises:
    ValueError: The tokenizer is not byte-level BPE of a known kind, or a part
      of it is missing.
  """
  own = {name.removeprefix('tokenizer.ggml.'): value
         for name, value in fields.items() if name.startswith('tokenizer.')}
  if own.get('model') != 'gpt2' or own.get('pre') not in _SPLITS:
    raise ValueError(
        f'{file} must hold a byte-level BPE tokenizer (gpt2) of '
        f'{", ".join(_SPLITS)}, but holds {own.get("model")!r} of '
        f'{own.get("pre")!r}, which is not implemented here. Give the folder '
        'of the model at Hugging Face, or its hub id.')
  for name in ('tokens', 'token_type', 'merges'):
    if name not in own:
      raise ValueError(f'{file} must say tokenizer.ggml.{name}, but does not. '
                       'Fetch it again.')
  for name in (*_ROLES.values(), *_ENDS):
    if name in own and own[name] not in range(len(own['tokens'])):
      raise ValueError(
          f'tokenizer.ggml.{name} in {file} must be one of the ids from 0 to '
          f'{len(own["tokens"]) - 1}, but is {own[name]!r}. Fetch it again.')
  roles = {role: own['tokens'][own[name]] for role, name in _ROLES.items()
           if name in own}
  try:
    tokenizer = _tokenizer(own, roles)
  except Exception as error:  # tokenizers raises plain Exceptions
    raise ValueError(f'{file} must hold a whole tokenizer, but: {error}. Fetch '
                     'it again.') from error
  tokenizer.save(str(folder / 'tokenizer.json'))
  config: dict[str, Any] = {
      'tokenizer_class': 'PreTrainedTokenizerFast',
      'clean_up_tokenization_spaces': False, **roles}
  _write_templates(fields, folder, file)
  generation = {f'{role}_id': own[name] for role, name in _ROLES.items()
                if name in own and role != 'unk_token'}
  ends = [*dict.fromkeys(own[name] for name in _ENDS if name in own)]
  if ends:
    generation['eos_token_id'] = ends if len(ends) > 1 else ends[0]
  for name, content in (('tokenizer_config', config),
                        ('generation_config', generation)):
    (folder / f'{name}.json').write_text(
        json.dumps(content, ensure_ascii=False, indent=2), encoding='utf-8')


def _write_templates(fields: Mapping[str, Any], folder: pathlib.Path,
                     file: pathlib.Path) -> None:
  """Writes the chat template, and each named one, as a model's folder has them.

  The default is a file, too, because transformers reads no template of
  tokenizer_config.json if there are files of others.
  """
  for key, template in fields.items():
    stem, _, name = key.removeprefix(_TEMPLATE).partition('.')
    if not key.startswith(_TEMPLATE) or stem or not template:
      continue
    if name and not re.fullmatch(r'[\w.-]{1,100}', name):
      raise ValueError(
          f'{file} must name its chat templates by letters, digits, _, - and '
          f'., but has {key!r}. Fetch it again.')
    if not isinstance(template, str):
      raise ValueError(f'{key} in {file} must be a text, but is {template!r}. '
                       'Fetch it again.')
    path = folder / (f'additional_chat_templates/{name}.jinja' if name
                     else 'chat_template.jinja')
    path.parent.mkdir(exist_ok=True)
    path.write_text(template, encoding='utf-8')


def _tokenizer(own: Mapping[str, Any], roles: Mapping[str, str]
              ) -> tokenizers.Tokenizer:
  pieces, kinds = own['tokens'], own['token_type']
  # Some ids have no text and only fill up the embedding. Their kind says so, or
  # in older files only their text: [PAD] with the number.
  kept = [(number, piece, kind)
          for number, (piece, kind) in enumerate(zip(pieces, kinds))
          if kind != _UNUSED and piece != f'[PAD{number}]']
  tokenizer = tokenizers.Tokenizer(models.BPE(
      {piece: number for number, piece, _ in kept},
      [tuple(merge.split(' ')) for merge in own['merges']],
      ignore_merges=own['pre'] == 'llama-bpe'))
  if own['pre'] == 'qwen2':
    tokenizer.normalizer = normalizers.NFC()
  tokenizer.pre_tokenizer = _SPLITS[own['pre']]
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
  start = roles.get('bos_token')
  # llama.cpp starts Llama 3's texts with this token unless the file says no.
  if start and own.get('add_bos_token', own['pre'] == 'llama-bpe'):
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f'{start} $A', pair=f'{start} $A {start}:1 $B:1',
        special_tokens=[(start, own['bos_token_id'])])
  tokenizer.add_tokens([
      tokenizers.AddedToken(piece, special=kind == _CONTROL, normalized=False)
      for _, piece, kind in kept if kind in (_CONTROL, _USER_DEFINED)])
  return tokenizer


def _split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
  return pre_tokenizers.Sequence([
      pre_tokenizers.Split(tokenizers.Regex(pattern), 'isolated'),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# How each kind of tokenizer splits a text into words. No merge spans two words.
_SPLITS = {
    'gpt-2': pre_tokenizers.ByteLevel(add_prefix_space=False),
    'llama-bpe': _split_by(_LLAMA3),
    'qwen2': _split_by(_QWEN2),
    'smollm': pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False)])}
