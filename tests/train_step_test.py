# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""train_step: names of its saved state; what its programs send, per loop.

golden/checkpoint was written by revision 0acfcdd, whose state was a dict of
dicts; golden/make_checkpoint.py made it, and shows how.
"""

from collections.abc import Iterator
import dataclasses
import functools
import importlib.util
import json
import math
import pathlib
import re
import shutil

import jax
import numpy as np
import optax
import pytest
import tiny

from searchrl.models import attention
from searchrl.models import critic
from searchrl.models import encoder
from searchrl.models import transformer
from searchrl.rl import algorithms
from searchrl.runtime import activations
from searchrl.runtime import devices
from searchrl.runtime import checkpoint
from searchrl.runtime import mesh as meshes
from searchrl.training import learner as learners
from searchrl.training import optimizer
from searchrl.training.train_state import TrainState
from searchrl.trajectory import Batch

DEVICES = 8

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


def batch_of(rows, length, words):
  """Random trajectories, some short, in groups of four."""
  rng = np.random.default_rng(0)
  ends = rng.integers(length // 2, length, rows, endpoint=True)
  mask = (rng.random((rows, length)) < 0.5) & (
      np.arange(length) < ends[:, None])
  mask[:, 0] = False
  rewards = rng.random(rows).astype(np.float32)
  groups = np.arange(rows) // 4
  return Batch(
      tokens=rng.integers(0, words, mask.shape, np.int32), loss_mask=mask,
      behavior_logprobs=np.where(mask, -1, 0).astype(np.float32),
      rewards=rewards, outcome_rewards=rewards, question_ids=groups,
      group_ids=groups, in_baseline=np.ones(rows, bool),
      in_loss=np.ones(rows, bool), on_policy=np.ones(rows, bool))


def collectives(text: str) -> Iterator[tuple[int, list[tuple[int, ...]], str]]:
  """Yields a program's collectives: loops around each, result's shapes, line.

  A computation that is called twice is counted twice.
  """
  computations, lines = {}, []
  for line in text.splitlines():
    if match := re.match(r'(ENTRY )?%([\w.-]+) \(.*\{$', line):
      lines = computations[match[2]] = []
      entry = match[2] if match[1] else None
    lines.append(line)
  name = re.compile(
      r' = (.*?) (?:all-gather|all-reduce|all-to-all|reduce-scatter|'
      r'collective-permute)(?:-start)?\(')
  called = re.compile(r'(\w+)=%([\w.-]+)')

  def inside(computation, loops):
    for line in computations[computation]:
      if match := name.search(line):
        shapes = re.findall(r'\w\d+\[([\d,]*)\]', match[1])
        yield loops, [tuple(map(int, filter(None, shape.split(','))))
                      for shape in shapes], line.strip()
      for role, other in called.findall(line):
        if other in computations:
          yield from inside(other, loops + (role == 'body'))

  return inside(entry, 0)


def assert_words_stay(compiled, shape, fsdp, most):
  """Checks that no array over words is sent in a loop of chunks of tokens.

  Args:
    compiled: Program with a loop of micro-batches, which contains the loops of
      layers and of chunks.
    shape: Shape of the decoder.
    fsdp: Minimum number of parts of the embedding and of the logits' matrix.
    most: Maximum number of times that a part of them may be sent.
  """
  words = {-(-shape.vocab_size // 2**n) for n in range(7)}
  share = -(-shape.vocab_size // fsdp) * shape.hidden_size
  found = list(collectives(compiled.as_text()))
  assert max(loops for loops, _, _ in found) >= 2  # of hidden states, for one
  sent = [x for x in found if any(words.intersection(dims) for dims in x[1])]
  for loops, shapes, line in sent:
    assert loops < 2 and sum(map(math.prod, shapes)) <= share, line
  assert 1 <= len(sent) <= most


def scored(arguments):
  """Returns the arguments of `TrainStep.logprobs` from those of `update`."""
  _, state, frozen, rows, _, count = arguments
  return (state['policy'].params, frozen, rows.layout, rows.batch.tokens, count)


@pytest.mark.slow
@pytest.mark.parametrize('fsdp, tensor, tied, words', [
    (8, 1, True, 1048), (8, 1, False, 1046), (4, 2, True, 1048),
    (4, 2, False, 1048)])
def test_logits_are_split_over_words_where_weights_are(
    fsdp, tensor, tied, words):
  """The update is that of one device. 8 does not divide 1,046 words."""
  shape = dataclasses.replace(
      tiny.CONFIG, vocab_size=words, tie_word_embeddings=tied)
  params, batch = jax.device_get(tiny.params(shape)), batch_of(16, 256, words)

  def updated(mesh):
    learner = learners.make(
        shape, algorithms.grpo(kl_coef=0.1, entropy_coef=0.01), optax.sgd(0.1),
        mesh, rows=16, length=256, microbatch_rows=8)  # two chunks a row
    packed = learner.score(learner.init(params), batch, params)
    state, metrics, *_ = learner.update(learner.init(params), packed)
    return learner, (jax.device_get(state['policy'].params), metrics)

  _, alone = updated(meshes.make(devices=jax.devices()[:1]))
  learner, split = updated(meshes.make(data=1, fsdp=fsdp, tensor=tensor))
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5),
               split, alone)
  step, arguments = learner.train_step, learner.abstract_update(16)
  for program, given, most in (
      (step.update, arguments, 4), (step.logprobs, scored(arguments), 1)):
    assert_words_stay(program.lower(*given).compile(), shape, fsdp, most)


@pytest.mark.slow
def test_a_layer_sends_weights_and_no_activations():
  """The smallest activations of a row are twice the largest weights."""
  shape = dataclasses.replace(
      tiny.CONFIG, vocab_size=64, hidden_size=64, intermediate_size=128)
  weights = shape.hidden_size * shape.intermediate_size
  learner = learners.make(
      shape, algorithms.grpo(), optax.sgd(0.1), meshes.make(data=1, fsdp=8),
      rows=16, length=512, microbatch_rows=8, remat='nothing')
  text = learner.train_step.update.lower(
      *learner.abstract_update(16)).compile().as_text()
  sent = [(math.prod(dims), line) for loops, shapes, line in collectives(text)
          for dims in shapes if loops >= 2]
  for size, line in sent:
    assert size <= weights, line
  assert any(size == weights for size, _ in sent)


@pytest.mark.slow
def test_an_encoder_sends_weights_and_no_activations():
  shape = encoder.EncoderConfig(
      vocab_size=64, hidden_size=64, num_hidden_layers=2,
      num_attention_heads=2, intermediate_size=128)
  mesh = meshes.make(data=1, fsdp=8)
  given = lambda x, axes: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=meshes.sharding(mesh, axes))
  params = jax.tree.map(
      given, jax.eval_shape(functools.partial(encoder.init, shape),
                            jax.random.key(0)), encoder.logical_axes(shape))
  tokens, mask = (given(np.zeros((8, 512), dtype), ('batch', None))
                  for dtype in (np.int32, bool))
  embed = jax.jit(functools.partial(
      encoder.embed, config=shape,
      constrain=functools.partial(activations.split_by_tokens, mesh)))
  text = embed.lower(params, tokens, mask).compile().as_text()
  sent = [(math.prod(dims), line) for loops, shapes, line in collectives(text)
          for dims in shapes if loops]
  for size, line in sent:
    assert size <= 64 * 128, line
  assert any(size == 64 * 128 for size, _ in sent)


@pytest.mark.slow
def test_an_update_with_sums_by_axis_is_that_without(monkeypatch):
  """The devices are told that they are a torus of 2 x 4."""
  params, batch = jax.device_get(tiny.params()), batch_of(
      16, 64, tiny.CONFIG.vocab_size)
  mesh = meshes.make(data=1, fsdp=8)
  torus = meshes.Mesh(mesh.devices.reshape(1, 2, 4, 1), (
      'data', 'fsdp0', 'fsdp1', 'tensor'))
  asked, given = [], {}

  def summed_by_axis(*args):
    asked.append(args)
    return meshes_summed_by_axis(*args)

  meshes_summed_by_axis = meshes.summed_by_axis
  monkeypatch.setattr(meshes, 'summed_by_axis', summed_by_axis)
  for found in (None, torus):
    monkeypatch.setattr(meshes, 'torus', lambda _, found=found: found)
    learner = learners.make(
        tiny.CONFIG, algorithms.grpo(kl_coef=0.1), optax.sgd(0.1), mesh,
        rows=16, length=64, microbatch_rows=8, remat='nothing')
    packed = learner.score(learner.init(params), batch, params)
    state, metrics, *_ = learner.update(learner.init(params), packed)
    given[found] = jax.device_get(state['policy'].params), metrics
    assert bool(asked) == (found is torus)
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5),
               given[torus], given[None])


QWEN_3B = transformer.TransformerConfig(
    vocab_size=151_936, hidden_size=2048, num_hidden_layers=2,
    num_attention_heads=16, num_key_value_heads=2, head_dim=128,
    intermediate_size=11_008)
QWEN_7B = transformer.TransformerConfig(
    vocab_size=152_064, hidden_size=3584, num_hidden_layers=2,
    num_attention_heads=28, num_key_value_heads=4, head_dim=128,
    intermediate_size=18_944, tie_word_embeddings=False)


@pytest.mark.long
@pytest.mark.skipif(
    not importlib.util.find_spec('libtpu'),
    reason="no libtpu: pip install 'jax[tpu]' to compile for TPUs")
@pytest.mark.filterwarnings('ignore:Error reading persistent compilation')
@pytest.mark.parametrize('shape, chip, fsdp, tensor, gib', [
    (QWEN_3B, 'v6e', 8, 1, 1.7), (QWEN_3B, 'v6e', 4, 2, 1.3),
    (QWEN_7B, 'v5e', 64, 1, 1.9)], ids=['3b', '3b-tensor', '7b'])
def test_chips_exchange_no_words_in_a_chunk(shape, chip, fsdp, tensor, gib):
  """Compiled with two layers, for rows of 4,096 tokens, one a chip.

  The compiler may use little memory here. Where more is free, it computes the
  next gradients while the last are summed, and an update of 7B takes 2.12 GiB.
  """
  mesh = meshes.make(
      data=1, fsdp=fsdp, tensor=tensor, devices=devices.to_compile_for(
          devices.KINDS[chip], fsdp * tensor))
  learner = learners.make(
      shape, algorithms.grpo(kl_coef=1e-3),
      optimizer.adamw(learning_rate=1e-6), mesh, rows=512, length=4096,
      microbatch_rows=fsdp, remat='nothing', dtype='bfloat16',
      attend=functools.partial(
          attention.causal, implementation='splash',
          sharding=meshes.sharding(mesh, ('batch', None, 'heads', None))))
  step, arguments = learner.train_step, learner.abstract_update(512)
  for program, given, most in (
      (step.update, arguments, 4), (step.logprobs, scored(arguments), 2)):
    compiled = program.lower(*given).compile(compiler_options={
        'xla_tpu_scheduler_percent_shared_memory_limit': '11'})
    assert_words_stay(compiled, shape, fsdp, most)
    assert compiled.memory_analysis().temp_size_in_bytes <= gib * devices.GIB
