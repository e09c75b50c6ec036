# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Supervised training: one resumable loop for any update function.

`fit` updates a state on batches, which are a function of the step. It keeps a
record of steps, tokens, time and metrics, and saves the state and the record. A
killed run that is started again has the same result bit by bit.
`language_update` makes the update of a language model: the learner's, with an
algorithm whose advantage is 1. `make_update` makes the update of another model:
a jitted step on a loss.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import itertools
import math
import pathlib
import time
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
import numpy as np
import optax

from searchrl.models import transformer
from searchrl.rl import algorithms
from searchrl.runtime import atomic_files
from searchrl.runtime import checkpoint
from searchrl.runtime import dispatch
from searchrl.runtime import metrics as metrics_lib
from searchrl.runtime import processes
from searchrl.runtime import progress as progress_lib
from searchrl.runtime import signals
from searchrl.training import learner as learners
from searchrl.trajectory import Batch

Metrics = dict[str, Any]  # scalars by name, including 'loss'
# A Loss maps (params, batch) to (loss, metrics), and an Update maps (state,
# batch) to (state, metrics).
Loss = Callable[[Any, Any], tuple[jax.Array, Metrics]]
Update = Callable[[Any, Any], tuple[Any, Metrics]]


class Document(NamedTuple):
  """A training document of a language model: token ids and their weights."""

  ids: Sequence[int]
  weights: Sequence[float]  # weights of the tokens in the loss; 0: only read


@dataclasses.dataclass(frozen=True)
class Validation:
  """A loss on held-out data, and the updates after which it is computed."""

  loss: Callable[[Any], float]  # function from the state to the loss
  # Updates between computations; 0: none. The loss is always computed before
  # the first update and after the last.
  every: int = 0

  def is_due(self, done: int, steps: int) -> bool:
    """Returns whether the loss is due after `done` of `steps` updates."""
    return done in (0, steps) or bool(self.every) and done % self.every == 0


def make_update(loss: Loss, optimizer: optax.GradientTransformation) -> Update:
  """Makes a jitted optimiser step, (state, batch) -> (state, metrics).

  Args:
    loss: Function (params, batch) -> (loss, further metrics).
    optimizer: Optimiser that made the state's `opt_state`.

  Returns:
    The step. It donates the buffers of its state.
  """
  def update(state, batch):
    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(
        state.params, batch)
    state, _ = state.apply_gradient(optimizer, gradient)
    return state, {'loss': value} | metrics

  return dispatch.Ordered(jax.jit(update, donate_argnums=0))


def fit(
    update: Update,
    state: Any,
    batch_of: Callable[[int], tuple[Any, int]],
    folder: pathlib.Path,
    *,
    steps: int,
    save_every: int,
    validation: Validation | None = None,
    writer: metrics_lib.Writer | None = None,
    progress: bool = True,
) -> tuple[Any, dict[str, Any]]:
  """Trains from the newest checkpoint of a folder, or else from a state.

  Ctrl-C and SIGTERM stop the training after the current update, which is saved.

  Args:
    update: Update from `make_update` or `language_update`.
    state: State before the first update, used if the folder has no checkpoint.
    batch_of: Function from the step, counted from 0, to the batch and the
      number of its tokens that are not padding.
    folder: Directory of the checkpoints.
    steps: Total number of updates, with those before the checkpoint.
    save_every: Number of updates between two checkpoints.
    validation: Loss on held-out data and its interval, if there is any.
    writer: Writer that gets the metrics of each update, as sft/<name>.
    progress: If True, a progress bar is shown on stderr.

  Returns:
    The last state, and a dictionary with the number of 'steps' and of 'tokens',
    the 'cpu_seconds', the loss of the last update ('last_loss'), and pairs of a
    step and its loss on held-out data ('validation'). Each metric's name has
    the list of the metric's means between checkpoints.

  Raises:
    Stopped: A signal stopped the training early.
    ValueError: A loss is not a finite number. Updates since the last checkpoint
      are not saved.
  """
  state, record = _restored(folder, state)
  writer = writer or metrics_lib.Writer(folder, enabled=False)
  writer.truncate(record['steps'] or -1)
  if record['steps'] >= steps:
    processes.say(f'All {steps} updates were done before.')
  if not record['steps']:
    writer.write(0, _validated(validation, state, record, steps))
  first, clock, stopping = record['steps'], time.process_time(), False
  loss: Any = None
  with (signals.StopRequest(_say_stop) as stop,
        contextlib.closing(progress_lib.ProgressBar(
            steps, first, enabled=progress and processes.is_first(),
            unit='update')) as bar):
    while record['steps'] < steps and not stopping:
      state, metrics = _updated(update, state, batch_of, record, first)
      # The previous update's loss is shown, so that the host need not wait.
      if loss is not None:
        bar.update(None, loss=float(loss))
      loss = metrics['sft/loss']
      writer.write(record['steps'], metrics | _validated(
          validation, state, record, steps))
      stopping = processes.stop_requested_anywhere(stop.is_requested)
      whole = record['steps'] % save_every == 0 or record['steps'] == steps
      if whole or stopping:
        clock = _save(folder, state, record, whole, clock)
    if loss is not None:
      bar.update(None, loss=float(loss))
  if record['steps'] < steps:
    raise signals.Stopped(
        f'Stopped after update {record["steps"]}; everything is saved in '
        f'{folder}. Run the same command to go on.')
  return state, record


