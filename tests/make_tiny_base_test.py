# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""make_tiny_base: it resumes exactly, and goes on from another model."""

import hashlib
import itertools
import shutil

import jax
import numpy as np
import pytest
from searchrl.agent import tokenizer as tokenizers
from searchrl.models import transformer
from searchrl.models import weights
from searchrl.world import names
from tools import induction
from tools import make_tiny_base
from tools import tiny_base


@pytest.mark.slow
@pytest.mark.long
def test_interrupted_making_ends_in_the_same_bytes(tmp_path):
  config = tiny_base.get_config('smoke')
  make_tiny_base.run(config, str(tmp_path / 'whole'))
  model = tmp_path / 'whole' / 'model'
  shape = weights.read_config(str(model))
  weights.load(str(model), shape)
  assert tokenizers.load(str(model)).vocab_size == shape.vocab_size == 512
  # As if it had been killed after the last checkpoint but one.
  broken = tmp_path / 'broken'
  shutil.copytree(tmp_path / 'whole', broken)
  steps = sorted(int(p.name) for p in (broken / 'checkpoints').iterdir())
  shutil.rmtree(broken / 'checkpoints' / str(steps[-1]))
  shutil.rmtree(broken / 'model')
  make_tiny_base.run(config, str(broken))
  digests = {hashlib.sha256(
      (folder / 'model' / 'model.safetensors').read_bytes()).hexdigest()
             for folder in (tmp_path / 'whole', broken)}
  assert len(digests) == 1
  # Another kind of model is made of it.
  config = tiny_base.get_config()
  config.model.path = str(model)
  config.optimizer.warmup_steps = 1
  smaller = tiny_base.get_config('smoke')
  config.lessons.stages = smaller.lessons.stages
  config.card.scores = smaller.card.scores
  make_tiny_base.run(config, str(tmp_path / 'base'))
  assert weights.read_config(str(tmp_path / 'base' / 'model')) == shape
  text = (tmp_path / 'base' / 'model' / 'README.md').read_text()
  assert f'Its training began with {model}.' in ' '.join(text.split())
  assert '| search | known | greedy |' in text


def test_a_tokenizer_cuts_new_words_into_a_stem_and_an_ending(tmp_path):
  config = tiny_base.get_config('instruct')
  make_tiny_base.make_tokenizer(tmp_path, **config.tokenizer)
  tokenizer = tokenizers.load(str(tmp_path))

  def pieces(source):
    rng = np.random.default_rng(1)
    words = [word for kind in names.KINDS for name in itertools.islice(
        names.names(rng, kind, source), 20) for word in name.split()]
    return np.mean([len(tokenizer.encode(f' {word}')) for word in words])
  assert pieces('known') == 1.0
  assert pieces('common') < 1.05
  assert pieces('unseen') < 2.0  # 2.2 by the merges of a few worlds alone


@pytest.mark.parametrize('size', ['laptop', 'raw', 'instruct', 'instruct/4m'])
def test_each_model_says_how_it_was_made(size):
  config = tiny_base.get_config(size)
  assert bool(config.model.path) == (not size.startswith('instruct'))
  assert config.card.command.startswith('tools/tiny_base.py')


@pytest.mark.slow
@pytest.mark.parametrize('size, millions', [
    ('0.25m', 0.25), ('1m', 1.1), ('4m', 4.4)])
def test_sizes_have_as_many_parameters_as_they_say(size, millions):
  config = tiny_base.get_config(f'instruct/{size}')
  shape = transformer.TransformerConfig(
      vocab_size=config.tokenizer.vocab_size, **config.model.shape)
  params = transformer.abstract(shape)
  count = sum(np.prod(x.shape) for x in jax.tree.leaves(params))
  assert count / 1e6 == pytest.approx(millions, rel=0.06)
  planted = induction.plant(
      transformer.init(shape, jax.random.key(0)), shape, seed=0)
  assert jax.tree.structure(planted) == jax.tree.structure(params)
