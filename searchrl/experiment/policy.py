# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A policy to sample from: the weights of a model or a run, and a Sampler."""

import functools
import pathlib
from typing import Any

import jax
from jax.sharding import Mesh

from searchrl.agent import tokenizer as tokenizers
from searchrl.experiment import model_folders
from searchrl.experiment import search as searches
from searchrl.models import lora as loras
from searchrl.models import transformer
from searchrl.models import weights
from searchrl.models.inference import engine as engines
from searchrl.models.inference import layouts
from searchrl.rollouts import driver
from searchrl.rollouts import sampler as samplers
from searchrl.rollouts import weight_sync
from searchrl.rollouts.sampler import Sampler
from searchrl.runtime import checkpoint
from searchrl.runtime import mesh as meshes
from searchrl.runtime import processes
from searchrl.runtime import workdir as workdirs

INIT = 'init'  # of a run's folder: the model that it began as, if by init_from
TINY_BASE = pathlib.Path(__file__).parents[1] / 'assets' / 'tiny_base'
TINY_DIALOGUE = 'searchrl.agent.dialogue:laptop'  # that it was trained with


def folder_of(config) -> model_folders.Folder:
  """The model folder of a config, whose conversations fit in its slots.

  Raises:
    FileNotFoundError, ValueError: as `folders.read`; or they do not.
  """
  folder = model_folders.read(str(config.model.path or TINY_BASE), config.dialogue)
  folder.check(budgets_of(config), config.rollout.length)
  return folder


def budgets_of(config) -> driver.Budgets:
  """The limits of a conversation, from config.rollout."""
  return driver.Budgets(**config.rollout.budgets)