def _restored(folder: pathlib.Path, state: Any) -> tuple[Any, dict[str, Any]]:
  """Returns the state and record of the newest checkpoint, if there is one.

  Otherwise it returns `state` and a new record. The record's 'recent' has the
  metrics of the updates after its last means.
  """
  with progress_lib.phase('Looking for a checkpoint'):
    _, state, record = checkpoint.restore(
        folder, state, warn=processes.warn) or (
            0, state,
            {'steps': 0, 'tokens': 0, 'cpu_seconds': 0.0, 'recent': []})
  return state, record


def _updated(update: Update, state: Any,
             batch_of: Callable[[int], tuple[Any, int]],
             record: dict[str, Any], first: int) -> tuple[Any, Metrics]:
  """Makes the next update and adds it to the record.

  `first` is the step of this process's first update, which compiles.

  Returns:
    The new state, and the update's metrics with names sft/<name>.
  """
  batch, tokens = batch_of(record['steps'])
  with progress_lib.phase(
      'updating' if record['steps'] > first else
      'First update, which compiles', quiet=record['steps'] > first):
    state, values = update(state, batch)
  record['recent'].append(values)
  record['steps'] += 1
  record['tokens'] += tokens
  return state, {'sft/tokens': tokens} | {
      f'sft/{name}': value for name, value in values.items()}


def _validated(validation: Validation | None, state: Any,
               record: dict[str, Any], steps: int) -> dict[str, float]:
  """Returns sft/val_loss, and records it, if the loss is due; else {}."""
  if not validation or not validation.is_due(record['steps'], steps):
    return {}
  loss = validation.loss(state)
  record.setdefault('validation', []).append([record['steps'], loss])
  return {'sft/val_loss': loss}


def _save(folder: pathlib.Path, state: Any, record: dict[str, Any],
          whole: bool, clock: float) -> float:
  """Saves a checkpoint, and returns the CPU time to pass as the next `clock`.

  Args:
    folder: Directory of the checkpoints.
    state: State to save.
    record: Record to save. The CPU seconds since `clock` are added to it.
    whole: Whether means of the recent metrics are due; False if the training
      stops between two regular saves. See `_add_means`.
    clock: CPU time of the process at the last save, or at the start.

  Raises:
    ValueError: A loss since the last save is not finite. Nothing is saved.
  """
  now = time.process_time()
  record['cpu_seconds'] += now - clock
  _check_finite(record)
  _add_means(record, whole)
  checkpoint.save(folder, record['steps'], state, record)
  return now


