# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""encoder: the vectors of transformers' BERT; padding changes nothing."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy

from searchrl.models import encoder
from searchrl.models import tensors
from searchrl.runtime import mesh as meshes

DEVICES = 8

GOLDEN = pathlib.Path(__file__).parent / 'golden' / 'bert'


@pytest.fixture(scope='module')
def config():
  return encoder.read_config(GOLDEN)


@pytest.fixture(scope='module')
def params(config):
  return encoder.load(GOLDEN, config)


@pytest.fixture(scope='module')
def golden():
  return dict(np.load(GOLDEN / 'golden.npz'))


@pytest.fixture(scope='module')
def embed(config):
  return jax.jit(lambda params, tokens, mask, **options: encoder.embed(
      params, tokens, mask, config, **options), static_argnames='dtype')


@pytest.fixture
def folder(tmp_path):
  return shutil.copytree(GOLDEN, tmp_path / 'bert')


def edit_tensors(folder, edit):
  values = safetensors.numpy.load_file(folder / 'model.safetensors')
  safetensors.numpy.save_file(edit(values), folder / 'model.safetensors')


def test_embeddings_and_hidden_states_are_those_of_transformers(
    config, params, golden, embed):
  tokens, mask = golden['tokens'], golden['mask']
  got = embed(params, tokens, mask)
  np.testing.assert_allclose(got, golden['embeddings'], atol=1e-5)
  np.testing.assert_allclose(np.linalg.norm(got, axis=-1), 1, atol=1e-6)
  hidden = jax.jit(lambda params: encoder.forward(
      params, tokens, mask, config))(params)
  seen = mask.astype(bool)
  np.testing.assert_allclose(hidden[seen], golden['hidden'][seen], atol=2e-5)


def test_padding_and_other_rows_change_nothing(params, golden, embed):
  tokens, mask = golden['tokens'], golden['mask']
  together = embed(params, tokens, mask)
  for row, length in enumerate(mask.sum(-1)):
    alone = embed(params, tokens[row:row + 1, :length],
                  mask[row:row + 1, :length])
    np.testing.assert_allclose(alone[0], together[row], atol=1e-6)
  other = np.where(mask, tokens, 7)
  np.testing.assert_array_equal(embed(params, other, mask > 0), together)


def test_an_empty_row_is_zero_and_has_no_gradient(params, config, golden):
  tokens, mask = golden['tokens'], np.zeros_like(golden['mask'])
  run = lambda params: encoder.embed(params, tokens, mask, config)
  assert not run(params).any()
  grads = jax.grad(lambda params: run(params).sum())(params)
  assert not any(np.any(x) for x in jax.tree.leaves(grads))


def test_bfloat16_is_an_approximation(params, golden, embed):
  got = embed(params, golden['tokens'], golden['mask'], dtype=jnp.bfloat16)
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, golden['embeddings'], atol=0.03)


def test_the_gradient_is_the_slope(params, config, golden):
  tokens, mask = golden['tokens'], golden['mask']

  rng = np.random.default_rng(0)
  aim = jnp.asarray(rng.normal(size=golden['embeddings'].shape), jnp.float32)

  @jax.jit
  def similarity(params):
    return jnp.vdot(encoder.embed(params, tokens, mask, config), aim)

  grads = jax.grad(similarity)(params)
  norm = optax.tree.norm(grads)
  # Half the gradient to all of it, at random: no weights cancel each other.
  direction = jax.tree.map(
      lambda g: g / norm * rng.uniform(.5, 1, g.shape).astype(np.float32),
      grads)
  moved = lambda h: jax.tree.map(lambda x, d: x + h * d, params, direction)
  slope = (similarity(moved(1e-2)) - similarity(moved(-1e-2))) / 2e-2
  along = optax.tree.vdot(grads, direction)
  np.testing.assert_allclose(along, slope, rtol=1e-3)


