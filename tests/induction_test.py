# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""induction: the planted circuit finds the previous token, and copies."""

import dataclasses

import jax
import numpy as np
import pytest

from searchrl.models import transformer
from tools import induction

CONFIG = transformer.TransformerConfig(
    vocab_size=200, hidden_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    intermediate_size=64)


def test_planted_circuit_attends_to_the_previous_token():
  query, key = induction._previous_token(32, 10_000.0, 8.0)
  at = np.arange(12)[None]
  rotated = [transformer.rotate(np.broadcast_to(
      x.astype(np.float32), (1, 12, 1, 32)), at, 10_000.0)[0, :, 0]
             for x in (query, key)]
  scores = np.asarray(rotated[0] @ rotated[1].T) / np.sqrt(32)
  for t in range(1, 12):
    assert scores[t, :t + 1].argmax() == t - 1
    others = np.delete(scores[t, :t + 1], t - 1)
    assert scores[t, t - 1] - others.max() > 4  # nats


def median_rank(params):
  """The rank of what followed before, among 200 ids; by chance about 100."""
  motif = np.random.default_rng(1).permutation(200)[:20]
  tokens = np.concatenate([motif, motif])[None]
  logits = np.asarray(transformer.logits(
      params, transformer.forward(params, tokens, CONFIG)))[0]
  return np.median([(logits[t] > logits[t, tokens[0, t + 1]]).sum()
                    for t in range(20, 39)])


def test_planted_circuit_prefers_what_followed_before():
  params = transformer.init(CONFIG, jax.random.key(0))
  planted = induction.plant(params, CONFIG, seed=0)
  assert median_rank(planted) < 50 < 75 < median_rank(params)


def test_shape_without_room_for_the_circuit_is_refused():
  narrow = dataclasses.replace(CONFIG, hidden_size=64)
  with pytest.raises(ValueError, match='hidden_size >= 2'):
    induction.plant({}, narrow, seed=0)
