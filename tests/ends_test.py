# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rollouts, training data and exports agree on the ids that end a sequence."""

import dataclasses
import json

import chats
import pytest
import real_tokenizers
import tiny
import transformers

from searchrl.agent import chat
from searchrl.agent import dialogue as dialogues
from searchrl.agent import tokenizer as tokenizers
from searchrl.agent import transcripts
from searchrl.experiment import model_folders
from searchrl.models import weights
from searchrl.rollouts import sampler

LAST, TURN = '<|endoftext|>', '<|im_end|>'
EOT = '<|eot_id|>'


@pytest.fixture
def source(tmp_path):
  """A function that writes a model folder and returns it."""
  def write(template=None, eos=LAST, generation=(), config=()):
    folder = tmp_path / 'source'
    tokenizer = chats.byte_level(template, eos=eos)
    tokenizer._fast.save_pretrained(folder)
    shape = dataclasses.replace(tiny.CONFIG, vocab_size=tokenizer.vocab_size)
    weights.save(folder, tiny.params(shape), shape, tokenizer_from=folder,
                 eos_id=0)
    raw = json.loads((folder / 'config.json').read_text())
    del raw['eos_token_id']
    ids = {name: [tokenizer.encode(text)[0] for text in texts]
           for name, texts in (('generation', generation), ('config', config))}
    if config:
      raw['eos_token_id'] = ids['config']
    (folder / 'config.json').write_text(json.dumps(raw))
    if generation:
      (folder / 'generation_config.json').write_text(json.dumps(
          {'eos_token_id': ids['generation'], 'top_p': 0.8}))
    return folder
  return write


def export(folder):
  tokenizer = tokenizers.load(str(folder))
  shape = weights.read_config(folder)
  weights.save(folder.parent / 'export', tiny.params(shape), shape,
               tokenizer_from=folder, eos_id=chat.ends(tokenizer))
  return folder.parent / 'export', tokenizer


def names(tokenizer, ids):
  return [tokenizer.token(id_) for id_ in (
      ids if isinstance(ids, (list, tuple)) else [ids])]


@pytest.mark.parametrize('options, ends, last', [
    (dict(template=chats.LLAMA3, generation=(LAST, TURN, EOT)),
     [LAST, TURN, EOT], EOT),
    (dict(template=chats.LLAMA3, eos=EOT, config=(LAST, EOT)), [LAST, EOT],
     EOT),
    (dict(template=chats.LLAMA3, eos=EOT), [EOT], EOT),
    (dict(template=chats.QWEN2), [LAST, TURN], TURN),
    (dict(template=chats.QWEN2, generation=(LAST,)), [LAST, TURN], TURN),
    (dict(template=chats.QWEN2, eos=TURN, generation=(TURN, LAST)),
     [TURN, LAST], TURN),
    (dict(generation=(TURN, LAST)), [TURN, LAST], TURN),
    (dict(), [LAST], LAST)])
def test_every_end_is_named_and_stopped_at(source, options, ends, last):
  folder, tokenizer = export(source(**options))
  assert names(tokenizer, chat.ends(tokenizer)) == ends
  raw = json.loads((folder / 'config.json').read_text())
  assert names(tokenizer, raw['eos_token_id']) == ends
  theirs = transformers.GenerationConfig.from_model_config(
      transformers.AutoConfig.from_pretrained(folder))
  if 'generation' in options:
    theirs = transformers.GenerationConfig.from_pretrained(folder)
    assert theirs.top_p == 0.8
    copied = (folder / 'generation_config.json').read_bytes()
    original = folder.parent / 'source' / 'generation_config.json'
    assert (copied == original.read_bytes()) == (
        list(options['generation']) == ends)
  assert names(tokenizer, theirs.eos_token_id) == ends
  assert tokenizers.load(str(folder)).eos_ids == chat.ends(tokenizer)
  table = sampler.compile_stops(
      dialogues.search_r1(tokenizer), tokenizer, tokenizer.vocab_size)
  assert table.hit[0, list(chat.ends(tokenizer))].all()
  ended = transcripts.of_segments([('a', True)], tokenizer, ends=True)
  assert names(tokenizer, ended.ids[-1:]) == [last] and ended.trained[-1]
  for end in ends:  # which the text has already
    assert transcripts.of_segments(
        [('a' + end, True)], tokenizer, ends=True) == transcripts.of_segments(
            [('a' + end, True)], tokenizer)


