# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Ids without a token: never sampled, scored as if they did not exist."""

import dataclasses
import functools
import json

import chats
import jax
import numpy as np
import optax
import pytest
import tiny

from searchrl.experiment import model_folders
from searchrl.models import policy_logprobs
from searchrl.models import transformer
from searchrl.models import weights
from searchrl.models.inference import engine as engines
from searchrl.models.inference import engine_weights
from searchrl.models.inference import layouts
from searchrl.models.inference import sampling
from searchrl.models.inference import slots as programs
from searchrl.models.inference import stops
from searchrl.rl import algorithms
from searchrl.runtime import mesh as meshes
from searchrl.training import learner as learners
from searchrl.training import supervised

TEMPERATURE = 0.8
UNUSED = (0, 7, 50, *range(96, 224))  # holes and padding
CONFIG = dataclasses.replace(
    tiny.CONFIG, vocab_size=224, tie_word_embeddings=False, unused_ids=UNUSED)
USED = np.setdiff1d(np.arange(CONFIG.vocab_size), UNUSED)


@pytest.fixture(scope='module')
def params():
  """Weights in which the unused ids are by far the likeliest."""
  params = tiny.params(CONFIG)
  kernel = np.array(params['head']['kernel'])
  kernel[:, list(UNUSED)] *= 20
  return {**params, 'head': {'kernel': kernel}}


@functools.cache
def oracle():
  """A function from rows [B T] to float64 scores over the used ids alone."""
  return jax.jit(lambda params, tokens: transformer.logits(
      params, transformer.forward(params, tokens, CONFIG)))


def expected(params, tokens, temperature):
  scores = np.asarray(oracle()(params, tokens), np.float64)[:, :-1, USED]
  logs = scores / temperature
  logs -= logs.max(-1, keepdims=True)
  logs -= np.log(np.exp(logs).sum(-1, keepdims=True))
  places = np.searchsorted(USED, tokens[:, 1:])
  return (np.take_along_axis(logs, places[..., None], -1)[..., 0],
          -np.sum(np.exp(logs) * logs, -1))


@pytest.mark.parametrize('temperature', [1.0, 0.3])
def test_log_probs_and_entropies_are_over_the_used_ids(params, temperature):
  tokens = np.random.default_rng(0).choice(USED, (4, 30)).astype(np.int32)
  ours = policy_logprobs.token_logprobs(
      params, tokens, CONFIG, temperature=temperature, chunk=8)
  for got, right in zip(ours, expected(params, tokens, temperature)):
    np.testing.assert_allclose(got[:, 1:], right, atol=1e-4, rtol=1e-5)


def test_nothing_is_added_where_all_ids_are_used(params):
  assert transformer.TransformerConfig.unused_ids == ()
  hidden = np.ones((2, CONFIG.hidden_size), np.float32)
  plain = jax.make_jaxpr(lambda p: transformer.logits(p, hidden))(params)
  assert not [x for x in plain.eqns if x.primitive.name in ('add', 'select_n')]


@pytest.mark.parametrize('truncation', [
    sampling.Truncation(), sampling.Truncation(top_k=40, top_p=0.95)])
def test_no_unused_id_is_sampled_and_both_sides_score_alike(
    params, truncation):
  slots, length = 512, 104
  table = stops.compile_table((), (), CONFIG.vocab_size, UNUSED)
  engine = engines.Engine(CONFIG, slots=slots, length=length, stop_table=table,
                          block=104, steps=50)
  drawn = []
  for round_ in range(2):
    engine.load(params, TEMPERATURE, truncation)
    engine.append([engines.Append(
        slot, (1, 2, 3), length - 4, (round_, slot, 0, 0, 0), fresh=True)
                   for slot in range(slots)])
    turns: list[engines.Stopped] = []
    while len(turns) < slots:
      turns += engine.decode()
    drawn += turns
  ids = np.array([turn.tokens for turn in drawn], np.int32)
  assert ids.size > 100_000 and not np.isin(ids, UNUSED).any()
  if truncation.is_off:
    rows = np.pad(ids[:16], ((0, 0), (3, 0)))
    rows[:, :3] = 1, 2, 3
    theirs = policy_logprobs.token_logprobs(
        params, rows, CONFIG, temperature=TEMPERATURE)[0]
    np.testing.assert_allclose(
        theirs[:, 3:], np.array([turn.logprobs for turn in drawn[:16]]),
        atol=1e-5)


@pytest.mark.parametrize('algorithm', [
    algorithms.grpo(kl_coef=0.1, entropy_coef=0.1), algorithms.sft()])
