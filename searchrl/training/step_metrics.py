# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Metrics of optimiser steps, as numbers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from searchrl.rl.masked import Mean


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
  """Returns metrics of one optimiser step as plain numbers, by name.

  A metric is a number or a Mean: a total and a count. A Mean becomes total /
  count, and is left out if its count is 0.
  """
  return {name: float(x.total / x.count if isinstance(x, Mean) else x)
          for name, x in metrics.items()
          if not isinstance(x, Mean) or x.count}


def means(per_step: Sequence[dict[str, float]]) -> dict[str, float]:
  """Returns the mean of each metric over the optimiser steps that have it."""
  names = dict.fromkeys(name for metrics in per_step for name in metrics)
  return {name: float(np.mean([m[name] for m in per_step if name in m]))
          for name in names}
