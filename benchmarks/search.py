# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Vectors in; recall, queries a second and memory of every dense index out.

  python benchmarks/search.py --rows 200000                       # made vectors
  python benchmarks/search.py --rows 200000 --index runs/debian   # from real ones

All indexes hold the same rows and answer the same queries in one process. Speed
is in queries a CPU-second of the whole process, which a busy machine changes
less than queries a second. Memory is what loading adds to the process's own
(anonymous) memory; rows that ScaNN reads from disk are not in it.

Rows are E5-like: 768 wide, with a common component, so that a random pair has a
cosine of about 0.77. They are the rows of an index and mixtures of two that are
alike, or, without an index, normal with a falling spectrum; queries are rows that
were held out.
"""

import argparse
import ctypes
import gc
import json
import pathlib
import shutil
import statistics
import sys
import tempfile
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from searchrl import metrics  # pylint: disable=g-import-not-at-top
from searchrl import workdir
from searchrl.search import device_index
from searchrl.search import embeddings
from searchrl.search import hnsw_index
from searchrl.search import nearest
from searchrl.search import scann_index

DIM = 768
COLUMNS = ('index', 'settings', 'recall@3', 'recall@10', 'q/CPU-s', 'q/s',
           'MiB', 'build CPU-s')


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--rows', type=int, default=200_000)
  parser.add_argument('--queries', type=int, default=512)
  parser.add_argument('--index', default='', help='folder of a built index')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--out', default='', help='jsonl, appended to')
  parser.add_argument('--folder', default='', help='keeps what is built')
  options = parser.parse_args()
  rows, vectors = make(options)
  source = embeddings.InMemory(rows)
  scores, ids = nearest.on_host(source)(vectors, 30)
  folder = pathlib.Path(options.folder or tempfile.mkdtemp(prefix='search-'))
  lines = []
  try:
    for make_line in (exact, approximate, peers):
      for name, settings, index, mib, built in make_line(source, folder):
        line = dict(index=name, settings=settings, MiB=mib, **speed(
            index, vectors), **{'build CPU-s': built})
        found = index(vectors, 10)[1]
        for k in (3, 10):
          line[f'recall@{k}'] = nearest.recall(found, ids, scores, k)
        lines.append(line)
        del index  # before the next is weighed
        print(line, file=sys.stderr, flush=True)
  finally:
    if not options.folder:
      shutil.rmtree(folder)
  report(lines, options)


def make(options):
  """Rows and queries, of length 1; see the top of this file."""
  rng = np.random.default_rng(options.seed)
  base = _real(options.index) if options.index else _made(rng)
  base = (base - base.mean(0)).astype(np.float32)
  turn = np.linalg.qr(rng.normal(size=(DIM, base.shape[1])))[0].T
  base = base[rng.permutation(len(base))] @ turn.astype(np.float32)
  vectors, base = base[:options.queries], base[options.queries:]
  common = rng.normal(size=DIM)
  common *= np.sqrt(.77 / .23) * np.linalg.norm(base, axis=1).mean() / (
      np.linalg.norm(common))
  rows = np.empty((options.rows, DIM), np.float32)
  rows[:len(base)] = base[:options.rows]
  for start in range(len(base), options.rows, 4096):
    part = rows[start:start + 4096]
    part[:] = _between(rng, base, len(part))
  return tuple(_unit(x + common.astype(np.float32)) for x in (rows, vectors))


def _between(rng, base, count):
  """Mixtures of a row and the one most like it of 256."""
  pool = base[rng.integers(len(base), size=256)]
  near = base[rng.integers(len(base), size=count)]
  like = pool[np.argmax(_unit(near) @ _unit(pool).T, axis=1)]
  share = rng.uniform(.5, 1, size=(count, 1)).astype(np.float32)
  mixed = share * near + (1 - share) * like
  return mixed * (np.linalg.norm(near, axis=1) / np.linalg.norm(mixed, axis=1)
                 )[:, None]


def _unit(x):
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _real(folder):
  store = embeddings.open_(pathlib.Path(folder) / 'vectors')
  return store.read(0, store.count)


def _made(rng, count=60_000, dim=384):
  """Normal, with variances that fall as those of real vectors do: as 1 / i."""
  return rng.normal(size=(count, dim)) / np.sqrt(np.arange(1, dim + 1))


def exact(source, folder):
  """numpy, and the devices with each storage."""
  del folder
  yield 'numpy', 'float32', nearest.on_host(source), source.rows.nbytes >> 20, 0
  for dtype in embeddings.DTYPES:
    before = memory()
    index = device_index.build(source, dtype=dtype)
    yield 'mesh', dtype, index, memory() - before, 0
    del index


def approximate(source, folder):
  """ScaNN and HNSW with each of their settings."""
  for name, module in (('scann', scann_index), ('hnsw', hnsw_index)):
    its = folder / name
    if (its / 'told.json').exists():
      told, built = json.loads((its / 'told.json').read_text())
    else:
      its.mkdir(parents=True)
      start = time.process_time()
      told = module.build(source, its)
      built = time.process_time() - start
      (its / 'told.json').write_text(json.dumps([told, built]))
    before, mib = memory(), None
    for settings in module.ladder(told):
      index = module.open_(its, told, source, **settings)
      mib = memory() - before if mib is None else mib
      shown = ' '.join(f'{k}={v}' for k, v in settings.items())
      yield name, shown, index, mib, round(built)
      del index


def peers(source, folder):
  """What others run: faiss Flat, and HNSW64 with the library's own settings."""
  del folder
  import faiss  # pylint: disable=g-import-not-at-top
  for name, ef in (('Flat', 0), ('HNSW64,Flat', 0)):
    before, start = memory(), time.process_time()
    index = faiss.index_factory(source.dim, name, faiss.METRIC_INNER_PRODUCT)
    index.add(source.rows)
    built, added = time.process_time() - start, memory() - before
    for ef in (0,) if name == 'Flat' else (16, 64, 128, 256, 512, 1024):
      def find(vectors, k, index=index, ef=ef):
        options = faiss.SearchParametersHNSW(efSearch=ef) if ef else None
        return index.search(vectors, k, params=options)
      yield (f'faiss {name}', f'efSearch={ef}' if ef else '', nearest.Index(
          name, source.count, source.dim, find), added, round(built))
    del index, find


