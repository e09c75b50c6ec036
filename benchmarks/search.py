# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Recall, speed and memory of every dense index over the same vectors.

  python benchmarks/search.py --rows 200000                      # made vectors
  python benchmarks/search.py --rows 200000 --index runs/debian  # of real ones
  python benchmarks/search.py --roofline                # an accelerator's sweep
  python benchmarks/search.py --load                 # rows from disk to devices

All indexes hold the same rows and answer the same queries in one process, on
one thread. Speed is in queries per CPU-second of the whole process, which a
busy machine changes less than queries per second; indexes close to a recall@3
of 0.99 are measured once more, in turns. Memory is what loading adds to the
process's own (anonymous) memory, without rows that ScaNN reads from disk.
hnswlib is compared if it is installed.

Rows are E5-like: 768 wide, with a common component, so that a random pair has a
cosine of about 0.77. They are the rows of an index and mixtures of two similar
ones or, without an index, normal with a falling spectrum; queries are rows that
were held out.

--roofline makes rows on the first device and searches them exactly, 256 queries
at a time: by default as many as Wikipedia has, in bfloat16 (32 GB); on a CPU
fewer. Its share is the time to read all rows once, at the rate of a copy on
that device, divided by the time of a batch.

--load writes stores of each type, and times how they are opened and put onto
all devices in the type they are stored in; the files were just written, so they
come from the system's cache and not from a disk.
"""

import argparse
import ctypes
import functools
import gc
import importlib.util
import itertools
import json
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time

for variable in ('OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS', 'NPROC'):
  os.environ.setdefault(variable, '1')  # read when a library is imported
# pylint: disable=g-import-not-at-top
import jax
import jax.numpy as jnp
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from searchrl.evaluation import figures
from searchrl.runtime import workdir
from searchrl.search.index import exact_device
from searchrl.search.index import exact_host
from searchrl.search.index import hnsw
from searchrl.search.index import scann as scann_index
from searchrl.search.index import vector_store

DIM = 768
WIKIPEDIA = 21_015_324  # passages of wiki-18
COLUMNS = ('index', 'settings', 'recall@3', 'recall@10', 'q/CPU-s', 'q/s',
           'in turns', 'MiB', 'build CPU-s')


def parsed() -> argparse.Namespace:
  """Command-line options."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--rows', type=int, help='200,000; see --roofline')
  parser.add_argument('--queries', type=int, default=2048)
  parser.add_argument('--index', default='', help='folder of a built index')
  parser.add_argument('--only', nargs='+', choices=list(LINES),
                      default=list(LINES))
  parser.add_argument('--roofline', action='store_true')
  parser.add_argument('--load', action='store_true')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--out', default='', help='jsonl, appended to')
  parser.add_argument('--folder', default='', help='keeps what is built')
  return parser.parse_args()


def main():
  options = parsed()
  if options.roofline:
    lines = [roofline(options.rows)]
    print(figures.table(lines, tuple(lines[0])))
    write(dict(roofline=lines), options)
    return
  if options.load:
    lines = [load(dtype, options.rows or 262_144)
             for dtype in vector_store.DTYPES]
    print(figures.table(lines, tuple(lines[0])))
    write(dict(load=lines), options)
    return
  threads(1)
  options.rows = options.rows or 200_000
  rows, vectors = make(options)
  source = vector_store.InMemory(rows)
  recalls = {k: exact_host.recall_of(source, vectors, k) for k in (3, 10)}
  folder = pathlib.Path(options.folder or tempfile.mkdtemp(prefix='search-'))
  lines, close = [], []
  try:
    for name, settings, index, mib, built in itertools.chain.from_iterable(
        LINES[name](source, folder) for name in options.only):
      line = dict(index=name, settings=settings, MiB=mib, **speed(
          index, vectors), **{'build CPU-s': built})
      found = index(vectors, 10)[1]
      for k, recall_of in recalls.items():
        line[f'recall@{k}'] = round(recall_of(found), 4)
      lines.append(line)
      if .98 <= line['recall@3'] <= .997:
        close.append((line, index))
      del index  # before the next is weighed
      print(line, file=sys.stderr, flush=True)
    in_turns(close, vectors)
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
  """Mixtures of a row and the most similar one of 256."""
  pool = base[rng.integers(len(base), size=256)]
  rows = base[rng.integers(len(base), size=count)]
  similar = pool[np.argmax(_unit(rows) @ _unit(pool).T, axis=1)]
  share = rng.uniform(.5, 1, size=(count, 1)).astype(np.float32)
  mixed = share * rows + (1 - share) * similar
  return mixed * (np.linalg.norm(rows, axis=1) / np.linalg.norm(mixed, axis=1)
                 )[:, None]


def _unit(x):
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _real(folder):
  store = vector_store.open_(pathlib.Path(folder) / 'vectors')
  return store.read(0, store.count)


def _made(rng, count=60_000, dim=384):
  """Normal, with variances that fall as those of real vectors do: as 1 / i."""
  return rng.normal(size=(count, dim)) / np.sqrt(np.arange(1, dim + 1))


