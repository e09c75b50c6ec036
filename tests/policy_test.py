# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""policy: log-probs against a plain log-softmax, the shift by one included."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from searchrl.models import policy_logprobs
from searchrl.models import transformer

ROWS, LENGTH, VOCAB = 3, 18, tiny.CONFIG.vocab_size


@functools.partial(
    jax.jit, static_argnames=('temperature', 'chunk', 'remat', 'dtype'))
def token_logprobs(params, tokens, **options):
  return policy_logprobs.token_logprobs(params, tokens, tiny.CONFIG, **options)


@pytest.fixture(scope='module')
def params():
  return tiny.params()


@pytest.fixture(scope='module')
def tokens():
  return np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH), np.int32)


@pytest.fixture(scope='module')
def logits(params, tokens):
  forward = jax.jit(lambda params: transformer.logits(
      params, transformer.forward(params, tokens, tiny.CONFIG)))
  return np.asarray(forward(params), np.float64)


def oracle(logits, tokens, temperature):
  """Row by row, token by token, in float64."""
  logprobs, entropy = np.zeros((2, *tokens.shape))
  for row in range(tokens.shape[0]):
    for t in range(1, tokens.shape[1]):
      scores = logits[row, t - 1] / temperature
      probs = np.exp(scores - scores.max())
      probs /= probs.sum()
      logprobs[row, t] = np.log(probs[tokens[row, t]])
      entropy[row, t] = -np.sum(probs * np.log(probs))
  return logprobs, entropy


@pytest.mark.parametrize('chunk', [5, 128])
@pytest.mark.parametrize('temperature', [1.0, 0.6])
def test_entry_t_belongs_to_token_t(params, tokens, logits, temperature, chunk):
  got = token_logprobs(params, tokens, temperature=temperature, chunk=chunk)
  for ours, expected in zip(got, oracle(logits, tokens, temperature)):
    np.testing.assert_allclose(ours, expected, atol=1e-4)
    assert ours.dtype == jnp.float32
    assert not ours[:, 0].any()  # nothing precedes it


@pytest.mark.parametrize('chunk', [1, 17])
def test_the_chunk_changes_nothing(params, tokens, chunk):
  for ours, whole in zip(token_logprobs(params, tokens, chunk=chunk),
                         token_logprobs(params, tokens, chunk=5)):
    np.testing.assert_allclose(ours, whole, atol=1e-5)


def test_logits_of_a_whole_batch_never_exist(params, tokens):
  def shapes(chunk):
    return str(jax.make_jaxpr(functools.partial(
        token_logprobs, chunk=chunk))(params, tokens))
  whole = f'{ROWS},{LENGTH},{VOCAB}]'
  assert whole in shapes(LENGTH)  # as one chunk
  assert whole not in shapes(6)
  assert f'{ROWS},6,{VOCAB}]' in shapes(6)


def test_packed_documents_have_the_log_probs_of_their_own_rows(params, tokens):
  cut = 7
  segments = np.tile(np.arange(LENGTH) >= cut, (ROWS, 1)).astype(np.int32)
  positions = np.tile([*range(cut), *range(LENGTH - cut)], (ROWS, 1))
  packed, _ = token_logprobs(
      params, tokens, segment_ids=segments, positions=positions)
  second = np.zeros_like(tokens)
  second[:, :LENGTH - cut] = tokens[:, cut:]
  first, second = (token_logprobs(params, t)[0] for t in (tokens, second))
  np.testing.assert_allclose(packed[:, :cut], first[:, :cut], atol=1e-4)
  np.testing.assert_allclose(  # a document's first token belongs to no one
      packed[:, cut + 1:], second[:, 1:LENGTH - cut], atol=1e-4)


def test_the_gradient_is_that_of_the_definition(params, tokens, logits):
  """d log p / d logits = onehot - p, through the head alone."""
  def ours(scale):
    scaled = {**params, 'norm': {'scale': params['norm']['scale'] * scale}}
    logprobs, _ = token_logprobs(scaled, tokens, chunk=5, remat=True)
    return logprobs.sum()  # every logit is scaled

  expected = 0.0
  for row in range(ROWS):
    for t in range(1, LENGTH):
      scores = logits[row, t - 1]
      probs = np.exp(scores - scores.max())
      probs /= probs.sum()
      expected += scores[tokens[row, t]] - probs @ scores
  np.testing.assert_allclose(jax.grad(ours)(1.0), expected, rtol=1e-4)


@pytest.mark.parametrize('remat', [True, 'nothing', 'dots'])
def test_recomputing_changes_no_gradient(params, tokens, remat):
  gradient = jax.grad(lambda params, remat: token_logprobs(
      params, tokens, chunk=5, remat=remat)[0].mean())
  jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5),
      gradient(params, remat), gradient(params, False))


def test_bfloat16_gives_float32_log_probs_and_gradients(params, tokens):
  half, whole = (token_logprobs(params, tokens, dtype=dtype)
                 for dtype in (jnp.bfloat16, jnp.float32))
  for x, y in zip(half, whole):
    assert x.dtype == jnp.float32
    np.testing.assert_allclose(x, y, atol=0.3)
    assert np.abs(x - y).max() > 1e-3
  grads = jax.grad(lambda params: token_logprobs(
      params, tokens, dtype=jnp.bfloat16)[0].mean())(params)
  assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype('float32')}


