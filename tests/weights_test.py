# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""weights: Hugging Face folders in and out, and what is refused.

The folders under golden/ and the numbers beside them are transformers' own;
golden/make_golden.py made them. Logits are compared in transformer_test, and
how tensors are read and written is tested in tensors_test.
"""

import errno
import json
import pathlib
import shutil

import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from searchrl.models.inference import engine as engines
from searchrl.models.inference import stops
from searchrl.models import families
from searchrl.models import tensors
from searchrl.models import transformer
from searchrl.models import weights

GOLDEN = pathlib.Path(__file__).parent / 'golden'
FOLDERS = ('qwen2_tied', 'qwen2_untied', 'qwen3', 'qwen3_moe', 'llama',
           'mistral')
golden_folders = pytest.mark.parametrize('name', FOLDERS)


def read(folder, **options):
  config = weights.read_config(folder)
  return config, weights.load(folder, config, **options)


@pytest.fixture
def folder(tmp_path):
  """A whole checkpoint that a test may damage."""
  return shutil.copytree(GOLDEN / 'qwen2_tied', tmp_path / 'model')


def edit_config(folder, **changes):
  raw = json.loads((folder / 'config.json').read_text()) | changes
  raw = {key: value for key, value in raw.items() if value is not ...}
  (folder / 'config.json').write_text(json.dumps(raw))


def edit_tensors(folder, edit):
  values = safetensors.numpy.load_file(folder / 'model.safetensors')
  edit(values)
  safetensors.numpy.save_file(values, folder / 'model.safetensors')


def cast(folder, dtype):
  edit_tensors(folder, lambda values: values.update(
      {name: value.astype(dtype) for name, value in values.items()}))


@golden_folders
def test_the_engine_continues_like_transformers(name):
  config, params = read(GOLDEN / name)
  golden = np.load(GOLDEN / name / 'golden.npz')
  count, length = golden['continued'].shape
  table = stops.compile_table((), ('never',), config.vocab_size, end_ids=(0,))
  engine = engines.Engine(config, slots=count, length=160, stop_table=table,
                          tile=8)
  engine.load(params, temperature=0.0)
  engine.append([
      engines.Append(slot, prompt, length, (0,) * 5, fresh=True)
      for slot, prompt in enumerate(golden['prompts'].tolist())])
  outputs = {}
  while len(outputs) < count:
    outputs |= {s.slot: s.tokens for s in engine.decode()}
  assert [outputs[slot] for slot in range(count)] == [
      tuple(row) for row in golden['continued'].tolist()]


@golden_folders
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_round_trip_is_bitwise(name, dtype, tmp_path):
  theirs = shutil.copytree(GOLDEN / name, tmp_path / 'theirs')
  cast(theirs, dtype)
  config, params = read(theirs)
  for file in ('tokenizer.json', 'tokenizer_config.json', 'other.txt'):
    (theirs / file).write_text(f'"{file}"')
  weights.save(tmp_path / 'ours', params, config, tokenizer_from=theirs,
               eos_id=3, dtype=dtype)
  config_again, params_again = read(tmp_path / 'ours')
  assert config_again == config
  jax.tree.map(np.testing.assert_array_equal, params_again, params)
  same_tensors(theirs, tmp_path / 'ours')
  assert sorted(f.name for f in (tmp_path / 'ours').iterdir()) == [
      'config.json', 'model.safetensors', 'tokenizer.json',
      'tokenizer_config.json']
  raw = json.loads((tmp_path / 'ours' / 'config.json').read_text())
  assert raw['eos_token_id'] == 3 and raw['dtype'] == dtype
  assert raw['bos_token_id'] is None  # as there; transformers' default is 1


def test_a_model_that_cannot_be_written_leaves_nothing_on_the_disk(
    folder, tmp_path, monkeypatch):
  config, params = read(folder)
  target = tmp_path / 'models' / 'mine'

  def save():
    weights.save(target, params, config, tokenizer_from=folder, eos_id=3)

  def fill(path, *_, **__):
    (path / 'model.safetensors').write_bytes(b'half')
    raise OSError(errno.ENOSPC, 'No space left on device')

  save()
  files = {file: file.read_bytes() for file in target.iterdir()}
  with monkeypatch.context() as patch:
    patch.setattr(tensors, 'save', fill)
    with pytest.raises(OSError, match='No space left'):
      save()
  assert [*target.parent.iterdir()] == [target]
  assert {file: file.read_bytes() for file in target.iterdir()} == files
  unfinished = target.with_name('.mine.unfinished')
  (unfinished / 'left_by_a_kill').mkdir(parents=True)
  save()
  assert [*target.parent.iterdir()] == [target]


def same_tensors(one, other):
  """Bit for bit, types included; files of the library's own reader."""
  one, other = (
      {name: value for file in sorted(folder.glob('*.safetensors'))
       for name, value in safetensors.numpy.load_file(file).items()}
      for folder in (one, other))
  assert sorted(one) == sorted(other)
  for tensor, value in one.items():
    assert value.dtype == other[tensor].dtype
    np.testing.assert_array_equal(other[tensor], value, err_msg=tensor)


