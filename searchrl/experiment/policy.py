# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Policies: loads the weights of a model or run, and makes its Sampler."""

import functools
import pathlib
from typing import Any

import jax
from jax.sharding import Mesh

from searchrl.agent import tokenizer as tokenizers
from searchrl.experiment import model_folders
from searchrl.experiment import past_runs
from searchrl.experiment import search as searches
from searchrl.experiment import toolsets
from searchrl.models import lora as loras
from searchrl.models import transformer
from searchrl.models import weights
from searchrl.models.inference import engine as engines
from searchrl.models.inference import layouts
from searchrl.rollouts import driver
from searchrl.rollouts import sampler as samplers
from searchrl.rollouts import weight_sync
from searchrl.rollouts.sampler import Sampler
from searchrl.runtime import atomic_files
from searchrl.runtime import checkpoint
from searchrl.runtime import dispatch
from searchrl.runtime import mesh as meshes
from searchrl.runtime import processes
from searchrl.runtime import progress

TINY_BASE = model_folders.TINY_BASE
BASE = 'base'  # a run's note about the weights that its adapters belong to


def folder_of(config) -> model_folders.ModelFolder:
  """Reads the model directory of a config, and checks that conversations fit.

  Raises:
    FileNotFoundError, ValueError: Any of the reasons of `model_folders.read`,
      or the limits of conversations do not suit the model.
  """
  with progress.phase('Reading the tokenizer'):
    folder = model_folders.read(
        str(config.model.path or TINY_BASE), config.dialogue,
        toolsets.listed(config), config.model.get('matmul_dtype', ''))
  folder.check(budgets_of(config), config.rollout.max_length)
  return folder


def budgets_of(config) -> driver.Budgets:
  """Returns the limits of a conversation, from config.rollout."""
  return driver.Budgets(**config.rollout.budgets)


