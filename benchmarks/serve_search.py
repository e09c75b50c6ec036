# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""The search server under load, over a generated corpus, as a table.

  python benchmarks/serve_search.py --out benchmarks/serve_search.jsonl

The server is the job of configs/serve_search.py in a process of its own, BM25
over passages of Zipf words; the client is this process. The ways to query it:

  single     threads that send one query a request, over the library's client
  turn       one call of as many queries as threads, as a rollout makes it
  bare       threads that post prepared bytes over http.client, so that the
             client costs little

and, for scale, the same queries to the same engine in this process.

  python benchmarks/serve_search.py --alone

measures the server alone, over engines that do nothing: the cost of a request
of one and of 256 queries, and 256 clients at once over an engine that takes
20 ms and 0.2 ms a query, with calls put together and one by one.
"""

import argparse
from collections.abc import Callable, Iterator
from concurrent import futures
import contextlib
import dataclasses
import http.client
import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# pylint: disable=g-import-not-at-top
from searchrl.runtime import workdir
from searchrl.search import corpus as corpora
from searchrl.search.index import bm25
from searchrl.search.remote import remote
from searchrl.search.remote import wire
from searchrl.serving import asgi
from searchrl.serving import search_server
from searchrl.trajectory import Passage, Query, Question, SearchError

NOBODY = Question('', '', ())
COLUMNS = ('way', 'concurrency', 'requests', 'queries/s', 'p50 ms', 'p95 ms',
           'server CPU ms a query', 'server CPU ms a request', 'seconds',
           'failed')


@dataclasses.dataclass
class Measured:
  """Requests of one way."""

  way: str
  concurrency: int
  latencies: list[float]  # seconds
  queries: int
  failed: int
  wall_secs: float
  server_cpu_secs: float

  def row(self) -> dict[str, object]:
    p50, p95 = 1000 * np.percentile(self.latencies, [50, 95])
    return dict(zip(COLUMNS, (
        self.way, self.concurrency, len(self.latencies),
        round(self.queries / self.wall_secs), round(p50, 1), round(p95, 1),
        round(1000 * self.server_cpu_secs / self.queries, 3),
        round(1000 * self.server_cpu_secs / len(self.latencies), 3),
        round(self.wall_secs, 2), self.failed)))


def words(rng, count: int, size: int = 20_000) -> list[str]:
  """Made-up words, the frequent ones far more frequent."""
  return [f'w{i}x' for i in np.minimum(rng.zipf(1.2, count), size)]


def generate(options) -> tuple[corpora.Corpus, list[str]]:
  rng = np.random.default_rng(options.seed)
  passages = tuple(Passage(f'{i}', f'Passage {i}', ' '.join(words(rng, 80)))
                   for i in range(options.passages))
  queries = [' '.join(words(rng, 8)) for _ in range(options.queries)]
  return corpora.Corpus(passages), queries


@contextlib.contextmanager
def server(corpus: pathlib.Path, folder: pathlib.Path):
  """The job in a process of its own; yields its address and process id."""
  command = [
      sys.executable, '-m', 'searchrl.main', '--config=configs/serve_search.py',
      f'--config.search.corpus={corpus}', '--config.serve.port=0',
      f'--workdir={folder}']
  variables = os.environ | {'JAX_PLATFORMS': 'cpu', 'OMP_NUM_THREADS': '1'}
  with subprocess.Popen(command, cwd=ROOT, text=True, env=variables,
                        stderr=subprocess.PIPE) as process:
    try:
      line = ''
      while 'Serving' not in line:
        line = process.stderr.readline()
        if not line:
          raise RuntimeError(f'the server ended with {process.wait()}.')
      yield line.partition(' at ')[2].partition(';')[0], process.pid
    finally:
      process.terminate()


@contextlib.contextmanager
def alone(call_secs: float = 0, query_secs: float = 0, **options):
  """A server of three passages to any query; as `server`."""
  context = multiprocessing.get_context('spawn')
  receiver, sender = context.Pipe()
  process = context.Process(target=serve_alone, daemon=True, args=(
      sender, call_secs, query_secs, options))
  process.start()
  try:
    yield receiver.recv(), process.pid
  finally:
    process.terminate()
    process.join()


def serve_alone(sender, call_secs, query_secs, options):
  """Serves until it is terminated; sends its address first."""
  found = tuple(Passage(f'{i}', f'Passage {i}', 'a word ' * 60, 1 / (i + 1))
                for i in range(3))

  def search(queries):
    if call_secs:
      time.sleep(call_secs + query_secs * len(queries))
    return [found] * len(queries)

  server = search_server.Server(search, search_server.Options(
      asgi.HttpOptions(port=0), **options))
  server.start()
  sender.send(f'{server.address}/retrieve')
  threading.Event().wait()


def cpu_secs(pid: int) -> float:
  """User and system time of a process; on Linux alone."""
  fields = pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2]
  user, system = fields.split()[11:13]
  return (int(user) + int(system)) / os.sysconf('SC_CLK_TCK')


def measure(way: str, one: Callable[[list[str]], int],
            requests: list[list[str]], concurrency: int, pid: int) -> Measured:
  """Makes all requests, `concurrency` at a time; `one` returns the failures."""
  latencies, failed = [], 0

  def timed(texts):
    start = time.perf_counter()
    return one(texts), time.perf_counter() - start

  with futures.ThreadPoolExecutor(concurrency) as pool:
    list(pool.map(timed, requests[:concurrency]))  # connections
    cpu, start = cpu_secs(pid), time.perf_counter()
    for bad, secs in pool.map(timed, requests):
      latencies.append(secs)
      failed += bad
    wall = time.perf_counter() - start
  return Measured(way, concurrency, latencies, sum(map(len, requests)), failed,
                  wall, cpu_secs(pid) - cpu)


def over_the_client(url: str, top_k: int) -> Callable[[list[str]], int]:
  search = remote.remote(urls=(url,), tries=1)

  def one(texts):
    found = search([Query(text, top_k, NOBODY) for text in texts])
    return sum(isinstance(result, SearchError) for result in found)

  return one


def over_bare_http(url: str, top_k: int) -> Callable[[list[str]], int]:
  parts, thread = urllib.parse.urlsplit(url), threading.local()

  def one(texts):
    if not hasattr(thread, 'connection'):
      thread.connection = http.client.HTTPConnection(parts.netloc, timeout=60)
    thread.connection.request(
        'POST', parts.path, wire.write_request(texts, top_k))
    response = thread.connection.getresponse()
    response.read()
    return 0 if response.status == 200 else len(texts)

  return one


def in_process(corpus: corpora.Corpus, queries: list[str], top_k: int
              ) -> dict[str, object]:
  """The engine without a server; CPU seconds of this process."""
  search = bm25.bm25(corpus)
  start, cpu = time.perf_counter(), time.process_time()
  search([Query(text, top_k, NOBODY) for text in queries])
  wall, cpu = time.perf_counter() - start, time.process_time() - cpu
  return {'way': 'in process', 'queries/s': round(len(queries) / wall),
          'server CPU ms a query': round(1000 * cpu / len(queries), 3)}


def over_nothing() -> Iterator[dict[str, object]]:
  """The server's own cost, and what putting calls together saves."""
  one, many = ['who built the mill?'], [f'question {i}' for i in range(256)]
  with alone() as (url, pid):
    for concurrency in (1, 16, 64):
      yield measure('alone, 1 query', over_bare_http(url, 3), [one] * 3000,
                    concurrency, pid).row()
    yield measure('alone, 256 queries', over_bare_http(url, 3), [many] * 100, 1,
                  pid).row()
  for way, options in (('20 + 0.2 ms, together', {}),
                       ('20 + 0.2 ms, one by one', dict(batch_queries=1))):
    with alone(.02, .0002, **options) as (url, pid):
      yield measure(way, over_bare_http(url, 3), [[text] for text in many], 256,
                    pid).row()


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--passages', type=int, default=20_000)
  parser.add_argument('--queries', type=int, default=6400)
  parser.add_argument('--concurrency', type=int, nargs='+', default=[64])
  parser.add_argument('--top_k', type=int, default=3)
  parser.add_argument('--repeats', type=int, default=3)
  parser.add_argument('--alone', action='store_true')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--out', type=pathlib.Path)
  options = parser.parse_args()
  if options.alone:
    report([row for _ in range(options.repeats) for row in over_nothing()],
           options)
    return
  corpus, queries = generate(options)
  rows = []
  with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    corpora.write(folder / 'corpus.jsonl', corpus)
    with server(folder / 'corpus.jsonl', folder / 'run') as (url, pid):
      client, bare = (over_the_client(url, options.top_k),
                      over_bare_http(url, options.top_k))
      for _ in range(options.repeats):
        for n in options.concurrency:
          singles = [[text] for text in queries]
          turns = [queries[i:i + n] for i in range(0, len(queries), n)]
          for way, one, requests, threads in (
              ('single', client, singles, n), ('bare', bare, singles, n),
              ('turn', client, turns, 1)):
            rows.append(measure(way, one, requests, threads, pid).row())
  for _ in range(options.repeats):
    rows.append(in_process(corpus, queries, options.top_k))
  report(rows, options)


def report(rows, options) -> None:
  """Prints a table, and appends records to --out."""
  found = workdir.environment()
  print(f'python benchmarks/serve_search.py {" ".join(sys.argv[1:])}, '
        f'{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end, '
        f'revision {found["git"]}\n')
  print('| ' + ' | '.join(COLUMNS) + ' |\n|' + '---|' * len(COLUMNS))
  for row in rows:
    print('| ' + ' | '.join(str(row.get(c, '')) for c in COLUMNS) + ' |')
  if options.out:
    with options.out.open('a', encoding='utf-8') as file:
      for row in rows:
        file.write(json.dumps(row | vars(options) | found, default=str) + '\n')


if __name__ == '__main__':
  main()