@pytest.mark.parametrize('name, old', [
    ('qwen2_tied', dict(rope_theta=50_000.0, rope_scaling=None)),
    ('llama', dict(rope_theta=500.0, rope_scaling={
        'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0,
        'high_freq_factor': 4.0, 'original_max_position_embeddings': 32}))])
def test_the_keys_of_transformers_4_are_read_too(name, old, tmp_path):
  folder = shutil.copytree(GOLDEN / name, tmp_path / 'model')
  new = weights.read_config(folder)
  edit_config(folder, rope_parameters=..., dtype=..., layer_types=...,
              torch_dtype='float32', **old)
  assert weights.read_config(folder) == new
  assert new.rope_theta == old['rope_theta'] and new.rms_norm_eps == 1e-5
  assert (new.rope_scaling is None) == (old['rope_scaling'] is None)


@pytest.mark.parametrize('kind, is_read', [
    ('llama3', True), ('yarn', False), ('linear', False)])
def test_a_scaling_that_a_user_adds_counts(kind, is_read, tmp_path):
  """transformers takes it, too, if `rope_parameters` stands beside it."""
  folder = shutil.copytree(GOLDEN / 'qwen2_tied', tmp_path / 'model')
  plain = weights.read_config(folder)
  assert plain.rope_scaling is None
  edit_config(folder, rope_scaling={
      'rope_type': kind, 'factor': 8.0, 'low_freq_factor': 1.0,
      'high_freq_factor': 4.0, 'original_max_position_embeddings': 32})
  if is_read:
    read = weights.read_config(folder)
    assert read.rope_scaling.factor == 8.0
    assert read.rope_theta == plain.rope_theta
  else:
    with pytest.raises(ValueError, match=f"rope_type .* is '{kind}'"):
      weights.read_config(folder)


# The fields of some public checkpoints' configs, as far as they are read.
LLAMA_32_1B = dict(
    architectures=['LlamaForCausalLM'], attention_bias=False, head_dim=64,
    hidden_act='silu', hidden_size=2048, intermediate_size=8192,
    max_position_embeddings=131072, mlp_bias=False, num_attention_heads=32,
    num_hidden_layers=16, num_key_value_heads=8, rms_norm_eps=1e-05,
    rope_scaling=dict(factor=32.0, high_freq_factor=4.0, low_freq_factor=1.0,
                      original_max_position_embeddings=8192,
                      rope_type='llama3'),
    rope_theta=500000.0, tie_word_embeddings=True, vocab_size=128256)
MISTRAL_7B = dict(
    architectures=['MistralForCausalLM'], hidden_act='silu', hidden_size=4096,
    intermediate_size=14336, max_position_embeddings=32768,
    num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=8,
    rms_norm_eps=1e-05, rope_theta=10000.0, sliding_window=4096,
    tie_word_embeddings=False, vocab_size=32000)
