# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""configs: every size of every recipe is a run that could be built."""

import importlib
import json
import pathlib

import pytest

from configs import common
from searchrl.experiment import build as builds
from searchrl.jobs import plan

RECIPES = sorted(
    path.stem for path in pathlib.Path(common.__file__).parent.glob('*.py')
    if 'config.algorithm' in path.read_text() and path.stem != 'common')
CONFIG_JSON = dict(
    architectures=['Qwen2ForCausalLM'], vocab_size=152_064, hidden_size=3584,
    num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
    intermediate_size=18_944, rope_theta=1e6, tie_word_embeddings=False)


def config_of(recipe, size):
  return importlib.import_module(f'configs.{recipe}').get_config(size)


@pytest.mark.parametrize('recipe', RECIPES)
def test_the_papers_size_of_every_recipe_fits_64_chips(recipe, tmp_path):
  """Built, checked and planned, all but the weights."""
  config = config_of(recipe, 'qwen2.5-7b')
  assert config.model.path == 'Qwen/Qwen2.5-7B'
  (tmp_path / 'config.json').write_text(json.dumps(CONFIG_JSON))
  config.model.path = str(tmp_path)
  config.plan.update(devices='v5p-64', compile=False)
  found = plan.make(config)
  assert found.fits and found.parameters == 7_615_616_512
  steps = config.optimizer.warmup_steps / config.learner.minibatches
  assert steps == 286
  algorithm = builds.algorithm(config)
  assert config.learner.minibatches == 1 or not algorithm.one_update
  assert not config.train.max_rollouts


@pytest.mark.parametrize('size', sorted(common.MODELS))
def test_models_by_size(size):
  config = config_of('dspo', size)
  assert config.model.path.lower() == f'qwen/{size}'
  instruct = size.endswith('-instruct')
  assert ('tools:dspo' in config.dialogue) == instruct
  assert ('chat:' in config_of('grpo', size).dialogue) == instruct


def test_an_unknown_size_names_the_known():
  with pytest.raises(ValueError, match="'smoke' or one of .'qwen2.5-3b'.* but "
                                       "is 'qwen2.5-70b'"):
    common.get_config('qwen2.5-70b')
