# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""policy: log-probs against a plain log-softmax, the shift by one included."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from searchrl.models import policy
from searchrl.models import transformer

ROWS, LENGTH, VOCAB = 3, 18, tiny.CONFIG.vocab_size


@functools.partial(jax.jit, static_argnames=('temperature', 'chunk', 'remat'))
def token_logprobs(params, tokens, **options):
  return policy.token_logprobs(params, tokens, tiny.CONFIG, **options)


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
def test_entry_t_speaks_of_token_t(params, tokens, logits, temperature, chunk):
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