def build(config, mesh: Mesh, *, most: int | None = None,
          folder: model_folders.Folder | None = None
         ) -> tuple[Sampler, transformer.Params]:
  """The sampler of a config, and the params of its model folder.

  Args:
    config: of a run, of `ask` or of a server.
    mesh: of all processes.
    most: trajectories at a time; no more slots than these are made.
    folder: of the config, if it has been read.
  """
  options = config.rollout
  slots = options.slots
  if most is not None:
    copies = max(mesh.size // options.tensor, 1)
    slots = -(-min(most, slots) // copies) * copies
  return load(
      folder or folder_of(config), seed=config.seed, slots=slots,
      length=options.length, budgets=budgets_of(config), mesh=mesh,
      dtype=config.model.dtype, engine_dtype=options.dtype,
      attention=options.attention,
      cache_tokens=options.cache_tokens if most is None else 0,
      tensor=options.tensor, schedule=schedule(
          mesh, options, is_remote=searches.is_remote(config.search)))


def schedule(mesh: Mesh, options: Any, *, is_remote: bool = False
            ) -> driver.Schedule:
  """The order in which slots are served, from config.rollout.

  Admission 'auto' is deterministic on a CPU, which searches itself, and where
  processes run in lockstep; by arrival for remote searches, and on other
  devices, which would be idle meanwhile.

  Raises:
    ValueError: processes in lockstep cannot admit by arrival.
  """
  admission = options.admission
  together = weight_sync.spans_processes(mesh, options.tensor)
  if together and admission == 'arrival':
    raise ValueError(
        "rollout.admission must be 'deterministic' where rollout.tensor="
        f'{options.tensor} devices of several processes share a copy of the '
        "weights, but is 'arrival'. Leave it at 'auto', or lower "
        'rollout.tensor.')
  if admission == 'auto':
    here = mesh.devices.flat[0].platform == 'cpu' and not is_remote
    admission = 'deterministic' if here or together else 'arrival'
  return driver.Schedule(
      admission=admission, decodes_in_flight=options.decodes_in_flight,
      search_timeout_secs=options.search_timeout_secs,
      search_calls=options.search_calls)


def load(
    folder: model_folders.Folder,
    *,
    seed: int,
    slots: int,
    length: int,
    budgets: driver.Budgets,
    mesh: Mesh,
    dtype: str = 'float32',
    engine_dtype: str = 'float32',
    attention: str = 'auto',
    cache_tokens: int = 0,
    tensor: int = 1,
    schedule: driver.Schedule = driver.Schedule(),
) -> tuple[Sampler, transformer.Params]:
  """Loads the weights of a model folder, and builds its Sampler.

  Args:
    folder: of the model, read.
    seed: of all sampling.
    slots: conversations side by side, over all processes.
    length: tokens a conversation may have.
    budgets: limits of a conversation.
    mesh: of all processes.
    dtype: of the params.
    engine_dtype: of the engine's weights, activations and cache.
    attention: of the engine; see `layouts.resolve`.
    cache_tokens: of all slots, over all processes; 0: all can be full at once.
    tensor: devices that share a copy of the engine's weights; if they belong
      to several processes, these run in lockstep.
    schedule: the order in which slots are served.

  Returns:
    The Sampler, and the folder's params on the mesh.

  Raises:
    FileNotFoundError, ValueError: the folder's weights are not whole, or the
      budgets cannot hold one turn.
  """
  shape, protocol = folder.shape, folder.dialogue
  folder.check(budgets, length)
  if shape.num_key_value_heads % tensor:
    raise ValueError(
        f'rollout.tensor must divide the {shape.num_key_value_heads} KV heads '
        f'of the model, but is {tensor}.')
  sync = weight_sync.WeightSync(
      mesh, transformer.logical_axes(shape), shape.num_hidden_layers,
      tensor=tensor, dtype=engine_dtype)
  copies = mesh.size // tensor
  if slots % copies:
    raise ValueError(
        f'rollout.slots must be a multiple of the {copies} copies '
        f'of the weights on {mesh.size} devices, but is {slots}.')
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
      stop_table=samplers.compile_stops(
          protocol, folder.tokenizer, shape.vocab_size),
      shardings=functools.partial(meshes.shardings, sync.mesh))
  return Sampler(shape, folder.tokenizer, protocol, budgets, engine, sync,
                 schedule, sync.together), params


def tested_attention(name: str, shape: transformer.TransformerConfig,
                     mesh: Mesh, *, dtype: str, tensor: int) -> str:
  """The name of the engine's attention; the first process tests it."""
  name, note = processes.on_first('attention of rollouts', lambda: (
      layouts.resolve(name, platform=mesh.devices.flat[0].platform, dtype=dtype,
                      config=shape, tensor=tensor)))
  if name != 'xla' or note.startswith('Warning'):
    processes.say(note)
  return name


def second(path: str, *, field: str, mesh: Mesh, dialogue: str, **options: Any
          ) -> tuple[Sampler, transformer.Params]:
  """As `load`, of a model beside the policy; for runs on one device.

  Args:
    path: of the second model; '' is the tiny base model.
    field: the name of its option, for the error.
    dialogue: 'module:function' that makes a Dialogue of a Tokenizer.
    mesh: of all processes.
    **options: as in `load`.

  Raises:
    ValueError: there are several devices, or as in `load`.
  """
  check_second(path, field=field, devices=mesh.size)
  return load(model_folders.read(path or str(TINY_BASE), dialogue), mesh=mesh,
              **options)


def check_second(path: str, *, field: str, devices: int) -> None:
  """Raises a ValueError if a second model has no place beside the policy."""
  if devices > 1:
    raise ValueError(
        f'{field} can be sampled from beside the policy on one device alone, '
        f'but there are {devices}. Serve {path!r} with '
        'configs/serve_model.py on other machines, and give its URL instead.')


def of_run(config, run: str, *, most: int | None = None,
           folder: model_folders.Folder | None = None
          ) -> tuple[Sampler, transformer.Params]:
  """The sampler of a config, with the policy of a run's checkpoint.

  Args:
    config: of `ask`, of a server or of an evaluation.
    run: the run's folder, as in `parse_run`; '' is the model itself.
    most: as in `build`.
    folder: as in `build`.

  Raises:
    ValueError, FileNotFoundError: as `build` and `kept_step`.
  """
  place, step = parse_run(run)
  if run:
    step = kept_step(place, step, 'evaluate.run')
  folder = folder or folder_of(config)  # before any device
  sampler, params = build(
      config, meshes.make(**config.mesh), most=most, folder=folder)
  if run:
    params = trained(place, params, sampler.shape, step=step)
  return sampler, params


def parse_run(text: str) -> tuple[pathlib.Path, int | None]:
  """The folder and the step of 'runs/dspo@20'; None: its newest checkpoint.

  'runs/dspo@best' is the step of the best validation.

  Raises:
    ValueError: the run has not been validated.
  """
  run, _, step = text.rpartition('@')
  if run and step.isdecimal() and not pathlib.Path(text).is_dir():
    return pathlib.Path(run), int(step)
  if run and step == 'best' and not pathlib.Path(text).is_dir():
    return pathlib.Path(run), _best_step(pathlib.Path(run))
  return pathlib.Path(text), None


def _best_step(run: pathlib.Path) -> int:
  path = run / 'checkpoints'
  best = checkpoint.extra(
      path, kept_step(run, None, 'the part before @best')).get('best')
  if not best:
    raise ValueError(
        f'@best needs a run that was validated (evaluate.every) and kept its '
        f'best (train.keep_best), but {run} was not. Name a step, as in '
        f'{run}@{checkpoint.steps(path)[-1]}.')
  return best[0]


def trained(run: pathlib.Path, base: transformer.Params,
            shape: transformer.TransformerConfig, *, step: int | None = None
           ) -> transformer.Params:
  """The policy of a run's checkpoint; adapters are merged with `base`.

  Args:
    run: the run's folder.
    base: what its model.path holds, where it trains adapters; else any params
      of the shape.
    shape: of the model.
    step: of the checkpoint; None: the newest.

  Raises:
    FileNotFoundError: the run has no checkpoint.
  """
  sharding = jax.tree.leaves(base)[0].sharding
  is_spread = isinstance(sharding, jax.sharding.NamedSharding)
  lora = recorded(run).get('model', {}).get('lora', dict(rank=0))
  if lora['rank']:
    lora = loras.Lora(**lora)
    wanted = loras.init(lora, shape, jax.random.key(0))
    if is_spread:  # whole, beside it
      wanted = jax.tree.map(lambda x: meshes.place(
          x, meshes.sharding(sharding.mesh, ())), wanted)
    if (run / INIT).is_dir():  # it began as another model than its model.path
      base = weights.load(
          str(run / INIT), shape, dtype=jax.tree.leaves(base)[0].dtype,
          sharding_of=functools.partial(meshes.sharding, sharding.mesh)
          if is_spread else None)
  else:
    lora = None
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(
        x.shape, 'float32', sharding=x.sharding), base)
  found = checkpoint.restore(
      run / 'checkpoints', {'policy': {'params': wanted}}, partial=True,
      at=step)
  if found is None:
    raise FileNotFoundError(
        f'evaluate.run must be the folder of a run with checkpoints, but {run} '
        'has none.')
  params = found[1]['policy']['params']
  return loras.merge(base, params, lora) if lora else params


