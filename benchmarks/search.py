# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Vectors in; recall, queries a second and memory of every dense index out.

  python benchmarks/search.py --rows 200000                       # made vectors
  python benchmarks/search.py --rows 200000 --index runs/debian   # from real ones
  python benchmarks/search.py --roofline                # an accelerator's sweep
  python benchmarks/search.py --load                    # rows from disk to devices

All indexes hold the same rows and answer the same queries in one process, on
one thread. Speed is in queries a CPU-second of the whole process, which a busy
machine changes less than queries a second; what comes near a recall@3 of 0.99
is measured once more, in turns. Memory is what loading adds to the
process's own (anonymous) memory; rows that ScaNN reads from disk are not in it.
hnswlib is compared if it is there.

Rows are E5-like: 768 wide, with a common component, so that a random pair has a
cosine of about 0.77. They are the rows of an index and mixtures of two that are
alike, or, without an index, normal with a falling spectrum; queries are rows that
were held out.

--roofline makes rows on the first device and searches them exactly, 256 queries
at a time: by default as many as Wikipedia has, in bfloat16 (32 GB), on a CPU few.
What reading all rows once would take, at the rate of a copy on that device, is
its share of the time that a batch takes.

--load writes stores of each type, and times how they are opened and put onto all
devices as they are stored; the files were just written, so that they come from
the system's cache and not from a disk.
"""

import argparse
import ctypes
import functools
import gc
import importlib.util
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


def main():
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
  options = parser.parse_args()
  if options.roofline:
    lines = [roofline(options.rows)]
    print(figures.table(lines, tuple(lines[0])))
    write(dict(roofline=lines), options)
    return
  if options.load:
    lines = [load(dtype, options.rows or 262_144) for dtype in vector_store.DTYPES]
    print(figures.table(lines, tuple(lines[0])))
    write(dict(load=lines), options)
    return
  threads(1)
  options.rows = options.rows or 200_000
  rows, vectors = make(options)
  source = vector_store.InMemory(rows)
  scores, ids = exact_host.on_host(source)(vectors, 30)
  folder = pathlib.Path(options.folder or tempfile.mkdtemp(prefix='search-'))
  lines, near = [], []
  try:
    for name, settings, index, mib, built in (
        found for name in options.only for found in LINES[name](source, folder)):
      line = dict(index=name, settings=settings, MiB=mib, **speed(
          index, vectors), **{'build CPU-s': built})
      found = index(vectors, 10)[1]
      for k in (3, 10):
        line[f'recall@{k}'] = round(exact_host.recall(found, ids, scores, k), 4)
      lines.append(line)
      if .98 <= line['recall@3'] <= .997:
        near.append((line, index))
      del index  # before the next is weighed
      print(line, file=sys.stderr, flush=True)
    in_turns(near, vectors)
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
  store = vector_store.open_(pathlib.Path(folder) / 'vectors')
  return store.read(0, store.count)


def _made(rng, count=60_000, dim=384):
  """Normal, with variances that fall as those of real vectors do: as 1 / i."""
  return rng.normal(size=(count, dim)) / np.sqrt(np.arange(1, dim + 1))


def exact(source, folder):
  """numpy, and the devices with each storage."""
  del folder
  yield 'numpy', 'float32', exact_host.on_host(source), source.rows.nbytes >> 20, 0
  for dtype in vector_store.DTYPES:
    before = memory()
    index = exact_device.build(source, dtype=dtype)
    yield 'mesh', dtype, index, memory() - before, 0
    del index


def approximate(name, module, source, folder):
  """ScaNN or HNSW with each of its settings."""
  its = folder / name
  if (its / 'told.json').exists():
    told, built = json.loads((its / 'told.json').read_text())
  else:
    its.mkdir(parents=True)
    start = time.process_time()
    threads(os.cpu_count())
    told = module.build(source, its)
    threads(1)
    built = time.process_time() - start
    (its / 'told.json').write_text(json.dumps([told, built]))
  before, mib = memory(), None
  for settings in module.ladder(told):
    index = module.open_(its, told, source, **settings)
    mib = memory() - before if mib is None else mib
    shown = ' '.join(f'{k}={v}' for k, v in settings.items())
    yield name, shown, index, mib, round(built)
    del index


def faiss_peers(source, folder):
  """What others run: faiss Flat, and HNSW64 with the library's own settings."""
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
  """hnswlib with the links of our HNSW."""
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
  """Threads of faiss from here on."""
  if importlib.util.find_spec('faiss') is not None:
    import faiss
    faiss.omp_set_num_threads(count)


