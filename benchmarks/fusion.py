# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Hit rates and speed of BM25, dense search and their fusion.

  python benchmarks/fusion.py --corpus runs/debian/corpus.jsonl \
      --questions runs/debian/questions.jsonl --index runs/debian/index

A hit is a passage whose title is a golden answer; see benchmarks/debian.py. The
speed is in queries per CPU-second of this process, 64 per call, with the
encoder's work and one worker of BM25. BM25 alone is also measured over --copies
of the postings, each impact changed a little, so that words keep their shares
of passages; beside it, in turns, the summing up of every posting of a query.

  python benchmarks/fusion.py ... --copies 1 17 --workers 2

also measures, in queries a second of turns of 2,560 and in turns, BM25 with one
worker and with more, on as many quiet cores, and that they find the same.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]
# pylint: disable=g-import-not-at-top
import bm25_oracle
from searchrl.encoders import embedder
from searchrl.evaluation import figures
from searchrl.runtime import workdir
from searchrl.search import engines
from searchrl.search.index import bm25
from searchrl.search.index import maxscore
from searchrl.search import mapped_corpus
from searchrl.trajectory import Query, Question

COLUMNS = ('engine', 'passages', 'hit@1', 'hit@3', 'hit@10', 'q/CPU-s')


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--corpus', required=True)
  parser.add_argument('--questions', required=True)
  parser.add_argument('--index', default='', help='of vectors; else BM25 alone')
  parser.add_argument('--backends', nargs='+', default=['exact'])
  parser.add_argument('--k', type=float, nargs='+', default=[5.0],
                      help='of fusion')
  parser.add_argument('--copies', type=int, nargs='*', default=[])
  parser.add_argument('--workers', type=int, nargs='*', default=[])
  parser.add_argument('--count', type=int, default=1000, help='questions')
  parser.add_argument('--seed', type=int, default=0, help='draws the questions')
  parser.add_argument('--out', type=pathlib.Path, help='jsonl, appended to')
  options = parser.parse_args()
  corpus = mapped_corpus.load(options.corpus)
  asked = read(options)
  lines, load_encoder = [], embedder.cached_loader()
  for name, spec in specs(options):
    search = engines.make(spec.pop('name'), corpus,
                          load_encoder=load_encoder, **spec)
    lines.append(measure(name, search, asked, len(corpus)))
    print(lines[-1], file=sys.stderr, flush=True)
  print(figures.table(lines, COLUMNS))
  texts, postings, parallel = [text for text, _ in asked], [], []
  for copies in options.copies:
    index = copied(corpus, copies)
    postings.append(both(index, texts))
    parallel += [by_workers(corpus, index, texts, n) for n in options.workers]
  for table in filter(None, (postings, parallel)):
    print(figures.table(table, tuple(table[0])))
  if options.out:
    with options.out.open('a', encoding='utf-8') as file:
      file.write(json.dumps(dict(
          options=vars(options), lines=lines, postings=postings,
          parallel=parallel,
          load=os.getloadavg()[0], environment=workdir.environment()),
                            default=str) + '\n')


def read(options):
  """Questions and the titles that answer them."""
  with open(options.questions, encoding='utf-8') as file:
    found = [json.loads(line) for line in file]
  drawn = np.random.default_rng(options.seed).permutation(len(found))
  return [(found[i]['question'], frozenset(found[i]['golden_answers']))
          for i in drawn[:options.count]]


def specs(options):
  """Names to show, and engines as dict(name=..., **options)."""
  yield 'bm25', dict(name='bm25', workers=1)
  for backend in options.backends if options.index else ():
    dense = dict(name='dense', index=options.index, backend=backend)
    yield f'dense, {backend}', dict(dense)
    for k in options.k:
      yield f'fusion, {backend}, k={k:g}', dict(name='fusion', k=k, engines=(
          dict(name='bm25', workers=1), dense))


def copied(corpus, copies):
  """An index of copies of the postings, each impact up to 10 % less."""
  one = bm25.build(corpus.texts)
  if copies == 1:
    return one
  spans = list(zip(one.starts, one.starts[1:]))
  first = len(corpus) * np.arange(copies, dtype=np.int32)[:, None]
  passages = np.concatenate(
      [(one.postings.passages[a:b] + first).ravel() for a, b in spans])
  impacts = np.concatenate(
      [np.tile(one.postings.impacts[a:b], copies) for a, b in spans])
  impacts *= np.random.default_rng(0).uniform(.9, 1, len(impacts)).astype('f4')
  return bm25.Index(one.terms, one.starts * copies, maxscore.Postings(
      passages, impacts, one.postings.size * copies))


def both(index, texts, k=3, rounds=5):
  """A line that compares `best` with the sum over every posting."""
  ways = {'best': lambda text: index.postings.best(index.spans(text), k),
          'all': lambda text: bm25_oracle.top(
              bm25_oracle.all_scores(index, text), k)}
  for text in texts:
    assert ways['best'](text)[0].tolist() == ways['all'](text).tolist(), text
  taken = {name: [] for name in ways}
  for _ in range(rounds):
    for name, way in ways.items():
      start = time.process_time()
      for text in texts:
        way(text)
      taken[name].append(1e6 * (time.process_time() - start) / len(texts))
  best, every = (statistics.median(taken[name]) for name in ('best', 'all'))
  return {'passages': index.postings.size, 'q/CPU-s': round(1e6 / best),
          'fastest round': round(1e6 / min(taken['best'])),
          'every posting, q/CPU-s': round(1e6 / every),
          'ratio': round(every / best, 2)}


class Folded:
  """A corpus for an index of copies of it."""

  def __init__(self, corpus):
    self._corpus = corpus

  def __getitem__(self, i):
    return self._corpus[i % len(self._corpus)]


def by_workers(corpus, index, texts, workers, turn=2560, rounds=5):
  """A line that compares one worker with several, over the same queries."""
  queries = [Query(texts[i % len(texts)], 3, Question('', '', ()))
             for i in range(turn)]
  searches = {n: bm25.searcher(Folded(corpus), index, workers=n)
              for n in (1, workers)}
  taken = {n: [] for n in searches}
  found = {n: search(queries) for n, search in searches.items()}
  time.sleep(5)  # its workers have started by then
  for _ in range(rounds):
    for n, search in searches.items():
      start = time.perf_counter()
      found[n] = search(queries)
      taken[n].append(time.perf_counter() - start)
  assert found[1] == found[workers]
  one, more = (statistics.median(taken[n]) for n in (1, workers))
  return {'passages': index.postings.size, 'workers': workers,
          'one, q/s': round(turn / one), 'q/s': round(turn / more),
          'ratio': round(one / more, 2), 'same results': True}


def measure(name, search, asked, passages, batch=64):
  """A line of the table; the speed is the median of three rounds of top 3."""
  find = lambda k, part: search([Query(text, k, Question('', '', ()))
                                 for text, _ in part])
  batches = [asked[i:i + batch] for i in range(0, len(asked), batch)]
  ranks = []
  for part in batches:
    for (_, answers), found in zip(part, find(10, part), strict=True):
      hits = [n for n, p in enumerate(found) if p.title in answers]
      ranks.append(hits[0] if hits else 10)
  rates = []
  for _ in range(3):
    start = time.process_time()
    for part in batches:
      find(3, part)
    rates.append(len(asked) / (time.process_time() - start))
  share = lambda k: round(float(np.mean(np.array(ranks) < k)), 3)
  return dict(zip(COLUMNS, (name, passages, share(1), share(3), share(10),
                            round(statistics.median(rates))), strict=True))


if __name__ == '__main__':
  main()