def speed(index, vectors, k=10, batch=64, secs=3.0):
  """Queries a CPU-second and a second: the median of rounds over all queries."""
  index(vectors[:batch], k)
  rates, walls, begun = [], [], time.perf_counter()
  while len(rates) < 3 or time.perf_counter() - begun < secs:
    cpu, wall, done = time.process_time(), time.perf_counter(), 0
    for start in range(0, len(vectors), batch):
      done += len(index(vectors[start:start + batch], k)[0])
      if time.perf_counter() - wall > secs:
        break
    rates.append(done / max(time.process_time() - cpu, 1e-9))
    walls.append(done / (time.perf_counter() - wall))
    if time.perf_counter() - begun > 4 * secs:
      break
  return {'q/CPU-s': round(statistics.median(rates)),
          'q/s': round(statistics.median(walls))}


def memory():
  """MiB of this process that are no file's, after handing back what is free."""
  gc.collect()
  if sys.platform == 'linux':
    ctypes.CDLL(None).malloc_trim(0)
  for line in pathlib.Path('/proc/self/status').read_text().splitlines():
    if line.startswith('RssAnon'):
      return int(line.split()[1]) >> 10
  return 0


def at_recall(lines, name, recall, key='recall@3'):
  """Queries a CPU-second of an index at a recall, between its settings."""
  fastest = {}
  for line in lines:
    if line['index'] == name:
      fastest[line[key]] = max(line['q/CPU-s'], fastest.get(line[key], 0))
  points = sorted(fastest.items())
  if not points or points[-1][0] < recall or points[0][0] > recall:
    return None
  return float(np.exp(np.interp(recall, [p[0] for p in points],
                                np.log([p[1] for p in points]))))


def report(lines, options):
  """The table, ratios, and a line of JSON."""
  for line in lines:
    line.update({k: round(line[k], 4) for k in ('recall@3', 'recall@10')})
  print(metrics.table(lines, COLUMNS))
  ratios = []
  for recall in (.95, .97, .98, .99, .995):
    rates = {name: at_recall(lines, name, recall)
             for name in ('scann', 'hnsw', 'faiss HNSW64,Flat')}
    ratios.append({'recall@3': recall, **{
        name: rate and round(rate) for name, rate in rates.items()}, **{
            f'scann / {name}': rates['scann'] and rates[name] and round(
                rates['scann'] / rates[name], 2)
            for name in ('hnsw', 'faiss HNSW64,Flat')}})
  print(metrics.table(ratios, tuple(ratios[0])))
  if options.out:
    with open(options.out, 'a', encoding='utf-8') as file:
      file.write(json.dumps(dict(
          options=vars(options), lines=lines, ratios=ratios,
          environment=workdir.environment())) + '\n')


if __name__ == '__main__':
  main()