def kept_step(run: pathlib.Path, step: int | None, field: str) -> int:
  """The step of a run's checkpoint, if it is kept; None: that of the newest.

  Raises:
    FileNotFoundError: the folder is that of no run with checkpoints.
    ValueError: the step is not kept.
  """
  kept = checkpoint.steps(run / 'checkpoints')
  if not kept or not recorded(run):
    raise FileNotFoundError(
        f'{field} must be the folder of a run with checkpoints, but {run} is '
        'none. Name for instance runs/dspo, the --workdir of a training run.')
  if step is not None and step not in kept:
    raise ValueError(
        f'{field} must be at a step whose checkpoint {run} keeps, which are '
        f'{", ".join(map(str, kept))}, but is at {step}. Keep more with '
        'train.keep_checkpoints.')
  return kept[-1] if step is None else step


def recorded(run: pathlib.Path) -> dict[str, Any]:
  """The config that a run recorded; {} if there is none."""
  return workdirs.read_config(run) if (run / workdirs.CONFIG).exists() else {}


def model_of_run(run: str) -> str:
  """The model.path that a run was trained with; '' is the tiny base model."""
  return recorded(parse_run(run)[0]).get('model', {}).get('path', '')


def tokenizer_of(folder: pathlib.Path) -> tokenizers.Tokenizer | None:
  """That of the policy of a run, or of the run that an evaluation is of.

  Returns:
    The tokenizer; None, and a line that says so, if it is not there any more.
  """
  of = recorded(folder).get('evaluate', {}).get('run', '')
  run = parse_run(of)[0] if of else folder
  path = next((str(run / name) for name in ('model', INIT)
               if (run / name).is_dir()),
              recorded(run).get('model', {}).get('path') or str(TINY_BASE))
  try:
    return tokenizers.load(weights.locate(path))
  except (OSError, ValueError) as error:
    processes.say(f'The tokens of {folder} are not told apart, as the tokenizer '
                  f'of its policy cannot be loaded: {str(error).splitlines()[0]}')
    return None


def search_of_run(run: str) -> tuple[str, dict[str, Any]]:
  """The engine that a run is evaluated with, and its options; or BM25."""
  config = recorded(parse_run(run)[0]) if run else {}
  search = config.get('evaluate', {}).get('search', {})
  if not search.get('engine'):  # that of training
    search = config.get('search', {})
  return search.get('engine', 'bm25'), search.get('options', {})


def check_run(run: str, *, model: str, dialogue: str) -> None:
  """Raises unless a run has a checkpoint, of this model and dialogue.

  Args:
    run: the run's folder.
    model: the model.path of the config that samples from the run.
    dialogue: the dialogue of that config.
  """
  folder, _ = parse_run(run)
  past = recorded(folder)
  if not past or not (folder / 'checkpoints').is_dir():
    raise FileNotFoundError(
        f'ask.run must be the folder of a run with checkpoints, but {run} is '
        'none. Name for instance runs/dspo, the --workdir of a training run.')
  for name, was, now in (
      ('model.path', past['model']['path'], model),
      ('dialogue', past['dialogue'], dialogue)):
    if was != now:
      raise ValueError(
          f'{name} must be what {run} was trained with, {was!r}, but is '
          f"{now!r}. Write the run's folder after the config's name, as in "
          f'--config=configs/ask.py:{run}: it takes all that from the run.')
