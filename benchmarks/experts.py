# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Speed and precision of a layer of experts, as a table.

  python benchmarks/experts.py --tokens 64 8192 32768

The layer is one of Qwen3-30B-A3B by default: 128 experts of 2048 x 768, of which
a token uses 8. `all` computes all experts for all tokens, `kernel` is our
product of rows with the matrices of their groups for GPUs, and `ragged_dot` is
that of jax. The share is that of a limit: the operations of the chosen experts
at the rate of a large matrix product or, if that takes longer, one read of all
weights (two reads and a write with gradients) at the rate of a large copy; both
rates are measured in the same run. A difference is ||x - y|| / ||y||, the
largest of the output and its gradients; y is computed in float32 by all experts,
for at most 2,048 tokens.
"""

import argparse
import sys

import jax
import jax.numpy as jnp

import decode  # adds the root to the path
# pylint: disable=g-import-not-at-top
from searchrl.models import experts
from searchrl.runtime import workdir

WAYS = {'all': experts._by_all, 'kernel': experts._by_blocks,
        'ragged_dot': experts._by_own}  # pylint: disable=protected-access
CHECKED = 2048  # tokens of a comparison with the reference


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--tokens', type=int, nargs='+', default=[64, 8192])
  parser.add_argument('--experts', type=int, default=128)
  parser.add_argument('--chosen', type=int, default=8)
  parser.add_argument('--widths', type=int, nargs=2, default=[2048, 768])
  parser.add_argument('--ways', nargs='+', choices=list(WAYS),
                      default=list(WAYS))
  parser.add_argument('--dtype', default='bfloat16')
  parser.add_argument('--repeats', type=int, default=5)
  parser.add_argument('--seed', type=int, default=0)
  options = parser.parse_args()
  device = jax.devices()[0]
  print(f'    python benchmarks/experts.py {" ".join(sys.argv[1:])}\n\n'
        f'{device.device_kind}, jax {jax.__version__}, revision '
        f'{workdir.environment()["git"]}, {options.dtype}, seed {options.seed}')
  limits = decode.bandwidth(), decode.matmul_rate(options.dtype)
  print(f'Limits: {limits[0] / 1e9:,.0f} GB/s, {limits[1] / 1e12:,.1f} TFLOP/s'
        '\n\n| tokens | way | forward ms | share | forward + backward ms '
        '| share | difference |\n|---|---|---|---|---|---|---|')
  for tokens in options.tokens:
    for way in options.ways:
      try:
        row = measured(tokens, WAYS[way], limits, options)
      except Exception as error:  # no room, or no kernel here
        row = f'{str(error).partition(chr(10))[0][:60]} | | | |'
      print(f'| {tokens} | {way} | {row} |', flush=True)


def measured(tokens: int, way, limits, options) -> str:
  """Returns the last cells of a row of the table."""
  inputs, ids, cotangent = draw(tokens, options)
  forward = jax.jit(lambda x, weights, *kernels: way(x, ids, weights, *kernels))
  both = jax.jit(lambda *given: gradients(way, ids, cotangent, *given))
  cells = []
  for function, passes in ((forward, 1), (both, 3)):
    secs = decode.seconds_of(function, *inputs, repeats=options.repeats)
    cells += [f'{1e3 * secs:.3f}',
              f'{least(tokens, passes, limits, options) / secs:.3f}']
  return ' | '.join([*cells, f'{difference(tokens, way, options):.1e}'])


def draw(tokens: int, options):
  """Returns (tokens, weights, gate, up, down), ids and an output's gradient."""
  width, inner = options.widths
  keys = iter(jax.random.split(jax.random.key(options.seed), 7))
  normal = lambda *shape: jax.random.normal(next(keys), shape, options.dtype)
  # Some experts are chosen several times as often as others.
  logits = (normal(tokens, options.experts) + normal(options.experts)).astype(
      jnp.float32)
  routing = experts.route(logits, options.chosen, True)
  x, cotangent = normal(tokens, width), normal(tokens, width)
  shapes = ((width, inner), (width, inner), (inner, width))
  kernels = [normal(options.experts, *shape) / jnp.sqrt(shape[0]).astype(
      options.dtype) for shape in shapes]
  return (x, routing.weights, *kernels), routing.ids, cotangent


def gradients(way, ids, cotangent, x, weights, *kernels):
  """Returns the output and the gradients of all inputs."""
  output, pullback = jax.vjp(
      lambda x, weights, *kernels: way(x, ids, weights, *kernels),
      x, weights, *kernels)
  return output, *pullback(cotangent.astype(output.dtype))


def least(tokens: int, passes: int, limits, options) -> float:
  """Returns the seconds that the layer takes at least."""
  size = 3 * options.widths[0] * options.widths[1]  # numbers of an expert
  flops = 2 * tokens * options.chosen * size * passes
  moved = options.experts * size * jnp.dtype(options.dtype).itemsize * passes
  return max(moved / limits[0], flops / limits[1])


def difference(tokens: int, way, options) -> float:
  """Returns the largest difference from all experts in float32."""
  inputs, ids, cotangent = draw(min(tokens, CHECKED), options)
  actual = jax.jit(lambda *given: gradients(way, ids, cotangent, *given))(
      *inputs)
  with jax.default_matmul_precision('highest'):
    wanted = jax.jit(lambda *given: gradients(
        experts._by_all, ids, cotangent, *given))(  # pylint: disable=protected-access
            *(x.astype(jnp.float32) for x in inputs))
  norm = lambda x: jnp.linalg.norm(x.astype(jnp.float32).ravel())
  return max(float(norm(x.astype(jnp.float32) - y) / norm(y))
             for x, y in zip(actual, wanted))


if __name__ == '__main__':
  main()
