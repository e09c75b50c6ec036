# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Metrics of experts, and metrics of optimiser steps as numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from searchrl.models import experts
from searchrl.rl.masked import Mean


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
  """Returns metrics of one optimiser step as plain numbers, by name.

  A metric is a number or a Mean: a total and a count. A Mean becomes total /
  count, and is left out if its count is 0.
  """
  return {name: float(x.total / x.count if isinstance(x, Mean) else x)
          for name, x in metrics.items()
          if not isinstance(x, Mean) or x.count}


def check(metrics: Mapping[str, Any]) -> None:
  """Raises a ValueError for a metric of a loss that is not a Mean.

  Micro-batches add up their totals and counts. A sum of numbers would depend on
  how many micro-batches there are.
  """
  for name, value in metrics.items():
    if not isinstance(value, Mean):
      raise ValueError(
          'the metrics of a loss must be searchrl.masked.Mean, but '
          f'{name!r} is {type(value).__name__}. Give Mean.of(x, mask), or '
          'Mean(total, count).')


def means(per_step: Sequence[dict[str, float]]) -> dict[str, float]:
  """Returns the mean of each metric over the optimiser steps that have it."""
  names = dict.fromkeys(name for metrics in per_step for name in metrics)
  return {name: float(np.mean([m[name] for m in per_step if name in m]))
          for name in names}


def of_experts(load: experts.Load) -> dict[str, Mean]:
  """Returns metrics of how evenly tokens use the experts, by name.

  actor/experts_balance is the balance loss, actor/experts_max_load the largest
  load divided by the mean load, and actor/experts_entropy the router's entropy
  in nats. If the rollouts' experts are replayed, actor/experts_replaced is the
  share of them that the router would not choose.
  """
  tokens = load.tokens[0]  # those of each layer
  per_layer = load.chosen.max(-1) / jnp.maximum(load.chosen.mean(-1), 1e-9)
  replaced = {} if load.replaced is None else {'actor/experts_replaced': Mean(
      load.replaced.sum(), load.chosen.sum())}
  return replaced | {f'actor/experts_{name}': Mean(mean * tokens, tokens)
                     for name, mean in (
      ('balance', experts.balance(load)),
      ('max_load', per_layer.mean()),
      ('entropy', load.entropy.mean() / jnp.maximum(tokens, 1)))}