def _check_finite(record: Mapping[str, Any]) -> None:
  """Raises a ValueError if a loss since the last checkpoint is not finite."""
  losses = [float(values['loss']) for values in record['recent']]
  bad = [n for n, loss in enumerate(losses, record['steps'] - len(losses) + 1)
         if not math.isfinite(loss)]
  if bad:
    raise ValueError(
        f'the loss must be a finite number, but is not in update {bad[0]}'
        f'{f" and {len(bad) - 1} more" if bad[1:] else ""}. Such updates were '
        'left out, and the last checkpoint is from before them. Lower '
        'optimizer.learning_rate, or look for a NaN in the model.')


def _add_means(record: dict[str, Any], whole: bool) -> None:
  """Adds the means of recent metrics to a record, before it is saved.

  record['recent'] has the metrics of each update since the last means. These
  become plain numbers. If `whole` is True, their means are added to the record,
  and record['recent'] is emptied. `whole` is False if the training stops
  between two checkpoints.
  """
  recent = [{name: float(x) for name, x in values.items()}
            for values in record['recent']]
  record['recent'], record['last_loss'] = recent, recent[-1]['loss']
  if whole:
    for name in recent[0]:
      mean = float(np.mean([values[name] for values in recent]))
      record.setdefault(name, []).append(round(mean, 4))
    record['recent'] = []


def _say_stop() -> None:
  if processes.is_first():
    signals.say('Stopping after this update; Ctrl-C stops at once and loses '
                'it.')


def language_update(learner: learners.Learner, base: Any = None) -> Update:
  """Returns a function that trains a language model on one batch.

  It maps (state, batch) to (state, metrics). The metrics are loss, entropy,
  grad_norm and useful, the share of computed tokens that are not padding.

  Args:
    learner: Learner from `language_learner`.
    base: Parameters of the frozen policy, needed only if adapters are trained.
  """
  names = {'loss': 'actor/pg_loss', 'entropy': 'actor/entropy',
           'grad_norm': 'actor/grad_norm', 'useful': 'perf/useful_tokens'}

  def update(state, batch):
    updated = learner.update(state, learner.pack(batch), base)
    return updated.state, {
        ours: updated.metrics.get(name, 0.0) for ours, name in names.items()}

  return update


def language_learner(
    shape: transformer.TransformerConfig,
    optimizer: optax.GradientTransformation, mesh: Mesh, *, pack_length: int,
    **options: Any) -> learners.Learner:
  """Makes the learner with which `language_update` trains a decoder.

  Args:
    shape: Shape of the decoder.
    optimizer: Optimiser of the decoder, or of its adapters.
    mesh: Mesh of the devices.
    pack_length: Number of tokens of a row. No document may be longer.
    **options: Options of `learner.make`. `rows` must be among them: the largest
      number of documents per update.
  """
  return learners.make(shape, algorithms.sft(), optimizer, mesh,
                       length=pack_length, pack_length=pack_length, **options)


def language_loss(learner: learners.Learner, base: Any,
                  batches: Sequence[Batch]) -> Callable[[Any], float]:
  """Returns a function that maps a training state to the loss on `batches`.

  The loss is the mean of -log p over all tokens, weighted by the batches'
  `weights`, in nats per token. Adapters need `base`, the parameters of the
  frozen policy.
  """
  def loss(state):
    total = count = 0.0
    with progress_lib.phase('Computing the validation loss',
                            total=len(batches), unit='batch') as reach:
      for batch in progress_lib.counted(batches, reach):
        weights = np.where(batch.loss_mask, batch.weights, 0).astype(np.float64)
        total -= np.sum(
            weights * learner.logprobs(state, learner.pack(batch), base))
        count += weights.sum()
    return float(total / count)

  return loss


