# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Supervised training: one loop that resumes, whatever its update is.

`fit` updates a state on the batches of a function of the step, keeps a record
of what it took, and saves both; a killed run that is started again ends in the
same bytes. The update of a language model is the learner's, with an algorithm
whose advantage is 1: `language_update`; that of another is a jitted step on a
loss: `make_update`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import hashlib
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
from searchrl.runtime import checkpoint
from searchrl.runtime import metrics as metrics_lib
from searchrl.runtime import processes
from searchrl.runtime import progress as progress_lib
from searchrl.runtime import signals
from searchrl.training import learner as learners
from searchrl.trajectory import Batch

Metrics = dict[str, Any]  # scalars, 'loss' among them
Loss = Callable[[Any, Any], tuple[jax.Array, Metrics]]
Update = Callable[[Any, Any], tuple[Any, Metrics]]


class Document(NamedTuple):
  """What a language model is trained on: token ids, and how each counts."""

  ids: Sequence[int]
  weights: Sequence[float]  # of the tokens in the loss; 0: only read


@dataclasses.dataclass(frozen=True)
class Validation:
  """A loss on data that is not trained on, and when it is computed."""

  loss: Callable[[Any], float]  # of the state
  every: int = 0  # updates, besides before the first and after the last

  def is_due(self, done: int, steps: int) -> bool:
    """Whether it is, after so many updates of the run's."""
    return done in (0, steps) or bool(self.every) and done % self.every == 0


def make_update(loss: Loss, optimizer: optax.GradientTransformation) -> Update:
  """One jitted optimiser step, (state, batch) -> state, metrics.

  Args:
    loss: (params, batch) -> what to minimise, and further metrics.
    optimizer: the one that made the state's `opt_state`.

  Returns:
    The step; it takes its state over (the buffers are donated).
  """
  def update(state, batch):
    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(
        state.params, batch)
    state, _ = state.apply_gradient(optimizer, gradient)
    return state, {'loss': value} | metrics

  return jax.jit(update, donate_argnums=0)


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
  """Trains from a state, or from the newest checkpoint of a folder.

  Ctrl-C and SIGTERM end it after the update at hand, which is saved.

  Args:
    update: from `make_update` or `language_update`.
    state: before the first update.
    batch_of: step, from 0 -> the batch, and its tokens without padding.
    folder: of the checkpoints.
    steps: updates.
    save_every: updates from one checkpoint to the next.
    validation: another loss, and when it is computed.
    writer: gets the metrics of each update, as sft/<name>.
    progress: show it on stderr.

  Returns:
    The last state, and the record: steps, tokens, CPU seconds, of each metric
    its means from one checkpoint to the next, and 'validation', [step, loss] of
    each.

  Raises:
    Stopped: a signal ended it before its end.
    ValueError: a loss is no finite number; nothing of that is saved.
  """
  state, record = _restored(folder, state)
  writer = writer or metrics_lib.Writer(folder, enabled=False)
  writer.truncate(record['steps'] or -1)
  if not record['steps']:
    writer.write(0, _validated(validation, state, record, steps))
  clock, stopping, shown = time.process_time(), False, {}
  with (signals.StopRequest(_say_stop) as stop, contextlib.closing(
      progress_lib.ProgressBar(
          steps, record['steps'], enabled=progress and processes.is_first(),
          unit='update')) as bar):
    while record['steps'] < steps and not stopping:
      batch, tokens = batch_of(record['steps'])
      state, values = update(state, batch)
      bar.update(**{name: float(x) for name, x in shown.items()})
      shown = {'loss': values['loss']}  # next time: the host need not wait
      record['recent'].append(values)
      record['steps'] += 1
      record['tokens'] += tokens
      writer.write(record['steps'], {
          'sft/tokens': tokens, **_named(values),
          **_validated(validation, state, record, steps)})
      stopping = processes.stop_requested_anywhere(stop.asked)
      whole = record['steps'] % save_every == 0 or record['steps'] == steps
      if whole or stopping:
        record['cpu_seconds'] += time.process_time() - clock
        clock = time.process_time()
        _check_finite(record)
        _add_means(record, whole)
        checkpoint.save(folder, record['steps'], state, record)
  if record['steps'] < steps:
    raise signals.Stopped(
        f'Stopped after update {record["steps"]}; everything is saved in '
        f'{folder}. Run the same command to go on.')
  return state, record