def test_older_names_and_what_is_not_needed_are_understood(
    folder, config, params):
  def older(values):
    values = {'bert.' + name.replace('LayerNorm.weight', 'LayerNorm.gamma')
              .replace('LayerNorm.bias', 'LayerNorm.beta'): value
              for name, value in values.items() if not
              name.startswith('pooler')}
    return values | {
        'bert.embeddings.position_ids': np.arange(64)[None],
        'bert.pooler.dense.bias': np.zeros(32), 'cls.predictions.bias':
        np.zeros(96)}

  edit_tensors(folder, older)
  jax.tree.map(np.testing.assert_array_equal,
               encoder.load(folder, config), params)


def test_each_device_is_given_its_slice(config, params):
  mesh = meshes.make(data=1, fsdp=2, tensor=4)
  loaded = encoder.load(GOLDEN, config, dtype=jnp.bfloat16, sharding_of=lambda
                        axes: meshes.sharding(mesh, axes))
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(
      x, y.astype(jnp.bfloat16)), loaded, params)
  kernel = loaded['layers']['up']['kernel']
  assert {s.data.shape for s in kernel.addressable_shards} == {(2, 16, 12)}


def test_init_has_the_tree_of_a_checkpoint(config, params):
  new = jax.jit(lambda key: encoder.init(config, key))(jax.random.key(0))
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(x.shape, y.shape),
               new, params)
  kernel = np.asarray(new['layers']['q']['kernel'])
  assert np.abs(kernel[0] - kernel[1]).max() > 1e-3


def edit_config(**changes):
  def edit(folder):
    raw = json.loads((folder / 'config.json').read_text()) | changes
    (folder / 'config.json').write_text(json.dumps(
        {k: v for k, v in raw.items() if v is not ...}))
  return edit


@pytest.mark.parametrize('damage, message', [
    (edit_config(model_type='roberta'), "must be 'bert', but is 'roberta'"),
    (edit_config(model_type=...), "must be 'bert', but is None"),
    (edit_config(hidden_act='gelu_new'), "must be 'gelu', but is 'gelu_new'"),
    (edit_config(position_embedding_type='relative_key'), "'absolute'"),
    (edit_config(vocab_size=...), "config.json .*'vocab_size'"),
    (edit_config(num_attention_heads=5), 'must divide hidden_size'),
    (edit_config(num_attention_heads=0), 'must be a whole number from 1'),
    (edit_config(num_hidden_layers=3), 'encoder.layer.2.*is missing'),
    (lambda f: edit_tensors(f, lambda t: t | {'x': np.zeros(1)}),
     'x is not expected'),
])
def test_a_damaged_folder_is_refused_and_the_damage_named(
    folder, damage, message, monkeypatch):
  damage(folder)
  monkeypatch.setattr(tensors, '_read', None)  # nothing is built before
  with pytest.raises(ValueError, match=message):
    encoder.load(folder, encoder.read_config(folder))


def test_texts_longer_than_the_table_are_refused(params, config):
  with pytest.raises(ValueError, match='at most 64 tokens.* but have 65'):
    encoder.embed(params, np.zeros((1, 65), int), np.ones((1, 65)), config)


def test_what_is_saved_is_loaded_again(folder, config, params, tmp_path):
  (folder / 'tokenizer.json').write_text('{}')
  new = tmp_path / 'new'
  for _ in range(2):  # the second replaces the first
    encoder.save(new, params, config, tokenizer_from=folder)
  assert encoder.read_config(new) == config
  jax.tree.map(np.testing.assert_array_equal, encoder.load(new, config), params)
  assert {file.name for file in new.iterdir()} == {
      'config.json', 'model.safetensors', 'tokenizer.json'}
  encoder.save(tmp_path / 'half', params, config, tokenizer_from=folder,
               dtype='bfloat16')
  jax.tree.map(
      lambda x, y: np.testing.assert_array_equal(x, y.astype(jnp.bfloat16)),
      encoder.load(tmp_path / 'half', config, dtype=jnp.bfloat16), params)


def test_a_folder_of_something_else_is_not_replaced(config, params, tmp_path):
  (tmp_path / 'mine' / 'data').mkdir(parents=True)
  with pytest.raises(ValueError, match='holds the folder data'):
    encoder.save(tmp_path / 'mine', params, config, tokenizer_from=tmp_path)