R1_DISTILL_15B = dict(
    architectures=['Qwen2ForCausalLM'], hidden_act='silu', hidden_size=1536,
    intermediate_size=8960, max_position_embeddings=131072,
    max_window_layers=21, num_attention_heads=12, num_hidden_layers=28,
    num_key_value_heads=2, rms_norm_eps=1e-06, rope_theta=10000,
    sliding_window=4096, tie_word_embeddings=False, use_mrope=False,
    use_sliding_window=False, vocab_size=151936)
QWEN3_06B = dict(
    architectures=['Qwen3ForCausalLM'], attention_bias=False, head_dim=128,
    hidden_act='silu', hidden_size=1024, intermediate_size=3072,
    max_position_embeddings=40960, max_window_layers=28,
    num_attention_heads=16, num_hidden_layers=28, num_key_value_heads=8,
    rms_norm_eps=1e-06, rope_scaling=None, rope_theta=1000000,
    sliding_window=None, tie_word_embeddings=True, use_sliding_window=False,
    vocab_size=151936)


@pytest.mark.parametrize('raw, parameters, expected', [
    (LLAMA_32_1B, 1_235_814_400, dict(
        attention_bias=False, attention_out_bias=False, sliding_window=None,
        rope_scaling=transformer.Llama3Rope(32.0, 1.0, 4.0, 8192))),
    (MISTRAL_7B, 7_241_732_096,
     dict(attention_bias=False, sliding_window=4096)),
    (MISTRAL_7B | dict(sliding_window=None), 7_241_732_096,
     dict(sliding_window=None)),
    ({k: v for k, v in MISTRAL_7B.items() if k != 'sliding_window'},
     7_241_732_096, dict(sliding_window=4096)),  # transformers' default
    (R1_DISTILL_15B, 1_777_088_000, dict(
        attention_bias=True, attention_out_bias=False, sliding_window=None,
        head_dim=128)),
    (R1_DISTILL_15B | dict(use_sliding_window=True, max_window_layers=0),
     1_777_088_000, dict(sliding_window=4096)),
    (QWEN3_06B, 596_049_920, dict(attention_bias=False, qk_norm=True)),
])
def test_public_checkpoints_have_the_shape_that_they_should(
    tmp_path, raw, parameters, expected):
  (tmp_path / 'config.json').write_text(json.dumps(raw))
  config = weights.read_config(tmp_path)
  for field, value in expected.items():
    assert getattr(config, field) == value, field
  sizes = [np.prod(shape) for shape in tensors.shapes(
      transformer.abstract(config), families.NAMES).values()]
  assert sum(sizes) == parameters


@pytest.mark.parametrize('dtype', [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_read_into_float32(folder, dtype):
  _, whole = read(folder)
  cast(folder, dtype)
  _, params = read(folder)
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(
      x, np.asarray(y).astype(dtype).astype(np.float32)), params, whole)


def test_params_may_be_bfloat16(folder):
  _, whole = read(folder)
  _, params = read(folder, dtype=jnp.bfloat16)
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(
      x, y.astype(jnp.bfloat16)), params, whole)


def shard(folder, index=True, **changes):
  values = safetensors.numpy.load_file(folder / 'model.safetensors')
  (folder / 'model.safetensors').unlink()
  names = sorted(values)
  for i, part in enumerate((names[:9], names[9:])):
    file = folder / f'model-0000{i + 1}-of-00002.safetensors'
    safetensors.numpy.save_file({n: values[n] for n in part}, file)
  if index:
    weight_map = {n: f'model-0000{1 + (n in names[9:])}-of-00002.safetensors'
                  for n in names}
    (folder / tensors.INDEX).write_text(
        json.dumps({'weight_map': weight_map | changes}))