def build(config, mesh: Mesh, *, limit: int | None = None, alike: bool = False,
          folder: model_folders.ModelFolder | None = None,
          onto: Mesh | None = None, weightless: bool = False
         ) -> tuple[Sampler, transformer.Params]:
  """Builds the sampler of a config, and loads the params of its model.

  Args:
    config: Config of a run, of `ask` or of a server.
    mesh: Mesh of all processes, on which the params are placed.
    limit: Maximum number of concurrent trajectories. It limits the number of
      slots. None: no limit.
    alike: Whether results with and without the limit must be equal bit by bit.
      Each copy of the weights then keeps at least `engines.ONE_KIND` slots, or
      all if it has fewer, because products of few rows round differently on
      CPUs.
    folder: Model directory of the config, if it has already been read.
    onto: Mesh of the devices of this process that sample, if they are not the
      devices of `mesh`.
    weightless: Whether the weights are left unread. The params are then structs
      with shapes and shardings.

  Raises:
    FileNotFoundError, ValueError: Any of the reasons of `folder_of` and `load`.
  """
  options = config.rollout
  slots, cache_tokens = options.max_num_seqs, options.cache_tokens
  if limit is not None:
    copies = max(_sampling_devices(mesh, onto) // options.tensor, 1)
    if alike:
      limit = max(limit, engines.ONE_KIND * copies)
    slots = -(-min(limit, slots) // copies) * copies
    if cache_tokens >= slots * options.max_length:
      cache_tokens = 0  # all slots can be full at once
  return load(
      folder or folder_of(config), seed=config.seed, slots=slots,
      length=options.max_length, budgets=budgets_of(config), mesh=mesh,
      onto=onto, dtype=config.model.dtype, engine_dtype=options.dtype,
      attention=options.attention, weightless=weightless,
      cache_tokens=cache_tokens,
      records=config.get('learner', {}).get('router_replay', False),
      tensor=options.tensor, schedule=schedule(
          onto or mesh, options, is_remote=searches.spec(config.search).is_remote))


def _sampling_devices(mesh: Mesh, onto: Mesh | None) -> int:
  """Returns the number of devices that sample, over all processes."""
  return mesh.size if onto is None else onto.size * processes.count()


def schedule(mesh: Mesh, options: Any, *, is_remote: bool = False
            ) -> driver.Schedule:
  """Returns the order in which slots are served, from config.rollout.

  The search order 'auto' becomes 'deterministic' if processes run in lockstep,
  or if the devices are CPUs and the search runs here too. Otherwise it becomes
  'arrival', because devices would be idle while they wait for a search. A
  decode runs while the host reads the results of the previous decode, if
  `async_decode` is set or the devices are not CPUs.

  Raises:
    ValueError: The order is by arrival, but processes run in lockstep.
  """
  search_order = options.search_order
  together = weight_sync.spans_processes(mesh, options.tensor)
  if together and search_order == 'arrival':
    raise ValueError(
        "rollout.search_order must be 'auto' or 'deterministic' where rollout."
        f'tensor={options.tensor} devices of several processes share a copy of '
        "the weights, but is 'arrival'. Set it to 'auto', or lower "
        'rollout.tensor.')
  if search_order == 'auto':
    here = mesh.devices.flat[0].platform == 'cpu' and not is_remote
    search_order = 'deterministic' if here or together else 'arrival'
  return driver.Schedule(
      search_order=search_order, async_decode=(
          options.async_decode or mesh.devices.flat[0].platform != 'cpu'),
      search_timeout_secs=options.search_timeout_secs,
      search_calls=options.search_calls)


def load(
    folder: model_folders.ModelFolder,
    *,
    seed: int,
    slots: int,
    length: int,
    budgets: driver.Budgets,
    mesh: Mesh,
    onto: Mesh | None = None,
    dtype: str = 'float32',
    engine_dtype: str = 'float32',
    attention: str = 'auto',
    cache_tokens: int = 0,
    records: bool = False,
    tensor: int = 1,
    schedule: driver.Schedule = driver.Schedule(),
    weightless: bool = False,
) -> tuple[Sampler, transformer.Params]:
  """Loads the weights of a model directory, and builds its Sampler.

  Args:
    folder: Model directory that has already been read.
    seed: Seed of all sampling.
    slots: Number of concurrent conversations, over all processes.
    length: Largest number of tokens of a conversation.
    budgets: Limits of a conversation.
    mesh: Mesh of all processes.
    onto: Mesh of the devices of this process that sample. None: the devices of
      `mesh`.
    dtype: Dtype of the params.
    engine_dtype: Dtype of the engine's weights, activations and cache.
    attention: Name of the engine's attention; see `layouts.resolve`.
    cache_tokens: Number of tokens in the KV cache, over all slots and
      processes. 0: enough for all slots to be full at once.
    records: Whether the engine records the experts of all tokens.
    tensor: Number of devices that share a copy of the engine's weights. If
      these devices belong to several processes, the processes run in lockstep.
    schedule: Order in which slots are served.
    weightless: Whether the weights are left unread because the weights of a
      checkpoint replace them. The params are then structs with shapes and
      shardings.

  Returns:
    The Sampler, and the model's params on the mesh.

  Raises:
    FileNotFoundError, ValueError: The model's weights are incomplete, the
      budgets cannot hold one turn, or `slots` or `tensor` does not fit.
  """
  shape, protocol = folder.shape, folder.dialogue
  folder.check(budgets, length)
  weight_sync.check_slots(slots, check_tensor(
      shape, _sampling_devices(mesh, onto), tensor))
  check_alike(folder.path)
  sync = weight_sync.WeightSync(
      mesh, transformer.logical_axes(shape), shape.num_hidden_layers,
      tensor=tensor, dtype=engine_dtype, onto=onto)
  say_products(shape)
  if weightless:
    params = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=sharding),
        transformer.abstract(shape, dtype),
        meshes.shardings(mesh, transformer.logical_axes(shape)))
  else:
    with progress.phase(f'Loading the weights of {folder.path}'):
      params = weights.load(
          folder.path, shape, dtype=dtype,
          sharding_of=functools.partial(meshes.sharding, mesh))
  engine = engines.Engine(
      shape, slots=slots if sync.together else slots // processes.count(),
      length=length, seed=seed, dtype=engine_dtype,
      attention=tested_attention(
          attention, shape, mesh, dtype=engine_dtype, tensor=tensor),
      cache_tokens=cache_tokens if sync.together else (
          cache_tokens // processes.count()),
      records=records,
      stop_table=samplers.compile_stops(
          protocol, folder.tokenizer, shape.vocab_size),
      ordered=functools.partial(dispatch.Ordered, mesh=sync.mesh),
      shardings=functools.partial(meshes.shardings, sync.mesh))
  return Sampler(shape, folder.tokenizer, protocol, budgets, engine, sync,
                 schedule, sync.together), params


def check_alike(path: str) -> None:
  """Raises a ValueError if processes have different weights in a model folder.

  All processes call it. `path` may be relative, or on a disk of each host.
  """
  if processes.count() > 1:
    processes.agree('model', weights.sketch(path))


def check_tensor(shape: transformer.TransformerConfig, devices: int,
                 tensor: int) -> int:
  """Returns the number of copies of a model's weights on devices that sample.

  Args:
    shape: Shape of the model.
    devices: Number of devices that sample, over all processes.
    tensor: Number of devices that share a copy of the weights.

  Raises:
    ValueError: `tensor` does not divide the KV heads, or the devices.
  """
  heads = shape.num_key_value_heads
  if heads % tensor:
    raise ValueError(f'rollout.tensor must divide the {heads} KV heads of the '
                     f'model, but is {tensor}.')
  return weight_sync.copies(devices, tensor)


def say_products(shape: transformer.TransformerConfig) -> None:
  """Prints a message if the operands of matrix products are rounded."""
  if shape.matmul_dtype:
    processes.say('The operands of matrix products are rounded to '
                  f'{shape.matmul_dtype} (model.matmul_dtype).')


def tested_attention(name: str, shape: transformer.TransformerConfig,
                     mesh: Mesh, *, dtype: str, tensor: int) -> str:
  """Returns the name of the attention implementation that rollouts use.

  The first process tests it. The name 'auto' means one that suits the device.
  """
  with progress.phase('Testing the attention of rollouts'):
    name, note = processes.on_first('attention of rollouts', lambda: (
        layouts.resolve(name, platform=mesh.devices.flat[0].platform,
                        dtype=dtype, config=shape, tensor=tensor)))
  if name != 'xla' or note.startswith('Warning'):
    processes.say(note)
  return name


def second(path: str, *, field: str, mesh: Mesh, dialogue: str, slots: int,
           **options: Any) -> tuple[Sampler, transformer.Params]:
  """Loads a second model beside the policy; returns its Sampler and params.

  Each device samples with a whole copy of the model unless `options` has
  another `tensor`.

  Args:
    path: Path of the second model. '': the tiny base model.
    field: Config field that names the model, for the error.
    mesh: Mesh of all processes.
    dialogue: Name, as 'module:function', of a function that makes a Dialogue
      for a Tokenizer.
    slots: Number of concurrent conversations, which is rounded up to a multiple
      of the devices.
    **options: Further arguments of `load`.

  Raises:
    ValueError: There are several processes, or any of the reasons of `load`.
  """
  check_second(path, field=field, count=processes.count())
  return load(model_folders.read(path or str(TINY_BASE), dialogue), mesh=mesh,
              slots=-(-slots // mesh.size) * mesh.size, **options)


def check_second(path: str, *, field: str, count: int) -> None:
  """Raises a ValueError if a run cannot load a second model of its own.

  The run's search would sample from the model. Several processes would have to
  exchange its samples, but each searches at a different time.
  """
  if count > 1:
    raise ValueError(
        f'{field} can name a local model only in a run of one process, but '
        f'this run has {count}. Serve {path!r} with configs/serve_model.py on '
        'other machines, and give its URL instead.')


def of_run(config, run: str, *, limit: int | None = None, alike: bool = False,
           folder: model_folders.ModelFolder | None = None
          ) -> tuple[Sampler, transformer.Params]:
  """Builds the sampler of a config, and loads the policy of a checkpoint.

  Args:
    config: Config of `ask`, of a server or of an evaluation.
    run: Directory of the run, perhaps with a step: 'runs/dspo@20'. '': the
      config's model is loaded.
    limit: Maximum number of concurrent trajectories. None: no limit.
    alike: Whether results must be equal bit by bit with and without the limit.
    folder: Model directory of the config, if it has been read.

  Raises:
    ValueError, FileNotFoundError: Any of the reasons of `build` and
      `past_runs.kept_step`.
  """
  place, step = past_runs.parse_run(run)
  if run:
    step = past_runs.kept_step(place, step, 'evaluate.run')
  folder = folder or folder_of(config)  # uses no device
  sampler, params = build(
      config, meshes.make(**config.mesh), limit=limit, alike=alike, folder=folder,
      weightless=bool(run) and not _lora_of(place)['rank'])
  if run:
    params = trained(place, params, sampler.shape, step=step)
  return sampler, params


def trained(run: pathlib.Path, base: transformer.Params,
            shape: transformer.TransformerConfig, *, step: int | None = None,
            dtype: str | None = None) -> transformer.Params:
  """Loads the policy of a run's checkpoint; merges adapters with `base`.

  Args:
    run: Directory of the run.
    base: Params of the run's model.path, if the run trains adapters; otherwise
      any params of the shape, or structs with shardings.
    shape: Shape of the model.
    step: Step of the checkpoint. None: the newest.
    dtype: Dtype of matrices with adapters. None: that of `base`.

  Raises:
    FileNotFoundError: The run has no checkpoint.
    ValueError: The run trained adapters, and model.path has other weights now.
  """
  sharding = jax.tree.leaves(base)[0].sharding
  is_spread = isinstance(sharding, jax.sharding.NamedSharding)
  options = _lora_of(run)
  lora = loras.Lora(**options) if options['rank'] else None
  if lora:
    template = loras.init(lora, shape, jax.random.key(0))
    if is_spread:  # adapters are replicated over its mesh
      template = jax.tree.map(lambda x: meshes.place(
          x, meshes.sharding(sharding.mesh, ())), template)
    initial = run / past_runs.INIT
    if initial.is_dir():  # its initial model was not its model.path
      base = weights.load(
          str(initial), shape, dtype=jax.tree.leaves(base)[0].dtype,
          sharding_of=functools.partial(meshes.sharding, sharding.mesh)
          if is_spread else None)
    else:
      processes.on_first('base', lambda: _check_base(run))
  else:
    template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(
        x.shape, 'float32', sharding=x.sharding), base)
  with progress.phase(f'Loading the policy of {run}'):
    restored = checkpoint.restore(
        run / 'checkpoints', {'policy': {'params': template}}, partial=True,
        at=step, warn=processes.warn)
  if restored is None:
    raise FileNotFoundError(
        f'evaluate.run must be the folder of a run with checkpoints, but {run} '
        'has none.')
  params = restored[1]['policy']['params']
  return loras.merge(base, params, lora, dtype) if lora else params


def base_of(path: str) -> dict[str, str]:
  """Returns a digest of a model's weights, as {'digest': digest}."""
  with progress.phase(f'Digesting the weights of {path or TINY_BASE}'):
    return {'digest': weights.digest(weights.locate(path or str(TINY_BASE)))}


def _check_base(run: pathlib.Path) -> None:
  """Raises a ValueError if a run's model.path has other weights by now."""
  noted = atomic_files.read_json(run / f'{BASE}.json')
  path = past_runs.recorded(run)['model']['path']
  if noted and noted != base_of(path):
    raise ValueError(
        f'model.path of {run} must have the weights whose adapters the run '
        f'trained, but {path or TINY_BASE} has others by now. Put the first '
        'ones back.')


def _lora_of(run: pathlib.Path) -> dict[str, Any]:
  """Returns the options of a run's adapters; those of rank 0 if it has none."""
  return past_runs.recorded(run).get('model', {}).get('lora', dict(rank=0))


def tokenizer_of(folder: pathlib.Path) -> tokenizers.Tokenizer | None:
  """Loads the policy's tokenizer, given a training run or an evaluation of one.

  Returns:
    The tokenizer. If it cannot be loaded, None, after a message is printed.
  """
  evaluated = past_runs.recorded(folder).get('evaluate', {}).get('run', '')
  run = past_runs.parse_run(evaluated)[0] if evaluated else folder
  path = next((str(run / name) for name in ('model', past_runs.INIT)
               if (run / name).is_dir()),
              past_runs.recorded(run).get('model', {}).get('path')
              or str(TINY_BASE))
  try:
    return tokenizers.load(weights.locate(path))
  except (OSError, ValueError) as error:
    processes.say(
        f'The tokens of {folder} are not told apart, as the tokenizer '
        f'of its policy cannot be loaded: {str(error).splitlines()[0]}')
    return None