@pytest.mark.parametrize('name, rows, ends, unused', [
    ('qwen2.5', 151_936, [151_643, 151_645], 271),  # the template's, too
    ('qwen3', 151_936, [151_645, 151_643], 267),
    ('llama3-instruct', 128_256, [128_001, 128_008, 128_009], 0),
    ('smollm2', 49_152, 2, 0)])
def test_exports_of_real_families(name, rows, ends, unused, tmp_path):
  files = real_tokenizers.folder(name)
  shape = dataclasses.replace(
      tiny.CONFIG, vocab_size=rows, hidden_size=8, num_hidden_layers=1)
  params = tiny.params(shape)
  weights.save(tmp_path / 'source', params, shape, tokenizer_from=files,
               eos_id=())
  path, read, tokenizer = model_folders.parts(str(tmp_path / 'source'))
  assert len(read.unused_ids) == unused
  weights.save(tmp_path / 'export', params, read, tokenizer_from=path,
               eos_id=chat.ends(tokenizer))
  content = lambda file: json.loads((tmp_path / 'export' / file).read_text())
  assert content('config.json')['eos_token_id'] == ends
  generation = json.loads((files / 'generation_config.json').read_text())
  assert content('generation_config.json') == generation | {'eos_token_id': ends}


def test_a_template_that_drops_the_answer_ends_nothing():
  tokenizer = chats.byte_level('{{ bos_token }}{{ messages[0].content }}')
  assert chat.turn_ends(tokenizer) == ()
  assert chat.ends(tokenizer) == tokenizer.eos_ids


def test_files_of_the_tokenizer_are_exported(source):
  folder = source(chats.QWEN2)
  extra = ('tokenizer.model', 'special_tokens_map.json', 'added_tokens.json',
           'vocab.json', 'merges.txt', 'chat_template.jinja', 'tekken.json',
           'tokenizer.model.v3', 'qwen.tiktoken')
  for name in extra:
    (folder / name).write_text((folder / name).read_text() if (
        folder / name).exists() else '{}')
  (folder / 'pytorch_model.bin').write_text('no')
  target, _ = export(folder)
  for name in extra:
    assert (target / name).read_bytes() == (folder / name).read_bytes()
  assert not (target / 'pytorch_model.bin').exists()


def test_named_chat_templates_are_exported_and_loaded_again(source):
  """transformers is the other reader of both folders."""
  folder = source()
  named = {'default': '{{ messages[0].content }}', 'tool_use': 'T {{ tools }}'}
  fast = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
  fast.chat_template = named
  fast.save_pretrained(folder)
  file = 'additional_chat_templates/tool_use.jinja'
  assert (folder / file).read_text() == named['tool_use']
  for _ in range(2):  # the second export replaces the first
    target, tokenizer = export(folder)
    assert (target / file).read_text() == named['tool_use']
  theirs = transformers.PreTrainedTokenizerFast.from_pretrained(target)
  assert theirs.chat_template == named
  asked = [{'role': 'user', 'content': 'x'}]
  ours = tokenizers.load(str(target))
  assert ours.render(asked) == 'x'
  assert ours.render(asked, tools=[{}]) == tokenizer.render(
      asked, tools=[{}]) == 'T [{}]'


def test_a_named_chat_template_that_only_an_earlier_export_has_is_kept(source):
  target, _ = export(source())
  kept = target / 'additional_chat_templates' / 'rag.jinja'
  kept.parent.mkdir()
  kept.write_text('R')
  assert export(target.parent / 'source')[0] == target
  assert kept.read_text() == 'R'