READ = {
    'some': lambda rng: rng.random((ROWS, LENGTH)) < 0.3,
    'first': lambda rng: np.arange(LENGTH) < np.ones((ROWS, 1)),  # gets none
    'one row': lambda rng: np.arange(ROWS)[:, None] == np.ones(LENGTH),
    'all': lambda rng: np.ones((ROWS, LENGTH), bool),
    'none': lambda rng: np.zeros((ROWS, LENGTH), bool),
}


@functools.partial(jax.jit, static_argnames=('config', 'skips', 'chunk'))
def weighted_sum(params, tokens, read, config, skips, chunk=4):
  """Both outputs of packed rows where they are read, and a gradient of both."""
  weights = np.random.default_rng(1).normal(size=(2, ROWS, LENGTH))
  positions = np.tile([*range(7), *range(LENGTH - 7)], (ROWS, 1))

  def loss(params):
    out = policy_logprobs.token_outputs(
        params, tokens, config, positions=positions, chunk=chunk,
        read=read if skips else None)[:2]
    out = jnp.where(read, jnp.stack(out), 0)
    return jnp.sum(out * weights), out

  return jax.grad(loss, has_aux=True)(params)


@pytest.mark.parametrize('name, tied, chunk', [
    *((name, False, 4) for name in READ), ('some', True, 128)])
def test_tokens_that_are_read_have_the_outputs_and_gradients_of_all(
    tokens, name, tied, chunk):
  config = dataclasses.replace(tiny.CONFIG, tie_word_embeddings=tied,
                               unused_ids=(3, 5))
  read = READ[name](np.random.default_rng(2))
  gradient, out = weighted_sum(
      tiny.params(config), tokens, read, config, skips=True, chunk=chunk)
  wanted_gradient, wanted = weighted_sum(
      tiny.params(config), tokens, read, config, skips=False)
  assert np.any(out) == (name not in ('first', 'none'))
  np.testing.assert_allclose(out, wanted, atol=1e-5)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4),
               gradient, wanted_gradient)


def test_tokens_that_are_not_read_get_no_logits(params, tokens, monkeypatch):
  seen, logits = [], transformer.logits

  def counted(vocabulary, states, *options):
    jax.debug.callback(lambda: seen.append(states.shape[1]), ordered=True)
    return logits(vocabulary, states, *options)

  monkeypatch.setattr(transformer, 'logits', counted)
  read = np.zeros((ROWS, LENGTH), bool)
  read[0, [3, 11, 17]], read[2, [1, 2, 4, 8, 16]] = True, True
  got = policy_logprobs.token_outputs(
      params, tokens, tiny.CONFIG, read=read, chunk=2)[:2]
  assert [(x != 0).sum() for x in got] == [8, 8]
  assert not any(x[~read].any() for x in got)
  jax.effects_barrier()
  # The fullest row has five tokens, which fill three of the nine chunks.
  assert seen == [2, 2, 2]


@pytest.mark.slow
@pytest.mark.parametrize('tied', [True, False])
def test_memory_is_a_fifth_of_what_whole_logits_take(tied):
  """Compiled for a real vocabulary, never run; forward and backward."""
  config = dataclasses.replace(
      tiny.CONFIG, vocab_size=151_936, hidden_size=2048, num_hidden_layers=1,
      num_attention_heads=1, num_key_value_heads=1, tie_word_embeddings=tied)

  def naive(params, tokens):
    hidden = transformer.forward(params, tokens, config)
    logprobs = jax.nn.log_softmax(transformer.logits(params, hidden)[:, :-1])
    picked = jnp.take_along_axis(logprobs, tokens[:, 1:, None], -1)[..., 0]
    return picked, -jnp.sum(jnp.exp(logprobs) * logprobs, -1)

  def temporary(function):
    def loss(params, tokens):
      logprobs, entropy, *_ = function(params, tokens)
      return logprobs.mean() + 0.01 * entropy.mean()

    shapes = jax.eval_shape(
        lambda key: transformer.init(config, key), jax.random.key(0))
    compiled = jax.jit(jax.grad(loss)).lower(
        shapes, jax.ShapeDtypeStruct((4, 2048), jnp.int32)).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  whole = temporary(naive)
  ours = functools.partial(policy_logprobs.token_outputs, config=config)
  assert temporary(ours) <= 0.20 * whole
  # Where only some tokens are read, too.
  assert temporary(lambda params, tokens: ours(
      params, tokens, read=tokens % 2 > 0)) <= 0.20 * whole


def test_no_product_of_the_head_has_operands_in_float32():
  """The operands are in bfloat16 as they are lowered."""
  shape = dataclasses.replace(tiny.CONFIG, vocab_size=97)
  lowered = jax.jit(jax.grad(lambda params: policy_logprobs.token_logprobs(
      params, jnp.zeros((2, 8), jnp.int32), shape, dtype=jnp.bfloat16)[0].sum()
  )).lower(tiny.params(shape)).as_text()
  products = [line.split(' : ')[1] for line in lowered.splitlines()
              if 'stablehlo.dot_general' in line and '97x' in line]
  assert len(products) == 3  # one forward and two backward
  for types in products:
    operands, _ = types.split(' -> ')
    assert 'f32' not in operands.replace('bf16', ''), types
