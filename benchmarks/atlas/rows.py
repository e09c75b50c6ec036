# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""The time of a decode step by the number of its rows, on this machine.

  python benchmarks/atlas/rows.py             # and with --rounded

A random model of the shape of SmolLM2-135M has 48 slots of 512 tokens. Some of
them hold 150 tokens and decode together. The table has milliseconds per step,
the least of four decodes of 16 steps, and whether the bits of a row are those
that it has with all rows (`compilation.rounding_alike`).
"""

import argparse
import pathlib
import sys
import time

import jax
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
# pylint: disable=g-import-not-at-top
from searchrl.models import transformer
from searchrl.models.inference import engine as engines
from searchrl.models.inference import stops

SHAPE = dict(vocab_size=49_152, hidden_size=576, num_hidden_layers=30,
             num_attention_heads=9, num_key_value_heads=3, head_dim=64,
             intermediate_size=1536)
SLOTS, LENGTH, CONTEXT = 48, 512, 150
ROWS = (8, 16, 24, 36)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--rounded', action='store_true',
                      help='products are rounded to bfloat16')
  options = parser.parse_args()
  shape = transformer.TransformerConfig(
      **SHAPE, matmul_dtype='bfloat16' if options.rounded else '')
  params = transformer.init(shape, jax.random.key(0))
  table = stops.compile_table([b''], ['never said'], shape.vocab_size)
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