def batches(lengths: Sequence[int], *, seed: int, documents: int = 0,
            tokens: int = 0, epochs: int = 0, steps: int = 0
           ) -> list[list[int]]:
  """Returns the indices of each update's documents, reshuffled each epoch.

  Args:
    lengths: Lengths of the documents, in tokens.
    seed: Seed of the shuffling; each epoch has another order.
    documents: Maximum number of documents per update; 0 means any number.
    tokens: Maximum number of tokens per update; 0 means any number. A document
      with more tokens than that gets an update of its own.
    epochs: Number of passes over all documents; 0: no limit, set `steps`.
    steps: Maximum number of updates; 0: no limit, set `epochs`.
  """
  orders = (np.random.default_rng([seed, epoch]).permutation(len(lengths))
            for epoch in itertools.islice(itertools.count(), epochs or None))
  stream = itertools.chain.from_iterable(order.tolist() for order in orders)
  return list(itertools.islice(
      cut(stream, lengths, documents=documents, tokens=tokens), steps or None))


def cut(stream: Iterable[int], lengths: Sequence[int], *, documents: int = 0,
        tokens: int = 0) -> Iterator[list[int]]:
  """Cuts a stream of documents into batches, one per update.

  Args:
    stream: Indices of documents, in the order of training.
    lengths: Lengths of all documents, in tokens.
    documents: Maximum number of documents per batch; 0 means any number.
    tokens: Maximum number of tokens per batch; 0 means any number. A document
      with more tokens than that gets a batch of its own.

  Yields:
    The indices of the documents of each batch.
  """
  batch: list[int] = []
  used = 0
  for index in stream:
    if batch and (len(batch) == documents
                  or 0 < tokens < used + lengths[index]):
      yield batch
      batch, used = [], 0
    batch.append(index)
    used += lengths[index]
  if batch:
    yield batch


def to_batch(documents: Sequence[Document], *, rows: int, length: int,
             pad_id: int) -> Batch:
  """Returns documents as a batch [B T] for the learner, each with reward 1.

  Args:
    documents: Documents of at most `length` tokens. The first token of each is
      not trained on, because nothing precedes it.
    rows: Number B of rows. Rows without a document are empty.
    length: Number T of tokens per row.
    pad_id: Token id of the padding.
  """
  tokens = np.full((rows, length), pad_id, np.int32)
  weights = np.zeros((rows, length), np.float32)
  for row, document in enumerate(documents):
    tokens[row, :len(document.ids)] = document.ids
    weights[row, 1:len(document.ids)] = document.weights[1:]
  filled = np.arange(rows) < len(documents)
  ids, rewards = np.arange(rows, dtype=np.int32), filled.astype(np.float32)
  arrays: dict[str, Any] = dict(
      tokens=tokens, loss_mask=weights > 0, weights=weights,
      behavior_logprobs=np.zeros_like(weights), rewards=rewards,
      outcome_rewards=rewards, question_ids=ids, group_ids=ids,
      in_baseline=filled, in_loss=filled, on_policy=filled)
  return Batch(**arrays)


def write_card(folder: pathlib.Path, introduction: Sequence[str],
               facts: Mapping[str, Any], record: Mapping[str, Any]) -> None:
  """Writes the README.md of a model: description, training facts and digests.

  Args:
    folder: Directory of the model, with its other files.
    introduction: Lines of Markdown that come first.
    facts: Names and values for the rows of the table.
    record: Record from `fit`.
  """
  rows = dict(facts) | {
      'updates, tokens': f'{record["steps"]:,}, {record["tokens"]:,}',
      'CPU seconds': f'{record["cpu_seconds"]:.0f}',
      'loss of the last update (nats)': f'{record["last_loss"]:.3f}',
      'mean loss since the checkpoint before': f'{record["loss"][-1]:.3f}',
      'jax': jax.__version__} | digests(folder)
  (folder / 'README.md').write_text(
      '\n'.join([*introduction, '', *table(rows), '']))


def table(rows: Mapping[str, Any]) -> list[str]:
  """Returns the lines of a card's table of names and values."""
  return ['| | |', '|---|---|', *(f'| {k} | {x} |' for k, x in rows.items())]


def digests(folder: pathlib.Path) -> dict[str, str]:
  """Returns the digest of each file of a model, for the table of a card."""
  files = [*sorted(folder.glob('*.safetensors')), folder / 'tokenizer.json',
           folder / 'config.json']
  return {f'sha256 of {file.name}': f'`{atomic_files.sha256(file)}`'
          for file in files}
