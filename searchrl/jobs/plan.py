# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Plans memory: computes the bytes per device for a config and a device kind.

Nothing is allocated and no weights are read. The sizes of arrays follow from
shapes and shardings, and that of the update from the compiler, if there is one
for the device. A compiled figure is exact, and an estimate is marked as one.
For each way to split the weights in rollouts, the plan gives a lower bound of
the time per token.
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
from searchrl.experiment import config_checks
from searchrl.experiment import model_defaults
from searchrl.experiment import policy
from searchrl.experiment import search as searches
from searchrl.models import attention
from searchrl.models import transformer
from searchrl.models import weights
from searchrl.models.inference import layouts
from searchrl.models.inference import slots as slots_lib
from searchrl.runtime import devices as devices_lib
from searchrl.runtime import mesh as meshes
from searchrl.runtime import progress
from searchrl.runtime.devices import GIB
from searchrl.training import learner as learners

SHAPES = pathlib.Path(__file__).parents[1] / 'assets' / 'shapes'  # by hub id
_ROOM = 0.92  # usable share of the memory; the runtime needs the rest
_CHUNK = 128  # tokens per row whose logits exist at the same time
_PAGE = 128  # tokens per page of the KV cache


@dataclasses.dataclass(frozen=True)
class Engine:
  """Costs per device of rollouts with one copy of the weights on some devices.

  To sample a token in every slot, a device reads the weights and the cache of
  full slots once. It sends around a ring what the devices of a copy sum up:
  after attention, after the feed-forward layer, and the tokens' embeddings.
  """

  tensor: int  # devices per copy of the weights
  frozen: float  # bytes of a frozen solver that plays for the reward
  cache: float  # bytes of the KV cache, held all the time
  besides: float  # further bytes, held during rollouts only
  read: float  # bytes read for a token in every slot
  sent: float  # bytes sent for a token in every slot
  slots: int  # slots of all devices together

  def secs(self, kind: devices_lib.Kind) -> float:
    """Returns the least seconds for a token in every slot.

    Reading and sending alternate, so that their times add up.
    """
    return self.read / kind.bandwidth + self.sent / kind.link


@dataclasses.dataclass(frozen=True)
class Plan:
  """Bytes per device, by what they hold."""

  devices: str
  available: float  # bytes of memory
  parameters: int  # parameters of the policy
  mesh: dict[str, int]
  holds: dict[str, float]  # bytes held all the time
  rollouts: float  # further bytes during rollouts
  update: float  # further bytes during an update
  compiled: bool  # whether `update` is from the compiler or an estimate
  kind: devices_lib.Kind
  engine: Engine  # the config's engine
  engines: tuple[Engine, ...]  # engines that model and devices allow

  @property
  def peak(self) -> float:
    """Largest number of bytes at any time, with the config's engine."""
    return self.peak_with(self.engine)

  def peak_with(self, engine: Engine) -> float:
    """Returns the peak of the bytes, if rollouts used this engine."""
    chosen = self.engine
    return (sum(self.holds.values()) + engine.cache - chosen.cache
            + engine.frozen - chosen.frozen + max(engine.besides, self.update))

  @property
  def fits(self) -> bool:
    """True if the config's engine fits into the memory."""
    return self.has_room_for(self.engine)

  def has_room_for(self, engine: Engine) -> bool:
    """Returns whether the plan fits into the memory with an engine."""
    return self.peak_with(engine) <= _ROOM * self.available

  @property
  def fastest(self) -> Engine | None:
    """Engine with the least time among those that fit; None without rates."""
    fitting = [engine for engine in self.engines if self.has_room_for(engine)]
    return min(fitting, key=lambda engine: engine.secs(self.kind),
               default=None) if self.kind.bandwidth else None


def run(config, workdir: str) -> None:
  """Prints whether the config fits config.plan.devices, and a table of sizes.

  A job of several trainings has a plan for each; see `build.beside_job`.

  Raises:
    ValueError: The config cannot be run on these devices.
  """
  del workdir  # nothing is written
  config_checks.check(config)
  parts = build.beside_job(config, 'trainings')
  if not parts:
    print(describe(make(config)))
  for name, part in parts.items():
    config_checks.check(part)
    print(f'The {name}:\n\n{describe(make(part))}\n')


