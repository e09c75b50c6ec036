# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The experts that the sampler chose, in trajectories, JSON and batches.

They are the choices of mixture-of-experts layers for each token. An update that
uses them computes the same layers as the sampler did, even if rounding would
lead its own router to other experts (R3, Ma et al. 2025, arXiv:2510.11370). A
choice takes one byte, or two if a layer has 256 or more experts.
"""

import base64
from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

from searchrl.trajectory import Batch, Trajectory


def to_json(routing: np.ndarray) -> dict[str, Any]:
  """Returns an array of chosen experts as a dict that JSON can hold.

  The dict has the dtype, the shape and the bytes in base64.
  """
  return {'dtype': routing.dtype.name, 'shape': routing.shape,
          'data': base64.b64encode(routing.tobytes()).decode()}


def from_json(record: Mapping[str, Any]) -> np.ndarray:
  """Returns the array of a dict that `to_json` returned."""
  return np.frombuffer(base64.b64decode(record['data']), record['dtype']
                      ).reshape(record['shape'])


def with_routing(batch: Batch, trajectories: Sequence[Trajectory],
                 contexts: int = 1) -> Batch:
  """Returns a batch with the experts that the sampler chose for its tokens.

  The field `routing` then has shape [rows, tokens, layers x experts per token],
  with zeros where nothing is known. If no trajectory has such experts, the
  batch is unchanged.

  Args:
    batch: Batch of numpy arrays, from `trajectory.collate`.
    trajectories: Trajectories of the batch, in order.
    contexts: Number of rows per trajectory.
  """
  first = next((t.routing[0] for t in trajectories if t.routing), None)
  if first is None:
    return batch
  routing: Any = np.zeros((*batch.tokens.shape, first.shape[-1]), first.dtype)
  lengths = np.asarray(batch.lengths)
  for number, trajectory in enumerate(trajectories):
    for row, experts in enumerate(trajectory.routing, start=number * contexts):
      used = experts[:lengths[row]]
      routing[row, :len(used)] = used
  return dataclasses.replace(batch, routing=routing)
