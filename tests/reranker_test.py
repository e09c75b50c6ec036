# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""reranker: a cross-encoder in a folder scores pairs as one at a time."""

import dataclasses
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy
import tiny
import tokenizers
from tokenizers import models as tokenizer_models
from tokenizers import pre_tokenizers
from tokenizers import processors

from searchrl.encoders import reranker
from searchrl.models import crossencoder
from searchrl.models import encoder
from searchrl.search import engines
from searchrl.search import rerank
from searchrl.search.corpus import Corpus
from searchrl.trajectory import Passage, Query

GOLDEN = pathlib.Path(__file__).parent / 'golden' / 'bert'
WORDS = 'river sea tarn garonne title a that joins the ( ) : "'.split()


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return make_folder(tmp_path_factory.mktemp('reranker'))


def make_folder(parent):
  """The golden encoder with a head, and a tokenizer of a few words."""
  path = shutil.copytree(GOLDEN, parent / 'bert')
  width = encoder.read_config(str(path)).hidden_size
  values = safetensors.numpy.load_file(path / 'model.safetensors')
  values = {name: value for name, value in values.items()
            if 'pooler' not in name}
  rng = np.random.default_rng(0)
  for name, shape in (('bert.pooler.dense.weight', (width, width)),
                      ('bert.pooler.dense.bias', (width,)),
                      ('classifier.weight', (1, width)),
                      ('classifier.bias', (1,))):
    values[name] = rng.normal(0, 0.3, shape).astype(np.float32)
  safetensors.numpy.save_file(values, path / 'model.safetensors')
  vocabulary = {word: i for i, word in enumerate(
      ['[PAD]', '[UNK]', '[CLS]', '[SEP]', *WORDS])}
  tokenizer = tokenizers.Tokenizer(
      tokenizer_models.WordLevel(vocabulary, unk_token='[UNK]'))
  tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  tokenizer.post_processor = processors.TemplateProcessing(
      single='[CLS] $A [SEP]', pair='[CLS] $A [SEP] $B:1 [SEP]:1',
      special_tokens=[('[CLS]', 2), ('[SEP]', 3)])
  tokenizer.save(str(path / 'tokenizer.json'))
  return path


@pytest.mark.parametrize('key, message', [
    ('vocab_size', 'has 17 ids and the model only 16'),
    ('type_vocab_size', 'has 2 segments and the model only 1')])
def test_a_tokenizer_of_another_model_is_refused(
    folder, tmp_path, monkeypatch, key, message):
  shape = dataclasses.replace(
      encoder.read_config(str(folder)), **{key: 16 if 'id' in message else 1})
  monkeypatch.setattr(encoder, 'read_config', lambda path: shape)
  with pytest.raises(ValueError, match=message):
    reranker.load(str(folder), max_length=32)


def oracle(params, config, tokens, segments):
  """One pair without padding; the head in plain numpy."""
  hidden = encoder.forward(
      params['encoder'], np.array([tokens]), np.ones((1, len(tokens))), config,
      segments=np.array([segments]))
  first = np.asarray(hidden, np.float64)[0, 0]
  pooled = np.tanh(first @ np.asarray(params['pooler']['kernel'], np.float64) +
                   np.asarray(params['pooler']['bias'], np.float64))
  head = params['classifier']
  return (pooled @ np.asarray(head['kernel'], np.float64)[:, 0] +
          float(head['bias'][0]))


def test_scores_are_those_of_single_pairs(folder):
  pairs = [('river', '(Title: "sea") a river'), ('tarn', 'the sea'),
           ('\ud800', ''), ('river', 'joins ' * 100), ('a', 'that'),
           ('tarn', 'the sea')]
  config = encoder.read_config(str(folder))
  params = crossencoder.load(str(folder), config)
  tokenizer = tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json'))
  tokenizer.enable_truncation(40)
  coded = [tokenizer.encode(first.replace('\ud800', '?'), second)
           for first, second in pairs]
  expected = [oracle(params, config, c.ids, c.type_ids) for c in coded]
  for batch in (1, 4, 32):
    scores = reranker.load(str(folder), max_length=40, batch=batch)(pairs)
    np.testing.assert_allclose(scores, expected, atol=1e-5)
  assert np.ptp(expected) > 0.1 and len(coded[3].ids) == 40


def test_which_text_is_which_matters(folder):
  score = reranker.load(str(folder), max_length=40)
  one, other = score([('river', 'the sea'), ('the sea', 'river')])
  assert abs(one - other) > 1e-3


def test_two_labels_are_refused(folder, tmp_path):
  path = shutil.copytree(folder, tmp_path / 'bert')
  values = safetensors.numpy.load_file(path / 'model.safetensors')
  width = values['classifier.weight'].shape[1]
  values['classifier.weight'] = np.zeros((2, width), np.float32)
  safetensors.numpy.save_file(values, path / 'model.safetensors')
  with pytest.raises(ValueError, match='classifier.weight is '):
    reranker.load(str(path), max_length=40)


def test_options_are_checked(folder, tmp_path):
  with pytest.raises(ValueError, match=r'max_length must lie in \[8, 64\]'):
    reranker.load(str(folder), max_length=65)
  path = shutil.copytree(folder, tmp_path / 'bert')
  (path / 'tokenizer.json').write_text(json.dumps({}))
  with pytest.raises(ValueError, match='must be a tokenizer'):
    reranker.load(str(path), max_length=40)


def test_init_and_axes_have_the_tree_of_a_checkpoint(folder):
  config = encoder.read_config(str(folder))
  loaded = crossencoder.load(str(folder), config)
  new = crossencoder.init(config, jax.random.key(0))
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(x.shape, y.shape),
               new, loaded)
  axes = crossencoder.logical_axes(config)
  jax.tree.map(lambda x, names: np.testing.assert_equal(x.ndim, len(names)),
               new, axes)


def test_a_search_reranks_by_it(folder):
  corpus = Corpus(tuple(Passage(str(i), 'T', text) for i, text in enumerate(
      ['river sea', 'river that joins', 'sea tarn river a'])))
  search = engines.make('rerank', corpus, load_judge=reranker.load,
                        engine=dict(name='bm25'), model=str(folder),
                        max_length=40, batch=2, candidates=3)
  passages, = search([Query('river', 3, tiny.question())])
  score = reranker.load(str(folder), max_length=40)
  expected = {p.id: float(s) for p, s in zip(corpus, score(
      [('river', rerank.pair_text(p)) for p in corpus]))}
  assert [p.id for p in passages] == sorted(
      expected, key=lambda uid: -expected[uid])
  for p in passages:
    np.testing.assert_allclose(p.score, expected[p.id], atol=1e-5)