def make(config) -> Plan:
  """Makes the plan of a training config; see `run`."""
  if 'learner' not in config or 'rollout' not in config:
    raise ValueError(
        'a plan is of a training run by RL, but this config has no '
        f'{"learner" if "learner" not in config else "rollout"}. Choose one of '
        'the recipes.')
  config = _resolved(config)
  shape = weights.read_config(shape_folder(
      config.model.path or str(policy.TINY_BASE)))
  kind, mesh, name = _devices(config)
  learner = _learner(config, shape, mesh, kind)
  a_process = min(kind.a_process, mesh.size)
  processes = mesh.size // a_process
  engine = functools.partial(_engine, config, shape, a_process, processes)
  chosen = engine(config.rollout.tensor)
  label, cache = _cache_label(config, processes), chosen.cache
  frozen = {} if 'solver' not in config else {
      f'frozen solver: weights, {config.rollout.dtype}': chosen.frozen}
  compiled = isinstance(mesh, jax.sharding.Mesh) and config.plan.compile
  update = (compiled_bytes if compiled else estimated_bytes)(
      learner, rows_of(config))
  return Plan(
      devices=name, available=kind.gib * GIB,
      parameters=sum(math.prod(x.shape) for x in jax.tree.leaves(
          transformer.abstract(shape))),
      mesh=dict(mesh.shape),
      holds=_holds(config, shape, learner, mesh) | {label: cache}
      | _model_of_search(config, mesh.size) | frozen,
      rollouts=chosen.besides, update=update, compiled=compiled, kind=kind,
      engine=chosen, engines=tuple(
          engine(tensor) for tensor in range(1, a_process + 1)
          if not (shape.num_key_value_heads % tensor or a_process % tensor or
                  config.rollout.max_num_seqs // processes
                  % (a_process // tensor))))


def _resolved(config) -> Any:
  """Returns the config with its lengths, if the model has a tokenizer."""
  folder = pathlib.Path(config.model.path or policy.TINY_BASE)
  if folder.is_dir() and not (folder / 'tokenizer.json').is_file():
    return config
  return model_defaults.resolved(
      config, trains=True, devices=config.plan.devices)


def shape_folder(path: str) -> str:
  """Returns a directory with a model's config.json; weights are not needed.

  Args:
    path: Path of a directory, or a hub id. The shapes of the named models
      are shipped, for machines that have not fetched them.
  """
  import huggingface_hub  # slow to import
  shipped = SHAPES / path / 'config.json'
  if pathlib.Path(path).is_dir() or not shipped.is_file():
    return weights.locate(path)
  fetched = huggingface_hub.try_to_load_from_cache(path, 'config.json')
  file = fetched if isinstance(fetched, str) else shipped
  return str(pathlib.Path(file).parent)


def rows_of(config) -> int:
  """Returns the number of trajectories in a batch."""
  return config.rollout.questions_per_step * config.rollout.group_size


def describe(plan: Plan) -> str:
  """Returns the plan as a table, with the verdict."""
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
      'should be used. For rollouts, more rollout.tensor, fewer '
      'rollout.max_num_seqs, '
      "rollout.dtype='bfloat16' help; for updates, more mesh.fsdp, learner."
      "remat='nothing', learner.dtype='bfloat16', model.lora.rank; for both, "
      'more devices.')
  return (f'{plan.parameters / 1e9:.3g} billion parameters on {plan.devices}, '
          f'mesh {axes}\n{figures.table(rows, tuple(rows[0]))}\n{verdict}'
          f'{_describe_engines(plan)}')


def _describe_engines(plan: Plan) -> str:
  """Returns a table of the cost of a token by rollout.tensor; '' if unknown."""
  if not plan.kind.bandwidth:
    return ''
  rows = []
  for engine in plan.engines:
    secs = engine.secs(plan.kind)
    rows.append({
        'rollout.tensor': engine.tensor,
        'GiB at most': f'{plan.peak_with(engine) / GIB:.2f}',
        'MB read': f'{engine.read / 1e6:,.0f}',
        'MB sent': f'{engine.sent / 1e6:.1f}',
        'ms a token': f'{1000 * secs:.2f}',
        'tokens/s at most': f'{engine.slots / secs:,.0f}'})
  best = plan.fastest
  choice = 'None of them fits.' if best is None else (
      f'rollout.tensor={best.tensor} is the fastest that fits' + (
          ', and is what the config has.' if best.tensor == plan.engine.tensor
          else f'; the config has {plan.engine.tensor}.'))
  return ('\n\nRollouts, a token of every slot, all of them full; the least '
          'that memory and links take\n'
          f'{figures.table(rows, tuple(rows[0]))}\n{choice}')


def compiled_bytes(learner: learners.Learner, rows: int) -> float:
  """Returns the bytes per device of the compiled update, besides the state."""
  arguments = learner.abstract_update(rows)
  with progress.phase('Compiling the update'):
    program = learner.train_step.update.lower(*arguments).compile()
  memory = program.memory_analysis()
  assert memory is not None  # the compilers of CPUs, GPUs and TPUs report it
  return memory.temp_size_in_bytes + bytes_of(arguments[3])


def estimated_bytes(learner: learners.Learner, rows: int) -> float:
  """Returns an estimate of `compiled_bytes`, from shapes.

  For large models, it is within a third of the true size. It counts the
  gradients of a micro-batch and their sum, and the gradients of the embedding
  and of the logits' matrix once more; the weights in the dtype of activations;
  the activations that layers save and those of the layer being computed; the
  gathered weights of two layers; and the logits of a chunk. The batch itself is
  small and is left out.
  """
  del rows
  run, shape = learner.train_step, learner.train_step.shape
  fsdp, tensor = run.mesh.shape['fsdp'], run.mesh.shape['tensor']
  ways = run.mesh.shape['data'] * fsdp
  size = np.dtype(run.forward_options.dtype).itemsize
  rows_here = learner.microbatch_rows // ways
  tokens = rows_here * learner.pack_length
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
  rounded = 0 if size == 4 else gradients * size / 4
  return (2 * gradients + rounded + 2 * (0 if run.lora else vocabulary)
          + tokens * size * (saved * shape.num_hidden_layers + 2 * inside)
          + 2 * layer * size / tensor
          + rows_here * _CHUNK * shape.vocab_size / tensor * 4 * 4)


def _devices(config):
  """Returns the kind of device, a mesh and a name.

  The mesh is of real devices, of devices to compile for, or abstract.
  """
  if not config.plan.devices:
    local = jax.devices()
    stats = local[0].memory_stats() or {}
    gib = stats.get('bytes_limit', _host_memory() / len(local)) / GIB
    kind = devices_lib.Kind(local[0].device_kind, gib, len(local))
    return kind, meshes.make(**config.mesh), (
        f'{len(local)} x {kind.name}, here')
  kind, count = devices_lib.parse(config.plan.devices)
  targets = config.plan.compile and devices_lib.to_compile_for(kind, count)
  mesh = meshes.make(**config.mesh, devices=targets) if targets else (
      meshes.abstract(count, **config.mesh))
  return kind, mesh, f'{count} x {kind.name}'


def _host_memory() -> int:
  return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')


def _learner(config, shape, mesh, kind) -> learners.Learner:
  """Returns the run's learner, with the attention that its platform uses."""
  platform = 'tpu' if kind.torus is not None else 'gpu'
  if isinstance(mesh, jax.sharding.Mesh):
    platform = mesh.devices.flat[0].platform
  name = config.model.attention
  if name == 'auto':
    name, _ = attention.choose(
        platform, config.learner.dtype, shape.head_dim,
        config.learner.pack_length or config.rollout.max_length)
  return build.learner(config, build.algorithm(config), shape, mesh,
                       build.attend(config, name, mesh))


def _holds(config, shape, learner, mesh) -> dict[str, float]:
  """Returns the bytes of the learner's arrays, by what they hold."""
  state = learner.train_step.abstract_state()
  holds = {}
  for network, trained in state.items():
    holds[f'{network}: trained parameters, float32'] = bytes_of(trained.params)
    holds[f'{network}: moments'] = bytes_of(trained.opt_state)
  if learner.needs_base:
    holds[f'reference policy, {config.model.dtype}'] = _bytes_on(
        mesh, transformer.abstract(shape, config.model.dtype),
        transformer.logical_axes(shape))
  return holds


def _cache_label(config, processes: int) -> str:
  slots, tokens = (count // processes for count in (
      config.rollout.max_num_seqs, config.rollout.cache_tokens))
  length = config.rollout.max_length
  return f'KV cache: {slots} slots x {length} tokens a process' + (
      f', in pages of {tokens} tokens together' if tokens else '')


def _model_of_search(config, devices: int) -> dict[str, float]:
  """Returns the bytes of a model that the search engine samples from.

  Raises:
    ValueError: The model cannot be on the policy's devices.
  """
  model = searches.spec(config.search).local_model
  if model is None:
    return {}
  policy.check_second(model.path, field=model.field, devices=devices)
  shape = weights.read_config(shape_folder(
      model.shape or model.path or str(policy.TINY_BASE)))
  mesh = meshes.abstract(1)
  layout = layouts.make(
      'ragged' if model.cache_tokens else 'xla', shape, slots=model.slots,
      block=_PAGE, length=model.length, parts=1,
      pages=model.cache_tokens // _PAGE)
  cache = jax.eval_shape(functools.partial(
      slots_lib.empty, shape, layout, 1, model.dtype))
  return {
      f'search engine: weights, {model.dtype}': _bytes_on(
          mesh, transformer.abstract(shape, model.dtype),
          transformer.logical_axes(shape)),
      f'search engine: {model.slots} slots x {model.length} tokens':
          _bytes_on(mesh, cache, slots_lib.logical_axes(shape, layout))}


def _engine(config, shape, a_process: int, processes: int, tensor: int
           ) -> Engine:
  """Returns the estimated costs of rollouts with `tensor` devices per copy.

  While the learner hands over new weights, the old ones are still held. Each
  decode step holds three arrays of the size of the logits.
  """
  here = meshes.abstract(a_process, data=-1, tensor=tensor)
  copies = here.shape['data']
  slots, tokens = (count // processes // copies for count in (
      config.rollout.max_num_seqs, config.rollout.cache_tokens))
  layout = layouts.make(
      'ragged' if tokens else 'xla', shape, slots=slots, block=_PAGE,
      length=config.rollout.max_length, parts=1, pages=tokens // _PAGE)
  cache = _bytes_on(here, jax.eval_shape(functools.partial(
      slots_lib.empty, shape, layout, copies, config.rollout.dtype)),
                    slots_lib.logical_axes(shape, layout))
  params, axes = transformer.abstract(
      shape, config.rollout.dtype), transformer.logical_axes(shape)
  weights_held = _bytes_on(here, params, axes)
  looked_up = _bytes_on(here, params['embed'], axes['embed']) * (
      'head' in params)  # only single rows are read
  row = slots * shape.hidden_size * np.dtype(config.rollout.dtype).itemsize
  return Engine(
      tensor=tensor, cache=cache,
      frozen=weights_held if 'solver' in config else 0.0,
      slots=config.rollout.max_num_seqs,
      besides=2 * weights_held + 3 * slots * shape.vocab_size * 4 / tensor,
      read=weights_held - looked_up + cache,
      sent=2 * (1 - 1 / tensor) * row * (2 * shape.num_hidden_layers + 1))


def _bytes_on(mesh, tree: Any, axes: Any) -> float:
  """Returns the bytes per device of arrays with logical axes on a mesh."""
  return bytes_of(jax.tree.map(
      lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype,
                                               sharding=sharding),
      tree, meshes.shardings(mesh, axes)))


def bytes_of(tree: Any) -> float:
  """Returns the bytes per device of arrays with shardings."""
  return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
             for x in jax.tree.leaves(tree))
