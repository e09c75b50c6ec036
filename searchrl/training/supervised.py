# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Supervised training: one loop that resumes, and a language model's loss.

`fit` updates a state on the batches of a function of the step, keeps a record
of what it took, and saves both; a killed run that is started again ends in the
same bytes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import hashlib
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm

from searchrl.models import policy
from searchrl.models import transformer
from searchrl.runtime import checkpoint
from searchrl.training.train_step import TrainState

Metrics = dict[str, Any]  # scalars, 'loss' among them
Loss = Callable[[Any, Any], tuple[jax.Array, Metrics]]
Update = Callable[[TrainState, Any], tuple[TrainState, Metrics]]


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
    return state.apply_gradient(optimizer, gradient), {'loss': value} | metrics

  return jax.jit(update, donate_argnums=0)


def fit(
    update: Update,
    state: TrainState,
    batch_of: Callable[[int], tuple[Any, int]],
    folder: pathlib.Path,
    *,
    steps: int,
    save_every: int,
) -> tuple[TrainState, dict[str, Any]]:
  """Trains from a state, or from the newest checkpoint of a folder.

  Args:
    update: from `make_update`.
    state: before the first update.
    batch_of: step, from 0 -> the batch, and its tokens without padding.
    folder: of the checkpoints.
    steps: updates.
    save_every: updates from one checkpoint to the next.

  Returns:
    The last state, and the record: steps, tokens, CPU seconds, and of each
    metric its mean from one checkpoint to the next.
  """
  record = {'steps': 0, 'tokens': 0, 'cpu_seconds': 0.0}
  found = checkpoint.restore(folder, state)
  if found:
    _, state, record = found
    if 'losses' in record:  # the name in older checkpoints
      record['loss'] = record.pop('losses')
  clock, recent = time.process_time(), []
  with tqdm.tqdm(total=steps, initial=record['steps']) as bar:
    for step in range(record['steps'], steps):
      batch, tokens = batch_of(step)
      state, metrics = update(state, batch)
      recent.append(metrics)
      record['tokens'] += tokens
      record['steps'] = step + 1
      if step % 20 == 0:
        bar.set_postfix({k: f'{float(x):.3f}' for k, x in metrics.items()})
      bar.update()
      if (step + 1) % save_every == 0 or step + 1 == steps:
        _add_means(record, recent)
        record['cpu_seconds'] += time.process_time() - clock
        clock, recent = time.process_time(), []
        checkpoint.save(folder, step + 1, state, record)
  return state, record


def _add_means(record: dict[str, Any], recent: Sequence[Metrics]) -> None:
  for name in recent[0]:
    mean = float(np.mean([metrics[name] for metrics in recent]))
    record.setdefault(name, []).append(round(mean, 4))


def language_model_loss(shape: transformer.TransformerConfig) -> Loss:
  """The weighted mean of -log p over the tokens of packed rows, in nats.

  Its batches hold tokens, weights and segment_ids [R W]; see `pack_documents`.
  """
  def loss(params, batch):
    segments, weights = batch['segment_ids'], batch['weights']
    logprobs, _ = policy.token_logprobs(
        params, batch['tokens'], shape, segment_ids=segments,
        positions=_positions(segments), chunk=segments.shape[1])
    return -jnp.sum(logprobs * weights) / jnp.maximum(jnp.sum(weights), 1), {}

  return loss


def _positions(segments):
  """The place of each token in its document, from 0 on."""
  starts = jnp.concatenate(
      [jnp.ones_like(segments[:, :1], bool),
       segments[:, 1:] != segments[:, :-1]], 1)
  index = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
  return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)


def pack_documents(
    documents: Iterable[tuple[Sequence[int], Sequence[float]]],
    widths: Sequence[int], pad_id: int) -> dict[int, list[np.ndarray]]:
  """Fills rows with documents in their order; {width: list of [3, width]}.

  A row holds tokens, weights and segment ids (0 is padding).

  Args:
    documents: token ids and loss weights of each. A document longer than the
      longest width is left out.
    widths: row lengths, rising; a document goes to the shortest that holds it.
    pad_id: of the padding.
  """
  packed = {w: [] for w in widths}
  open_rows = {}
  for ids, weight in documents:
    width = next((w for w in widths if len(ids) <= w), None)
    if width is None:
      continue
    row, used, segment = open_rows.get(width, (None, width, 0))
    if row is None or used + len(ids) > width:
      row = np.zeros((3, width), np.float64)
      row[0] = pad_id
      packed[width].append(row)
      used, segment = 0, 0
    span = slice(used, used + len(ids))
    row[0, span], row[1, span], row[2, span] = ids, weight, segment + 1
    row[1, used] = 0.0  # nothing of its document precedes the first token
    open_rows[width] = (row, used + len(ids), segment + 1)
  return packed


def write_card(folder: pathlib.Path, introduction: Sequence[str],
               facts: Mapping[str, Any], record: Mapping[str, Any]) -> None:
  """Writes README.md of a model: what it is, what made it, digests.

  Args:
    folder: of the model; it holds the other files.
    introduction: lines of Markdown.
    facts: rows of the table.
    record: from `fit`.
  """
  digests = {
      f'sha256 of {name}': f'`{sha256(folder / name)}`'
      for name in ('model.safetensors', 'tokenizer.json', 'config.json')}
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