def exact(source, folder):
  """numpy, and the devices with each type of rows."""
  del folder
  yield ('numpy', 'float32', exact_host.on_host(source),
         source.rows.nbytes >> 20, 0)
  for dtype in vector_store.DTYPES:
    before = memory()
    index = exact_device.build(source, dtype=dtype)
    yield 'mesh', dtype, index, memory() - before, 0
    del index


def approximate(name, module, source, folder):
  """ScaNN or HNSW with each of its settings."""
  folder = folder / name
  if (folder / 'facts.json').exists():
    facts, secs = json.loads((folder / 'facts.json').read_text())
  else:
    folder.mkdir(parents=True)
    start = time.process_time()
    threads(os.cpu_count())
    facts = module.build(source, folder)
    threads(1)
    secs = time.process_time() - start
    (folder / 'facts.json').write_text(json.dumps([facts, secs]))
  before, mib = memory(), None
  for settings in module.ladder(facts):
    index = module.open_(folder, facts, source, **settings)
    mib = memory() - before if mib is None else mib
    shown = ' '.join(f'{k}={v}' for k, v in settings.items())
    yield name, shown, index, mib, round(secs)
    del index


def faiss_peers(source, folder):
  """faiss as others use it: Flat, and HNSW64 with its default settings."""
  del folder
  import faiss
  for name in ('Flat', 'HNSW64,Flat'):
    before, start = memory(), time.process_time()
    index = faiss.index_factory(source.dim, name, faiss.METRIC_INNER_PRODUCT)
    threads(os.cpu_count())
    index.add(source.rows)
    threads(1)
    built, added = time.process_time() - start, memory() - before
    for ef in (0,) if name == 'Flat' else (16, 64, 128, 256, 512, 1024):
      def find(vectors, k, index=index, ef=ef):
        options = faiss.SearchParametersHNSW(efSearch=ef) if ef else None
        return index.search(vectors, k, params=options)
      yield (f'faiss {name}', f'efSearch={ef}' if ef else '', exact_host.Index(
          name, source.count, source.dim, find), added, round(built))
    del index, find


def hnswlib_peer(source, folder, links=32, construction=200):
  """hnswlib with as many links as our HNSW."""
  del folder
  if importlib.util.find_spec('hnswlib') is None:
    return
  import hnswlib
  before, start = memory(), time.process_time()
  index = hnswlib.Index(space='ip', dim=source.dim)
  index.init_index(source.count, ef_construction=construction, M=links)
  index.add_items(source.rows, num_threads=os.cpu_count())
  built, added = time.process_time() - start, memory() - before

  for ef in (32, 64, 128, 256, 512, 1024):
    def find(vectors, k, ef=ef):
      index.set_ef(ef)
      ids, distances = index.knn_query(vectors, k, num_threads=1)
      return 1 - distances, ids.astype(np.int64)

    yield (f'hnswlib M={links}', f'ef={ef}', exact_host.Index(
        'hnswlib', source.count, source.dim, find), added, round(built))


LINES = {'exact': exact,
         'scann': functools.partial(approximate, 'scann', scann_index),
         'faiss': faiss_peers,
         'hnsw': functools.partial(approximate, 'hnsw', hnsw),
         'hnswlib': hnswlib_peer}


def threads(count):
  """Sets the number of threads of faiss."""
  if importlib.util.find_spec('faiss') is not None:
    import faiss
    faiss.omp_set_num_threads(count)


