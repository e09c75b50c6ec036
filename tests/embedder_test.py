# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""embedder: a text's vector is that of the text alone, whatever the batch."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import tokenizers

from searchrl.encoders import embedder
from searchrl.models import encoder
from searchrl.runtime import mesh as meshes
import tiny_bert

DEVICES = 8

TEXTS = ('a river', '', 'b' * 200, 'x y z 1 2 3', '\ud800 half', 'Tarn',
         *(f'w{i} ' * (i % 23) for i in range(90)))
SETTINGS = embedder.Settings(max_length=48, batch_tokens=384)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tiny_bert.make(tmp_path_factory.mktemp('encoder') / 'bert')


def alone(folder, text, prefix, pooling='mean'):
  """One text, cut, without any padding."""
  found = tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json'))
  found.enable_truncation(48)
  ids = found.encode(prefix + text).ids
  config = encoder.read_config(folder)
  hidden = np.asarray(encoder.forward(
      encoder.load(folder, config), np.array([ids]), np.ones((1, len(ids))),
      config), np.float64)[0]
  row = hidden.mean(0) if pooling == 'mean' else hidden[0]
  return row / np.linalg.norm(row)


@pytest.mark.parametrize('kind', ['query', 'passage'])
def test_vectors_are_those_of_each_text_alone(folder, kind):
  texts = TEXTS[:9]
  encode = embedder.load(folder, SETTINGS)
  got = encode(texts, kind)
  assert got.dtype == np.float32 and encode.dim == 32
  clean = [text.replace('\ud800', '?') for text in texts]
  expected = [alone(folder, text, f'{kind}: ') for text in clean]
  np.testing.assert_allclose(got, expected, atol=2e-6)


def with_ids(folder, target):
  """A copy of a folder whose tokenizer has one id more than the model."""
  shutil.copytree(folder, target)
  tokenizer = tokenizers.Tokenizer.from_file(str(target / 'tokenizer.json'))
  words = encoder.read_config(str(target)).vocab_size
  tokenizer.add_tokens([f'new{n}' for n in range(
      words + 1 - tokenizer.get_vocab_size())])
  tokenizer.save(str(target / 'tokenizer.json'))
  return target


def test_a_tokenizer_of_another_model_is_refused(folder, tmp_path):
  words = encoder.read_config(str(folder)).vocab_size
  with pytest.raises(ValueError, match='must belong together, but .* has '
                     f'{words + 1} ids and the model only {words}. Copy'):
    embedder.load(with_ids(folder, tmp_path / 'bert'), SETTINGS)


@pytest.mark.parametrize('modes, warns', [
    ({'pooling_mode_cls_token': True, 'pooling_mode_mean_tokens': False}, True),
    ({'pooling_mode_mean_tokens': True, 'word_embedding_dimension': 1}, False),
    ({'pooling_mode_lasttoken': True}, True), ({}, False)])
def test_another_pooling_than_that_of_the_folder_is_a_warning(
    folder, tmp_path, caplog, modes, warns):
  shutil.copytree(folder, tmp_path / 'bert')
  (tmp_path / 'bert' / '1_Pooling').mkdir()
  (tmp_path / 'bert/1_Pooling/config.json').write_text(json.dumps(modes))
  embedder.load(tmp_path / 'bert', SETTINGS)
  assert ("but encoder.pooling is 'mean'" in caplog.text) == warns


def test_pooling_and_prefixes_are_the_settings(folder):
  settings = embedder.Settings(
      max_length=48, batch_tokens=384, pooling='cls', query_prefix='find ',
      passage_prefix='')
  encode = embedder.load(folder, settings)
  np.testing.assert_allclose(
      encode(['a river'], 'query'), [alone(folder, 'a river', 'find ', 'cls')],
      atol=2e-6)
  np.testing.assert_allclose(
      encode(['a river'], 'passage'), [alone(folder, 'a river', '', 'cls')],
      atol=2e-6)


def test_order_company_and_devices_change_nothing(folder):
  encode = embedder.load(folder, SETTINGS)
  together = encode(TEXTS, 'passage')
  np.testing.assert_allclose(
      encode(TEXTS[::-1], 'passage')[::-1], together, atol=1e-6)
  np.testing.assert_allclose(
      np.concatenate([encode([t], 'passage') for t in TEXTS[:5]]),
      together[:5], atol=1e-6)
  one = embedder.load(folder, SETTINGS, mesh=meshes.make(
      devices=jax.local_devices()[:1]))
  np.testing.assert_allclose(one(TEXTS, 'passage'), together, atol=1e-6)
  assert encode([], 'query').shape == (0, 32)