@pytest.mark.parametrize('index', [False, True])
def test_a_checkpoint_in_several_files_is_one(folder, index):
  _, whole = read(folder)
  shard(folder, index)
  if index:  # some hubs add the weights in a second format; it is not read
    (folder / 'consolidated.safetensors').write_text('not ours')
  _, params = read(folder)
  jax.tree.map(np.testing.assert_array_equal, params, whole)


def truncate(folder):
  file = folder / 'model.safetensors'
  file.write_bytes(file.read_bytes()[:-100])


def only_pickle(folder):
  (folder / 'model.safetensors').rename(folder / 'pytorch_model.bin')


def misshape(values):
  values['model.norm.weight'] = np.zeros(31, np.float32)


def lose_a_shard(folder):
  shard(folder)
  (folder / 'model-00002-of-00002.safetensors').unlink()


def index_with(**changes):
  return lambda folder: shard(folder, **{
      name.replace('__', '.'): file for name, file in changes.items()})


@pytest.mark.parametrize('changes, message', [
    (dict(decoder_sparse_step=2), 'all layers must have experts, but .* has '
     'decoder_sparse_step 2 and mlp_only_layers'),
    (dict(mlp_only_layers=[0]), r'mlp_only_layers \[0\], which is not'),
    (dict(num_experts_per_tok=7), 'at most num_experts, 6, but is 7'),
    (dict(moe_intermediate_size='24'), "whole number .* but is '24'")])
def test_experts_that_are_not_implemented_are_refused(
    changes, message, tmp_path):
  folder = shutil.copytree(GOLDEN / 'qwen3_moe', tmp_path / 'model')
  edit_config(folder, **changes)
  with pytest.raises(ValueError, match=message):
    weights.read_config(folder)


def store_it_twice(folder):
  shutil.copy(folder / 'model.safetensors', folder / 'a.safetensors')
  (folder / 'model.safetensors').rename(folder / 'b.safetensors')


def add_a_head(folder):
  edit_tensors(folder, lambda t: t.update({
      'lm_head.weight': t['model.embed_tokens.weight'] + 1}))


def a_run(folder):
  shutil.copytree(folder, folder / 'model')
  edit_config(folder, architectures=...)


def rope(**changes):
  return lambda folder: edit_config(folder, rope_parameters=changes)


