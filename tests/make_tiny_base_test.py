# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The tiny base model's making: packing, the planted circuit, exact resume."""

import hashlib
import shutil

from configs import tiny_base
import jax
import numpy as np
import pytest
from searchrl.agent import tokenizer as tokenizers
from searchrl.jobs import make_tiny_base
from searchrl.models import induction
from searchrl.models import transformer
from searchrl.models import weights


def test_packing_keeps_every_document_whole_and_apart():
  rng = np.random.default_rng(0)
  documents = [(rng.integers(1, 9, n).tolist(), [1.0] * n)
               for n in rng.integers(1, 17, 30)]
  packed = make_tiny_base.pack_documents(documents, (8, 16), pad_id=0)
  found = []
  for width, rows in packed.items():
    for tokens, weight, segments in rows:
      for segment in range(1, int(segments.max()) + 1):
        where = np.flatnonzero(segments == segment)
        assert (np.diff(where) == 1).all()
        assert weight[where[0]] == 0 and (weight[where[1:]] == 1).all()
        assert len(where) <= width
        found.append(tuple(tokens[where].astype(int)))
      assert (weight[segments == 0] == 0).all()
  assert sorted(found) == sorted(tuple(ids) for ids, _ in documents)


def test_document_longer_than_every_row_is_left_out():
  packed = make_tiny_base.pack_documents([([1] * 9, [1.0] * 9)], (8,), pad_id=0)
  assert packed == {8: []}


def test_echoes_weigh_only_what_can_be_copied():
  (ids, weight), = make_tiny_base.echoes(1, 50, np.random.default_rng(0))
  said = weight.count(0.0)
  assert len(ids) == 128 and ids[said:] == ids[:-said]


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
  """Of what followed before, among 200 ids; by chance about 100."""
  said = np.random.default_rng(1).permutation(200)[:20]
  tokens = np.concatenate([said, said])[None]
  logits = np.asarray(transformer.logits(
      params, transformer.forward(params, tokens, CONFIG)))[0]
  return np.median([(logits[t] > logits[t, tokens[0, t + 1]]).sum()
                    for t in range(20, 39)])


def test_planted_circuit_prefers_what_followed_before():
  params = transformer.init(CONFIG, jax.random.key(0))
  planted = induction.plant(params, CONFIG, seed=0)
  assert median_rank(planted) < 50 < 75 < median_rank(params)


def test_shape_without_room_for_the_circuit_is_refused():
  import dataclasses
  narrow = dataclasses.replace(CONFIG, hidden_size=64)
  with pytest.raises(ValueError, match='hidden_size >= 2'):
    induction.plant({}, narrow, seed=0)


@pytest.mark.slow
def test_interrupted_making_ends_in_the_same_bytes(tmp_path):
  config = tiny_base.get_config('smoke')
  make_tiny_base.run(config, str(tmp_path / 'whole'))
  model = tmp_path / 'whole' / 'model'
  shape = weights.read_config(str(model))
  weights.load(str(model), shape)
  assert tokenizers.load(str(model)).vocab_size == shape.vocab_size == 512
  # As if it had been killed after the last checkpoint but one.
  broken = tmp_path / 'broken'
  shutil.copytree(tmp_path / 'whole', broken)
  steps = sorted(int(p.name) for p in (broken / 'checkpoints').iterdir())
  shutil.rmtree(broken / 'checkpoints' / str(steps[-1]))
  shutil.rmtree(broken / 'model')
  make_tiny_base.run(config, str(broken))
  digests = {hashlib.sha256(
      (folder / 'model' / 'model.safetensors').read_bytes()).hexdigest()
             for folder in (tmp_path / 'whole', broken)}
  assert len(digests) == 1
