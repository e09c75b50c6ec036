# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Digests of arrays whose parts may be on several hosts."""

import hashlib
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np


def describe(leaf: Any) -> dict[str, str]:
  """Returns the dtype, shape and SHA-256 of an array.

  If a host lacks a part of it, all processes must call this at the same time:
  the array is gathered.
  """
  if isinstance(leaf, jax.Array) and not is_whole_on_each_host(leaf):
    leaf = multihost_utils.process_allgather(leaf, tiled=True)
  elif isinstance(leaf, jax.Array):
    leaf = _on_host(copy(leaf))  # an array keeps its host copy while it exists
  flat = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
  return {'array': f'{leaf.dtype}{list(leaf.shape)}',
          'sha256': hashlib.sha256(flat.data).hexdigest()}


def is_whole_on_each_host(leaf: jax.Array) -> bool:
  """Returns whether every host has all parts of an array; same on all hosts."""
  parts: dict[int, set[str]] = {}
  for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
    host: int = device.process_index  # type: ignore[attr-defined]
    parts.setdefault(host, set()).add(str(index))
  return len(parts) == jax.process_count() and (
      len(set(map(frozenset, parts.values()))) == 1)


def copy(leaf: jax.Array) -> jax.Array:
  """Returns a copy of an array, split over devices in the same way.

  If possible, the copy of an accelerator's array is in pinned host memory.
  """
  sharding = leaf.sharding
  device: Any = next(iter(sharding.device_set))
  if device.platform != 'cpu' and 'pinned_host' in {
      memory.kind for memory in device.addressable_memories()}:
    sharding = sharding.with_memory_kind('pinned_host')
  return jax.device_put(leaf, sharding, may_alias=False)


def _on_host(leaf: jax.Array) -> np.ndarray:
  """Returns the whole array as numpy, from the parts that this host has."""
  if leaf.is_fully_addressable:
    return np.asarray(leaf)
  whole = np.empty(leaf.shape, leaf.dtype)
  for part in leaf.addressable_shards:
    whole[part.index] = part.data
  return whole