@pytest.mark.parametrize('damage, error, message', [
    (shutil.rmtree, FileNotFoundError,
     'model.path must be a folder, but .*model is none'),
    (lambda f: (f / 'config.json').unlink(), FileNotFoundError,
     'must hold a config.json, but .*model has none'),
    (only_pickle, FileNotFoundError,
     r'must hold \*.safetensors, but .*model has none.*bin'),
    (lambda f: edit_config(f, architectures=['GPT2LMHeadModel']), ValueError,
     r"one of \['Llama.*'Qwen3MoeForCausalLM'\].* names 'GPT2LMHeadModel'"),
    (lambda f: edit_config(f, architectures=...), ValueError, "names 'none'"),
    (a_run, ValueError, 'must be the folder of a model, but .*model is that of '
     'a run. Name its model: .*model/model'),
    (lambda f: edit_config(f, hidden_size=...), ValueError,
     "config.json.*'hidden_size'"),
    (lambda f: edit_config(f, vocab_size='96'), ValueError,
     "vocab_size in .*config.json must be a whole number .* but is '96'"),
    (lambda f: edit_config(f, num_key_value_heads=3), ValueError,
     'num_key_value_heads that divide .* 8, 3 and 4'),
    (lambda f: edit_config(f, hidden_act='gelu'), ValueError,
     "hidden_act in .*config.json must be 'silu', but is 'gelu'"),
    (lambda f: edit_config(f, quantization_config={'bits': 4}), ValueError,
     "quantization_config in .*config.json must be None"),
    (lambda f: edit_config(f, use_sliding_window=True, sliding_window=4,
                           max_window_layers=1, layer_types=...), ValueError,
     'see equally far, but .*full_attention.*sliding_attention.*window 4'),
    (lambda f: edit_config(f, layer_types=['sliding_attention'] * 2),
     ValueError, 'see equally far'),
    (lambda f: (f / 'config.json').write_text('{'), ValueError, 'config.json'),
    (lambda f: (f / 'config.json').write_text('[1]'), ValueError, 'TypeError'),
    (truncate, ValueError, 'model.safetensors cannot be read: .*Fetch it'),
    (lambda f: (f / 'model.safetensors').write_bytes(b'x' * 99), ValueError,
     'model.safetensors cannot be read: .*Fetch it'),
    (lambda f: edit_tensors(f, lambda t: t.pop('model.norm.weight')),
     ValueError, 'model.norm.weight is missing'),
    (lambda f: edit_tensors(f, lambda t: t.update(x=np.zeros(1))), ValueError,
     r'x is not expected \(1 in all\)'),
    (lambda f: edit_tensors(f, misshape), ValueError,
     r'model.norm.weight is \(31,\), not \(32,\)'),
    (lambda f: cast(f, np.int8), ValueError, r'is of type I8, .*\(26 in all\)'),
    (lambda f: edit_config(f, num_hidden_layers=3, layer_types=...), ValueError,
     r'model.layers.2.*is missing.* \(12 in all\)'),
    (add_a_head, ValueError, 'lm_head.weight must equal .*if .* are tied'),
    (store_it_twice, ValueError,
     'each tensor once, but .* is in a.safetensors and in b.safetensors'),
    (lose_a_shard, FileNotFoundError,
     'model-00002-of-00002.safetensors must be in .* according to .*index'),
    (index_with(model__norm__weight='../other.safetensors'), ValueError,
     "its own folder, but names '../other.safetensors'"),
    (index_with(model__norm__weight='/etc/passwd'), ValueError, 'own folder'),
    (rope(rope_type='yarn', factor=4.0, rope_theta=1e6), ValueError,
     "rope_type in .*config.json is 'yarn'"),
    (rope(rope_type='llama3', rope_theta=1e6), ValueError, "'factor'"),
    (rope(rope_type='default', partial_rotary_factor=0.5), ValueError,
     "is 'partial'"),
    (rope(full_attention={'rope_type': 'default'}), ValueError, 'a kind of la'),
    (lambda f: edit_config(f, rope_parameters=..., rope_scaling=[1]),
     ValueError, r'TypeError the rotary embeddings are \[1\]'),
    (rope(rope_type='default', rope_theta='1e4'), ValueError,
     "rope_theta in .* must be a number above 0, but is '1e4'"),
    (rope(rope_type='default', rope_theta=None), ValueError, 'is None. Fetch'),
    (lambda f: edit_config(f, rms_norm_eps='1e-6'), ValueError,
     "rms_norm_eps in .* must be a number above 0, but is '1e-6'"),
    (rope(rope_type='llama3', rope_theta=1e6, factor='8', low_freq_factor=1.0,
          high_freq_factor=4.0, original_max_position_embeddings=64),
     ValueError, "factor in .* must be a number above 0, but is '8'"),
    (rope(rope_type='llama3', rope_theta=1e6, factor=8, low_freq_factor=4.0,
          high_freq_factor=4.0, original_max_position_embeddings=64),
     ValueError, 'low_freq_factor in .* must be below high_freq_factor, 4.0'),
    (lambda f: edit_config(f, use_sliding_window=True, sliding_window=0,
                           max_window_layers=0, layer_types=...), ValueError,
     'sliding_window in .* must be a whole number from 1 on, but is 0'),
    (lambda f: edit_config(f, rope_parameters=..., rope_theta=1e6,
                           rope_scaling={'type': 'yarn', 'factor': 4.0}),
     ValueError,
     "rope_type in .*config.json is 'yarn'"),
])
def test_a_damaged_folder_is_refused_and_the_damage_named(
    folder, damage, error, message, monkeypatch):
  read(folder)
  damage(folder)
  monkeypatch.setattr(tensors, '_read', None)  # nothing is built before
  with pytest.raises(error, match=message):
    read(folder)