def roofline(count, k=10, batch=256):
  """The time of exact search of made bfloat16 rows on the first device."""
  device = jax.devices()[0]
  count = count or (131_072 if device.platform == 'cpu' else WIKIPEDIA)
  block = exact_device.rows_per_block(count, [device])
  blocks = -(-count // block)
  mesh = jax.sharding.Mesh(np.array([device]), ('rows',), axis_types=(
      jax.sharding.AxisType.Auto,))
  each = 1 if device.platform == 'gpu' else blocks

  @functools.partial(jax.jit, out_shardings=exact_device.on(mesh, 'rows'))
  def fill(keys):  # a block at a time: nothing else is as large as the rows
    return jax.lax.map(lambda key: jax.random.normal(
        key, (block, DIM), jnp.bfloat16), keys)

  with jax.default_device(device):
    rate = copied_bytes_per_sec()
    keys = jax.random.split(jax.random.key(0), blocks)
    rows = tuple(fill(keys[i:i + each]) for i in range(0, blocks, each))
    scales = tuple(jax.device_put(
        np.ones((each, block), np.float32), exact_device.on(mesh, 'rows'))
        for _ in rows)
    vectors = jax.device_put(exact_device.parts_of(
        np.random.default_rng(0).normal(size=(batch, DIM)).astype(np.float32),
        device.platform != 'cpu'), exact_device.on(mesh))
    secs = timed(lambda: exact_device.top_k(
        rows, scales, vectors, k=k, count=count, mesh=mesh))
  size = sum(part.nbytes for part in rows)
  sweep = size / rate
  return {'device': device.device_kind, 'rows': count, 'batch': batch, 'k': k,
          'GB of rows': round(size / 1e9, 2),
          'copy, GB/s': round(rate / 1e9, 1),
          'ms a sweep': round(1e3 * sweep, 2),
          'ms a batch': round(1e3 * secs, 2), 'share': round(sweep / secs, 3),
          'TFLOP/s': round(2 * count * DIM * batch / secs / 1e12, 2),
          'q/s': round(batch / secs)}


def load(dtype, count, shard=65_536):
  """The time to open a store and put its rows onto all devices."""
  rng = np.random.default_rng(0)
  with tempfile.TemporaryDirectory(prefix='search-') as folder:
    writer = vector_store.Writer(folder, vector_store.Recipe(
        'made', {'digest': 'made'}, count, DIM, dtype, shard))
    for number in writer.missing():
      start, stop = writer.recipe.span(number)
      writer.write(number, rng.normal(size=(stop - start, DIM)))
    writer.finish()
    size = writer.recipe.disk_bytes
    secs = timed(lambda: exact_device.build(
        vector_store.open_(folder), dtype=dtype))
  return {'rows as': dtype, 'rows': count, 'GB on disk': round(size / 1e9, 2),
          'seconds': round(secs, 3), 'GB/s': round(size / secs / 1e9, 2),
          'devices': jax.local_device_count()}


def copied_bytes_per_sec():
  """Bytes that a copy reads and writes per second."""
  size = 2**27 if jax.default_backend() == 'cpu' else 2**31
  values = jnp.zeros(size // 4, jnp.int32)
  return 2 * size / timed(functools.partial(jax.jit(lambda x: x + 1), values))


def timed(run, repeats=10):
  """The median seconds of a call, after two that compile and warm up."""
  for _ in range(2):
    jax.block_until_ready(run())
  secs = []
  for _ in range(repeats):
    start = time.perf_counter()
    jax.block_until_ready(run())
    secs.append(time.perf_counter() - start)
  return statistics.median(secs)


def speed(index, vectors, k=10, batch=64, secs=3.0):
  """Queries per CPU-second and per second, as medians over rounds."""
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


def in_turns(close, vectors, rounds=7, batch=64, most=512):
  """Adds the median q/CPU-s of each index to its line, measured in turns.

  Each index answers all queries once before it is timed: the others have filled
  the caches with their rows, while a server has one index.
  """
  vectors, rates = vectors[:most], [[] for _ in close]
  for _ in range(rounds):
    for (_, index), index_rates in zip(close, rates):
      for timed_too in (False, True):
        cpu = time.process_time()
        for start in range(0, len(vectors), batch):
          index(vectors[start:start + batch], 10)
        if timed_too:
          index_rates.append(len(vectors) / (time.process_time() - cpu))
  for (line, _), index_rates in zip(close, rates):
    line['in turns'] = round(statistics.median(index_rates))


def memory():
  """Anonymous memory of this process in MiB, after freed memory is returned."""
  gc.collect()
  if sys.platform == 'linux':
    ctypes.CDLL(None).malloc_trim(0)
  for line in pathlib.Path('/proc/self/status').read_text().splitlines():
    if line.startswith('RssAnon'):
      return int(line.split()[1]) >> 10
  return 0


def at_recall(lines, name, recall, key='recall@3'):
  """Queries per CPU-second at a recall, interpolated between settings."""
  fastest = {}
  for line in lines:
    if line['index'] == name:
      rate = line.get('in turns') or line['q/CPU-s']
      fastest[line[key]] = max(rate, fastest.get(line[key], 0))
  points = sorted(fastest.items())
  if not points or points[-1][0] < recall or points[0][0] > recall:
    return None
  return float(np.exp(np.interp(recall, [p[0] for p in points],
                                np.log([p[1] for p in points]))))


def report(lines, options):
  """The table, ratios, and a line of JSON."""
  print(figures.table(lines, COLUMNS))
  ratios = []
  others = [name for name in dict.fromkeys(line['index'] for line in lines)
            if 'hnsw' in name.lower()]
  for recall in (.95, .97, .98, .99, .995):
    ours = at_recall(lines, 'scann', recall)
    rates = {name: at_recall(lines, name, recall) for name in others}
    ratios.append({
        'recall@3': recall, 'scann': ours and round(ours),
        **{name: rate and round(rate) for name, rate in rates.items()},
        **{f'scann / {name}': ours and rate and round(ours / rate, 2)
           for name, rate in rates.items()}})
  print(figures.table(ratios, tuple(ratios[0])))
  write(dict(lines=lines, ratios=ratios), options)


def write(found, options):
  """Appends a line of JSON."""
  if options.out:
    with open(options.out, 'a', encoding='utf-8') as file:
      file.write(json.dumps(dict(
          options=vars(options), load=os.getloadavg()[0], **found,
          environment=workdir.environment())) + '\n')


if __name__ == '__main__':
  main()
