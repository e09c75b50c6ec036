# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Speed and precision of each attention implementation, as tables.

  python benchmarks/attention.py --shapes 8x2048x16x2x128 8x4096x28x4x128 \
      --packing 32x4096x16x2x128

A shape is rows x tokens x query heads x KV heads x head size. `--packing` lays
so many trajectories, of the lengths of rollouts, out in three ways: padded to
the longest, in buckets of an eighth of it, and packed with segment ids. An
implementation is one of models/attention.py, with :N for blocks of N queries.
If it cannot do a case, its row holds the reason. Differences are from the
float32 reference, relative to its largest entry, the worst of output and
gradients; NaN if one of them is. `padding` is the largest result there.

On a GPU, this checks and times attention over packed rows by cuDNN's packed
layout and, as before, with each document in a row of its own, in about three
minutes:

  python benchmarks/attention.py --shapes --layouts packed --repeats 10 \
      --packing 24x4096x16x2x128 24x4096x14x2x64 4x32768x16x2x128 \
      --implementations cudnn cudnn_padded xla:1024
"""

import argparse
import functools
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# pylint: disable=g-import-not-at-top
from searchrl import packing
from searchrl.models import attention
from searchrl.runtime import workdir
import workload

CALLS = 4  # dispatched between two readings of the clock


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--shapes', nargs='*', default=['8x2048x16x2x128'])
  parser.add_argument('--packing', nargs='*', default=[])
  parser.add_argument('--layouts', nargs='+',
                      default=['padded', 'buckets', 'packed'])
  parser.add_argument('--segments', type=int, default=16,
                      help='most trajectories in a packed row')
  parser.add_argument('--implementations', nargs='+', default=[
      'xla', 'xla:512', 'cudnn', 'cudnn_padded', 'splash'])
  parser.add_argument('--dtype', default='bfloat16')
  parser.add_argument('--window', type=int, help='tokens that a query sees')
  parser.add_argument('--repeats', type=int, default=20)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--interpret', action='store_true',
                      help='splash without a TPU: correct, not fast')
  options = parser.parse_args()
  print(f'    python benchmarks/attention.py {" ".join(sys.argv[1:])}\n')
  print(machine(options) + '\n')
  if options.shapes:
    print('| B T H K d | implementation | forward ms | forward + backward ms '
          '| times as fast as the first | TFLOP/s | temporary MiB '
          '| difference |\n|---|---|---|---|---|---|---|---|')
  for shape in map(_shape, options.shapes):
    whole_rows(shape, options)
  if options.packing:
    print('\n| B T H K d | layout | implementation | tokens computed '
          '| of them useful | programs | forward + backward ms '
          '| times as fast as the first | temporary MiB | difference '
          '| padding |\n|---|---|---|---|---|---|---|---|---|---|---|')
  for shape in map(_shape, options.packing):
    layouts(shape, options)
  for _, length, heads, kv_heads, size in map(_shape, options.packing):
    print('\n' + attention.resolve(
        'auto', platform=jax.devices()[0].platform, dtype=options.dtype,
        heads=heads, kv_heads=kv_heads, head_dim=size, length=length,
        sliding_window=options.window, rows=1, max_segments=options.segments
    )[1], flush=True)


def machine(options) -> str:
  """Device, versions and seed of all figures."""
  device, found = jax.devices()[0], workdir.environment()
  return (f'Device: {device.device_kind} ({len(jax.devices())} of them, one '
          f'used); {" ".join(device.client.platform_version.split())}; '
          f'{found["machine"]}. Python {found["python"]}, jax '
          f'{jax.__version__}, revision {found["git"]}. {options.dtype}, '
          f'window {options.window}, seed {options.seed}, median of '
          f'{options.repeats} times {CALLS} calls after 2.')


def whole_rows(shape, options) -> None:
  """One table row an implementation."""
  rows, length, heads, _, size = shape
  arrays = draw(shape, options)
  flops = 4 * heads * size * rows * sum(
      min(t + 1, options.window or length) for t in range(length))
  first = None
  for name in options.implementations:
    start = f'| {" ".join(map(str, shape))} | {name} |'
    try:
      run = functools.partial(attention.causal, **_keywords(name, options))
      forward, _ = clock(jax.jit(run), [arrays[:3]], options)
      both, memory = clock(jax.jit(backward(run)), [arrays], options)
      off = max(attention.differences(
          shape, options.dtype, 1, **_keywords(name, options)).values())
    except Exception as error:  # pylint: disable=broad-exception-caught
      print(f'{start} {_line(error)} | | | | | |', flush=True)
      continue
    first = first or both
    print(f'{start} {1e3 * forward:.3f} | {1e3 * both:.3f} '
          f'| {first / both:.2f} | {3.5 * flops / both / 1e12:.1f} '
          f'| {memory / 2 ** 20:.0f} | {off:.1e} |', flush=True)


def layouts(shape, options) -> None:
  """One table row a layout of the same trajectories and implementation."""
  longest = shape[1]
  lengths = workload.lengths(shape[0], longest, options.seed)
  arrays = [np.asarray(x, np.float32) for x in draw(shape, options)]
  real = (np.arange(longest) < lengths[:, None])[..., None, None]
  arrays = [x * real for x in arrays]
  with jax.default_matmul_precision('highest'):
    expected = jax.device_get(jax.jit(backward(functools.partial(
        attention.reference, sliding_window=options.window,
        segment_ids=jnp.zeros((len(lengths), longest), jnp.int32))))(*arrays))
  first = None
  for layout in options.layouts:
    parts = (packed(lengths, longest, options.segments) if layout == 'packed'
             else dict(padded=padded, buckets=buckets)[layout](lengths, longest))
    computed = sum(owner.size for owner, _ in parts)
    for name in options.implementations:
      start = f'| {" ".join(map(str, shape))} | {layout} | {name} |'
      try:
        taken, memory, off, beside = one_layout(
            parts, layout == 'packed', arrays, expected,
            _keywords(name, options), options)
      except Exception as error:  # pylint: disable=broad-exception-caught
        print(f'{start} {_line(error)} | | | | | | | |', flush=True)
        continue
      first = first or taken
      print(f'{start} {computed} | {lengths.sum() / computed:.3f} '
            f'| {len(parts)} | {1e3 * taken:.3f} | {first / taken:.2f} '
            f'| {memory / 2 ** 20:.0f} | {off:.1e} | {beside:.1e} |',
            flush=True)


def one_layout(parts, is_packed, arrays, expected, keywords, options):
  """Seconds of all parts, temporary bytes of the last, and two differences.

  These are the largest at real tokens from what is expected, and from 0 at
  padding.
  """

  def both(segments, *arrays):
    run = functools.partial(attention.causal, **keywords)
    if is_packed:
      run = functools.partial(run, segment_ids=segments,
                              max_segments=options.segments)
    return backward(run)(*arrays)

  arguments = []
  for owner, position in parts:
    laid = [np.where((owner >= 0)[..., None, None], x[owner, position], 0)
            for x in arrays]
    arguments.append((jnp.asarray(numbers(owner, position), jnp.int32), *(
        jnp.asarray(x, options.dtype) for x in laid)))
  run = jax.jit(both)
  taken, memory = clock(run, arguments, options)
  off, beside = [], []
  for (owner, position), argument in zip(parts, arguments):
    here = owner >= 0
    for x, y in zip(run(*argument), expected):
      x = np.asarray(x, np.float32)
      gap = np.abs(x[here] - y[owner[here], position[here]]).max()
      off.append(gap / np.abs(y).max())
      beside.append(np.abs(x[~here]).max(initial=0))
  return taken, memory, np.max(off), np.max(beside)  # a NaN stays one


def numbers(owner, position):
  """The number of each token's document in its row, from 1; 0: none."""
  begins = (owner >= 0) & (position == 0)
  return np.where(owner >= 0, np.cumsum(begins, 1), 0)


