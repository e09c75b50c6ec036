# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A tiny checkpoint as revision 0acfcdd wrote it, for train_step_test.

Its state is a dict of dicts, and its modules lie elsewhere, so run it there:

  git worktree add ../before 0acfcdd
  PYTHONPATH=../before:tests python tests/golden/make_checkpoint.py

Writes checkpoint/ beside itself: a policy and a critic under AdamW. Parameters
are `tiny.params` of seeds 0 and 1; a parameter p has the moments p / 2 and
p * p; the policy has made 3 updates and the critic 5.
"""

import dataclasses
import pathlib
import shutil

import jax
import numpy as np
import optax
from searchrl import checkpoint
from searchrl import learner as learners
from searchrl import mesh as meshes
from searchrl import optimizer
from searchrl.models import critic
from searchrl.rl import algorithms
import tiny

FOLDER = pathlib.Path(__file__).parent / 'checkpoint'
CONFIG = dataclasses.replace(
    tiny.CONFIG, vocab_size=16, hidden_size=8, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, head_dim=4,
    intermediate_size=8)


def train_state(fresh, params, updates: int):
  """A network's state with known numbers, in the structure of a fresh one."""
  adam = optax.tree.get(fresh['opt_state'], 'mu')
  assert jax.tree.structure(adam) == jax.tree.structure(params)
  opt_state = optax.tree.set(
      fresh['opt_state'], mu=jax.tree.map(lambda p: p / 2, params),
      nu=jax.tree.map(lambda p: p * p, params), count=np.int32(updates))
  state = {'params': params, 'opt_state': opt_state,
           'updates': np.int32(updates)}
  return jax.tree.map(lambda x, like: jax.device_put(
      np.asarray(x, like.dtype), like.sharding), state, fresh)


def main() -> None:
  learner = learners.make(
      CONFIG, algorithms.ppo(), optimizer.adamw(learning_rate=1e-3),
      meshes.make(devices=jax.devices()[:1]), rows=4, length=24,
      critic_optimizer=optimizer.adamw(learning_rate=1e-3))
  params = tiny.params(CONFIG)
  fresh = learner.init(params)
  values = critic.init(tiny.params(CONFIG, seed=1))
  state = {'policy': train_state(fresh['policy'], params, 3),
           'critic': train_state(fresh['critic'], values, 5)}
  shutil.rmtree(FOLDER, ignore_errors=True)
  checkpoint.save(FOLDER, 2, state, {'step': 2})
  (FOLDER / '2' / 'state' / 'commit_success.txt').unlink()  # holds the path


if __name__ == '__main__':
  main()