def _restored(folder: pathlib.Path, state: Any) -> tuple[Any, dict[str, Any]]:
  """The state and the record of the newest checkpoint, or those to begin with.

  The record's 'recent' has the metrics since the last of its means.
  """
  record = {'steps': 0, 'tokens': 0, 'cpu_seconds': 0.0, 'recent': []}
  found = checkpoint.restore(folder, state)
  if found:
    _, state, past = found
    if 'losses' in past:  # the name in older checkpoints
      past['loss'] = past.pop('losses')
    record |= past
  return state, record


def _validated(validation: Validation | None, state: Any,
               record: dict[str, Any], steps: int) -> dict[str, float]:
  """The validation's metric, if it is due; the record gets it, too."""
  if not validation or not validation.is_due(record['steps'], steps):
    return {}
  loss = validation.loss(state)
  record.setdefault('validation', []).append([record['steps'], loss])
  return {'sft/val_loss': loss}


def _check_finite(record: Mapping[str, Any]) -> None:
  """Raises a ValueError if a loss since the last checkpoint is no number."""
  losses = [float(values['loss']) for values in record['recent']]
  bad = [n for n, loss in enumerate(losses, record['steps'] - len(losses) + 1)
         if not math.isfinite(loss)]
  if bad:
    raise ValueError(
        f'the loss must be a finite number, but is none in update {bad[0]}'
        f'{f" and {len(bad) - 1} more" if bad[1:] else ""}. Such updates were '
        'left out, and the last checkpoint is from before them. Lower '
        'optimizer.learning_rate, or look for what is no number in the model.')


def _named(values: Metrics) -> Metrics:
  return {f'sft/{name}': value for name, value in values.items()}


def _add_means(record: dict[str, Any], whole: bool) -> None:
  """Moves the recent metrics into the means; a stop leaves them as they are."""
  recent = [{name: float(x) for name, x in values.items()}
            for values in record['recent']]
  record['recent'] = recent
  if whole:
    for name in recent[0]:
      mean = float(np.mean([values[name] for values in recent]))
      record.setdefault(name, []).append(round(mean, 4))
    record['recent'] = []


def _say_stop() -> None:
  if processes.is_first():
    signals.say('Stopping after this update; press Ctrl-C again to stop at '
                'once and lose it.')


def language_update(learner: learners.Learner, base: Any = None) -> Update:
  """(state, batch from `to_batch`) -> state, metrics; the learner's own update.

  Args:
    learner: from `language_learner`.
    base: the frozen policy, if adapters are trained.
  """
  names = {'loss': 'actor/pg_loss', 'entropy': 'actor/entropy',
           'grad_norm': 'actor/grad_norm', 'useful': 'perf/useful_tokens'}

  def update(state, batch):
    state, metrics = learner.update(state, learner.pack(batch), base)
    return state, {ours: metrics[name] for ours, name in names.items()}

  return update


def language_learner(
    shape: transformer.TransformerConfig,
    optimizer: optax.GradientTransformation, mesh: Mesh, *, row_length: int,
    **options: Any) -> learners.Learner:
  """The learner of `language_update`; it takes documents of a row at most.

  Args:
    shape: of the decoder.
    optimizer: of its parameters or adapters.
    mesh: of the devices.
    row_length: tokens of a packed row.
    **options: of `learner.make`: rows (documents of an update, at most),
      microbatch_rows, lora and others.
  """
  return learners.make(shape, algorithms.sft(), optimizer, mesh,
                       length=row_length, row_length=row_length, **options)


