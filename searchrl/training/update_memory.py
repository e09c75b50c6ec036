# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Memory of an update besides the learner's state, in bytes per device.

The compiler's number is exact except for cuDNN's workspace, which XLA adds only
on a GPU. If there is no compiler, the memory is estimated from shapes. Long
tests compare both for models from 3 to 32 billion parameters.
"""

import math
import re
from typing import Any

import jax
import numpy as np

from searchrl.models import experts
from searchrl.models import sizes
from searchrl.models import transformer
from searchrl.runtime import mesh as meshes
from searchrl.runtime import progress
from searchrl.runtime.devices import GIB
from searchrl.training.learner import Learner

# Gibibytes of temporary memory in the message of the compiler of TPUs.
_REFUSED = re.compile(
    r'RESOURCE_EXHAUSTED.*HLO temporaries \(([\d.]+)G\) exceeds available HBM',
    re.DOTALL)
_CHUNK = 128  # tokens per row whose logits exist at the same time


def programs(learner: Learner, rows: int
             ) -> list[tuple[Any, tuple[Any, ...]]]:
  """Returns the programs of an update, each with the shapes of its arguments.

  An update is one program. If the optimisers' moments are in the hosts' memory,
  an update has two programs per network instead: the first computes the
  gradient, and the second makes the optimiser step.

  Args:
    learner: Learner that makes the update.
    rows: Number of rows of a batch.
  """
  step, arguments = learner.train_step, learner.abstract_update(rows)
  if not step.offload_optimizer:
    return [(step.update, arguments)]
  _, state, *batch = arguments
  params = {network: trained.params for network, trained in state.items()}
  return [call for network, (gradient, apply) in step.update_parts.items()
          for call in ((gradient, (len(state) == 1, params, *batch)),
                       (apply, (state[network], params[network])))]


def compiled(learner: Learner, rows: int) -> float:
  """Returns the memory per device of a compiled update, in bytes.

  It is the compiler's number for temporary arrays, plus the size of a packed
  mini-batch. `rows` is the number of rows of a batch. If the moments are in the
  hosts' memory, the update has several programs: the compiler's largest number
  counts, and the size of a gradient is added. The compiler of TPUs refuses a
  program that needs more memory than a chip has. In that case, the result is
  the number in the compiler's message.
  """
  calls = programs(learner, rows)
  batch = meshes.bytes_of(calls[0][1][3])
  gradient = _gradient(learner) if learner.train_step.offload_optimizer else 0
  temporary = 0
  with progress.phase('Compiling the update'):
    for program, arguments in calls:
      lowered = program.lower(*arguments)
      try:
        memory = lowered.compile().memory_analysis()
      except jax.errors.JaxRuntimeError as error:
        if not (refused := _REFUSED.search(str(error))):
          raise
        return float(refused[1]) * GIB
      assert memory is not None  # compilers of CPUs, GPUs and TPUs report it
      temporary = max(temporary, memory.temp_size_in_bytes)
  return temporary + gradient + batch


def estimated(learner: Learner, attention: str, rows: int, on_tpu: bool
             ) -> float:
  """Returns an estimate of the memory per device of an update, in bytes.

  It is computed from shapes, without a compiler. Networks are trained one after
  the other. The estimate counts the sum of a network's gradients, and the
  gradients of a micro-batch with copies of them in another layout. A second
  network adds a copy of the gradients. The activations that layers save are
  added, and the larger of a layer's backward pass and a chunk's logits. The
  numbers of copies are those that the compilers made for models from 3 to 32
  billion parameters. Of the batch, the estimate counts the record of each
  token's experts if the router is replayed; all else is small.

  Args:
    learner: Learner that makes the update.
    attention: One of `attention.IMPLEMENTATIONS`.
    rows: Number of rows of a batch.
    on_tpu: True for TPUs, False for other devices.
  """
  step = learner.train_step
  networks, tensor = len(step.axes), step.mesh.shape['tensor']
  size = np.dtype(step.forward_options.dtype).itemsize
  tokens = _tokens(learner)
  gradient = _gradient(learner)
  width, inner = step.shape.hidden_size, sizes.inner_width(step.shape)
  queries, keys = _heads(learner)
  padded = learner.max_segments * (attention == 'cudnn_padded')
  layer = tokens * size * (8 * width + 3 * inner / tensor + 4 * padded * queries)
  layer += _experts(learner)
  logits = 4 * 4 * tokens / learner.pack_length * _CHUNK * (
      step.shape.vocab_size / tensor)
  parts = meshes.ways(step.mesh, 'length')
  if parts > 1:  # the last layer's output and its gradient, in whole rows
    logits += 2 * parts * tokens * width * size
  saved = _saved_per_token(learner)
  if not step.forward_options.remat:
    saved += padded * 2 * (queries + keys)
  copies = 4.2 if on_tpu else 2 if step.shape.experts else 2.5
  if networks > 1 and not step.offload_optimizer:
    copies += 1.25
  if on_tpu and step.mesh.shape['fsdp'] > 32:
    # A layer's gradients are summed whole.
    layer += 2 * 4 * _layer_parameters(learner) / tensor
  total = (copies * gradient + max(layer, logits) + _replayed(learner, rows)
           + step.shape.num_hidden_layers * tokens * size * saved)
  # The optimiser step alone may need more, with moments that come from hosts.
  return max(total, 4.75 * gradient * (step.offload_optimizer and on_tpu))


def _gradient(learner: Learner) -> float:
  """Returns the bytes per device of the largest gradient of a network."""
  return max(meshes.bytes_of(trained.params)
             for trained in learner.train_step.abstract_state().values())


def _experts(learner: Learner) -> float:
  """Returns the bytes per device of a layer's experts in its backward pass.

  They are the rows that the experts compute, the tokens of all devices that
  share the experts, and the gradients of the experts' matrices. Without experts
  the result is 0.
  """
  step, options = learner.train_step, learner.train_step.shape.experts
  if options is None:
    return 0
  size = np.dtype(step.forward_options.dtype).itemsize
  ways = meshes.ways(step.mesh, 'experts')
  width = step.shape.hidden_size
  inner = options.moe_intermediate_size / step.mesh.shape['tensor']
  tokens = _tokens(learner) * ways
  rows = tokens * options.num_experts_per_tok * min(1, 2 / ways)
  of_each = 2 * size + 8  # twice in this dtype and twice in float32
  return rows * size * (6 * width + 8 * inner) + of_each * (
      tokens * width + options.num_experts / ways * 3 * width * inner)


def _replayed(learner: Learner, rows: int) -> float:
  """Returns the bytes per device of the record of each token's experts.

  An update that replays the router has this record of a mini-batch, from the
  rollout. The result is 0 if the router chooses again. `rows` is the number of
  rows of a batch.
  """
  step, options = learner.train_step, learner.train_step.shape.experts
  if options is None or not step.forward_options.router_replay:
    return 0
  tokens = rows / learner.minibatches * learner.pack_length / meshes.ways(
      step.mesh, 'batch') / meshes.ways(step.mesh, 'length')
  return (tokens * step.shape.num_hidden_layers * options.num_experts_per_tok
          * np.dtype(experts.record_dtype(options.num_experts)).itemsize)


def _tokens(learner: Learner) -> int:
  """Returns the number of a micro-batch's tokens on a device."""
  mesh = learner.train_step.mesh
  rows = learner.microbatch_rows // meshes.ways(mesh, 'batch')
  return rows * learner.pack_length // meshes.ways(mesh, 'length')


