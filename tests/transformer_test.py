# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""transformer: the numbers of transformers, masks, and other shapes.

Numbers under golden/ are what transformers computed; golden/make_golden.py made
them.
"""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiny

from searchrl.models import attention
from searchrl.models import policy_logprobs
from searchrl.models import rotary
from searchrl.models import transformer
from searchrl.models import weights

GOLDEN = pathlib.Path(__file__).parent / 'golden'
FOLDERS = ('qwen2_tied', 'qwen2_untied', 'qwen3', 'qwen3_moe', 'llama',
           'mistral')
golden_folders = pytest.mark.parametrize('name', FOLDERS)
ROWS, LENGTH = 2, 14
UNTIED = dataclasses.replace(tiny.CONFIG, tie_word_embeddings=False)
EVERYTHING = dataclasses.replace(
    UNTIED, qk_norm=True, attention_out_bias=True, mlp_bias=True)


@functools.partial(jax.jit, static_argnames='remat')
def forward(params, tokens, segment_ids=None, positions=None, remat=False):
  return transformer.forward(
      params, tokens, tiny.CONFIG, segment_ids=segment_ids,
      positions=positions, remat=remat)


@pytest.fixture(scope='module')
def params():
  return tiny.params()


@pytest.fixture(scope='module')
def tokens():
  return np.random.default_rng(0).integers(0, 96, (ROWS, LENGTH), np.int32)


def assert_close(x, y, atol=1e-4):
  np.testing.assert_allclose(x, y, atol=atol)


def read(name):
  config = weights.read_config(GOLDEN / name)
  return config, weights.load(GOLDEN / name, config)


def scores_of(config):
  return jax.jit(lambda params, tokens: transformer.logits(
      params, transformer.forward(params, tokens, config)))


@golden_folders
def test_logits_and_hidden_states_are_those_of_transformers(name):
  config, params = read(name)
  golden = np.load(GOLDEN / name / 'golden.npz')
  more = np.load(GOLDEN / name / 'more.npz')
  logits = scores_of(config)(params, golden['prompts'])
  np.testing.assert_allclose(logits, golden['logits'], atol=2e-4)
  assert golden['logits'].std() > 0.5  # not all alike
  hidden = jax.jit(lambda params, tokens: transformer.forward(
      params, tokens, config))(params, golden['prompts'])
  np.testing.assert_allclose(hidden, more['hidden'], atol=2e-4)


@golden_folders
def test_log_probs_and_gradients_are_those_of_transformers(
    name, tmp_path):
  config, params = read(name)
  tokens = np.load(GOLDEN / name / 'golden.npz')['prompts']
  more = np.load(GOLDEN / name / 'more.npz')

  @jax.jit
  @jax.value_and_grad
  def gradient(params):
    logprobs, _ = policy_logprobs.token_logprobs(params, tokens, config, chunk=16)
    return logprobs[:, 1:].mean()

  logprobs, _ = jax.jit(lambda params: policy_logprobs.token_logprobs(
      params, tokens, config))(params)
  np.testing.assert_allclose(logprobs, more['logprobs'], atol=2e-4)
  mean, grads = gradient(params)
  np.testing.assert_allclose(mean, more['logprobs'][:, 1:].mean(), atol=1e-5)
  weights.save(tmp_path, grads, config, tokenizer_from=tmp_path, eos_id=0)
  by_name = safetensors.numpy.load_file(tmp_path / 'model.safetensors')
  names = [n for n in more if n in by_name]
  assert len(names) >= 5
  for tensor in names:
    assert np.abs(more[tensor]).max() > 1e-2
    np.testing.assert_allclose(by_name[tensor], more[tensor], atol=1e-5,
                               rtol=1e-4, err_msg=tensor)


@pytest.mark.parametrize('name, changes', [
    ('llama', dict(rope_scaling=None)),
    ('mistral', dict(sliding_window=None)),
    ('mistral', dict(sliding_window=7)),
    ('qwen3', dict(qk_norm=False)),
])
def test_what_makes_a_family_shows_in_its_numbers(name, changes):
  config, params = read(name)
  golden = np.load(GOLDEN / name / 'golden.npz')
  other = dataclasses.replace(config, **changes)
  assert other != config
  logits = scores_of(other)(params, golden['prompts'])
  assert np.abs(logits - golden['logits']).max() > 0.1


@pytest.mark.parametrize('changed', [0, 6, LENGTH - 1])
def test_a_token_changes_nothing_before_it_and_all_after(
    params, tokens, changed):
  other = tokens.copy()
  other[:, changed] = (other[:, changed] + 1) % 96
  before, after = forward(params, tokens), forward(params, other)
  np.testing.assert_array_equal(before[:, :changed], after[:, :changed])
  moved = np.abs(before - after).max(-1)[:, changed:]
  assert (moved > 1e-4).all()


def test_rows_do_not_see_each_other(params, tokens):
  other = tokens.copy()
  other[1] = 7
  np.testing.assert_array_equal(forward(params, tokens)[0],
                                forward(params, other)[0])


def test_packed_documents_equal_rows_of_their_own(params, tokens):
  ends = (5, 6, LENGTH)
  starts = (0, *ends[:-1])
  segments = np.repeat(np.arange(3), np.subtract(ends, starts))
  positions = np.concatenate([np.arange(e - s) for s, e in zip(starts, ends)])
  packed = forward(params, tokens, np.tile(segments, (ROWS, 1)),
                   np.tile(positions, (ROWS, 1)))
  for start, end in zip(starts, ends):
    alone = np.zeros_like(tokens)
    alone[:, :end - start] = tokens[:, start:end]
    assert_close(packed[:, start:end],
                 forward(params, alone)[:, :end - start])


def test_rope_depends_on_distances_only(params, tokens):
  positions = np.tile(np.arange(LENGTH), (ROWS, 1))
  shifted = forward(params, tokens, None, positions + 100)
  assert_close(shifted, forward(params, tokens), atol=2e-3)
  stretched = forward(params, tokens, None, positions * 2)
  assert np.abs(stretched - forward(params, tokens)).max() > 0.1


def test_rotation_by_hand():
  x = jnp.array([3.0, 0.0, 4.0, 0.0]).reshape(1, 1, 1, 4)  # halves (3 0) (4 0)
  turned = transformer.rotate(x, jnp.array([[2]]), 10_000.0).ravel()
  angle = 2.0  # the first frequency is 1
  np.testing.assert_allclose(turned, [
      3 * np.cos(angle) - 4 * np.sin(angle), 0,
      4 * np.cos(angle) + 3 * np.sin(angle), 0], rtol=1e-6)


def test_slow_frequencies_are_scaled_as_in_llama_3():
  """The definition, frequency by frequency, in float64."""
  rope = transformer.Llama3Rope(8.0, 1.0, 4.0, 8192)
  frequencies = 500_000.0 ** (-np.arange(64) / 64)
  expected, kinds = [], set()
  for frequency in frequencies:
    wavelength = 2 * np.pi / frequency
    if wavelength < 8192 / 4:
      kinds.add('kept')
    elif wavelength > 8192 / 1:
      kinds.add('divided')
      frequency = frequency / 8
    else:
      kinds.add('between')
      smooth = (8192 / wavelength - 1) / (4 - 1)
      frequency = (1 - smooth) * frequency / 8 + smooth * frequency
    expected.append(frequency)
  assert len(kinds) == 3
  np.testing.assert_allclose(rotary.stretched(
      jnp.float32(frequencies), rope), expected, rtol=1e-5)


@pytest.mark.parametrize('remat', [True, 'nothing', 'dots'])
def test_recomputing_layers_changes_no_value(params, tokens, remat):
  """Nor any gradient: that is in policy_test."""
  assert_close(forward(params, tokens, remat=remat),
               forward(params, tokens), 1e-5)


def test_another_remat_is_refused(params, tokens):
  with pytest.raises(ValueError, match=r"\['dots', 'nothing'\], but is 'all'"):
    forward(params, tokens, remat='all')


def test_bfloat16_is_an_approximation_of_float32(params, tokens):
  hidden = {dtype: jax.jit(lambda params, tokens: transformer.forward(
      params, tokens, tiny.CONFIG, dtype=dtype))(params, tokens)
            for dtype in (jnp.float32, jnp.bfloat16)}
  half, whole = hidden[jnp.bfloat16], hidden[jnp.float32]
  assert half.dtype == jnp.bfloat16 and whole.dtype == jnp.float32
  assert_close(half.astype(jnp.float32), whole, 0.15)
  assert np.abs(half - whole).max() > 1e-3  # and it was bfloat16 within


def test_bfloat16_parameters_may_be_used_in_float32(params, tokens):
  rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
  back = jax.tree.map(lambda x: x.astype(jnp.float32), rounded)
  np.testing.assert_array_equal(forward(rounded, tokens), forward(back, tokens))


@pytest.mark.parametrize('window, expected', [
    (None, ['1000', '1100', '1110', '1111']),
    (2, ['1000', '1100', '0110', '0011']),
    (1, ['1000', '0100', '0010', '0001']),
])
def test_a_window_counts_the_token_itself(window, expected):
  column = jnp.arange(4)
  seen = attention.visible(column, column, window)
  assert [''.join(str(int(x)) for x in row) for row in seen] == expected
  rows = attention.visible(column[None, :2], column, window)
  np.testing.assert_array_equal(rows[0], seen[:2])


def test_a_window_reaches_back_by_one_window_a_layer(params, tokens):
  config = dataclasses.replace(tiny.CONFIG, sliding_window=3)
  run = jax.jit(lambda tokens: transformer.forward(params, tokens, config))
  other = tokens.copy()
  other[:, 2] = (other[:, 2] + 1) % 96
  moved = np.abs(run(tokens) - run(other)).max((0, 2)) > 0
  reach = 2 + config.num_hidden_layers * (config.sliding_window - 1)
  np.testing.assert_array_equal(
      moved, (np.arange(LENGTH) >= 2) & (np.arange(LENGTH) <= reach))


def test_packed_documents_have_windows_of_their_own(params, tokens):
  config, cut = dataclasses.replace(tiny.CONFIG, sliding_window=3), 6
  run = jax.jit(functools.partial(transformer.forward, config=config))
  packed = run(
      params, tokens,
      segment_ids=np.tile(np.arange(LENGTH) >= cut, (ROWS, 1)),
      positions=np.tile([*range(cut), *range(LENGTH - cut)], (ROWS, 1)))
  assert_close(packed[:, :cut], run(params, tokens[:, :cut]))
  assert_close(packed[:, cut:], run(params, tokens[:, cut:]))


def test_grouped_queries_equal_repeated_keys_in_float64():
  rng = np.random.default_rng(1)
  q = rng.normal(size=(2, 3, 4, 8))
  k, v = rng.normal(size=(2, 2, 2, 5, 8))
  visible = rng.random((2, 3, 5)) < 0.6
  visible[:, :, 0] = True
  got = attention.grouped(*map(jnp.float32, (q, k, v)), visible)
  for row in range(2):
    for t in range(3):
      for head in range(4):
        keys, values = k[row, head // 2], v[row, head // 2]
        scores = np.array([keys[s] @ q[row, t, head] / np.sqrt(8)
                           for s in range(5)])
        weights = np.where(visible[row, t], np.exp(scores), 0)
        assert_close(got[row, t, head], weights @ values / weights.sum(),
                     atol=1e-5)


def test_a_query_that_sees_nothing_is_finite():
  q = jnp.ones((1, 1, 2, 4))
  v = jnp.arange(12.0).reshape(1, 1, 3, 4)
  seen = attention.grouped(q, v, v, jnp.zeros((1, 1, 3), bool))
  np.testing.assert_allclose(seen[0, 0, 0], v[0, 0].mean(0))


@pytest.mark.parametrize(
    'config', [tiny.CONFIG, UNTIED, EVERYTHING],
    ids=['tied', 'untied', 'everything'])
def test_every_parameter_has_its_logical_axes(config):
  params = jax.eval_shape(
      lambda key: transformer.init(config, key), jax.random.key(0))
  axes = transformer.logical_axes(config)
  jax.tree.map(lambda leaf, names: None, params, axes)  # the same tree
  ranks = jax.tree.map(lambda leaf: leaf.ndim, params)
  named = jax.tree.map(len, axes, is_leaf=lambda x: isinstance(x, tuple))
  assert ranks == named
  assert ('head' in params) == (not config.tie_word_embeddings)
  assert all(names[0] == 'layers' for names in jax.tree.leaves(
      axes['layers'], is_leaf=lambda x: isinstance(x, tuple)))


def test_layers_start_differently():
  init = jax.jit(lambda key: transformer.init(tiny.CONFIG, key))
  params = init(jax.random.key(0))
  kernel = np.asarray(params['layers']['q']['kernel'])
  assert np.abs(kernel[0] - kernel[1]).max() > 1e-3
  assert 0.015 < kernel.std() < 0.025
