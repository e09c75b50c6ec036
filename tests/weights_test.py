# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""weights: Hugging Face folders in and out, and the numbers of transformers.

The folders under golden/ and the numbers beside them are transformers' own;
golden/make_golden.py made them.
"""

import dataclasses
import json
import pathlib
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tiny

from searchrl.models import engine as engines
from searchrl.models import stops
from searchrl.models import transformer
from searchrl.models import weights

GOLDEN = pathlib.Path(__file__).parent / 'golden'
FOLDERS = ('qwen2_tied', 'qwen2_untied')
golden_folders = pytest.mark.parametrize('name', FOLDERS)


def read(folder):
  config = weights.read_config(folder)
  return config, weights.load(folder, config)


@pytest.fixture
def folder(tmp_path):
  """A whole checkpoint that a test may damage."""
  shutil.copytree(GOLDEN / 'qwen2_tied', tmp_path / 'model')
  return tmp_path / 'model'


def edit_config(folder, **changes):
  raw = json.loads((folder / 'config.json').read_text()) | changes
  raw = {key: value for key, value in raw.items() if value is not ...}
  (folder / 'config.json').write_text(json.dumps(raw))


def edit_tensors(folder, edit):
  tensors = safetensors.numpy.load_file(folder / 'model.safetensors')
  edit(tensors)
  safetensors.numpy.save_file(tensors, folder / 'model.safetensors')


@golden_folders
def test_logits_are_those_of_transformers(name):
  config, params = read(GOLDEN / name)
  golden = np.load(GOLDEN / name / 'golden.npz')
  forward = jax.jit(lambda params, tokens: transformer.logits(
      params, transformer.forward(params, tokens, config)))
  logits = forward(params, golden['prompts'])
  np.testing.assert_allclose(logits, golden['logits'], atol=2e-4)
  assert golden['logits'].std() > 0.5  # not all alike


@golden_folders
def test_the_engine_continues_like_transformers(name):
  config, params = read(GOLDEN / name)
  golden = np.load(GOLDEN / name / 'golden.npz')
  count, length = golden['continued'].shape
  table = stops.compile_table((), ('never',), config.vocab_size)
  engine = engines.Engine(config, slots=count, length=160, stop_table=table,
                          eos_ids=(0,), chunks=(8,))
  engine.load(params, temperature=0.0)
  engine.append([
      engines.Append(slot, prompt, length, (0,) * 5, fresh=True)
      for slot, prompt in enumerate(golden['prompts'].tolist())])
  said = {}
  while len(said) < count:
    said |= {s.slot: s.tokens for s in engine.decode()}
  assert [said[slot] for slot in range(count)] == [
      tuple(row) for row in golden['continued'].tolist()]


@golden_folders
def test_a_round_trip_is_bitwise(name, tmp_path):
  config, params = read(GOLDEN / name)
  (tmp_path / 'source').mkdir()
  for file in ('tokenizer.json', 'tokenizer_config.json', 'other.txt'):
    (tmp_path / 'source' / file).write_text(f'"{file}"')
  weights.save(tmp_path / 'copy', params, config,
               tokenizer_from=tmp_path / 'source', eos_id=3)
  config_again, params_again = read(tmp_path / 'copy')
  assert config_again == config
  jax.tree.map(np.testing.assert_array_equal, params_again, params)
  theirs, ours = (safetensors.numpy.load_file(f / 'model.safetensors')
                  for f in (GOLDEN / name, tmp_path / 'copy'))
  assert sorted(theirs) == sorted(ours)
  for tensor, value in theirs.items():
    np.testing.assert_array_equal(ours[tensor], value, err_msg=tensor)
  assert sorted(f.name for f in (tmp_path / 'copy').iterdir()) == [
      'config.json', 'model.safetensors', 'tokenizer.json',
      'tokenizer_config.json']
  assert json.loads(
      (tmp_path / 'copy' / 'config.json').read_text())['eos_token_id'] == 3


def test_the_keys_of_transformers_4_are_read_too(folder):
  new = weights.read_config(folder)
  edit_config(folder, rope_parameters=..., dtype=..., layer_types=...,
              rope_theta=50_000.0, rope_scaling=None, torch_dtype='float32')
  assert weights.read_config(folder) == new
  assert new == dataclasses.replace(
      tiny.CONFIG, rope_theta=50_000.0, rms_norm_eps=1e-5,
      max_position_embeddings=128)


@pytest.mark.parametrize('dtype', [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_read_into_float32(folder, dtype):
  _, whole = read(folder)

  def halve(tensors):
    for name in tensors:
      tensors[name] = tensors[name].astype(dtype)

  edit_tensors(folder, halve)
  _, params = read(folder)
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(
      x, np.asarray(y).astype(dtype).astype(np.float32)), params, whole)


def test_a_checkpoint_in_several_files_is_one(folder):
  _, whole = read(folder)
  tensors = safetensors.numpy.load_file(folder / 'model.safetensors')
  (folder / 'model.safetensors').unlink()
  names = sorted(tensors)
  for i, part in enumerate((names[:9], names[9:])):
    safetensors.numpy.save_file({n: tensors[n] for n in part},
                                folder / f'model-0000{i}-of-00002.safetensors')
  _, params = read(folder)
  jax.tree.map(np.testing.assert_array_equal, params, whole)


def truncate(folder):
  file = folder / 'model.safetensors'
  file.write_bytes(file.read_bytes()[:-100])


def only_pickle(folder):
  (folder / 'model.safetensors').rename(folder / 'pytorch_model.bin')


def misshape(tensors):
  tensors['model.norm.weight'] = np.zeros(31, np.float32)


@pytest.mark.parametrize('damage, error, message', [
    (shutil.rmtree, FileNotFoundError,
     'model.path must be a folder, but .*model is none'),
    (lambda f: (f / 'config.json').unlink(), FileNotFoundError,
     'must hold a config.json, but .*model has none'),
    (only_pickle, FileNotFoundError,
     r'must hold \*.safetensors, but .*model has none.*bin'),
    (lambda f: edit_config(f, architectures=['GPT2LMHeadModel']), ValueError,
     r"one of \['Qwen2ForCausalLM'\].*config.json.* names 'GPT2LMHeadModel'"),
    (lambda f: edit_config(f, architectures=...), ValueError, "names 'none'"),
    (lambda f: edit_config(f, hidden_size=...), ValueError,
     "config.json.*'hidden_size'"),
    (lambda f: (f / 'config.json').write_text('{'), ValueError, 'config.json'),
    (truncate, ValueError, 'model.safetensors cannot be read: .*Fetch it'),
    (lambda f: edit_tensors(f, lambda t: t.pop('model.norm.weight')),
     ValueError, 'model.norm.weight is missing'),
    (lambda f: edit_tensors(f, lambda t: t.update(x=np.zeros(1))), ValueError,
     r'x is not expected \(1 in all\)'),
    (lambda f: edit_tensors(f, misshape), ValueError,
     r'model.norm.weight is \(31,\), not \(32,\)'),
    (lambda f: edit_config(f, num_hidden_layers=3), ValueError,
     r'model.layers.2.*is missing.* \(12 in all\)'),
    (lambda f: edit_config(f, rope_parameters={
        'rope_type': 'yarn', 'factor': 4.0, 'rope_theta': 1e6}), ValueError,
     "rope_type in .*config.json is 'yarn'"),
    (lambda f: edit_config(f, rope_parameters=..., rope_theta=1e6,
                           rope_scaling={'type': 'yarn', 'factor': 4.0}),
     ValueError,
     "rope_type in .*config.json is 'yarn'"),
])
def test_a_damaged_folder_is_refused_and_the_damage_named(
    folder, damage, error, message):
  read(folder)
  damage(folder)
  with pytest.raises(error, match=message):
    read(folder)


def test_transformers_reads_what_we_write(tmp_path):
  """Live, where the parity extra is installed."""
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  params = tiny.params()
  weights.save(tmp_path, params, tiny.CONFIG, tokenizer_from=tmp_path, eos_id=0)
  model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
  tokens = np.random.default_rng(0).integers(0, 96, (2, 20))
  with torch.no_grad():
    theirs = model(torch.tensor(tokens)).logits.numpy()
  ours = transformer.logits(
      params, transformer.forward(params, tokens, tiny.CONFIG))
  np.testing.assert_allclose(ours, theirs, atol=2e-4)
