# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Plans memory: a config and a kind of device in, bytes a device out.

Nothing is allocated and no weight is read: the sizes of arrays follow from
shapes and shardings, those of the update from the compiler, if there is one for
the device. A compiled figure is exact; an estimate is marked as one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib
from typing import Any

import jax
import numpy as np

from searchrl.evaluation import figures
from searchrl.experiment import build
from searchrl.experiment import checks
from searchrl.experiment import policy
from searchrl.models import attention
from searchrl.models.inference import layouts
from searchrl.models.inference import slots as slots_lib
from searchrl.models import transformer
from searchrl.models import weights
from searchrl.runtime import devices as devices_lib
from searchrl.runtime.devices import GIB
from searchrl.runtime import mesh as meshes
from searchrl.training import learner as learners

SHAPES = pathlib.Path(__file__).parents[1] / 'assets' / 'shapes'  # by hub id
_ROOM = 0.92  # of the memory; the rest is the runtime's
_CHUNK = 128  # tokens of a row whose logits exist at one time
_PAGE = 128  # tokens of the cache


@dataclasses.dataclass(frozen=True)
class Plan:
  """Bytes a device, by what they hold."""

  devices: str
  available: float
  parameters: int  # of the policy
  mesh: dict[str, int]
  holds: dict[str, float]  # all the time
  rollouts: float  # besides, during rollouts
  update: float  # besides, during an update
  compiled: bool  # whether `update` is the compiler's, or an estimate

  @property
  def peak(self) -> float:
    return sum(self.holds.values()) + max(self.rollouts, self.update)

  @property
  def fits(self) -> bool:
    return self.peak <= _ROOM * self.available


def run(config, workdir: str) -> None:
  """Prints whether the config fits config.plan.devices, and a table of sizes.

  Raises:
    ValueError: the config cannot be run there at all.
  """
  del workdir  # nothing is written
  checks.check(config)
  found = make(config)
  print(describe(found))


def make(config) -> Plan:
  """The plan of a training config; see `run`."""
  if 'learner' not in config or 'rollout' not in config:
    raise ValueError(
        'a plan is of a training run by RL, but this config has no '
        f'{"learner" if "learner" not in config else "rollout"}. Choose one of '
        'the recipes.')
  shape = weights.read_config(shape_folder(
      config.model.path or str(policy.TINY_BASE)))
  kind, mesh, name = _devices(config)
  learner = _learner(config, shape, mesh, kind)
  here = meshes.abstract(min(kind.a_process, mesh.size), data=-1,
                         tensor=config.rollout.tensor)  # of one process
  processes = mesh.size // here.size
  compiled = isinstance(mesh, jax.sharding.Mesh) and config.plan.compile
  update = (compiled_bytes if compiled else estimated_bytes)(
      learner, rows_of(config))
  return Plan(
      devices=name, available=kind.gib * GIB,
      parameters=sum(math.prod(x.shape) for x in jax.tree.leaves(
          transformer.abstract(shape))),
      mesh=dict(mesh.shape),
      holds=_holds(config, shape, learner, mesh, here, processes),
      rollouts=_rollouts(config, shape, here, processes), update=update,
      compiled=compiled)


def shape_folder(path: str) -> str:
  """A folder with the config.json of a model, whose weights are not needed.

  Args:
    path: of a folder, or a hub id. Of the models of configs/models.py the shape
      is shipped, for machines that have not fetched them.
  """
  import huggingface_hub  # slow to import
  shipped = SHAPES / path / 'config.json'
  if pathlib.Path(path).is_dir() or not shipped.is_file():
    return weights.locate(path)
  fetched = huggingface_hub.try_to_load_from_cache(path, 'config.json')
  file = fetched if isinstance(fetched, str) else shipped
  return str(pathlib.Path(file).parent)


def rows_of(config) -> int:
  """Trajectories of a batch."""
  return config.rollout.questions * config.rollout.group_size


def describe(plan: Plan) -> str:
  """The plan as a table, and the verdict."""
  axes = ' x '.join(f'{axis}={n}' for axis, n in plan.mesh.items())
  how = 'compiled' if plan.compiled else 'estimated; no compiler for it here'
  rows = [{'a device holds': name, 'GiB': f'{size / GIB:.2f}'}
          for name, size in plan.holds.items()]
  rows += [
      {'a device holds': 'rollouts: weight sync, logits (estimated)',
       'GiB': f'{plan.rollouts / GIB:.2f}'},
      {'a device holds': f'or update: gradients, activations ({how})',
       'GiB': f'{plan.update / GIB:.2f}'},
      {'a device holds': 'at most, together', 'GiB': f'{plan.peak / GIB:.2f}'},
      {'a device holds': 'of', 'GiB': f'{plan.available / GIB:.2f}'}]
  share = plan.peak / plan.available
  verdict = f'It fits: {share:.0%} of the memory.' if plan.fits else (
      f'It does not fit: {share:.0%} of the memory, and at most {_ROOM:.0%} '
      'should be used. For rollouts, more rollout.tensor, fewer rollout.slots, '
      "rollout.dtype='bfloat16' help; for updates, more mesh.fsdp, learner."
      "remat='nothing', learner.dtype='bfloat16', model.lora.rank; for both, "
      'more devices.')
  return (f'{plan.parameters / 1e9:.3g} billion parameters on {plan.devices}, '
          f'mesh {axes}\n{figures.table(rows, tuple(rows[0]))}\n{verdict}')


