# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Updates whose optimiser's moments are in the hosts' memory."""

import dataclasses
import functools

import critic_test as critics
from critic_test import batch, learner, params  # noqa: F401
import jax
import learner_test as learning
import numpy as np
import pytest

from searchrl.runtime import checkpoint
from searchrl.runtime import mesh as meshes
from searchrl.training import optimizer
from searchrl.training import update_memory

# Small gradients are not scaled up, with their rounding.
ADAM = functools.partial(optimizer.adamw, learning_rate=1e-2, eps=1e-3)


def make(mesh, offload, **options):
  return critics.make(
      mesh, ADAM(), critic_optimizer=ADAM(), offload_optimizer=offload,
      **options)


def kinds_of(tree):
  return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)
          if leaf.ndim}


def assert_on_host(state):
  for trained in state.values():
    assert kinds_of(trained.opt_state) == {'pinned_host'}
    assert kinds_of(trained.params) == {'device'}


@pytest.fixture(params=[(1, 1, 1), (2, 2, 2)], ids=['one', 'eight'])
def mesh(request):
  devices = jax.devices()[:int(np.prod(request.param))]
  return meshes.make(**dict(zip(meshes.AXES, request.param)), devices=devices)


def test_updates_are_those_with_moments_on_the_devices(
    mesh, batch, params):  # noqa: F811
  results = []
  for offload in (False, True):
    learner = make(mesh, offload, critic_warmup=1)  # noqa: F811
    state = learner.init(params)
    metrics = []
    for _ in range(3):
      state, measured = learning.update(learner, state, batch)
      metrics.append(measured)
    results.append((state, metrics))
  (there, metrics), (here, same) = results
  assert_on_host(here)
  assert kinds_of(there) == {'device'}
  for one, two in zip(metrics, same, strict=True):
    assert one.keys() == two.keys()
    for name in one:
      np.testing.assert_allclose(two[name], one[name], rtol=1e-4, atol=1e-6)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4,
                                 atol=1e-5),
               *map(jax.device_get, (here, there)))
  assert {name: int(x.updates) for name, x in here.items()} == dict(
      policy=2, critic=3)


def test_a_checkpoint_brings_the_moments_back_to_the_host(
    mesh, batch, params, tmp_path):  # noqa: F811
  learner = make(mesh, True)  # noqa: F811
  state, _ = learning.update(learner, learner.init(params), batch)
  digest = checkpoint.digest(state)
  checkpoint.save(tmp_path, 1, state, {})
  _, restored, _ = checkpoint.restore(tmp_path, learner.init(params))
  assert_on_host(restored)
  assert checkpoint.digest(restored) == digest
  one, two = (learning.update(learner, s, batch)[0] for s in (state, restored))
  assert checkpoint.digest(one) == checkpoint.digest(two)
  # A run may also go on without this option.
  _, moved, _ = checkpoint.restore(
      tmp_path, make(mesh, False).train_step.abstract_state())
  assert kinds_of(moved) == {'device'}
  assert checkpoint.digest(moved) == digest


def test_a_gradient_that_is_not_finite_changes_nothing(
    batch, params):  # noqa: F811
  learner = make(None, True)  # noqa: F811
  state = learner.init(params)
  before = jax.device_get(state)
  bad = dataclasses.replace(
      batch, rewards=np.full_like(batch.rewards, np.nan))
  state, metrics = learning.update(learner, state, bad)
  assert metrics['actor/updates_left_out'] == 1
  assert metrics['critic/updates_left_out'] == 1
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)
  assert_on_host(state)


def test_the_programs_of_an_update_take_the_arguments_of_a_plan():
  learner = make(None, True)  # noqa: F811
  calls = update_memory.programs(learner, critics.ROWS)
  assert len(calls) == 4  # a gradient and an optimiser step for each network
  for program, arguments in calls:
    program.lower(*arguments)
  (program, arguments), = update_memory.programs(
      make(None, False), critics.ROWS)
  assert program.lower(*arguments)
