# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The optimiser, which is AdamW after clipping, and its learning rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax

from searchrl.runtime import option_rules

Schedule = Literal['constant', 'cosine', 'linear']


def learning_rate(
    peak: float,
    *,
    warmup_steps: int = 0,
    total_steps: int | None = None,
    schedule: Schedule = 'constant',
    final_fraction: float = 0.1,
) -> optax.Schedule:
  """Returns a function from update n = 0, 1, ... to its learning rate.

    n < warmup:  peak (n + 1) / warmup
    then, with p = min((n - warmup) / (total - warmup), 1) and f the final
    fraction:
      constant:  peak
      linear:    peak (1 - (1 - f) p)
      cosine:    peak (f + (1 - f) (1 + cos(pi p)) / 2)

  The optimiser and the logs use this function. The first update has rate peak /
  warmup and not 0, so that it has an effect. For the same reason p is below 1
  at the last update, n = total - 1.

  Args:
    peak: Learning rate after the warm-up.
    warmup_steps: Number of updates until the peak; 0 starts at the peak.
    total_steps: Number of updates of the whole run. 'constant' does not need
      it.
    schedule: Name of the shape after the warm-up.
    final_fraction: Fraction f of the peak that is left at the end.

  Raises:
    ValueError: A value is outside its range.
  """
  option_rules.check(
      '',
      ('learning_rate', peak, 0 <= peak < float('inf'),
       'finite and at least 0'),
      ('warmup_steps', warmup_steps, warmup_steps >= 0, 'at least 0'),
      ('schedule', schedule, schedule in get_args(Schedule),
       f'one of {get_args(Schedule)}'),
      ('final_fraction', final_fraction, 0 <= final_fraction <= 1,
       'in [0, 1]'),
      ('total_steps', total_steps,
       schedule == 'constant' or total_steps is not None,
       f'set for schedule={schedule!r}, to the number of updates'),
      ('warmup_steps', warmup_steps,
       total_steps is None or warmup_steps <= total_steps,
       f'at most total_steps={total_steps}'))
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


# Another name, because `adamw` has an argument `learning_rate`.
_schedule_of = learning_rate


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
  """Makes AdamW (Loshchilov and Hutter 2019) after clipping by global norm.

  Args:
    learning_rate: Peak learning rate. The function of the same name gives the
      schedule.
    b1: Decay of the mean of the gradients.
    b2: Decay of the mean of the squared gradients.
    eps: Number added to the root of the mean of the squares.
    weight_decay: Strength of the pull towards 0, as a multiple of the learning
      rate, on the leaves that `decayed` selects.
    max_grad_norm: Maximum norm of the gradient of all leaves together. A larger
      gradient is scaled down to this norm. None turns clipping off.
    warmup_steps: Updates of the linear warm-up; see `learning_rate`.
    total_steps: Updates of the whole schedule; see `learning_rate`.
    schedule: Shape of the schedule after warm-up; see `learning_rate`.
    final_fraction: Share of the peak at the end; see `learning_rate`.
    mu_dtype: Dtype of the mean of the gradients: 'float32', or 'bfloat16',
      which saves 2 bytes per parameter. The mean of the squares stays float32,
      because bfloat16 would round away a relative change of 1 - b2.

  Raises:
    ValueError: A value is outside its range.
  """
  option_rules.check(
      '',
      ('mu_dtype', mu_dtype, mu_dtype in ('float32', 'bfloat16'),
       "'float32' or 'bfloat16'"),
      ('b1', b1, 0 <= b1 < 1, 'in [0, 1)'),
      ('b2', b2, 0 <= b2 < 1, 'in [0, 1)'),
      ('weight_decay', weight_decay, weight_decay >= 0, 'at least 0'),
      ('max_grad_norm', max_grad_norm,
       max_grad_norm is None or max_grad_norm > 0,
       'positive, or None for no clipping'))
  rate = _schedule_of(
      learning_rate, warmup_steps=warmup_steps, total_steps=total_steps,
      schedule=schedule, final_fraction=final_fraction)
  clip = (optax.identity() if max_grad_norm is None else
          optax.clip_by_global_norm(max_grad_norm))
  return optax.chain(clip, optax.adamw(
      rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decayed,
      mu_dtype=mu_dtype))


def options_for_run(options: Mapping[str, Any], updates: int
                   ) -> dict[str, Any]:
  """Returns options of `adamw` whose schedule ends with the run.

  They are `options` with total_steps = `updates`, unless `options` has another
  total_steps, or the schedule is constant and needs none.

  Args:
    options: Options of `adamw`.
    updates: Number of updates of the run.
  """
  is_constant = options.get('schedule', 'constant') == 'constant'
  total = options.get('total_steps') or (None if is_constant else updates)
  return dict(options) | {'total_steps': total}


def for_run(options: Mapping[str, Any], updates: int
           ) -> optax.GradientTransformation:
  """Makes the optimiser of a run: AdamW after clipping the gradient.

  Args:
    options: Options of `adamw`.
    updates: Number of updates of the run. The learning rate decays until then,
      unless the options say otherwise.
  """
  return adamw(**options_for_run(options, updates))


def schedule_for_run(options: Mapping[str, Any], updates: int
                    ) -> optax.Schedule:
  """Returns the function from an update's number to its learning rate in a run.

  The optimiser of `for_run` with the same arguments has these learning rates.
  """
  ending = options_for_run(options, updates)
  return learning_rate(ending['learning_rate'], **{
      name: ending[name] for name in (
          'warmup_steps', 'total_steps', 'schedule', 'final_fraction')
      if name in ending})


def scaled(optimizer: optax.GradientTransformation, factor: float
          ) -> optax.GradientTransformation:
  """Returns the same optimiser with its learning rate times `factor`.

  A state of either optimiser is valid for the other.
  """
  def update(gradient, state, params=None):
    changes, state = optimizer.update(gradient, state, params)
    return jax.tree.map(lambda change: factor * change, changes), state

  return optax.GradientTransformation(optimizer.init, update)


def decayed(params: Any) -> Any:
  """Returns a tree with True for each parameter that weight decay applies to.

  These are the matrices. Vectors are not decayed. Layers are stacked on axis 0,
  so that a norm's scale has two dimensions, too. For this reason leaves named
  'scale' or 'bias' are not decayed either.
  """
  def is_matrix(path, leaf):
    name = jax.tree_util.keystr(path[-1:], simple=True)
    return leaf.ndim >= 2 and name not in ('scale', 'bias')

  return jax.tree_util.tree_map_with_path(is_matrix, params)
