# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""The time of a decode step by the number of its rows, on this machine.

  python benchmarks/atlas/rows.py             # and with --rounded

A random model of the shape of SmolLM2-135M has 48 slots of 512 tokens. Some of
them hold 150 tokens and decode together. The first line has the numbers of rows
with which the bits of a row are those that it has with all rows
(`compilation.rounding_alike`). The table has milliseconds per step, the least
of four decodes of 16 steps.
"""

import argparse
import pathlib
import sys
import time

import jax
import numpy as np

BENCHMARKS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(BENCHMARKS.parent), str(BENCHMARKS)]
# pylint: disable=g-import-not-at-top
import peers
from searchrl.models.inference import engine as engines

SLOTS, LENGTH, CONTEXT = 48, 512, 150
ROWS = (8, 16, 24, 36)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--rounded', action='store_true',
                      help='products are rounded to bfloat16')
  options = parser.parse_args()
  shape, params = peers.random_model(
      peers.SHAPES['smollm2'], 'bfloat16' if options.rounded else '')
  table = peers.never_stops(shape.vocab_size)
  make = lambda **few: engines.Engine(
      shape, slots=SLOTS, length=LENGTH, stop_table=table, tiles=(4, 16), **few)
  engine = make()
  engine.load(params, 1.0)
  engine.compile()
  print(f'jax {jax.__version__}; bits as with {SLOTS} rows: {engine._rows}\n')
  engine = make(few_rows=ROWS)
  engine.load(params, 1.0)
  print('| rows | ms per step |\n|---|---|')
  for rows in (*ROWS, SLOTS):
    print(f'| {rows} | {1000 * secs(engine, rows):.0f} |', flush=True)


def secs(engine: engines.Engine, rows: int) -> float:
  """Seconds of a decode step in which the first slots sample."""
  tokens = np.random.default_rng(0).integers(0, 40_000, (rows, CONTEXT))
  engine.append([engines.Append(
      slot, tuple(ids), LENGTH - CONTEXT, engines.row_ids(0, f'{slot}', 0, 0),
      True) for slot, ids in enumerate(tokens.tolist())])
  taken = []
  for _ in range(5):  # the first compiles
    before, start = engine.slot_steps, time.perf_counter()
    engine.decode(alike=False)
    taken.append((time.perf_counter() - start) * rows / (
        engine.slot_steps - before))
  engine.abandon()
  return min(taken[1:])


if __name__ == '__main__':
  main()
