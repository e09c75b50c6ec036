# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Our encoder and transformers' BERT on the same weights; passages a CPU-second.

  pip install 'searchrl[parity]'
  python benchmarks/encoder.py

The shape of E5-base-v2 (12 layers, 768 wide) with random weights, both in
float32 on the CPU of one process, in turns, so that what else the machine does
falls on both. Ours is the jitted function that index builds and servers call;
torch's is BertModel in inference mode, with the same mean over tokens and the
same norm. The ratio is the median over pairs of neighbours.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# pylint: disable=g-import-not-at-top
import jax
import torch
import transformers

from searchrl import metrics
from searchrl import workdir
from searchrl.models import encoder

COLUMNS = ('rows x tokens', 'ours, CPU ms a passage',
           'torch, CPU ms a passage', 'torch / ours', 'seconds, torch / ours',
           'max |difference|')


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--batches', nargs='+', default=['8x32', '16x128'])
  parser.add_argument('--repeats', type=int, default=5)
  parser.add_argument('--layers', type=int, default=12)
  parser.add_argument('--threads', type=int, default=0, help='of torch')
  parser.add_argument('--out', type=pathlib.Path, help='jsonl, appended to')
  options = parser.parse_args()
  if options.threads:
    torch.set_num_threads(options.threads)
  with tempfile.TemporaryDirectory() as folder:
    theirs = make(folder, options.layers)
    config = encoder.read_config(folder)
    params = encoder.load(folder, config)
  embed = jax.jit(lambda tokens, mask: encoder.embed(
      params, tokens, mask, config))
  ours = lambda *batch: np.asarray(embed(*batch))
  lines = [compare(ours, theirs, *map(int, batch.split('x')), options.repeats)
           for batch in options.batches]
  about = workdir.environment()
  print(f'torch {torch.__version__} on {torch.get_num_threads()} threads, '
        f'transformers {transformers.__version__}, jax {jax.__version__}, '
        f'{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n')
  print(metrics.table(lines, COLUMNS))
  if options.out:
    with options.out.open('a', encoding='utf-8') as file:
      file.write(json.dumps(dict(
          lines=lines, environment=about, torch=torch.__version__,
          transformers=transformers.__version__)) + '\n')


def make(folder, layers):
  """Writes random weights of E5's shape; the function of torch on them."""
  torch.manual_seed(0)
  model = transformers.BertModel(
      transformers.BertConfig(num_hidden_layers=layers),
      add_pooling_layer=False).eval()
  model.save_pretrained(folder)

  def run(tokens, mask):
    with torch.inference_mode():
      mask = torch.from_numpy(mask)
      hidden = model(input_ids=torch.from_numpy(tokens),
                     attention_mask=mask).last_hidden_state
      summed = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
      return torch.nn.functional.normalize(summed).numpy()

  return run


def compare(ours, theirs, rows, width, repeats):
  """One line of the table; texts fill half of a row to all of it."""
  rng = np.random.default_rng(width)
  lengths = rng.integers(width // 2, width + 1, rows)
  mask = (np.arange(width) < lengths[:, None]).astype(np.int64)
  tokens = rng.integers(1000, 30_000, (rows, width)) * mask
  gap = np.abs(ours(tokens, mask) - theirs(tokens, mask)).max()
  cpus, walls = ([], []), ([], [])
  for _ in range(repeats):
    for run, its_cpus, its_walls in zip((ours, theirs), cpus, walls):
      cpu, wall = time.process_time(), time.perf_counter()
      for _ in range(3):
        run(tokens, mask)
      its_cpus.append((time.process_time() - cpu) / 3)
      its_walls.append((time.perf_counter() - wall) / 3)
  ratio = lambda pair: round(statistics.median(
      b / a for a, b in zip(*pair, strict=True)), 2)
  cost = [round(1000 * statistics.median(its) / rows, 1) for its in cpus]
  return dict(zip(COLUMNS, (f'{rows} x {width}', *cost, ratio(cpus),
                            ratio(walls), f'{gap:.1e}'), strict=True))


if __name__ == '__main__':
  main()