def _heads(learner: Learner) -> tuple[float, float]:
  """Returns the widths of a token's queries and of its keys on a device."""
  shape, tensor = learner.train_step.shape, learner.train_step.mesh.shape[
      'tensor']
  return (shape.num_attention_heads * shape.head_dim / tensor,
          shape.num_key_value_heads * shape.head_dim / tensor)


def _layer_parameters(learner: Learner) -> int:
  layers = transformer.abstract(learner.train_step.shape)['layers']
  return sum(math.prod(x.shape[1:]) for x in jax.tree.leaves(layers))


def _saved_per_token(learner: Learner) -> float:
  """Returns how many numbers per token a layer saves for its backward pass.

  They are the inputs of its matrix products, norms and attention. Their widths
  are those of the residual stream, of all heads, and of the feed-forward layer.
  """
  step = learner.train_step
  width = step.shape.hidden_size
  inner = sizes.inner_width(step.shape) / step.mesh.shape['tensor']
  queries, keys = _heads(learner)
  if not step.forward_options.remat:
    norms = queries + keys if step.shape.qk_norm else 0
    return 4 * width + 4 * queries + 2 * keys + 3 * inner + norms
  if step.forward_options.remat == 'dots':
    return 2 * width + queries + 2 * keys + 2 * inner
  return width


def workspace(learner: Learner, attention: str) -> float:
  """Returns the bytes of cuDNN's workspace for attention's backward pass.

  For each query of each head, it has two float32 vectors of a head's size and a
  float32 number. They hold sums of the queries' gradients, and the gradients of
  keys and values for all query heads. It has room for documents that are all as
  long as a row. In the packed layout, padding is one more document.

  Args:
    learner: Learner that makes the update.
    attention: One of `attention.IMPLEMENTATIONS`. Others than cuDNN's give 0.
  """
  if not attention.startswith('cudnn'):
    return 0
  step = learner.train_step
  heads = step.shape.num_attention_heads / step.mesh.shape['tensor']
  segments = learner.max_segments + (attention == 'cudnn')
  return math.ceil(_tokens(learner) * segments * heads * (
      8 * step.shape.head_dim + 4))
