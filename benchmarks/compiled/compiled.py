# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Compiles programs for TPUs or GPUs without one, and prints their figures.

  pip install -e '.[compile]'; export JAX_PLATFORMS=cpu
  python benchmarks/compiled/compiled.py --chip=v6e --size=3b --slots=64,256,512
  python benchmarks/compiled/compiled.py --chip=v5e --size=7b --slots=64 --tensor=4
  python benchmarks/compiled/compiled.py --chip=h200 --size=3b
  python benchmarks/compiled/compiled.py --programs=update,score --chips=8 --fsdp=4

The compiler's text is read by `hlo.py`; nothing runs and no time is measured.
All figures are of one chip and one unit of work:

  program     unit                           bytes needed
  decode      a token of every slot          W + C + B k
  append      a call: n tiles of t tokens    W' + C' n / B + n t k
  copy        a call: a page, or half of     2 m
              what a slot holds, to each slot
  begin       a call: a turn in every slot   2 s, without the cache
  release     the same                       2 s, of one field
  hand-over   all weights                    S / 3, and W written
  update      a micro-batch                  2 W + 2 S / M
  score       a micro-batch                  W
  reference   the same of another policy     W
  ppo-update  a micro-batch, with a critic   2 W + 2 S / M, of both networks
  dspo-update the same of DSPO's loss        2 W + 2 S / M
  values      a micro-batch, of the critic   W
  advantages  PPO's (GAE) of a batch         the batch, on one chip
  search      64 queries                     the rows and their scales

  W  weights in bfloat16, but an untied input embedding; in a decode, of the
     experts those that are chosen, if the router chose evenly
  C  keys and values of all tokens held; slots are full     k: of one token
  W' C'  in layers alone, of the last one what makes keys and values
  B  slots; each tile is the end of another one     m  what is moved
  s  all that is known of slots, beside the cache
  S  parameters and moments, of a chip     M  micro-batches of an update

decode and append are compiled with `--layers` layers and with half as many;
what a layer adds is extrapolated to the model's depth. The others hold the
whole model, whose layers are one loop; their rows are full, too.

  touched     what ops read and write of the chip's main memory
  anywhere    and of the memory beside its cores
  XLA's       `cost_analysis` of a call, each loop's body once; else with trips
  temporary   that a call holds beside arguments and results
  copied      leaves of the cache, in loops and around them
  compiled    CPU seconds of tracing and compilation, on all cores together
  sent        to other chips, as around a ring; needed: weights gathered, in an
              update twice, and gradients scattered; where chips share layers,
              what two products of a layer add up, and its gradients, too; all
              in bfloat16
  bound       the largest of touched / bandwidth, FLOPs / peak and sent / links
              of the whole model, as if they overlapped; MFU: of the model's
              FLOPs. A ring along one axis of a torus has two of the links

On GPUs, products have default tiles, as nothing was tried on a device.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import itertools
import json
import math
import pathlib
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from train_step import model_flops  # puts the library on the path
import jax
import jax.numpy as jnp
import numpy as np

import hlo
from configs import dspo
from configs import grpo
from configs import ppo
from searchrl.experiment import build
from searchrl.experiment import memory_plan
from searchrl.models import attention
from searchrl.models import shipped_shapes
from searchrl.models import transformer
from searchrl.models import weights
from searchrl.models.inference import engine_weights
from searchrl.models.inference import kv_cache
from searchrl.models.inference import layouts
from searchrl.models.inference import slots as slots_lib
from searchrl.models.inference import stops
from searchrl.rollouts import weight_sync
from searchrl.runtime import devices as devices_lib
from searchrl.runtime import mesh as meshes
from searchrl.runtime import workdir
from searchrl.search.index import exact_device
from searchrl.training import update_memory
from searchrl import trajectory

CHIPS = ('v5e', 'v5p', 'v6e', 'a100', 'h100', 'h200', 'b200')
DTYPE = 'bfloat16'  # of the engine
PROGRAMS = ('decode', 'append', 'copy', 'begin', 'release', 'hand-over',
            'update', 'score', 'reference', 'ppo-update', 'values',
            'dspo-update', 'advantages', 'search')
WIKIPEDIA, WIDTH = 21_015_324, 768  # passages of wiki-18, and their vectors
_SLICES = (4, 8, 16, 32, 64, 128, 256)  # chips of a topology