def test_an_update_leaves_their_rows_as_they_are(params, algorithm):
  learner = learners.make(
      CONFIG, algorithm, optax.sgd(1.0),
      meshes.make(devices=jax.devices()[:1]), rows=4, length=16,
      max_segments=4)
  rng = np.random.default_rng(0)
  batch = supervised.to_batch(
      [supervised.Document(rng.choice(USED, 16).tolist(), [1.0] * 16)
       for _ in range(4)], rows=4, length=16, pad_id=1)
  batch = dataclasses.replace(
      batch, group_ids=np.array([0, 0, 1, 1], np.int32),
      rewards=np.array([1, 0, 0, 1], np.float32))
  base = tiny.params(CONFIG, seed=1)
  state = learner.init(params)
  old = np.array(state['policy'].params['head']['kernel'])
  state, metrics, *_ = learner.update(
      state, learner.score(state, batch, base), base)
  change = np.array(state['policy'].params['head']['kernel']) - old
  assert not change[:, list(UNUSED)].any() and change[:, USED].any(0).all()
  assert all(np.isfinite(x) for x in metrics.values())


def test_a_model_folder_names_them(tmp_path):
  """A tokenizer with a hole, and a model with more rows than it has ids."""
  fast = chats.qwen()._fast
  fast.save_pretrained(tmp_path / 'tokenizer')
  path = tmp_path / 'tokenizer' / 'tokenizer.json'
  raw = json.loads(path.read_text())
  last = max(raw['model']['vocab'], key=raw['model']['vocab'].get)
  hole = raw['model']['vocab'][last]
  raw['model']['vocab'][last] = len(fast)
  path.write_text(json.dumps(raw))
  shape = dataclasses.replace(tiny.CONFIG, vocab_size=len(fast) + 10)
  params = tiny.params(shape)
  weights.save(tmp_path / 'model', params, shape,
               tokenizer_from=tmp_path / 'tokenizer', eos_id=0)
  folder, read, tokenizer = model_folders.parts(str(tmp_path / 'model'))
  assert tokenizer.vocab_size == len(fast) + 1  # and not one less
  assert read.unused_ids == (
      hole, *range(len(fast) + 1, shape.vocab_size))
  assert tokenizer.token_bytes[hole] == b''
  jax.tree.map(np.testing.assert_array_equal,
               weights.load(folder, read), params)  # with all rows
  weights.save(tmp_path / 'again', params, read,
               tokenizer_from=folder, eos_id=0)
  assert model_folders.parts(str(tmp_path / 'again'))[1] == read


def costs(compiled):
  cost = compiled.cost_analysis()
  return np.array([cost['flops'], cost['bytes accessed'],
                   compiled.memory_analysis().temp_size_in_bytes])


@pytest.mark.slow
@pytest.mark.parametrize('program', ['decode', 'update'])
def test_the_compiler_says_that_they_cost_nothing(program):
  """The model has one layer, so that the vocabulary is nearly all the work."""
  plain = dataclasses.replace(
      tiny.CONFIG, vocab_size=32_768, hidden_size=896, num_hidden_layers=1,
      num_attention_heads=14, num_key_value_heads=2, head_dim=64,
      intermediate_size=4864)
  masked = dataclasses.replace(plain, unused_ids=tuple(range(32_500, 32_768)))

  def decode(config):
    layout = layouts.make('xla', config, slots=32, length=256, block=256,
                          parts=1, pages=0, platform='cpu')
    size = 64, config.vocab_size
    table = stops.StopTable(jax.ShapeDtypeStruct(size, np.uint8),
                            jax.ShapeDtypeStruct(size, bool))
    return jax.jit(functools.partial(
        programs.decode, config=config, layout=layout, steps=16, patience=4)
    ).lower(
        jax.eval_shape(
            functools.partial(engine_weights.unstacked, dtype='float32'),
            transformer.abstract(config)),
        jax.eval_shape(lambda: programs.empty(config, layout, 1, 'float32')),
        table, np.float32(1), None).compile()

  def update(config):
    learner = learners.make(
        config, algorithms.grpo(kl_coef=0.0), optax.adamw(1e-6),
        meshes.make(devices=jax.devices()[:1]), rows=8, length=256)
    return learner.train_step.update.lower(
        *learner.abstract_update(8)).compile()

  compiled = {'decode': decode, 'update': update}[program]
  assert (costs(compiled(masked)) <= 1.01 * costs(compiled(plain))).all()