def roofline(count, k=10, batch=256, block=65_536):
  """What exact search of made bfloat16 rows takes on the first device."""
  device = jax.devices()[0]
  count = count or (131_072 if device.platform == 'cpu' else WIKIPEDIA)
  blocks = -(-count // block)
  mesh = jax.sharding.Mesh(np.array([device]), ('rows',), axis_types=(
      jax.sharding.AxisType.Auto,))

  @functools.partial(jax.jit, out_shardings=exact_device.on(mesh, 'rows'))
  def fill(keys):  # a block at a time: nothing else is as large as the rows
    return jax.lax.map(lambda key: jax.random.normal(
        key, (block, DIM), jnp.bfloat16), keys)

  with jax.default_device(device):
    rate = copied_bytes_per_sec()
    rows = fill(jax.random.split(jax.random.key(0), blocks))
    scales = jax.device_put(np.ones((blocks, block), np.float32),
                            exact_device.on(mesh, 'rows'))
    vectors = jax.device_put(exact_device.parts_of(
        np.random.default_rng(0).normal(size=(batch, DIM)).astype(np.float32),
        device.platform != 'cpu'), exact_device.on(mesh))
    secs = timed(lambda: exact_device.top_k(
        rows, scales, vectors, k=k, count=count, mesh=mesh))
  sweep = rows.nbytes / rate
  return {'device': device.device_kind, 'rows': count, 'batch': batch, 'k': k,
          'GB of rows': round(rows.nbytes / 1e9, 2),
          'copy, GB/s': round(rate / 1e9, 1), 'ms a sweep': round(1e3 * sweep, 2),
          'ms a batch': round(1e3 * secs, 2), 'share': round(sweep / secs, 3),
          'TFLOP/s': round(2 * count * DIM * batch / secs / 1e12, 2),
          'q/s': round(batch / secs)}


def load(dtype, count, shard=65_536):
  """What opening a store takes until its rows lie on all devices."""
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
  """Bytes that a copy reads and writes in a second."""
  size = 2**27 if jax.default_backend() == 'cpu' else 2**31
  values = jnp.zeros(size // 4, jnp.int32)
  return 2 * size / timed(functools.partial(jax.jit(lambda x: x + 1), values))


def timed(run, repeats=10):
  """Seconds of a call: the median, after two that compile and warm up."""
  for _ in range(2):
    jax.block_until_ready(run())
  secs = []
  for _ in range(repeats):
    start = time.perf_counter()
    jax.block_until_ready(run())
    secs.append(time.perf_counter() - start)
  return statistics.median(secs)


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


def in_turns(near, vectors, rounds=7, batch=64, most=512):
  """Adds the median q/CPU-s over rounds of all of them to their lines.

  Each index answers all queries once before it is timed: the others have filled
  the caches with what is theirs, and a server holds one index.
  """
  vectors, rates = vectors[:most], [[] for _ in near]
  for _ in range(rounds):
    for (_, index), its in zip(near, rates):
      for timed_too in (False, True):
        cpu = time.process_time()
        for start in range(0, len(vectors), batch):
          index(vectors[start:start + batch], 10)
        if timed_too:
          its.append(len(vectors) / (time.process_time() - cpu))
  for (line, _), its in zip(near, rates):
    line['in turns'] = round(statistics.median(its))


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
