# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The experts in trajectories are those of a forward pass of the sampler."""

import dataclasses
import functools

import contexts_test
import experts_learner_test as learning
import fakes
import jax
import numpy as np
import pallas
import pytest
import tiny

from searchrl.agent import dialogue as dialogues
from searchrl.models import policy_logprobs
from searchrl.models import transformer
from searchrl.models.inference import engine as engines
from searchrl.rollouts import driver
from searchrl.rollouts import routing
from searchrl.rollouts import sampler as samplers
from searchrl.rollouts import weight_sync
from searchrl.runtime import mesh as meshes
from searchrl import trajectory as trajectory_lib
from searchrl.trajectory import Request

DEVICES = 8

CONFIG = learning.CONFIG
DIALOGUE = dataclasses.replace(
    dialogues.tags('q: {question}\n'), parse=fakes.by_length,
    stop_strings=('th', '>', 'e', 'ar'))
BUDGETS = driver.Budgets(max_turns=8, max_new_tokens=16, max_prompt_tokens=60,
                         passage_tokens=80, top_k=1)


@pytest.fixture(scope='module', name='params')
def fixture_params():
  return jax.device_get(tiny.params(CONFIG))


def play(params, config=CONFIG, slots=6, length=120, when_full='stop',
         schedule=driver.Schedule(), weights=None, search=None, **options):
  """Trajectories of four questions, four each; and their engine."""
  engine = engines.Engine(
      config, slots=slots, length=length, tile=16, tiles=(2, 8), steps=6,
      records=True, **options, stop_table=samplers.compile_stops(
          DIALOGUE, fakes.TOKENIZER, config.vocab_size))
  sampler = samplers.Sampler(
      config, fakes.TOKENIZER, DIALOGUE, dataclasses.replace(
          BUDGETS, when_full=when_full), engine, weight_sync.Synced, schedule)
  requests = [Request(tiny.question(f'{n}', 'where? ' * (n + 2)), sample)
              for n in range(4) for sample in range(4)]
  return sampler.rollout(
      params if weights is None else weights, requests,
      search=search or fakes.Search(), temperature=1.5, step=2,
      routing=True).trajectories, engine


def check(trajectories, params, config=CONFIG, dtype='float32'):
  """Compares each context's record; returns the share of equal choices."""
  equal = total = 0
  for trajectory in trajectories:
    contexts = trajectory.contexts
    assert len(contexts) == len(trajectory.routing)
    for context, record in zip(contexts, trajectory.routing, strict=True):
      assert context.routing == (record,) and record.dtype == np.uint8
      tokens = context.tokens[:len(record)]
      assert len(tokens) == np.flatnonzero(context.loss_mask)[-1]
      row = np.zeros((1, 208), np.int32)
      row[0, :len(tokens)] = tokens
      expected = forward(params, row, config, dtype)[0, :len(tokens)]
      equal += (record == expected).sum()
      total += record.size
  return equal / total


@functools.cache
def program(config, dtype):
  return jax.jit(functools.partial(learning.chosen, shape=config, dtype=dtype))


def forward(params, tokens, config, dtype):
  return np.asarray(program(config, dtype)(params, tokens))


@pytest.mark.slow
@pytest.mark.parametrize('options', [
    dict(block=16), dict(block=120),
    dict(block=16, schedule=driver.Schedule(async_decode=True))], ids=str)
def test_a_slot_records_prompts_copies_observations_and_actions(
    params, options):
  trajectories, engine = play(params, **options)
  assert engine.copied_tokens and max(len(t.turns) for t in trajectories) > 2
  assert check(trajectories, params) == 1


@pytest.mark.slow
@pytest.mark.parametrize('rule', ['drop', 'summarise'])
def test_each_context_has_a_record_and_a_row(params, rule):
  trajectories, _ = play(params, when_full=rule, block=48, length=200,
                         search=contexts_test.find)
  counts = [len(t.contexts) for t in trajectories]
  assert max(counts) > 1
  assert check(trajectories, params) == 1
  scored = [dataclasses.replace(t, reward=1.0, outcome_reward=1.0)
            for t in trajectories]
  batch = routing.with_routing(trajectory_lib.collate(
      scored, group_ids=range(16), policy_step=2, length=200, contexts=4),
                               scored, 4)
  known = (batch.routing > 0).all(-1)
  np.testing.assert_array_equal(
      known.sum(1), np.maximum(np.asarray(batch.lengths) - 1, 0))
  last = trajectories[counts.index(max(counts))]
  row = 4 * counts.index(max(counts)) + max(counts) - 1
  np.testing.assert_array_equal(
      batch.routing[row][known[row]], last.routing[-1][:known[row].sum()])


@pytest.mark.slow
@pytest.mark.parametrize('ways, tensor', [
    (dict(expert=2), 1), (dict(data=1, expert=2, tensor=4), 4)], ids=str)
def test_devices_record_the_same(params, ways, tensor):
  mesh = meshes.make(**ways)
  axes = transformer.logical_axes(CONFIG)
  sync = weight_sync.WeightSync(
      mesh, axes, CONFIG.num_hidden_layers, tensor=tensor)
  weights = sync(jax.tree.map(
      meshes.place, params, meshes.shardings(mesh, axes))).weights
  trajectories, engine = play(
      params, slots=16, weights=weights, block=16,
      shardings=functools.partial(meshes.shardings, sync.mesh))
  assert engine.copied_tokens
  assert check(trajectories, params) == 1


@pytest.mark.slow
def test_pages_are_shared_with_their_records():
  config = dataclasses.replace(CONFIG, head_dim=128)
  params = jax.device_get(tiny.params(config))
  with pallas.interpreted():
    trajectories, engine = play(
        params, config, attention='ragged', block=16, cache_tokens=320)
  assert engine.copied_tokens
  assert check(trajectories, params, config) == 1


@pytest.mark.slow
def test_a_sampler_of_fewer_bits_is_followed_where_rounding_decides(params):
  trajectories, _ = play(params, block=16, dtype='bfloat16')
  assert check(trajectories, params, dtype='bfloat16') > 0.99
  assert check(trajectories, params) < 1
  scored = [dataclasses.replace(t, reward=1.0, outcome_reward=1.0)
            for t in trajectories]
  batch = routing.with_routing(trajectory_lib.collate(
      scored, group_ids=range(16), policy_step=2, length=120), scored)
  errors = {}
  for replay in (False, True):
    logprobs, _ = jax.jit(functools.partial(
        policy_logprobs.token_logprobs, config=CONFIG, temperature=1.5))(
            params, batch.tokens, routing=batch.routing if replay else None)
    errors[replay] = abs(np.where(
        batch.loss_mask, logprobs - batch.behavior_logprobs, 0))
  assert errors[True].max() < errors[False].max() / 2
