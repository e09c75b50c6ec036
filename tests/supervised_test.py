# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""supervised: updates by hand, exact resume, a language model's loss, cards."""

import contextlib
import hashlib
import json
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from searchrl.models import lora as loras
from searchrl.models import policy_logprobs
from searchrl.runtime import checkpoint
from searchrl.runtime import mesh as mesh_lib
from searchrl.runtime import metrics
from searchrl.runtime import signals
from searchrl.training import supervised
from searchrl.training.train_state import TrainState

DEVICES = 8

STEPS, RATE = 5, 0.1


def batch_of(step):
  rng = np.random.default_rng(step)
  return {'x': rng.normal(size=(4, 3)), 'y': rng.normal(size=4)}, 10 + step


def loss(params, batch):
  errors = batch['x'] @ params['w'] - batch['y']
  return jnp.mean(errors ** 2), {'largest': jnp.max(jnp.abs(errors))}


def fit(folder, optimizer=optax.sgd(RATE), batch_of=batch_of, **options):
  params = {'w': jnp.ones(3)}
  return supervised.fit(
      supervised.make_update(loss, optimizer),
      TrainState(params, optimizer.init(params)), batch_of, folder,
      steps=STEPS, save_every=2, progress=False, **options)


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
  np.testing.assert_allclose(record['last_loss'], losses[-1], rtol=1e-5)
  for name, values in (('loss', losses), ('largest', largest)):
    np.testing.assert_allclose(
        record[name], [np.mean(values[:2]), np.mean(values[2:4]), values[4]],
        atol=1e-4)
  assert checkpoint.steps(tmp_path) == [4, 5]


def test_each_loss_is_shown_beside_its_update(tmp_path, monkeypatch):
  shown = []

  class Bar:
    def __init__(self, total, done, **_):
      self.done = done

    def update(self, done, loss):
      self.done += 1
      shown.append((self.done, loss))

    def close(self):
      pass

  monkeypatch.setattr(supervised.progress_lib, 'ProgressBar', Bar)
  with contextlib.closing(metrics.Writer(tmp_path)) as writer:
    fit(tmp_path, writer=writer)
  written = [json.loads(line) for line in (
      tmp_path / metrics.FILE).read_text().splitlines()]
  assert shown == [
      (line['training/global_step'], pytest.approx(line['sft/loss']))
      for line in written if 'sft/loss' in line]
  assert len(shown) == STEPS


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


def test_a_finished_run_is_not_trained_again(tmp_path, capsys):
  state, record = fit(tmp_path)
  again, same = fit(tmp_path, batch_of=None)
  assert f'All {STEPS} updates were done before.' in capsys.readouterr().err
  assert checkpoint.digest(again) == checkpoint.digest(state)
  assert same == record


def test_a_stopped_run_is_saved_and_ends_in_the_same_bytes(tmp_path):
  adam = optax.adam(RATE)
  whole, record = fit(tmp_path / 'whole', adam)

  def stopping(step):
    if step == 2:
      signal.raise_signal(signal.SIGTERM)
    return batch_of(step)

  with pytest.raises(signals.Stopped, match='Stopped after update 3; .*go on'):
    fit(tmp_path / 'stopped', adam, stopping)
  assert checkpoint.steps(tmp_path / 'stopped') == [2, 3]
  resumed, again = fit(tmp_path / 'stopped', adam)
  assert checkpoint.digest(resumed) == checkpoint.digest(whole)
  assert again | {'cpu_seconds': 0} == record | {'cpu_seconds': 0}


def test_a_loss_that_is_no_number_ends_it_before_it_is_saved(tmp_path):
  def poisoned(step):
    batch, tokens = batch_of(step)
    return (batch if step < 3 else jax.tree.map(lambda x: x * np.nan, batch),
            tokens)

  with pytest.raises(ValueError, match='finite number, but is not in update 4'):
    fit(tmp_path, optax.adam(RATE), poisoned)
  assert checkpoint.steps(tmp_path) == [2]


def test_validation_comes_before_now_and_then_and_after(tmp_path):
  seen = []

  def run(batch_of=batch_of):
    validation = supervised.Validation(
        lambda state: seen.append(1) or float(state.params['w'][0]), every=2)
    with contextlib.closing(metrics.Writer(
        tmp_path, step_field='sft/step')) as writer:
      return fit(tmp_path / 'checkpoints', batch_of=batch_of,
                 validation=validation, writer=writer)

  def killed(step):
    if step == 3:
      raise KeyboardInterrupt
    return batch_of(step)

  with pytest.raises(KeyboardInterrupt):
    run(killed)
  _, record = run()
  assert [step for step, _ in record['validation']] == [0, 2, 4, 5]
  assert len(seen) == 4 and record['validation'][0][1] == 1
  lines = metrics.read(tmp_path / metrics.FILE)
  assert [line['sft/step'] for line in lines] == [0, 1, 2, 3, 4, 5]
  assert [[line['sft/step'], line['sft/val_loss']] for line in lines
          if 'sft/val_loss' in line] == record['validation']
  assert lines[2].keys() == {
      'sft/step', 'sft/tokens', 'sft/loss', 'sft/largest', 'sft/val_loss'}


