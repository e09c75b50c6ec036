# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""supervised: updates by hand, exact resume, packed rows, the model's card."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from searchrl.models import policy
from searchrl.runtime import checkpoint
from searchrl.training import supervised
from searchrl.training.train_step import TrainState

STEPS, RATE = 5, 0.1


def batch_of(step):
  rng = np.random.default_rng(step)
  return {'x': rng.normal(size=(4, 3)), 'y': rng.normal(size=4)}, 10 + step


def loss(params, batch):
  errors = batch['x'] @ params['w'] - batch['y']
  return jnp.mean(errors ** 2), {'largest': jnp.max(jnp.abs(errors))}


def fit(folder, optimizer=optax.sgd(RATE), batch_of=batch_of):
  params = {'w': jnp.ones(3)}
  return supervised.fit(
      supervised.make_update(loss, optimizer),
      TrainState(params, optimizer.init(params)), batch_of, folder,
      steps=STEPS, save_every=2)


def test_updates_and_their_record_by_hand(tmp_path):
  state, record = fit(tmp_path)
  w, losses, largest = np.ones(3), [], []
  for step in range(STEPS):
    batch, _ = batch_of(step)
    errors = batch['x'] @ w - batch['y']
    losses.append(np.mean(errors ** 2))
    largest.append(np.abs(errors).max())
    w = w - RATE * 2 * errors @ batch['x'] / 4
  np.testing.assert_allclose(state.params['w'], w, rtol=1e-5)
  assert record['steps'] == STEPS and record['tokens'] == 10 + 11 + 12 + 13 + 14
  assert record['cpu_seconds'] > 0
  for name, values in (('loss', losses), ('largest', largest)):
    np.testing.assert_allclose(
        record[name], [np.mean(values[:2]), np.mean(values[2:4]), values[4]],
        atol=1e-4)
  assert checkpoint.steps(tmp_path) == [4, 5]


def test_a_killed_run_ends_in_the_same_bytes(tmp_path):
  adam = optax.adam(RATE)
  whole, record = fit(tmp_path / 'whole', adam)

  def killed(step):
    if step == 3:
      raise KeyboardInterrupt
    return batch_of(step)

  with pytest.raises(KeyboardInterrupt):
    fit(tmp_path / 'killed', adam, killed)
  resumed, again = fit(tmp_path / 'killed', adam)
  assert checkpoint.digest(resumed) == checkpoint.digest(whole)
  assert again | {'cpu_seconds': 0} == record | {'cpu_seconds': 0}


def test_a_finished_run_is_not_trained_again(tmp_path):
  state, record = fit(tmp_path)
  again, same = fit(tmp_path, batch_of=None)
  assert checkpoint.digest(again) == checkpoint.digest(state)
  assert same == record


def test_older_checkpoints_are_resumed(tmp_path):
  """Those of a state of dicts, whose record had 'losses'."""
  adam = optax.adam(RATE)
  state, _ = fit(tmp_path / 'new', adam)
  old = {'params': state.params, 'opt_state': state.opt_state}
  record = {'steps': 4, 'tokens': 46, 'cpu_seconds': 1.0, 'losses': [2.5, 1.5]}
  checkpoint.save(tmp_path / 'old', 4, old, record)
  _, resumed = fit(tmp_path / 'old', adam)
  assert resumed['loss'][:2] == [2.5, 1.5] and len(resumed['loss']) == 3
  assert resumed['tokens'] == 60 and 'losses' not in resumed


def test_packing_keeps_every_document_whole_and_apart():
  rng = np.random.default_rng(0)
  documents = [(rng.integers(1, 9, n).tolist(), [1.0] * n)
               for n in rng.integers(1, 17, 30)]
  packed = supervised.pack_documents(documents, (8, 16), pad_id=0)
  found = []
  for width, rows in packed.items():
    for tokens, weight, segments in rows:
      for segment in range(1, int(segments.max()) + 1):
        places = np.flatnonzero(segments == segment)
        assert (np.diff(places) == 1).all()
        assert weight[places[0]] == 0 and (weight[places[1:]] == 1).all()
        assert len(places) <= width
        found.append(tuple(tokens[places].astype(int)))
      assert (weight[segments == 0] == 0).all()
  assert sorted(found) == sorted(tuple(ids) for ids, _ in documents)


def test_document_longer_than_every_row_is_left_out():
  packed = supervised.pack_documents([([1] * 9, [1.0] * 9)], (8,), pad_id=0)
  assert packed == {8: []}


def test_the_loss_of_packed_rows_is_that_of_each_document():
  rng = np.random.default_rng(0)
  documents = [(rng.integers(0, 96, n).tolist(), rng.random(n).tolist())
               for n in (5, 9, 7, 16)]
  rows = np.stack(supervised.pack_documents(documents, (16,), pad_id=0)[16])
  assert len(rows) == 3
  batch = {'tokens': rows[:, 0].astype(np.int32), 'weights': rows[:, 1],
           'segment_ids': rows[:, 2].astype(np.int32)}
  params = tiny.params()
  value, _ = supervised.language_model_loss(tiny.CONFIG)(params, batch)
  total = count = 0
  for ids, weights in documents:
    logprobs, _ = policy.token_logprobs(
        params, np.array([ids], np.int32), tiny.CONFIG)
    total -= np.asarray(logprobs)[0, 1:] @ weights[1:]
    count += sum(weights[1:])
  np.testing.assert_allclose(value, total / count, rtol=1e-5)


def test_a_card_records_how_the_model_was_made(tmp_path):
  for name in ('model.safetensors', 'tokenizer.json', 'config.json'):
    (tmp_path / name).write_text(name)
  record = {'steps': 1200, 'tokens': 34_567, 'cpu_seconds': 8.6,
            'loss': [2.0, 1.2345]}
  supervised.write_card(tmp_path, ['# A model', '', 'It is small.'],
                        {'data': 'lessons', 'seed': 3}, record)
  digest = hashlib.sha256(b'tokenizer.json').hexdigest()
  assert (tmp_path / 'README.md').read_text().startswith(
      '# A model\n\nIt is small.\n\n| | |\n|---|---|\n'
      '| data | lessons |\n| seed | 3 |\n| updates, tokens | 1,200, 34,567 |\n'
      '| CPU seconds | 9 |\n| last loss (nats) | 1.234 |\n'
      f'| jax | {jax.__version__} |\n| sha256 of model.safetensors | ')
  assert f'| sha256 of tokenizer.json | `{digest}` |' in (
      tmp_path / 'README.md').read_text()
