# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The memory that a config needs: bytes per device, for each kind of content.

Nothing is allocated and no weights are read. The sizes of arrays follow from
shapes and shardings. The size of the update comes from the compiler, if there
is one for the device. Otherwise it is an estimate, and is marked as such. For
each way to split the weights in rollouts, the plan has a lower bound of the
time per token.
"""

import copy
import dataclasses
import functools
import itertools
import math
import os
from typing import Any

import jax

from searchrl.experiment import build
from searchrl.experiment import config_checks
from searchrl.experiment import model_defaults
from searchrl.experiment import model_folders
from searchrl.experiment import policy
from searchrl.experiment import rollout_memory
from searchrl.experiment import rules
from searchrl.experiment import search as searches
from searchrl.experiment.plan_totals import Plan, ROOM, Update
from searchrl.experiment.rollout_memory import Engine
from searchrl.models import attention
from searchrl.models import shipped_shapes
from searchrl.models import sizes
from searchrl.models import transformer
from searchrl.models import weights
from searchrl.rollouts import weight_sync
from searchrl.runtime import devices as devices_lib
from searchrl.runtime import mesh as meshes
from searchrl.runtime import processes
from searchrl.runtime.devices import GIB
from searchrl.training import learner as learners
from searchrl.training import update_memory

_MANY = 10**6  # updates, with which any warm-up ends
_REMATS = ('', 'dots', 'nothing')  # the fastest first
_SLOTS = 16, 256  # minimum and maximum slots per copy of the weights
_DOCUMENTS = 32  # per row of an update, fewest for two rows per device
# Bytes of a process besides its arrays, and for each layer; benchmarks/speed.md
_PROCESS, _LAYER = 0.852 * GIB, 0.012 * GIB


def make(config) -> Plan:
  """Returns the memory plan of a config that trains or samples a policy.

  Raises:
    ValueError: The config is of another job, or its model cannot be divided
      among the devices as the config says.
  """
  if 'learner' not in config and 'rollout' not in config or (
      'model' not in config):
    raise ValueError(
        'a plan is of a training or of rollouts, but this config has neither a '
        'learner nor a rollout of a language model. Choose one of the recipes.')
  if 'plan' not in config:
    raise ValueError(
        'config.plan must be there for --plan, but this config has none. Give a '
        'recipe, configs/sft.py or configs/evaluate.py with the same model.')
  config = resolved(config)
  if 'learner' in config:
    config_checks.check_shape(config, _shape(config))
  config = chosen(config)
  _check_split(config)
  return _make(config)


def _check_split(config) -> None:
  """Raises a ValueError if a training cannot divide its model among devices."""
  if 'learner' not in config:
    return
  shape, (kind, mesh, _) = _shape(config), _devices(config)
  jax.tree.map(lambda x, axes: meshes.check_divisible(
      mesh, x.shape, axes, 'a parameter'), transformer.abstract(shape),
               transformer.logical_axes(shape))
  if 'rollout' in config and not _follows(config, 'rollout.tensor'):
    copies = policy.check_tensor(
        shape, math.prod(_samplers(config, mesh, kind)), config.rollout.tensor)
    if not _follows(config, 'rollout.max_num_seqs'):
      weight_sync.check_slots(config.rollout.max_num_seqs, copies)


def _make(config) -> Plan:
  """Returns the plan of a config in which all options are set and legal."""
  shape = _shape(config)
  kind, mesh, name = _devices(config)
  update = _update(config, shape, mesh, kind)
  engine, engines, sampling, besides = _rollouts(config, shape, mesh, kind)
  on_cpu = _platform(mesh, kind) == 'cpu'
  if on_cpu:
    process = _PROCESS + _LAYER * shape.num_hidden_layers
    besides['Python, JAX, programs'] = process / kind.a_process
  parameters, active = sizes.parameters(shape)
  apart = bool(_rollout_devices(config))
  return Plan(
      devices=name, available=kind.gib * GIB, parameters=parameters,
      active=active, mesh=dict(mesh.shape),
      holds=update.holds | ({} if apart else sampling) | besides,
      update=update, kind=kind, engine=engine, engines=engines,
      sampling=sampling | besides if apart else None,
      frees_cache=on_cpu and not config.get('train', {}).get('max_staleness'))


def _shape(config) -> transformer.TransformerConfig:
  """Returns the shape of the policy, with the dtype of its products."""
  shape = weights.read_config(shipped_shapes.locate(
      config.model.path or str(policy.TINY_BASE)))
  rounds = config.model.get('matmul_dtype', '')
  if rounds == 'auto' and config.plan.devices:  # none of them are CPUs
    rounds = ''
  return dataclasses.replace(
      shape, matmul_dtype=model_folders.product_dtype(rounds))


def chosen(config) -> Any:
  """Returns a copy of the config with options that fit into the memory.

  Each option gets the fastest value that fits by the estimates, with a tenth of
  the update to spare. These choices are printed:

  - rollout.tensor, if it is unset and the devices are not CPUs. It is the
    smallest value with which 16 slots for each copy of the weights fit beside
    an update that takes the least memory, or 1 if there is no such value.
  - rollout.max_num_seqs, if it is unset and the devices are not CPUs. For each
    copy of the weights, it starts at 256, or at the copy's share of a step's
    samples if that is smaller. It is halved until the search engine answers so
    many queries in time, and (not below 16) until the slots fit beside an
    update that takes the least memory.
  - learner.remat, if it is 'auto', and then learner.microbatch_rows, if it is
    0: two rows per device if they fit and a mini-batch has many, else one.

  Raises:
    ValueError: A training cannot divide its model among the devices.
  """
  config = copy.deepcopy(config)
  choices: dict[str, Any] = {}
  if _follows(config, 'rollout.tensor'):
    config.rollout.tensor = processes.on_first(
        'tensor', lambda: _tensor(config))
    if config.rollout.tensor > 1:
      choices['rollout.tensor'] = config.rollout.tensor
  if _follows(config, 'rollout.max_num_seqs'):
    choices['rollout.max_num_seqs'] = processes.on_first(
        'slots', lambda: _slots(config))
    config.rollout.max_num_seqs = choices['rollout.max_num_seqs']
  if 'learner' in config and config.learner.remat == 'auto':
    remat, rows = processes.on_first('remat', lambda: _remat(config))
    choices |= {'learner.remat': remat, 'learner.microbatch_rows': rows}
    with config.unlocked():
      config.learner.update(remat=remat, microbatch_rows=rows)
  if choices:
    processes.say('Chosen by memory: ' + ', '.join(
        f'{name}={value!r}' for name, value in choices.items()) + '.')
  return config


def _follows(config, name: str) -> bool:
  """Returns whether `chosen` may set a field of config.rollout by memory."""
  return bool({'learner', 'rejection'} & {*config}) and (
      name in dict(rules.unset(config))) and (
          not model_folders.is_tiny(config.model.path)) and (
              bool(config.plan.devices) or jax.default_backend() != 'cpu')


def _tensor(config) -> int:
  """Returns the fewest devices per copy of the weights with which all fits.

  If nothing fits, it is 1.
  """
  trial, _, size = _trial(config)
  given = 0 if _follows(config, 'rollout.max_num_seqs') else (
      config.rollout.max_num_seqs)

  def plan(tensor: int) -> Plan:
    copies = size // tensor
    trial.rollout.update(tensor=tensor, max_num_seqs=given or (
        _in_time(config, _SLOTS[0], copies) * copies))
    return _make(trial)

  for tensor in [engine.tensor for engine in plan(1).engines]:
    if _has_room(plan(tensor)):
      return tensor
  return 1


def _slots(config) -> int:
  """Chooses the number of trajectories to sample at a time, over all copies.

  It is halved until searches end in time and the memory suffices.
  """
  trial, _, size = _trial(config)
  copies = max(size // config.rollout.tensor, 1)
  each = _in_time(
      config, min(_SLOTS[1], -(-documents_of(config) // copies)), copies)
  while each >= 2 * _SLOTS[0]:
    trial.rollout.max_num_seqs = each * copies
    if _has_room(_make(trial)):
      break
    each //= 2
  return each * copies


def _in_time(config, each: int, copies: int) -> int:
  """Returns `each`, the slots per copy, halved until searches end in time."""
  search = searches.spec(config.search)
  while each > 1 and (search.deadline_secs(each * copies)
                      >= config.rollout.search_timeout_secs):
    each //= 2
  return each


def _remat(config) -> tuple[str, int]:
  """Returns the fastest remat and rows per micro-batch that fit the memory."""
  trial, ways, _ = _trial(config)
  documents = documents_of(config) // config.learner.get('minibatches', 1)
  for remat, each in itertools.product(_REMATS, (2, 1)):
    rows = config.learner.microbatch_rows or each * ways
    if each > 1 and documents < _DOCUMENTS * each * ways:
      continue
    trial.learner.update(remat=remat, microbatch_rows=rows)
    if _has_room(_make(trial)):
      break
  return remat, rows


def _trial(config) -> tuple[Any, int, int]:
  """Returns a copy of the config for trials, and two numbers.

  They are the number of parts into which the mesh splits a batch's rows, and
  the number of devices that sample, over all processes. If remat is 'auto', the
  copy has the options of an update that takes the least memory.

  Raises:
    ValueError: A training cannot divide its model among the devices.
  """
  _check_split(config)
  trial = copy.deepcopy(config)
  trial.unlock()
  trial.plan.compile = False
  kind, mesh, _ = _devices(trial)
  ways = meshes.ways(mesh, 'batch')
  if 'learner' in trial and trial.learner.remat == 'auto':
    trial.learner.update(remat=_REMATS[-1],
                         microbatch_rows=trial.learner.microbatch_rows or ways)
  return trial, ways, math.prod(_samplers(config, mesh, kind))


def _rollout_devices(config) -> int:
  """Returns the number of devices of a process that only sample."""
  return config.get('train', {}).get('rollout_devices', 0)


def _samplers(config, mesh, kind) -> tuple[int, int]:
  """Returns how many devices of a process sample, and how many processes run.

  `mesh` has the devices that train.
  """
  apart = _rollout_devices(config)
  return apart or min(kind.a_process, mesh.size), max(
      mesh.size // (kind.a_process - apart), 1)


def _has_room(plan: Plan) -> bool:
  """Returns whether a plan fits even if its update takes a tenth more bytes."""
  return plan.peak + 0.1 * plan.update.bytes <= ROOM * plan.available


def _rollouts(config, shape, mesh, kind
             ) -> tuple[Engine, tuple[Engine, ...], dict[str, float],
                        dict[str, float]]:
  """Returns the config's Engine, all possible Engines, and two dicts.

  The first dict has the bytes, by content, that only a device that samples
  holds. The second has those that every device holds.
  """
  if 'rollout' not in config:
    return rollout_memory.NONE, (), {}, {}
  apart = _rollout_devices(config)
  a_process, processes = _samplers(config, mesh, kind)
  trains = mesh.size // processes  # devices of a process
  merged = 0 if apart else rollout_memory.merged_adapters(config, shape, mesh)
  engine = functools.partial(
      rollout_memory.estimated, config, shape, kind, a_process, processes,
      merged=merged)
  chosen = engine(config.rollout.tensor)
  engines = tuple(
      engine(tensor) for tensor in range(1, a_process + 1)
      if not (shape.num_key_value_heads % tensor or a_process % tensor or
              trains % tensor or
              config.rollout.max_num_seqs // processes
              % (a_process // tensor)))
  holds = {_cache_label(config, processes): chosen.cache}
  holds |= rollout_memory.model_of_search(config, a_process, processes)
  if chosen.frozen:
    holds[f'frozen weights of rollouts, {config.rollout.dtype}'] = chosen.frozen
  return chosen, engines, holds, rollout_memory.index_of_search(
      config, trains + apart, processes, kind)


def resolved(config) -> Any:
  """Returns the config with the lengths that the tokenizer determines.

  Without a tokenizer on this machine, the lengths are those of the config.
  """
  if not {'rollout', 'dialogue', 'plan'} <= {*config} or (
      'rejection' in config):
    return config
  trains = 'learner' in config
  if shipped_shapes.has_tokenizer(config.model.path or str(policy.TINY_BASE)):
    return model_defaults.resolved(
        config, trains=trains, devices=config.plan.devices)
  config = copy.deepcopy(config)
  model_defaults.set_engine(config, None)
  if not trains and config.plan.devices and (
      'rollout.max_num_seqs' in dict(rules.unset(config))):
    copies = _trial(config)[2] // config.rollout.tensor
    config.rollout.max_num_seqs = model_defaults.SLOTS * copies
  return config


def rows_of(config) -> int:
  """Returns the number of rows of a batch; a context has a row of its own."""
  contexts = 1
  if 'rollout' in config and 'rejection' not in config:
    contexts = policy.budgets_of(config).contexts
  return documents_of(config) * contexts


def documents_of(config) -> int:
  """Returns the maximum number of trajectories or documents in a batch."""
  if 'rejection' in config:
    return config.rejection.questions_a_round * config.rejection.samples
  if 'rollout' in config:
    return config.rollout.questions_per_step * config.rollout.group_size
  return config.batch.documents or config.batch.tokens


def _devices(config):
  """Returns the kind of the devices, the mesh that trains, and a text of both.

  Without plan.devices, the mesh has the devices of this machine. Otherwise it
  has devices to compile for, or abstract ones. The mesh does not have devices
  that only sample.

  Raises:
    ValueError: The mesh of the config cannot be made of the devices.
  """
  apart = _rollout_devices(config)
  tensor = config.get('rollout', {}).get('tensor', 1)
  shown = lambda processes: (
      f', of which {apart * processes} sample' if apart else '')
  if not config.plan.devices:
    local, processes = meshes.all_devices(), jax.process_count()
    stats = local[0].memory_stats() or {}
    host = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    gib = stats.get('bytes_limit', host / len(local)) / GIB
    kind = devices_lib.Kind(
        local[0].device_kind, gib, len(local) // processes)
    mesh, _ = meshes.divided(apart, tensor, **config.mesh)
    return kind, mesh, f'{len(local)} x {kind.name}, here{shown(processes)}'
  kind, count = devices_lib.parse(config.plan.devices)
  a_process = min(kind.a_process, count)
  processes = count // a_process
  meshes.trains(a_process, apart, tensor)  # raises
  trains = count - apart * processes
  targets = config.plan.compile and devices_lib.to_compile_for(kind, trains)
  mesh = meshes.make(**config.mesh, devices=targets) if targets else (
      meshes.abstract(trains, **config.mesh))
  return kind, mesh, f'{count} x {kind.name}{shown(processes)}'


def _update(config, shape, mesh, kind) -> Update:
  """Returns the bytes that training needs, or only those of the policy."""
  if 'learner' not in config:
    dtype = config.model.dtype
    return Update({f'policy, {dtype}': sum(
        rollout_memory.weights_on(mesh, shape, dtype).values())})
  learner, name = learner_of(config, shape, mesh, kind)
  platform = _platform(mesh, kind)
  on_host = learner.train_step.offload_optimizer and platform != 'cpu'
  holds, rows = _holds(config, shape, learner, mesh, on_host), rows_of(config)
  compiled = isinstance(mesh, jax.sharding.Mesh) and config.plan.compile
  if compiled:
    size = update_memory.compiled(learner, rows)
  else:
    size = update_memory.estimated(learner, name, rows, platform == 'tpu')
  state = learner.train_step.abstract_state()
  return Update(
      holds, size, update_memory.workspace(learner, name), compiled,
      on_host * meshes.bytes_of([x.opt_state for x in state.values()]))


def _platform(mesh, kind) -> str:
  if isinstance(mesh, jax.sharding.Mesh):
    return mesh.devices.flat[0].platform
  return 'gpu' if kind.torus is None else 'tpu'


def learner_of(config, shape, mesh, kind) -> tuple[learners.Learner, str]:
  """Returns the run's learner, and the name of the attention that it uses.

  `shape` is the model's shape. `mesh` and `kind` are from `_devices`.
  """
  name = config.model.attention
  if name == 'auto':
    name, _ = attention.choose(
        _platform(mesh, kind), config.learner.dtype, shape.head_dim,
        config.learner.pack_length or config.rollout.max_length,
        is_packed='a100' not in kind.name.lower())
  options = build.attend(config, name, mesh)
  if 'rollout' not in config:
    return build.supervised_learner(
        config, shape, mesh, options, rows=rows_of(config),
        updates=config.train.steps or _MANY), name
  return build.learner(
      config, build.algorithm(config), shape, mesh, options), name


def _holds(config, shape, learner, mesh, on_host: bool) -> dict[str, float]:
  """Returns the bytes of the learner's arrays, for each kind of content."""
  state = learner.train_step.abstract_state()
  holds = {}
  for network, trained in state.items():
    holds[f'{network}: trained parameters, float32'] = meshes.bytes_of(
        trained.params)
    if not on_host:
      holds[f'{network}: moments'] = meshes.bytes_of(trained.opt_state)
  if learner.needs_base:
    dtype = config.model.dtype
    holds[f'reference policy, {dtype}'] = sum(
        rollout_memory.weights_on(mesh, shape, dtype).values())
  return holds


def _cache_label(config, processes: int) -> str:
  slots, tokens = (count // processes for count in (
      config.rollout.max_num_seqs, config.rollout.cache_tokens))
  length = config.rollout.max_length
  return f'KV cache: {slots} slots x {length} tokens a process' + (
      f', in pages of {tokens} tokens together' if tokens else '')
