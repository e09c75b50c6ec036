# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Memory and time of rollouts and their search, per device, from shapes."""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np

from searchrl.experiment import policy
from searchrl.experiment import search as searches
from searchrl.models import lora as loras
from searchrl.models import shipped_shapes
from searchrl.models import sizes
from searchrl.models import transformer
from searchrl.models import weights
from searchrl.models.inference import engine as engines
from searchrl.models.inference import layouts
from searchrl.models.inference import slots as slots_lib
from searchrl.runtime import devices as devices_lib
from searchrl.runtime import mesh as meshes
from searchrl.runtime.devices import GIB

_PAGE = 128  # tokens per page of the KV cache
_TILES = 64 * 128  # maximum tokens of a prefill


@dataclasses.dataclass(frozen=True)
class Engine:
  """Costs per device of rollouts in which devices share copies of the weights.

  To sample a token in every slot, a device reads the weights and the cache of
  full slots once. The devices that share a copy add up some arrays around a
  ring. These are the outputs of attention and of the feed-forward layer, and
  the embeddings of the tokens.
  """

  tensor: int  # devices per copy of the weights
  frozen: float  # bytes of a solver's weights and a thread's, always held
  cache: float  # bytes of the KV cache, held all the time
  besides: float  # further bytes, held during rollouts only
  read: float  # bytes read for a token in every slot
  sent: float  # bytes sent for a token in every slot
  weights: float  # bytes of a copy of the weights
  slots: int  # slots of all devices together

  def secs(self, kind: devices_lib.Kind) -> float:
    """Returns a lower bound of the seconds to sample one token in every slot.

    Reading and sending alternate, so that their times add up.
    """
    return self.read / kind.bandwidth + self.sent / kind.link


NONE = Engine(1, 0, 0, 0, 0, 0, 0, 0)


