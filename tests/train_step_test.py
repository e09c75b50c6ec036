# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""train_step: its state is saved under the names that it always had.

golden/checkpoint was written by revision 0acfcdd, whose state was a dict of
dicts; golden/make_checkpoint.py made it, and shows how.
"""

import dataclasses
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import tiny

from searchrl.models import critic
from searchrl.rl import algorithms
from searchrl.runtime import checkpoint
from searchrl.runtime import mesh as meshes
from searchrl.training import learner as learners
from searchrl.training import optimizer
from searchrl.training.train_step import TrainState

GOLDEN = pathlib.Path(__file__).parent / 'golden' / 'checkpoint'
CONFIG = dataclasses.replace(
    tiny.CONFIG, vocab_size=16, hidden_size=8, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, head_dim=4,
    intermediate_size=8)


@pytest.fixture
def old(tmp_path):
  return shutil.copytree(GOLDEN, tmp_path / 'old')


def initial_state():
  learner = learners.make(
      CONFIG, algorithms.ppo(), optimizer.adamw(learning_rate=1e-3),
      meshes.make(devices=jax.devices()[:1]), rows=4, length=24,
      critic_optimizer=optimizer.adamw(learning_rate=1e-3))
  return learner.init(tiny.params(CONFIG, seed=7))


def leaf_names(folder):
  file, = folder.glob('*/integrity.json')
  return json.loads(file.read_text())['leaves']


def assert_equal(one, two):
  jax.tree.map(np.testing.assert_array_equal, one, two)


def test_a_state_of_dicts_is_restored(old):
  step, state, extra = checkpoint.restore(old, initial_state())
  assert (step, extra) == (2, {'step': 2})
  networks = {'policy': (tiny.params(CONFIG), 3),
              'critic': (critic.init(tiny.params(CONFIG, seed=1)), 5)}
  assert state.keys() == networks.keys()
  for network, (params, updates) in networks.items():
    restored = state[network]
    assert isinstance(restored, TrainState) and restored.updates == updates
    assert_equal(restored.params, params)
    adam = restored.opt_state[1][0]
    assert adam.count == updates
    assert_equal(adam.mu, jax.tree.map(lambda p: p / 2, params))
    assert_equal(adam.nu, jax.tree.map(lambda p: p * p, params))


def test_a_state_is_saved_under_the_same_names(old, tmp_path):
  _, state, _ = checkpoint.restore(old, initial_state())
  checkpoint.save(tmp_path / 'new', 2, state, {})
  assert leaf_names(tmp_path / 'new') == leaf_names(old)
  assert 'policy/params/embed/embedding' in leaf_names(old)


def test_a_policy_is_restored_without_the_rest(old):
  wanted = {'policy': {'params': jax.eval_shape(lambda: tiny.params(CONFIG))}}
  _, state, _ = checkpoint.restore(old, wanted, partial=True)
  assert_equal(state['policy']['params'], tiny.params(CONFIG))
  saved = initial_state()
  for network, trained in saved.items():  # and alone from a new checkpoint
    checkpoint.save(old / network, 0, saved, {})
    _, state, _ = checkpoint.restore(
        old / network, {network: {'params': trained.params}}, partial=True)
    assert_equal(state[network]['params'], trained.params)