@dataclasses.dataclass(frozen=True)
class Program:
  """Calls to compile, and what they are for; see the top of this file."""

  calls: tuple[tuple[Any, tuple, dict], ...]  # jitted, and its arguments
  needed: float  # bytes, a chip and unit
  flops: float  # of the model, a chip and unit
  tokens: float = 0  # a unit, of all chips together; or queries
  units: int = 1  # of a call
  trips: float = 1  # of loops whose number is not in the program
  must_send: float = 0  # bytes, a chip and unit
  cache: tuple[jax.ShapeDtypeStruct, ...] = ()
  attended: float = 1  # the share of the cache that is needed
  context: int = 0  # tokens that a query of the engine sees, at most


@dataclasses.dataclass(frozen=True)
class Found:
  """Figures of one chip and one unit of work; bytes, if not said otherwise."""

  needed: float
  touched: float
  anywhere: float
  by_xla: float  # of a call
  temporary: float  # of a call
  cache: float
  flops: float
  model_flops: float
  tokens: float
  sent: float
  must_send: float
  copied_in_loops: float  # leaves of the cache
  copied_around: float
  secs: float  # CPU seconds that the host needs to compile it


def main() -> None:
  options = parsed()
  print(f'    python benchmarks/compiled/compiled.py {" ".join(sys.argv[1:])}\n')
  print(f'jax {jax.__version__}, revision {workdir.environment()["git"]}\n')
  rows, sent, failed = 0, [], []
  for label, is_unrolled, make in cases(options):
    try:
      layers, found, whole, exchanges = of_depths(
          options, label, is_unrolled, make)
    except (ValueError, jax.errors.JaxRuntimeError) as error:
      failed.append(f'{label}: {str(error).splitlines()[0]}')
      continue
    print_row(line(label, layers, found, whole, devices_lib.KINDS[
        options.chip]), not rows)
    rows, sent = rows + 1, sent + [
        dict(program=label, **x) for x in exchanges[:8]]
    if options.json:
      record = dict(vars(options), program=label, layers=layers,
                    found=vars(found), whole=vars(whole), sent=exchanges,
                    environment=workdir.environment())
      with open(options.json, 'a', encoding='utf-8') as file:
        file.write(json.dumps(record) + '\n')
  print()
  for number, row in enumerate(sent):
    print_row(row, not number)
  print('\n'.join(['', *failed]))


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  several = lambda text: [int(x) for x in text.split(',')]
  parser.add_argument('--chip', choices=CHIPS, default='v6e')
  parser.add_argument('--size', default='3b', help='of a Qwen2.5, or qwen3-8b')
  parser.add_argument('--programs', default=','.join(PROGRAMS))
  parser.add_argument('--layers', type=int, default=4)
  parser.add_argument('--slots', type=several, default=[64])
  parser.add_argument('--length', type=int, default=2048, help='of a slot')
  parser.add_argument('--tensor', type=several, default=[1], help='of engines')
  parser.add_argument('--tile', type=int, default=128)
  parser.add_argument('--tiles', type=int, default=16)
  parser.add_argument('--steps', type=int, default=16, help='of a decode')
  parser.add_argument('--block', type=int, default=128)
  parser.add_argument('--parts', type=int, default=3)
  parser.add_argument('--attention', default='auto', help='of engines')
  parser.add_argument('--chips', type=int, default=8,
                      help='of a learner, and of a search')
  parser.add_argument('--fsdp', type=int, default=0,
                      help='of a learner; the rest is tensor. 0: all chips')
  parser.add_argument('--expert', type=int, default=1,
                      help='ways of experts, of engines and of a learner')
  parser.add_argument('--records', action='store_true',
                      help='engines record experts, for a replay')
  parser.add_argument('--sequence', type=int, default=1,
                      help='ways of the positions of rows, of a learner')
  parser.add_argument('--remat', default='nothing', help='of a learner')
  parser.add_argument('--row-length', type=int, default=4096)
  parser.add_argument('--offload-optimizer', action='store_true',
                      help='of a learner')
  parser.add_argument('--flags', default='', help='of XLA: name=value,...')
  parser.add_argument('--json', default='', help='a file to append records to')
  parser.add_argument('--keep', default='', help='a folder for the texts')
  options = parser.parse_args(arguments)
  if options.layers < 2:
    parser.error('--layers must be at least 2: half as many are compiled, too')
  options.fsdp = options.fsdp or (
      options.chips // options.expert // options.sequence)
  return options


def cases(options) -> Iterator[tuple[str, bool, Callable[..., Program]]]:
  """Yields the rows: label, whether layers are unrolled, shape -> Program."""
  configs = dict.fromkeys(PROGRAMS, grpo) | dict.fromkeys(
      ('ppo-update', 'values', 'advantages'), ppo) | {'dspo-update': dspo}
  configs = {name: recipe.get_config(name_of(options.size))
             for name, recipe in configs.items()}
  for config in configs.values():
    config.rollout.max_length = options.row_length
    config.learner.remat = options.remat
    config.learner.offload_optimizer = options.offload_optimizer
  ways = options.fsdp * options.expert * options.sequence
  mesh = mesh_of(options.chip, options.fsdp, options.chips // ways,
                 options.expert, options.sequence)
  split = ' x '.join(f'{axis} {n}' for axis, n in mesh.shape.items() if n > 1)
  partial = functools.partial
  kind = '' if options.attention == 'auto' else f', {options.attention}'
  for name in options.programs.split(','):
    if name in ('decode', 'append', 'copy', 'begin', 'release'):
      for tensor, slots in itertools.product(options.tensor, options.slots):
        ways = f'tensor {tensor}' + (
            f' x expert {options.expert}' if options.expert > 1 else '')
        yield f'{name}, {slots} slots, {ways}{kind}', True, partial(
            engine, name, options, mesh_of(
                options.chip, 1, tensor, options.expert), slots)
    elif name == 'hand-over':
      for tensor in options.tensor:
        yield f'{name}, {split} to tensor {tensor}', False, partial(
            hand_over, mesh, tensor)
    elif name == 'search':
      yield f'{name}, {mesh.size} chips', False, lambda _: search(mesh)
    else:
      yield f'{name}, {split}', False, partial(
          learner, name, configs[name], mesh)


def name_of(size: str) -> str:
  """The name of a model in the recipes' configs."""
  return size if '-' in size else f'qwen2.5-{size}'


def mesh_of(chip: str, fsdp: int, tensor: int, expert: int = 1,
            sequence: int = 1) -> jax.sharding.Mesh:
  """A mesh of chips that need not exist, of the least slice that has them.

  A whole slice is ordered as in training, by its links.
  """
  sizes = dict(fsdp=fsdp, sequence=sequence, expert=expert, tensor=tensor)
  count = math.prod(sizes.values())
  kind = devices_lib.KINDS[chip]
  slices = (count,) if kind.torus is None else _SLICES
  found = devices_lib.to_compile_for(
      kind, next(n for n in slices if n >= count))
  if found is None:
    raise SystemExit(
        "it takes the chip's compiler: pip install -e '.[compile]'")
  if len(found) == count:
    return meshes.make(data=1, devices=found, **sizes)
  return meshes.in_order(found[:count], **sizes)


def of_depths(options, label: str, is_unrolled: bool,
              make: Callable[..., Program]
             ) -> tuple[int, Found, Found, list[dict[str, Any]]]:
  """The layers compiled, what was found, that of all layers, what is sent."""
  shape = weights.read_config(shipped_shapes.locate(
      grpo.get_config(name_of(options.size)).model.path))
  depth = shape.num_hidden_layers
  many = min(options.layers, depth) if is_unrolled else depth

  def found(layers):
    return measured(
        make(dataclasses.replace(shape, num_hidden_layers=layers)),
        f'{options.chip} {options.size} {label}, {layers} layers',
        options.flags, options.keep)

  at, sent = found(many)
  if many == depth:
    return many, at, at, sent
  few = many // 2
  below, _ = found(few)
  return many, at, extrapolated(at, below, (depth - many) / (many - few)), sent


def extrapolated(at: Found, below: Found, times: float) -> Found:
  """Returns the figures of more layers, from those of two numbers of layers."""
  return Found(**{name: value + times * (value - vars(below)[name])
                  for name, value in vars(at).items()})


def engine(name: str, options, mesh, slots: int, shape) -> Program:
  """`decode`, `append`, or one of `between_decodes`.

  All that is known here of the engine's programs and of its State is in this
  function and the two after it. The leaves of a State that hold floats are its cache.
  """
  tensor, copies = mesh.shape['tensor'], meshes.ways(mesh, 'batch')
  if shape.num_key_value_heads % tensor:
    raise ValueError(f'rollout.tensor must divide the KV heads of the model, '
                     f'{shape.num_key_value_heads}, but is {tensor}.')
  split, read = functools.partial(meshes.shardings, mesh), meshes.sharding(
      mesh, ())
  layout = layout_of(options, mesh, slots // copies, shape)
  axes, state_axes = transformer.logical_axes(shape), slots_lib.logical_axes(
      shape, layout, options.records)
  axes = engine_weights.unstacked_axes(axes, shape.num_hidden_layers)
  params = on(mesh, jax.eval_shape(
      functools.partial(engine_weights.unstacked, dtype=DTYPE),
      transformer.abstract(shape)), axes)
  state = on(mesh, jax.eval_shape(functools.partial(
      slots_lib.empty, shape, layout, copies, DTYPE, options.records)),
             state_axes)
  cache = tuple(x for x in jax.tree.leaves(state)
                if jnp.issubdtype(x.dtype, jnp.floating))
  given = lambda *dims, dtype=jnp.int32: jax.ShapeDtypeStruct(
      dims, dtype, sharding=read)
  blocks = math.ceil(options.length / options.block)
  pages = lambda rows: given(rows, blocks) if layout.has_pages else None

  bytes_of, item = meshes.bytes_of, np.dtype(DTYPE).itemsize
  held, pairs = bytes_of(cache), (  # FLOPs of a query and a key
      4 * shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim
      / mesh.size)
  token = held * copies / slots / options.length
  common = dict(cache=cache, context=options.length, trips=blocks)
  if name in ('copy', 'begin', 'release'):
    return between_decodes(name, state, layout, given, split(state_axes),
                           blocks // 2)
  if name == 'decode':
    run = jax.jit(functools.partial(
        slots_lib.decode, config=shape, layout=layout, steps=options.steps,
        patience=4), donate_argnames='state',
                  out_shardings=(split(state_axes), read))
    stop = stops.StopTable(*(given(64, shape.vocab_size, dtype=dtype)
                             for dtype in (jnp.uint8, jnp.bool)))
    whole = bytes_of(params) - bytes_of(
        params['embed'] if 'head' in params else ())
    experts = of_experts(params)
    once = whole - (1 - chosen(shape, slots)) * experts
    used = whole - experts + copies * chosen(shape, 1) * experts
    return Program(
        ((run, (params,), dict(
            state=state, stop=stop, temperature=given(dtype=jnp.float32),
            truncation=None, slot=None, pages=pages(slots))),),
        needed=once + held + slots / copies * token, units=options.steps,
        tokens=slots, flops=slots / copies * (
            2 * used / item + pairs * copies * options.length),
        **common)
  run = jax.jit(functools.partial(slots_lib.append, config=shape,
                                  layout=layout), donate_argnames='state',
                out_shardings=split(state_axes))
  tiles = min(options.tiles, slots)
  *before, last = params['layers']  # of which nobody reads the output
  in_layers = bytes_of((before, last['attention_norm'], last['k'], last['v']))
  tokens, others = tiles * options.tile, len(before) / (len(before) + 1)
  experts = of_experts({'layers': before})
  used = in_layers - experts + copies * chosen(shape, 1) * experts
  return Program(
      ((run, (params,), dict(
          state=state, slot=given(tiles), tokens=given(tiles, options.tile),
          start=given(tiles), length=given(tiles), pages=pages(tiles))),),
      needed=in_layers + others * held * tiles / slots + (
          tokens / copies * token),
      tokens=tokens, flops=tokens / copies * (2 * used / item) + (
          tokens * others * pairs * (options.length - (options.tile - 1) / 2)),
      attended=tiles / slots, **common)


def chosen(shape, slots: int) -> float:
  """The share of the experts that some slot chose, if the router chose evenly.
  """
  if shape.experts is None:
    return 1
  each = shape.experts.num_experts_per_tok / shape.experts.num_experts
  return 1 - (1 - each) ** slots


def of_experts(params) -> float:
  """Bytes of all experts."""
  return meshes.bytes_of([leaf for layer in params['layers']
                          for name, leaf in layer.items()
                          if name.startswith('expert_')])


def between_decodes(name: str, state, layout, given, shardings, half: int
                    ) -> Program:
  """`copy`, `begin` or `release` of an engine, for all of its slots."""
  run = getattr(slots_lib, name)
  run = jax.jit(functools.partial(run, layout=layout) if name == 'copy' else
                run, donate_argnames='state', out_shardings=shardings)
  cache = tuple(jax.tree.leaves(state.cache))
  slots, row = len(state.position), lambda *dims, **kind: given(
      len(state.position), *dims, **kind)
  if name == 'copy':
    blocks = slots * (1 if layout.has_pages else half)
    share = blocks / math.prod(cache[0].shape[:1 if layout.has_pages else 2])
    return Program(
        ((run, (), dict(state=state, source=row(), target=row(),
                        blocks=given())),),
        needed=2 * share * meshes.bytes_of(cache), flops=0, trips=blocks,
        cache=cache, attended=share)
  if name == 'begin':
    ids = row(5, dtype=jnp.uint32)
    given_too = dict(last=row(), position=row(), budget=row(), ids=ids,
                     root=given(2, dtype=jnp.uint32))
    changed = dataclasses.replace(state, cache=())
  else:
    given_too, changed = {}, state.active
  return Program(((run, (), dict(state=state, slot=row(), **given_too)),),
                 needed=2 * meshes.bytes_of(changed), flops=0, cache=cache)


def layout_of(options, mesh, slots: int, shape) -> kv_cache.Layout:
  """The engine's layout, by the attention that it would use or that is named.
  """
  platform, name = mesh.devices.flat[0].platform, options.attention
  if name == 'auto':
    name, _ = layouts.choose(platform, DTYPE, dataclasses.replace(
        shape, num_key_value_heads=(
            shape.num_key_value_heads // mesh.shape['tensor'])))
  return kv_cache.sharded(layouts.make(
      name, shape, slots=slots, length=options.length, block=options.block,
      parts=min(options.parts, slots), platform=platform),
                          functools.partial(meshes.shardings, mesh))


def on(mesh, tree: Any, axes: Any) -> Any:
  """A tree of shapes with the shardings that its logical axes mean."""
  return jax.tree.map(
      lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype,
                                               sharding=sharding),
      tree, meshes.shardings(mesh, axes))


def hand_over(mesh, tensor: int, shape) -> Program:
  """The learner's weights to an engine's."""
  axes = transformer.logical_axes(shape)
  sync = weight_sync.WeightSync(mesh, axes, shape.num_hidden_layers,
                                tensor=tensor, dtype=DTYPE)
  trained = on(mesh, transformer.abstract(shape), axes)
  move: Any = sync._move  # pylint: disable=protected-access
  if mesh.size == 1:  # a run has a small program for each layer instead
    move = jax.jit(functools.partial(engine_weights.unstacked, dtype=DTYPE))
  written = meshes.bytes_of(jax.tree.map(
      lambda x, sharding: jax.ShapeDtypeStruct(x.shape, DTYPE,
                                               sharding=sharding),
      trained, meshes.shardings(sync.mesh, axes)))
  return Program(
      ((move, (trained,), {}),), flops=0,
      needed=meshes.bytes_of(trained) + written,
      must_send=written - meshes.bytes_of(trained) / 2)


def learner(name: str, config, mesh, shape) -> Program:
  """A program of the learner, with the attention that the chip would use."""
  kind, _ = attention.choose(
      mesh.devices.flat[0].platform, config.learner.dtype, shape.head_dim,
      config.rollout.max_length)
  # With logits of all tokens, as if the policy had sampled all of them.
  algorithm = dataclasses.replace(
      build.algorithm(config), skips_unsampled=False)
  made = build.learner(config, algorithm, shape, mesh,
                       build.attend(config, kind, mesh))
  if name == 'advantages':
    return advantages(made, memory_plan.rows_of(config), mesh)
  arguments = made.abstract_update(memory_plan.rows_of(config))
  _, state, frozen, stacked, _, count = arguments
  params = state['policy'].params
  micros, rows, length = stacked.batch.tokens.shape
  untied = params['embed'] if 'head' in params else ()
  once = 2 * sum(math.prod(x.shape) * sign for tree, sign in (
      (params, 1), (untied, -1)) for x in jax.tree.leaves(tree)
                ) / mesh.shape['tensor']
  gathered = once * (1 - 1 / meshes.ways(mesh, 'embed'))
  summed = 2 * shape.num_hidden_layers * 2 * (1 - 1 / mesh.shape['tensor']) * (
      2 * rows * length * shape.hidden_size * mesh.shape['tensor'] / mesh.size)
  flops = model_flops(shape, np.full(rows, length)) / mesh.size
  common = dict(tokens=rows * length, units=micros, trips=micros)
  if name.endswith('update'):
    networks = len(state)  # a critic is as large as the policy
    return Program(
        tuple((*call, {}) for call in update_memory.programs(
            made, memory_plan.rows_of(config))), flops=networks * flops,
        needed=2 * networks * once + 2 * meshes.bytes_of(state) / micros,
        must_send=networks * (3 * gathered + 2 * summed), **common)
  score = made.train_step.logprobs
  if name == 'values':
    score, params = made.train_step.values, state['critic'].params
  if name == 'reference':
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(
        x.shape, config.model.dtype, sharding=x.sharding), params)
  return Program(
      ((score, (params, frozen, stacked.layout, stacked.batch.tokens, count),
        {}),),
      flops=flops / 3, needed=once, must_send=gathered + summed, **common)


def advantages(made, rows: int, mesh) -> Program:
  """The advantages of a whole batch, from values and from the reference."""
  batch = trajectory.collate([], group_ids=[], policy_step=0, rows=rows,
                             length=made.train_step.length)
  scores = np.zeros(batch.tokens.shape, np.float32)
  batch = dataclasses.replace(batch, **dict.fromkeys(
      (*made.train_step.algorithm.needs, 'old_logprobs'), scores))
  one = meshes.sharding(meshes.in_order(mesh.devices[:1, :1, :1]), ())
  given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=one), batch)
  return Program(((made.train_step.advantages, (given,), {}),),
                 needed=meshes.bytes_of(given), flops=0)


def search(mesh, queries: int = 64, k: int = 10) -> Program:
  """Exact search among Wikipedia's passages in bfloat16."""
  mesh = jax.sharding.Mesh(mesh.devices.flatten(), ('rows',), axis_types=(
      jax.sharding.AxisType.Auto,))
  most = exact_device.rows_per_block(WIKIPEDIA, [*mesh.devices.flat])
  blocks = math.ceil(WIKIPEDIA / mesh.size / most)
  block = math.ceil(WIKIPEDIA / mesh.size / blocks)
  given = lambda dims, dtype, *axes: jax.ShapeDtypeStruct(
      dims, dtype, sharding=exact_device.on(mesh, *axes))
  each = blocks if mesh.devices.flat[0].platform == 'tpu' else 1
  rows, scales = ((given((mesh.size * each, *dims), dtype, 'rows'),
                   ) * (blocks // each) for dims, dtype in (
      ((block, WIDTH), jnp.bfloat16), ((block,), jnp.float32)))
  parts = given((3, queries, WIDTH), jnp.bfloat16)  # of each query
  return Program(
      ((exact_device.top_k, (rows, scales, parts),
        dict(k=k, count=WIKIPEDIA, mesh=mesh)),),
      needed=meshes.bytes_of((rows, scales)), tokens=queries,
      flops=2 * WIKIPEDIA * WIDTH * queries / mesh.size,
      must_send=(mesh.size - 1) * queries * k * 8)


def measured(program: Program, label: str, flags: str = '', keep: str = ''
            ) -> tuple[Found, list[dict[str, Any]]]:
  """Compiles a program, and returns its figures (see `Found`) and exchanges."""
  flags = dict(x.split('=') for x in flags.split(',') if x)
  total, exchanges = {}, []
  for number, (function, args, kwargs) in enumerate(program.calls):
    began, started = time.process_time(), time.time()
    compiled = function.lower(*args, **kwargs).compile(
        compiler_options=flags or None)
    secs = time.process_time() - began
    print(f'{label}, program {number + 1} of {len(program.calls)}, compiled '
          f'in {time.time() - started:.0f} s, {secs:.0f} CPU s',
          file=sys.stderr)
    text = compiled.as_text()
    if keep:
      pathlib.Path(keep).mkdir(parents=True, exist_ok=True)
      name = f'{label} {number}.txt'.replace(',', '').replace(' ', '_')
      (pathlib.Path(keep) / name).write_text(text)
    found, sent = of_text(text, program)
    exchanges += sent
    found |= dict(
        secs=secs, by_xla=(compiled.cost_analysis() or {}).get(  # None for GPUs
            'bytes accessed', 0.0),
        temporary=compiled.memory_analysis().temp_size_in_bytes)
    held = max(found['temporary'], total.get('temporary', 0))  # one by one
    total = {key: total.get(key, 0) + value for key, value in found.items()}
    total['temporary'] = held
  return Found(
      needed=program.needed, cache=meshes.bytes_of(program.cache),
      model_flops=program.flops, tokens=program.tokens,
      must_send=program.must_send, **total), together(exchanges, program.units)


def of_text(text: str, program: Program
           ) -> tuple[dict[str, float], list[hlo.Collective]]:
  """The figures of one unit that a compiled text has, and its exchanges."""
  module = hlo.parse(text)
  moved = hlo.touched(module, program.trips)
  kernels = [of_kernel(call, program)
             for call in hlo.custom_calls(module, program.trips)]
  read = sum(count for count, _ in kernels)
  sent = hlo.collectives(module, program.trips)
  copied = [x for x in hlo.copies(module, leaves_of(program)) if not x.is_move]
  found = dict(
      touched=moved.get(0, 0) + read, anywhere=sum(moved.values()) + read,
      flops=hlo.flops(module, program.trips) + sum(n for _, n in kernels),
      sent=sum(x.times * x.sent for x in sent))
  return {name: count / program.units for name, count in found.items()} | dict(
      copied_in_loops=sum(bool(x.loops) for x in copied),
      copied_around=sum(not x.loops for x in copied)), sent


def leaves_of(program: Program) -> set[int]:
  """Elements, on a chip, of the leaves of the cache."""
  return {math.prod(x.sharding.shard_shape(x.shape)) for x in program.cache}


def of_kernel(call: hlo.CustomCall, program: Program) -> tuple[float, float]:
  """Bytes of main memory and FLOPs of all runs of a custom call.

  The kernels known are counted by their grids. Of others, FLOPs are not known,
  and each array is read or written once, whatever they do.
  """
  if 'slot_copy' in call.op_name:
    return call.times * 2 * program.attended * call.results[0].bytes, 0.0
  if 'splash' in call.name:
    return of_splash(call)
  if 'ragged_paged_attention' in call.name or (
      '/slot_attention/' in call.op_name):
    return of_slots(call, program)
  if call.target.startswith('__cudnn$fmha'):
    return of_cudnn(call)
  return call.times * sum(x.bytes for x in (*call.operands, *call.results)
                          if x.memory == 0), 0.0


def of_slots(call: hlo.CustomCall, program: Program) -> tuple[float, float]:
  """The same of ragged paged attention, and of our kernel for GPUs.

  They go through blocks of queries, and through the pages or blocks of every
  row that has queries in one. Rows are tokens, or tiles: what a row sees is
  read once, as programs of a tile run together and share a GPU's cache. Queries
  are read and results are written once.
  """
  arrays, leaves = (*call.operands, *call.results), leaves_of(program)
  once = sum(x.bytes for x in arrays
             if x.memory == 0 and x.elements not in leaves)
  leaf = program.cache[0]
  held = leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
  held *= sum(x.elements in leaves for x in call.operands)
  queries = max(x.elements for x in call.results)
  return (call.times * (program.attended * held + once),
          call.times * 4 * queries * program.context)


def of_cudnn(call: hlo.CustomCall) -> tuple[float, float]:
  """The same of cuDNN's attention: each array once, and causal whole rows."""
  rows, length, heads, width = call.operands[0].dims
  keys = call.operands[1].dims[1]
  pairs = length * (length + 1) / 2 if keys == length else length * keys
  products = 5 if 'Backward' in call.target else 2
  return (call.times * sum(x.bytes for x in (*call.operands, *call.results)),
          call.times * 2 * products * rows * heads * pairs * width)


def of_splash(call: hlo.CustomCall) -> tuple[float, float]:
  """The same of splash attention, causal, with grouped queries.

  Its grid is heads x blocks of queries x blocks of keys that these see: what
  belongs to queries is read once, or once a head if it has no heads; what
  belongs to keys once a head and pair of blocks. The gradients of keys have a
  grid of blocks of keys x heads x blocks of queries, and the reverse holds.
  The first result is a scratch of a block; segments of what is read again and
  again have 8 rows.
  """
  block, of_keys = call.results[0].dims[0], 'dkv' in call.name
  heads, length, width = max(x.dims for x in call.operands
                             if x.dtype == 'bf16')
  blocks = length // block
  pairs = blocks * (blocks + 1) / 2

  def times(dims):
    again = pairs / blocks
    if len(dims) == 2:
      return again * heads if dims[0] == 8 else 1 if of_keys else heads
    of_queries = dims[0] == heads
    if of_queries != of_keys:
      return 1
    return again if of_queries else again * heads / dims[0]

  read = sum(times(x.dims) * x.bytes for x in call.operands if x.memory == 0)
  written = sum(x.bytes for x in call.results if x.memory == 0)
  products = 4 if of_keys else 3 if 'dq' in call.name else 2
  return (call.times * (read + written),
          call.times * 2 * products * heads * pairs * block ** 2 * width)


def together(exchanges: list[hlo.Collective], units: int
            ) -> list[dict[str, Any]]:
  """Exchanges of one unit, alike ones as one, the most bytes first."""
  sums = {}
  for x in exchanges:
    key = (x.kind, ' '.join(map(str, x.arrays[:2])), x.group, len(x.loops),
           'yes' if x.is_async else 'no', '/'.join(x.op_name.split('/')[-3:]))
    times, sent = sums.get(key, (0, 0))
    sums[key] = times + x.times / units, sent + x.times * x.sent / units
  names = 'exchange', 'result', 'chips', 'in loops', 'async', 'where'
  return [dict(zip(names, key), times=f'{times:.4g}', MB=f'{sent / 1e6:.4g}')
          for key, (times, sent) in sorted(
              sums.items(), key=lambda item: -item[1][1])]


def line(label: str, layers: int, found: Found, whole: Found,
         chip: devices_lib.Kind) -> dict[str, Any]:
  """A row of the table."""
  secs = {'bandwidth': whole.touched / chip.bandwidth,
          'FLOPs': whole.flops / chip.flops, 'links': whole.sent / chip.link}
  bound = max(secs, key=secs.get)
  ratio = lambda a, b: f'{a / b:.2f}' if b else ''
  return {
      'program': label, 'layers': layers,
      'needed, MB': f'{found.needed / 1e6:.0f}',
      'touched': ratio(found.touched, found.needed),
      'anywhere': ratio(found.anywhere, found.needed),
      "XLA's, MB": f'{found.by_xla / 1e6:.0f}',
      'temporary, MB': f'{found.temporary / 1e6:.0f}',
      'of the cache': ratio(found.temporary, found.cache),
      "FLOPs / model's": ratio(found.flops, found.model_flops),
      'copied in loops + around': (
          f'{found.copied_in_loops:.0f} + {found.copied_around:.0f}'
          if found.cache else ''),
      'all layers: touched': ratio(whole.touched, whole.needed),
      'temporary of the cache': ratio(whole.temporary, whole.cache),
      'sent, MB': f'{whole.sent / 1e6:.4g}',
      'of needed': ratio(whole.sent, whole.must_send),
      'bound by': bound, 'ms': f'{1000 * secs[bound]:.4g}',
      'tokens/s': f'{whole.tokens / secs[bound]:.0f}' if whole.tokens else '',
      'MFU': f'{whole.model_flops / chip.flops / secs[bound]:.3f}'
             if whole.model_flops else '',
      'compiled, CPU s': f'{found.secs:.0f}',
  }


def print_row(row: dict[str, Any], is_first: bool) -> None:
  """Prints a row of a table, below its header if it is the first."""
  if is_first:
    print(f'| {" | ".join(row)} |\n{"|---" * len(row)}|')
  print(f'| {" | ".join(map(str, row.values()))} |', flush=True)


if __name__ == '__main__':
  main()