def language_loss(learner: learners.Learner, base: Any,
                  batches: Sequence[Batch]) -> Callable[[Any], float]:
  """state -> the weighted mean of -log p over all batches, nats a token."""
  def loss(state):
    total = count = 0.0
    for batch in batches:
      weights = np.where(batch.loss_mask, batch.weights, 0).astype(np.float64)
      total -= np.sum(
          weights * learner.logprobs(state, learner.pack(batch), base))
      count += weights.sum()
    return float(total / count)

  return loss


def batches(lengths: Sequence[int], *, seed: int, documents: int = 0,
            tokens: int = 0, epochs: int = 0, steps: int = 0
           ) -> list[list[int]]:
  """The documents of each update: all of them, again and again, reshuffled.

  Args:
    lengths: of the documents, in tokens.
    seed: of the orders; each epoch has another.
    documents: of an update, at most; 0: any number.
    tokens: of an update, at most, unless one document has more; 0: any number.
    epochs: over all documents; 0: as many as `steps` takes.
    steps: updates, at most; 0: as many as `epochs` takes.
  """
  orders = (np.random.default_rng([seed, epoch]).permutation(len(lengths))
            for epoch in itertools.islice(itertools.count(), epochs or None))
  stream = itertools.chain.from_iterable(order.tolist() for order in orders)
  return list(itertools.islice(
      cut(stream, lengths, documents=documents, tokens=tokens), steps or None))


def cut(stream: Iterable[int], lengths: Sequence[int], *, documents: int = 0,
        tokens: int = 0) -> Iterator[list[int]]:
  """Yields a stream of documents batch by batch; arguments as in `batches`."""
  batch, used = [], 0
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
  """Documents as rows [B T] that the learner takes, each with reward 1.

  Args:
    documents: no longer than `length`. The first token of each is not trained
      on: nothing precedes it.
    rows: B; missing ones are empty.
    length: T.
    pad_id: of the padding.
  """
  tokens = np.full((rows, length), pad_id, np.int32)
  weights = np.zeros((rows, length), np.float32)
  for row, document in enumerate(documents):
    tokens[row, :len(document.ids)] = document.ids
    weights[row, 1:len(document.ids)] = document.weights[1:]
  filled = np.arange(rows) < len(documents)
  ids, zeros = np.arange(rows, dtype=np.int32), np.zeros_like(weights)
  return Batch(
      tokens=tokens, loss_mask=weights > 0, behavior_logprobs=zeros,
      rewards=filled.astype(np.float32),
      outcome_rewards=filled.astype(np.float32), question_ids=ids,
      group_ids=ids, in_baseline=filled, in_loss=filled, on_policy=filled,
      weights=weights)


def write_card(folder: pathlib.Path, introduction: Sequence[str],
               facts: Mapping[str, Any], record: Mapping[str, Any]) -> None:
  """Writes README.md of a model: what it is, what made it, digests.

  Args:
    folder: of the model; it holds the other files.
    introduction: lines of Markdown.
    facts: rows of the table.
    record: from `fit`.
  """
  files = [*sorted(folder.glob('*.safetensors')), folder / 'tokenizer.json',
           folder / 'config.json']
  digests = {f'sha256 of {file.name}': f'`{sha256(file)}`' for file in files}
  rows = dict(facts) | {
      'updates, tokens': f'{record["steps"]:,}, {record["tokens"]:,}',
      'CPU seconds': f'{record["cpu_seconds"]:.0f}',
      'last loss (nats)': f'{record["loss"][-1]:.3f}',
      'jax': jax.__version__} | digests
  table = ['| | |', '|---|---|', *(f'| {k} | {x} |' for k, x in rows.items())]
  (folder / 'README.md').write_text(
      '\n'.join([*introduction, '', *table, '']))


def sha256(path: str | pathlib.Path) -> str:
  """The SHA-256 of a file, in hex."""
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()