def padded(lengths, longest):
  """A layout's parts: the row (-1: none) and position of each place's token."""
  return [_place([[i] for i in range(len(lengths))], lengths, longest)]


def buckets(lengths, longest):
  """Rows of similar length together, each part as long as its longest."""
  step = max(longest // 8, 1)
  tops = -(-lengths // step) * step
  return [_place([[i] for i in np.flatnonzero(tops == top)], lengths, top)
          for top in sorted(set(tops))]


def packed(lengths, longest, segments):
  """First fit, the longest first."""
  rows = packing.first_fit(lengths, longest, segments)
  return [_place(rows, lengths, longest)]


def _place(rows, lengths, width):
  owner = np.full((len(rows), width), -1)
  position = np.zeros((len(rows), width), int)
  for r, members in enumerate(rows):
    start = 0
    for i in members:
      owner[r, start:start + lengths[i]] = i
      position[r, start:start + lengths[i]] = np.arange(lengths[i])
      start += lengths[i]
  return owner, position


def draw(shape, options) -> list[jax.Array]:
  """Random queries, keys and values, and a gradient of the output."""
  rows, length, heads, kv_heads, size = shape
  return [jax.random.normal(jax.random.key(options.seed + i),
                            (rows, length, n, size), options.dtype)
          for i, n in enumerate((heads, kv_heads, kv_heads, heads))]


def backward(run):
  """run(q, k, v), and the gradients of its product with a weight."""

  def both(q, k, v, weight):
    out, back = jax.vjp(run, q, k, v)
    return out, *back(weight)
  return both


def clock(run, arguments, options) -> tuple[float, int]:
  """Median seconds of a run of all arguments; temporary bytes of the last."""
  programs = [run.lower(*a).compile() for a in arguments]
  analysis = programs[-1].memory_analysis()
  seconds = []
  for repeat in range(-2, options.repeats):
    start = time.perf_counter()
    out = [program(*a) for _ in range(CALLS)
           for program, a in zip(programs, arguments)]
    jax.block_until_ready(out)
    if repeat >= 0:
      seconds.append((time.perf_counter() - start) / CALLS)
    del out
  return (statistics.median(seconds),
          analysis.temp_size_in_bytes if analysis else 0)


def _keywords(name: str, options) -> dict:
  implementation, _, block = name.partition(':')
  return dict(
      implementation=implementation, block=int(block) if block else None,
      sliding_window=options.window, interpret=options.interpret)


def _shape(text: str) -> tuple[int, ...]:
  shape = tuple(int(n) for n in text.split('x'))
  if len(shape) != 5:
    raise ValueError(f'a shape is BxTxHxKxd, but is {text!r}.')
  return shape


def _line(error: Exception) -> str:
  return f'{type(error).__name__}: {str(error).strip().splitlines()[0]}'[:100]


if __name__ == '__main__':
  main()