@pytest.mark.parametrize('devices', [1, None])
def test_a_querys_vector_is_the_same_to_the_last_bit_in_any_company(
    folder, devices):
  encode = embedder.load(folder, SETTINGS, mesh=meshes.make(
      devices=jax.local_devices()[:devices]))
  together = encode(TEXTS, 'query')
  for texts in (TEXTS[::-1], TEXTS[:1], TEXTS[5:8], TEXTS[3:70]):
    found = dict(zip(texts, encode(texts, 'query')))
    for text, row in found.items():
      np.testing.assert_array_equal(row, together[TEXTS.index(text)])


def test_an_encoder_for_a_new_index_is_as_e5_and_on_one_device(tmp_path):
  folder = tiny_bert.make(tmp_path / 'bert')
  load_encoder = embedder.cached_loader()
  with pytest.raises(ValueError, match=r'lie in \[8, 64\]'):  # E5's 256 tokens
    load_encoder(path=str(folder))
  shipped = load_encoder(path='tiny_e5')
  assert shipped.about['query_prefix'] == 'query: '
  assert shipped.about['digest'] == embedder.digest(
      embedder.locate('tiny_e5'), embedder.Settings())
  assert shipped._mesh.size == 1


def test_a_loader_keeps_its_last_encoder_and_shares_it_with_no_other(tmp_path):
  first, second = (embedder.load(
      tiny_bert.make(tmp_path / name), SETTINGS).about for name in 'ab')
  load_encoder = embedder.cached_loader()
  kept = load_encoder(first)
  assert load_encoder(dict(first)) is kept
  assert embedder.cached_loader()(first) is not kept
  assert load_encoder(second).about['path'] == second['path']
  assert load_encoder(first) is not kept  # the second took its place


def test_few_shapes_are_compiled(folder):
  encode = embedder.load(folder, SETTINGS)
  for count in range(1, 60, 7):
    encode(TEXTS[:count], 'passage')
  assert encode._embed._cache_size() <= 3  # widths 16, 32 and 48


def test_bfloat16_is_an_approximation(folder):
  settings = dataclasses.replace(SETTINGS, dtype='bfloat16')
  got = embedder.load(folder, settings)(TEXTS[:4], 'query')
  exact = embedder.load(folder, SETTINGS)(TEXTS[:4], 'query')
  assert 0 < np.abs(got - exact).max() < .05


@pytest.mark.parametrize('change, message', [
    (dict(pooling='max'), "pooling must be one of mean, cls, but is 'max'"),
    (dict(max_length=65), r'lie in \[8, 64\].* but is 65'),
    (dict(max_length=7), 'but is 7'), (dict(dtype='int8'), "but is 'int8'"),
    (dict(batch_tokens=40), 'at least max_length=48, but is 40')])
def test_settings_are_checked_before_weights_are_read(
    folder, change, message, monkeypatch):
  monkeypatch.setattr(encoder, 'load', None)
  settings = dict(max_length=48, batch_tokens=384) | change
  with pytest.raises(ValueError, match=message):
    embedder.load(folder, embedder.Settings(**settings))


def test_a_folder_without_tokenizer_or_with_a_broken_one_is_named(tmp_path):
  folder = tiny_bert.make(tmp_path / 'bert')
  (folder / 'tokenizer.json').write_text('{')
  with pytest.raises(ValueError, match='tokenizer.json must be a tokenizer'):
    embedder.load(folder, SETTINGS)
  (folder / 'tokenizer.json').unlink()
  with pytest.raises((ValueError, FileNotFoundError), match='tokenizer.json'):
    embedder.load(folder, SETTINGS)


def test_the_encoder_of_an_index_is_found_again_and_another_refused(tmp_path):
  folder = tiny_bert.make(tmp_path / 'bert')
  first = embedder.load(folder, SETTINGS)
  about = json.loads(json.dumps(first.about))
  load_encoder = embedder.cached_loader()
  again = load_encoder(about)
  np.testing.assert_array_equal(again(TEXTS, 'query'), first(TEXTS, 'query'))
  moved = folder.rename(tmp_path / 'moved')
  with pytest.raises(FileNotFoundError):
    load_encoder(about)
  assert load_encoder(about, path=str(moved)).about['digest'] == (
      about['digest'])
  raw = (moved / 'model.safetensors').read_bytes()
  (moved / 'model.safetensors').write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
  with pytest.raises(ValueError, match='must be the one that made the index'):
    load_encoder(about, path=str(moved))
  with pytest.raises(ValueError, match="but is of kind 'ngrams'"):
    load_encoder({'kind': 'ngrams'})


def test_what_changes_vectors_changes_the_digest(folder):
  changes = ({}, dict(query_prefix=''), dict(passage_prefix=''),
             dict(pooling='cls'), dict(max_length=64), dict(dtype='bfloat16'))
  digests = {embedder.digest(folder, embedder.Settings(**change))
             for change in changes}
  assert len(digests) == 6
  assert embedder.digest(folder, embedder.Settings(batch_tokens=512)) == (
      embedder.digest(folder, embedder.Settings()))