def test_every_epoch_has_every_document_once_in_an_order_of_its_own():
  lengths = [3, 1, 4, 1, 5, 9, 2]
  plan = supervised.batches(lengths, seed=1, documents=2, epochs=3)
  order = [i for chosen in plan for i in chosen]
  epochs = [order[n:n + 7] for n in (0, 7, 14)]
  assert [len(chosen) for chosen in plan] == [2] * 10 + [1]
  assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
  assert len(set(map(tuple, epochs))) == 3
  assert plan[:4] == supervised.batches(lengths, seed=1, documents=2, steps=4)
  assert plan != supervised.batches(lengths, seed=2, documents=2, epochs=3)


def test_a_batch_has_tokens_at_most_unless_one_document_has_more():
  cut = lambda **most: list(supervised.cut(range(5), [3, 3, 9, 1, 4], **most))
  assert cut(tokens=6) == [[0, 1], [2], [3, 4]]
  assert cut(tokens=6, documents=1) == [[0], [1], [2], [3], [4]]
  assert cut(documents=3) == [[0, 1, 2], [3, 4]]


def documents_of(rng, lengths=(5, 9, 7, 16)):
  return [supervised.Document(
      rng.integers(0, 96, n), np.round(rng.random(n), 1)) for n in lengths]


def language(documents, base=None, devices=1, **options):
  """The learner, its first state, and the documents as its batch."""
  learner = supervised.language_learner(
      tiny.CONFIG, optax.sgd(0.1), mesh_lib.make(
          devices=jax.devices()[:devices]), pack_length=16, max_segments=4, rows=8,
      **options)
  return (learner, learner.init(base or tiny.params()),
          supervised.to_batch(documents, rows=8, length=16, pad_id=0))


def by_document(params, documents):
  """The weighted mean of -log p, one document at a time."""
  total = count = 0
  for ids, weights in documents:
    row = np.pad(ids, (0, 16 - len(ids)))[None]
    logprobs, _ = token_logprobs(params, row)
    total -= np.asarray(logprobs, np.float64)[0, 1:len(ids)] @ weights[1:]
    count += sum(weights[1:])
  return total / count


@jax.jit
def token_logprobs(params, tokens):
  return policy_logprobs.token_logprobs(params, tokens, tiny.CONFIG)


@pytest.mark.slow
def test_the_loss_of_packed_rows_is_that_of_each_document():
  documents = documents_of(np.random.default_rng(0))
  learner, state, batch = language(documents)
  want = by_document(tiny.params(), documents)
  loss = supervised.language_loss(learner, None, [batch, batch])
  np.testing.assert_allclose(loss(state), want, rtol=1e-5)
  state, values = supervised.language_update(learner)(state, batch)
  np.testing.assert_allclose(values['loss'], want, rtol=1e-5)
  np.testing.assert_allclose(
      loss(state), by_document(state['policy'].params, documents), rtol=1e-5)
  assert loss(state) < want


@pytest.mark.slow
@pytest.mark.parametrize('options', [
    dict(devices=8), dict(remat='nothing'), dict(microbatch_rows=1),
    dict(devices=8, lora=loras.Lora(2, 4.0)), dict(lora=loras.Lora(2, 4.0))])
def test_devices_remat_and_micro_batches_change_no_loss(options):
  documents = documents_of(np.random.default_rng(1))
  lora, losses = options.get('lora'), []
  for changed in ({}, options):
    base = tiny.params()
    learner, state, batch = language(
        documents, base, **({'lora': lora} | changed))
    update = supervised.language_update(learner, base)
    for _ in range(4):
      state, values = update(state, batch)
      losses.append(values['loss'])
    losses.append(supervised.language_loss(learner, base, [batch])(state))
  assert losses[4] < losses[0]
  np.testing.assert_allclose(losses[:5], losses[5:], rtol=1e-5)


def test_a_card_records_how_the_model_was_made(tmp_path):
  for name in ('model.safetensors', 'tokenizer.json', 'config.json'):
    (tmp_path / name).write_text(name)
  record = {'steps': 1200, 'tokens': 34_567, 'cpu_seconds': 8.6,
            'loss': [2.0, 1.5], 'last_loss': 1.2345}
  supervised.write_card(tmp_path, ['# A model', '', 'It is small.'],
                        {'data': 'lessons', 'seed': 3}, record)
  digest = hashlib.sha256(b'tokenizer.json').hexdigest()
  assert (tmp_path / 'README.md').read_text().startswith(
      '# A model\n\nIt is small.\n\n| | |\n|---|---|\n'
      '| data | lessons |\n| seed | 3 |\n| updates, tokens | 1,200, 34,567 |\n'
      '| CPU seconds | 9 |\n| loss of the last update (nats) | '
      '1.234 |\n| mean loss since the checkpoint before | 1.500 |\n'
      f'| jax | {jax.__version__} |\n| sha256 of model.safetensors | ')
  assert f'| sha256 of tokenizer.json | `{digest}` |' in (
      tmp_path / 'README.md').read_text()
