# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Speed of our encoder and of transformers' BERT with the same weights.

  pip install 'searchrl[parity]'
  python benchmarks/encoder.py                    # equal batches of made tokens
  python benchmarks/encoder.py --model FOLDER --corpus corpus.jsonl     # texts

Both run in float32 on the CPU of one process, in turns, so that other load on
the machine falls on both; ratios are medians over adjacent pairs. Torch runs
BertModel in inference mode, with the same mean over tokens and the same norm.

Equal batches have the shape of E5-base-v2 (12 layers, 768 wide) with random
weights, and call the jitted function inside our `Embedder`. Texts go through
the tokenizer, too: ours through `Embedder`; torch's in batches of --batch
texts, padded to the longest of each, in the order of the corpus, as Search-R1's
index builder does, or sorted by length, as sentence-transformers does.
"""

import argparse
import itertools
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

from searchrl.encoders import embedder
from searchrl.evaluation import figures
from searchrl.models import encoder
from searchrl.runtime import workdir

TEXT_COLUMNS = ('texts', 'CPU ms a text', 'of it useful tokens',
                'CPU time, of ours', 'seconds, of ours', 'max |difference|')
COLUMNS = ('rows x tokens', 'ours, CPU ms a passage',
           'torch, CPU ms a passage', 'torch / ours', 'seconds, torch / ours',
           'max |difference|')


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--batches', nargs='+', default=['8x32', '16x128'])
  parser.add_argument('--repeats', type=int, default=5)
  parser.add_argument('--layers', type=int, default=12)
  parser.add_argument('--threads', type=int, default=0, help='of torch')
  parser.add_argument('--model', default='', help='a BERT folder')
  parser.add_argument('--corpus', default='', help='jsonl: texts, not batches')
  parser.add_argument('--texts', type=int, default=512, help='from its front')
  parser.add_argument('--batch', type=int, default=32, help='texts, of torch')
  parser.add_argument('--out', type=pathlib.Path, help='jsonl, appended to')
  options = parser.parse_args()
  if options.threads:
    torch.set_num_threads(options.threads)
  if bool(options.model) != bool(options.corpus):
    parser.error('--model and --corpus go together.')
  lines = texts(options) if options.corpus else batches(options)
  about = workdir.environment()
  print(f'torch {torch.__version__} on {torch.get_num_threads()} threads, '
        f'transformers {transformers.__version__}, jax {jax.__version__}, '
        f'{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n')
  print(figures.table(lines, tuple(lines[0])))
  if options.out:
    with options.out.open('a', encoding='utf-8') as file:
      file.write(json.dumps(dict(
          lines=lines, environment=about, torch=torch.__version__,
          transformers=transformers.__version__)) + '\n')


def batches(options):
  """The lines of equal batches."""
  with tempfile.TemporaryDirectory() as folder:
    torch.manual_seed(0)
    transformers.BertModel(
        transformers.BertConfig(num_hidden_layers=options.layers),
        add_pooling_layer=False).save_pretrained(folder)
    theirs = of_torch(folder)
    config = encoder.read_config(folder)
    params = encoder.load(folder, config)
  embed = jax.jit(lambda tokens, mask: encoder.embed(
      params, tokens, mask, config))
  ours = lambda *batch: np.asarray(embed(*batch))
  return [compare(ours, theirs, *map(int, batch.split('x')), options.repeats)
          for batch in options.batches]


def texts(options):
  """The lines of texts: ours, torch in corpus order, and torch sorted."""
  with open(options.corpus, encoding='utf-8') as file:
    found = [json.loads(line)['contents']
             for line in itertools.islice(file, options.texts)]
  tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
  by_bert, length = of_torch(options.model), 256
  ours = embedder.load(options.model, embedder.Settings(max_length=length))
  counts = []  # of tokens computed

  def counted(params, tokens, mask, inner=ours._embed):
    counts.append(tokens.size)
    return inner(params, tokens, mask)

  ours._embed = counted

  def padded(texts):
    coded = tokenizer([encoder.PASSAGE_PREFIX + text for text in texts],
                      padding=True, truncation=True, max_length=length,
                      return_tensors='np')
    counts.append(coded['input_ids'].size)
    return by_bert(coded['input_ids'], coded['attention_mask'])

  def by_torch(texts, order):
    result = np.empty((len(texts), ours.dim), np.float32)
    for start in range(0, len(texts), options.batch):
      at = order[start:start + options.batch]
      result[at] = padded([texts[i] for i in at])
    return result

  ways = {
      'searchrl': lambda texts: ours(texts, 'passage'),
      'torch, in order': lambda texts: by_torch(texts, np.arange(len(texts))),
      'torch, sorted': lambda texts: by_torch(
          texts, np.argsort([-len(text) for text in texts], kind='stable'))}
  vectors, useful, took = {}, {}, {name: [] for name in ways}
  real = sum(map(len, tokenizer(
      [encoder.PASSAGE_PREFIX + text for text in found], truncation=True,
      max_length=length)['input_ids']))
  for turn in range(options.repeats + 1):
    for name, run in ways.items():
      counts.clear()
      cpu, wall, vectors[name] = clocked(lambda run=run: run(found))
      useful[name] = round(real / sum(counts), 2)
      if turn:  # the first compiles
        took[name].append((cpu, wall))
  of_ours = lambda name, at: round(statistics.median(
      pair[at] / own[at] for pair, own in zip(took[name], took['searchrl'])), 2)
  return [dict(zip(TEXT_COLUMNS, (
      name, round(1000 * statistics.median(
          cpu for cpu, _ in took[name]) / len(found), 1), useful[name],
      of_ours(name, 0), of_ours(name, 1),
      f'{np.abs(vectors[name] - vectors["searchrl"]).max():.1e}'), strict=True))
          for name in ways]


def of_torch(folder):
  """BertModel of a folder: a function from tokens and mask to unit vectors."""
  model = transformers.BertModel.from_pretrained(
      folder, add_pooling_layer=False).eval()

  def run(tokens, mask):
    with torch.inference_mode():
      mask = torch.from_numpy(mask)
      hidden = model(input_ids=torch.from_numpy(tokens),
                     attention_mask=mask).last_hidden_state
      summed = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
      return torch.nn.functional.normalize(summed).numpy()

  return run


def clocked(run):
  """CPU seconds, seconds and result of a call."""
  cpu, wall = time.process_time(), time.perf_counter()
  result = run()
  return time.process_time() - cpu, time.perf_counter() - wall, result


def compare(ours, theirs, rows, width, repeats):
  """One line of the table; texts fill between half a row and all of it."""
  rng = np.random.default_rng(width)
  lengths = rng.integers(width // 2, width + 1, rows)
  mask = (np.arange(width) < lengths[:, None]).astype(np.int64)
  tokens = rng.integers(1000, 30_000, (rows, width)) * mask
  gap = np.abs(ours(tokens, mask) - theirs(tokens, mask)).max()
  cpus, walls = ([], []), ([], [])
  for _ in range(repeats):
    for run, run_cpus, run_walls in zip((ours, theirs), cpus, walls):
      cpu, wall, _ = clocked(lambda run=run: [
          run(tokens, mask) for _ in range(3)])
      run_cpus.append(cpu / 3)
      run_walls.append(wall / 3)
  ratio = lambda pair: round(statistics.median(
      b / a for a, b in zip(*pair, strict=True)), 2)
  cost = [round(1000 * statistics.median(secs) / rows, 1) for secs in cpus]
  return dict(zip(COLUMNS, (f'{rows} x {width}', *cost, ratio(cpus),
                            ratio(walls), f'{gap:.1e}'), strict=True))


if __name__ == '__main__':
  main()