def compiled_bytes(learner: learners.Learner, rows: int) -> float:
  """Bytes that the compiled update takes on a device besides its state."""
  arguments = learner.abstract_update(rows)
  program = learner.train_step.update.lower(*arguments).compile()
  found = program.memory_analysis()
  return found.temp_size_in_bytes + bytes_of(arguments[3])


def estimated_bytes(learner: learners.Learner, rows: int) -> float:
  """An estimate of the same, from shapes; within a third for large models.

  Gradients, those of the embedding and of the logits' matrix once more; what
  the layers save, the layer being computed, and two layers' weights gathered;
  logits of a chunk. The batch itself is small.
  """
  del rows
  run, shape = learner.train_step, learner.train_step.shape
  fsdp, tensor = run.mesh.shape['fsdp'], run.mesh.shape['tensor']
  ways = run.mesh.shape['data'] * fsdp
  size = np.dtype(run.forward_options.dtype).itemsize
  own = learner.microbatch_rows // ways
  tokens = own * learner.row_length
  width, inner = shape.hidden_size, shape.intermediate_size
  gradients = sum(bytes_of(run.abstract_state()[network].params)
                  for network in run.axes)
  inside = (8 * width + 3 * inner) / tensor
  saved = width if run.forward_options.remat else width + inside
  if run.forward_options.remat == 'dots':
    saved = width + inside / 2
  layer = transformer.abstract(shape)['layers']
  layer = sum(math.prod(x.shape[1:]) for x in jax.tree.leaves(layer))
  vocabulary = shape.vocab_size * width * 4 / tensor / fsdp
  return (gradients + 2 * (0 if run.lora else vocabulary)
          + tokens * size * (saved * shape.num_hidden_layers + 2 * inside)
          + 2 * layer * size / tensor
          + own * _CHUNK * shape.vocab_size / tensor * 4 * 4)


def _devices(config):
  """The kind of device, a mesh (real, to compile for, or abstract), a name."""
  if not config.plan.devices:
    local = jax.devices()
    stats = local[0].memory_stats() or {}
    gib = stats.get('bytes_limit', _host_memory() / len(local)) / GIB
    kind = devices_lib.Kind(local[0].device_kind, gib, len(local))
    return kind, meshes.make(**config.mesh), (
        f'{len(local)} x {kind.name}, here')
  kind, count = devices_lib.parse(config.plan.devices)
  found = config.plan.compile and devices_lib.to_compile_for(kind, count)
  mesh = meshes.make(**config.mesh, devices=found) if found else (
      meshes.abstract(count, **config.mesh))
  return kind, mesh, f'{count} x {kind.name}'


def _host_memory() -> int:
  return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')


def _learner(config, shape, mesh, kind) -> learners.Learner:
  """The run's learner, with the attention that its platform would use."""
  platform = 'tpu' if kind.torus is not None else 'gpu'
  if isinstance(mesh, jax.sharding.Mesh):
    platform = mesh.devices.flat[0].platform
  name = config.model.attention
  if name == 'auto':
    name, _ = attention.choose(
        platform, config.learner.dtype, shape.head_dim,
        config.learner.row_length or config.rollout.length)
  return build.learner(config, build.algorithm(config), shape, mesh,
                       build.attend(config, name, mesh))


def _holds(config, shape, learner, mesh, here, processes: int
          ) -> dict[str, float]:
  """Bytes of the arrays that stay in memory, by what they hold."""
  state = learner.train_step.abstract_state()
  holds = {}
  for network, trained in state.items():
    holds[f'{network}: trained parameters, float32'] = bytes_of(trained.params)
    holds[f'{network}: moments'] = bytes_of(trained.opt_state)
  if learner.needs_base:
    holds[f'reference policy, {config.model.dtype}'] = _bytes_on(
        mesh, transformer.abstract(shape, config.model.dtype),
        transformer.logical_axes(shape))
  slots = config.rollout.slots // processes
  copies, tokens = here.shape['data'], config.rollout.cache_tokens // processes
  layout = layouts.make(
      'ragged' if tokens else 'xla', shape, slots=slots // copies, block=_PAGE,
      length=config.rollout.length, parts=1, pages=tokens // copies // _PAGE)
  state = jax.eval_shape(functools.partial(
      slots_lib.empty, shape, layout, copies, config.rollout.dtype))
  holds[f'KV cache: {slots} slots x {config.rollout.length} tokens a process' + (
      f', in pages of {tokens} tokens together' if tokens else '')
       ] = _bytes_on(here, state, slots_lib.logical_axes(shape, layout))
  return holds


def _rollouts(config, shape, here, processes: int) -> float:
  """The engine's copy of the weights, twice while it is made; its logits."""
  copy = _bytes_on(here, transformer.abstract(shape, config.rollout.dtype),
                   transformer.logical_axes(shape))
  rows = config.rollout.slots // processes / here.shape['data']
  return 2 * copy + 3 * rows * shape.vocab_size * 4 / here.shape['tensor']


def _bytes_on(mesh, tree: Any, axes: Any) -> float:
  """Bytes a device of a mesh of arrays with logical axes."""
  return bytes_of(jax.tree.map(
      lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype,
                                               sharding=sharding),
      tree, meshes.shardings(mesh, axes)))


def bytes_of(tree: Any) -> float:
  """Bytes a device of arrays with shardings."""
  return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
             for x in jax.tree.leaves(tree))
