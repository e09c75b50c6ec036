# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The optimiser: clipping, then AdamW; and its learning-rate schedule."""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax

Schedule = Literal['constant', 'cosine', 'linear']


def learning_rate(
    peak: float,
    *,
    warmup_steps: int = 0,
    total_steps: int | None = None,
    schedule: Schedule = 'constant',
    final_fraction: float = 0.1,
) -> optax.Schedule:
  """The learning rate of update n = 0, 1, ...; for the optimiser and for logs.

    n < warmup:  peak (n + 1) / warmup
    then, with p = min((n - warmup) / (total - warmup), 1) and f the final
    fraction:
      constant:  peak
      linear:    peak (1 - (1 - f) p)
      cosine:    peak (f + (1 - f) (1 + cos(pi p)) / 2)

  The first update has peak / warmup, not 0, so that it has an effect; for
  the same reason the last, n = total - 1, is one short of p = 1.

  Args:
    peak: the learning rate after the warm-up.
    warmup_steps: updates until the peak is reached; 0 starts at the peak.
    total_steps: updates of the whole run; 'constant' does not need it.
    schedule: the shape after the warm-up.
    final_fraction: f, the share of the peak that is left at the end.

  Raises:
    ValueError: a value lies outside its range.
  """
  _check(peak, warmup_steps, total_steps, schedule, final_fraction)
  decay_steps = max((total_steps or 0) - warmup_steps, 1)

  def rate(count):
    n, f = jnp.asarray(count, jnp.float32), final_fraction
    p = jnp.clip((n - warmup_steps) / decay_steps, 0, 1)
    factor = {
        'constant': 1.0,
        'linear': 1 - (1 - f) * p,
        'cosine': f + (1 - f) * (1 + jnp.cos(jnp.pi * p)) / 2,
    }[schedule]
    return peak * factor * jnp.minimum((n + 1) / max(warmup_steps, 1), 1)

  return rate


_schedule_of = learning_rate  # `adamw` has an argument of that name


def adamw(
    *,
    learning_rate: float,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    max_grad_norm: float | None = 1.0,
    warmup_steps: int = 0,
    total_steps: int | None = None,
    schedule: Schedule = 'constant',
    final_fraction: float = 0.1,
    mu_dtype: str = 'float32',
) -> optax.GradientTransformation:
  """Clips by the global norm, then AdamW (Loshchilov and Hutter 2019).

  Args:
    learning_rate: the peak; the function `learning_rate` is the schedule.
    b1: decay of the mean of the gradients.
    b2: decay of the mean of their squares.
    eps: added to the root of the latter.
    weight_decay: pull towards 0, in units of the learning rate, on the leaves
      that `decayed` names.
    max_grad_norm: longer gradients are scaled to this norm, which is taken over
      all leaves together; None leaves them as they are.
    warmup_steps, total_steps, schedule, final_fraction: see `learning_rate`.
    mu_dtype: of the mean of the gradients: 'float32', or 'bfloat16', which
      saves 2 bytes a parameter. The mean of the squares stays float32: in
      bfloat16 a change by 1 - b2 of it would be rounded away.

  Raises:
    ValueError: a value lies outside its range.
  """
  if mu_dtype not in ('float32', 'bfloat16'):
    raise ValueError(
        f"mu_dtype must be 'float32' or 'bfloat16', but is {mu_dtype!r}.")
  _check_adamw(b1, b2, weight_decay, max_grad_norm)
  rate = _schedule_of(
      learning_rate, warmup_steps=warmup_steps, total_steps=total_steps,
      schedule=schedule, final_fraction=final_fraction)
  clip = (optax.identity() if max_grad_norm is None else
          optax.clip_by_global_norm(max_grad_norm))
  return optax.chain(clip, optax.adamw(
      rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decayed,
      mu_dtype=mu_dtype))


def scaled(optimizer: optax.GradientTransformation, factor: float
          ) -> optax.GradientTransformation:
  """The same optimiser, with the same state, at `factor` of its rate."""
  def update(gradient, state, params=None):
    changes, state = optimizer.update(gradient, state, params)
    return jax.tree.map(lambda change: factor * change, changes), state

  return optax.GradientTransformation(optimizer.init, update)


def decayed(params: Any) -> Any:
  """True for each leaf under weight decay: matrices, not scales or biases.

  Layers are stacked on axis 0, so that a norm's scale has two dimensions, too.
  So the name decides: 'scale' and 'bias' are spared, and so is any vector.
  """
  def is_matrix(path, leaf):
    name = jax.tree_util.keystr(path[-1:], simple=True)
    return leaf.ndim >= 2 and name not in ('scale', 'bias')

  return jax.tree_util.tree_map_with_path(is_matrix, params)


def _check_adamw(b1, b2, weight_decay, max_grad_norm):
  for name, decay in (('b1', b1), ('b2', b2)):
    if not 0 <= decay < 1:
      raise ValueError(f'{name} must be in [0, 1), but is {decay}.')
  if not weight_decay >= 0:
    raise ValueError(f'weight_decay must be at least 0, but is {weight_decay}.')
  if max_grad_norm is not None and not max_grad_norm > 0:
    raise ValueError(
        f'max_grad_norm must be positive, but is {max_grad_norm}. Use None '
        'for no clipping.')


def _check(peak, warmup_steps, total_steps, schedule, final_fraction):
  if not 0 <= peak < float('inf'):
    raise ValueError(f'learning_rate must be finite and at least 0, but is '
                     f'{peak}.')
  if warmup_steps < 0:
    raise ValueError(f'warmup_steps must be at least 0, but is {warmup_steps}.')
  if schedule not in get_args(Schedule):
    raise ValueError(
        f'schedule must be one of {get_args(Schedule)}, but is {schedule!r}.')
  if not 0 <= final_fraction <= 1:
    raise ValueError(
        f'final_fraction must lie in [0, 1], but is {final_fraction}.')
  if schedule != 'constant' and total_steps is None:
    raise ValueError(
        f'total_steps must be set for schedule={schedule!r}, but is None. Set '
        "it to the run's updates, or use schedule='constant'.")
  if total_steps is not None and total_steps < warmup_steps:
    raise ValueError(
        f'warmup_steps must be at most total_steps={total_steps}, but is '
        f'{warmup_steps}. Shorten the warm-up.')