def test_what_other_exporters_add_is_ignored(folder):
  _, whole = read(folder)
  edit_tensors(folder, lambda t: t.update({
      'lm_head.weight': t['model.embed_tokens.weight'],
      'model.layers.0.self_attn.rotary_emb.inv_freq': np.zeros(4)}))
  jax.tree.map(np.testing.assert_array_equal, read(folder)[1], whole)


def test_a_hub_id_is_fetched_without_pickle_or_code(monkeypatch, folder):
  fetched = {}

  def download(name, *, revision, allow_patterns):
    assert revision is None
    fetched[name] = allow_patterns
    return str(folder)

  monkeypatch.setattr(huggingface_hub, 'snapshot_download', download)
  assert weights.locate('Qwen/Qwen2.5-7B-Instruct') == str(folder)
  matches = lambda file: any(pathlib.PurePath(file).match(pattern)
                             for pattern in fetched['Qwen/Qwen2.5-7B-Instruct'])
  assert all(map(matches, (
      'config.json', 'generation_config.json', 'tokenizer.json', 'merges.txt',
      'model.safetensors', 'model-00001-of-00004.safetensors', tensors.INDEX,
      'additional_chat_templates/tool_use.jinja')))
  assert not any(map(matches, (
      'pytorch_model.bin', 'modeling_qwen.py', 'consolidated.safetensors')))
  for local in (str(folder), '/no/folder', './no/folder', 'no_folder'):
    assert weights.locate(local) == local
  assert len(fetched) == 1


def test_an_unreachable_hub_is_named(monkeypatch):
  def download(name, **_):
    raise OSError('offline')

  monkeypatch.setattr(huggingface_hub, 'snapshot_download', download)
  with pytest.raises(FileNotFoundError,
                     match='Qwen/none is no folder and .*OSError offline'):
    weights.locate('Qwen/none')


@pytest.mark.parametrize('path, name, revision', [
    ('Qwen/Qwen2.5-7B', 'Qwen/Qwen2.5-7B', None),
    ('Qwen/Qwen2.5-7B@main', 'Qwen/Qwen2.5-7B', 'main'),
    ('Qwen/Qwen2.5-7B@v1.0', 'Qwen/Qwen2.5-7B', 'v1.0'),
    ('a/b@refs/pr/7', 'a/b', 'refs/pr/7'),
    ('a/b@' + '0f' * 20, 'a/b', '0f' * 20)])
def test_a_hub_id_may_name_a_revision(monkeypatch, path, name, revision):
  fetched = []

  def download(repo, *, revision, allow_patterns):
    fetched.append((repo, revision))
    return '/cache'

  monkeypatch.setattr(huggingface_hub, 'snapshot_download', download)
  assert weights.locate(path) == '/cache'
  assert fetched == [(name, revision)]


@pytest.mark.parametrize('path', ['a/b@', 'a@b', 'a/b@-x', 'a/b@x@y'])
def test_what_is_no_hub_id_is_a_folder(monkeypatch, path):
  monkeypatch.setattr(huggingface_hub, 'snapshot_download', None)
  assert weights.locate(path) == path


@pytest.mark.parametrize('at', [0, 100, -1])
def test_a_sketch_sees_either_end_of_each_file(at, tmp_path, monkeypatch):
  monkeypatch.setattr(weights, '_END', 128)
  data = bytearray(range(250)) * 2
  for name in ('a.safetensors', 'b.safetensors'):
    (tmp_path / name).write_bytes(data)
  before = weights.sketch(tmp_path)
  assert before == weights.sketch(tmp_path)
  data[at] ^= 1
  (tmp_path / 'b.safetensors').write_bytes(data)
  after = weights.sketch(tmp_path)
  assert [name for name in before if before[name] != after[name]] == [
      'b.safetensors']