def estimated(config, shape, kind, a_process: int, processes: int, tensor: int,
              merged: float = 0) -> Engine:
  """Returns the estimated memory and time of rollouts, per device.

  Weights are held during rollouts only. If rollouts run in a thread, the
  weights in use and the next weights are held all the time. A decode has three
  arrays of the size of the logits. A prefill has the activations of a layer.
  Weight sync on GPUs has another layout of the vocabulary's matrices.

  Args:
    config: Config with a field `rollout`.
    shape: Shape of the model.
    kind: Kind of the devices.
    a_process: Number of devices per process that sample.
    processes: Number of processes.
    tensor: Number of devices that share one copy of the weights.
    merged: Bytes that `merged_adapters` returns, where the same devices train.
      They are held when the model is written, in place of the rollouts' memory.
  """
  here = meshes.abstract(
      a_process, data=-1, tensor=tensor,
      expert=math.gcd(config.mesh.expert, max(a_process // tensor, 1)))
  copies = meshes.ways(here, 'batch')
  slots, tokens = (count // processes // copies for count in (
      config.rollout.max_num_seqs, config.rollout.cache_tokens))
  cache = cache_on(
      here, shape, config.rollout.dtype, slots=slots, tokens=tokens,
      length=config.rollout.max_length,
      records=config.get('learner', {}).get('router_replay', False))
  params = weights_on(here, shape, config.rollout.dtype)
  weights_held = sum(params.values())
  vocabulary = params['embed'] + params.get('head', 0)
  # Only single rows are read of embeddings that are not the head, too.
  looked_up = params['embed'] * ('head' in params)
  size = np.dtype(config.rollout.dtype).itemsize
  row = slots * shape.hidden_size * size
  ahead = config.train.max_staleness if 'train' in config else 0
  working = max(3 * slots * shape.vocab_size * 4 / tensor, _TILES * size * (
      4 * shape.hidden_size + 3 * sizes.inner_width(shape) / tensor),
                1.5 * vocabulary * (kind.torus is None))
  return Engine(
      tensor=tensor, cache=cache,
      frozen=weights_held * (('solver' in config) + 2 * bool(ahead)),
      slots=config.rollout.max_num_seqs,
      besides=max(weights_held * (not ahead) + working
                  + _kernels(config, here, shape, kind, slots), merged),
      read=weights_held - looked_up + cache, weights=weights_held,
      sent=2 * (1 - 1 / tensor) * row * (2 * shape.num_hidden_layers + 1))


def merged_adapters(config, shape, mesh) -> float:
  """Returns the bytes per device of the kernels that adapters are merged into.

  They are made when the model is written. Without LoRA, there are none.
  """
  if 'learner' not in config or not config.model.lora.rank:
    return 0
  names = loras.logical_axes(
      loras.Lora(**config.model.lora), shape)['layers'].keys()
  kernels, axes = transformer.abstract(
      shape, config.model.dtype), transformer.logical_axes(shape)
  return sum(bytes_on(mesh, kernels['layers'][name]['kernel'],
                      axes['layers'][name]['kernel']) for name in names)


def _kernels(config, mesh, shape, kind, slots: int) -> float:
  """Returns the bytes per device of an engine's own copies of the kernels.

  With model.matmul_dtype, an engine copies the matrices of its products in that
  dtype. Otherwise it copies them transposed, on CPUs if it has many slots. The
  engine of a server does not, because with few rows results would differ.
  """
  params = weights_on(mesh, shape, shape.matmul_dtype or config.rollout.dtype)
  if shape.matmul_dtype:
    return params['layers'] + params.get('head', params['embed'])
  is_transposed = (kind.name == 'cpu' and slots > engines.FEW_SLOTS
                   and meshes.ways(mesh, 'batch') == 1
                   and 'serve' not in config)
  return is_transposed * (params['layers'] + params.get('head', 0))


def cache_on(mesh, shape, dtype: str, *, slots: int, length: int, tokens: int,
             records: bool = False) -> float:
  """Returns the bytes per device of the slots of an engine, with their cache.

  Args:
    mesh: Mesh of the devices that sample.
    shape: Shape of the model.
    dtype: Dtype of the cache.
    slots: Number of slots of each copy of the weights.
    length: Largest number of tokens of a slot.
    tokens: Number of tokens in the cache of a copy; 0: `length` for each slot.
    records: Whether the engine records the experts of all tokens.
  """
  layout = layouts.make(
      'ragged' if tokens else 'xla', shape, slots=slots, block=_PAGE,
      length=length, parts=1, pages=tokens // _PAGE)
  return bytes_on(mesh, jax.eval_shape(functools.partial(
      slots_lib.empty, shape, layout, meshes.ways(mesh, 'batch'), dtype,
      records)), slots_lib.logical_axes(shape, layout, records))


def weights_on(mesh, shape, dtype: str) -> dict[str, float]:
  """Returns {name of a part of the params: bytes per device} for a model."""
  axes = transformer.logical_axes(shape)
  return {name: bytes_on(mesh, tree, axes[name])
          for name, tree in transformer.abstract(shape, dtype).items()}


def bytes_on(mesh, tree: Any, axes: Any) -> float:
  """Returns the bytes per device of a tree of arrays that is spread on a mesh.

  `axes` has the logical axes of each array, which decide how it is split.
  """
  return meshes.bytes_of(jax.tree.map(
      lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype,
                                               sharding=sharding),
      tree, meshes.shardings(mesh, axes)))


def index_of_search(config, a_process: int, processes: int, kind
                   ) -> dict[str, float]:
  """Returns the bytes of search engines' vectors on a device, by content."""
  rows = searches.spec(config.search).rows_on_devices(
      a_process * kind.gib * GIB, processes)
  return {f'search engine: {name}': size / a_process
          for name, size in rows.items()}


def model_of_search(config, a_process: int, processes: int
                   ) -> dict[str, float]:
  """Returns the bytes per device of a search engine's own LLM, by content.

  Without such a model, the result is {}.

  Raises:
    ValueError: There are several processes, which cannot share such a model.
  """
  model = searches.spec(config.search).local_model
  if model is None:
    return {}
  policy.check_second(model.path, field=model.field, count=processes)
  shape = weights.read_config(shipped_shapes.locate(
      model.shape or model.path or str(policy.TINY_BASE)))
  mesh, slots = meshes.abstract(1), -(-model.slots // a_process)
  return {
      f'search engine: weights, {model.dtype}': sum(
          weights_on(mesh, shape, model.dtype).values()),
      f'search engine: {slots} slots x {model.length} tokens': cache_on(
          mesh, shape, model.dtype, slots=slots, length=model.length,
          tokens=model.cache_tokens // a_process)}
