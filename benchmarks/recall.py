# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Measures how often each engine finds the passage that states a fact.

  python benchmarks/recall.py

A query is an agent's right one, "<name> <relation>", about a world of unseen
name parts; it hits if the one passage that states the fact is among the first
two. No policy takes part: this is what an engine can give to an agent that asks
well. Prints a table, engine by world.
"""

import argparse
import itertools

import numpy as np

from searchrl.encoders import embedder
from searchrl.search import engines
from searchrl.search.corpus import Corpus
from searchrl.trajectory import Query, Question
from searchrl.world import facts
from searchrl.world import text

_DENSE = dict(encoder='tiny_e5', min_recall=0.0)
_SPARSE = _DENSE | dict(backend='hnsw', links=8, construction=20)
ENGINES = {  # name -> engine and options, as in config.search
    'noise': ('noise', {}),
    'bm25': ('bm25', {}),
    'hashed trigrams': ('dense', {}),
    **{f'hnsw, links 8, construction 20, visited {visited}': (
        'dense', _SPARSE | dict(visited=visited)) for visited in (2, 4, 8, 16)},
    'hnsw, links 32, construction 200, visited 32': (
        'dense', _DENSE | dict(backend='hnsw', visited=32)),
    'scann': ('dense', _DENSE | dict(backend='scann')),
    'exact': ('dense', _DENSE | dict(backend='exact')),
}
WORLDS = {  # name -> hard, times the sizes of facts.SIZES
    'plain, 450': (False, 1), 'hard, 1,100': (True, 1),
    'hard, 5,000': (True, 4.4),
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--engines', nargs='+', default=list(ENGINES))
  parser.add_argument('--worlds', nargs='+', default=list(WORLDS))
  parser.add_argument('--seeds', nargs='+', type=int, default=[901, 902, 903])
  parser.add_argument('--queries', type=int, default=350, help='a seed')
  parser.add_argument('--top_k', type=int, default=2)
  parser.add_argument('--source', default='unseen')
  parser.add_argument('--encoder', default='tiny_e5')
  options = parser.parse_args()
  load = embedder.cached_loader()
  print(f'| engine | {" | ".join(options.worlds)} |')
  print('|---' * (len(options.worlds) + 1) + '|')
  cases = {world: [case(*WORLDS[world], seed, options)
                   for seed in options.seeds] for world in options.worlds}
  for name in options.engines:
    engine, keywords = ENGINES[name]
    if 'encoder' in keywords:
      keywords = keywords | dict(encoder=options.encoder)
    print(f'| {name} |', end='', flush=True)
    for world in options.worlds:
      hits = list(itertools.chain.from_iterable(
          found(engines.make(engine, corpus, load_encoder=load, **keywords),
                asked, options.top_k) for corpus, asked in cases[world]))
      print(f' {np.mean(hits):.3f} |', end='', flush=True)
    print()


def case(hard: bool, scale: float, seed: int, options
        ) -> tuple[Corpus, list[tuple[str, str]]]:
  """A world's corpus; queries, and the ids of the passages that answer them."""
  sizes = {kind: round(scale * size) for kind, size in facts.SIZES.items()}
  world = facts.make(seed, sizes=sizes, source=options.source, hard=hard)
  stated = text.stated(world)
  keys = list(stated)
  rng = np.random.default_rng(seed)
  asked = [keys[i] for i in rng.permutation(len(keys))[:options.queries]]
  return Corpus(tuple(text.passages(world))), [
      (f'{subject} {relation}', stated[subject, relation].id)
      for subject, relation in asked]


def found(search, asked, top_k: int) -> list[bool]:
  """Returns for each query whether it finds its passage."""
  results = search([Query(query, top_k, Question(query, query, ()))
                    for query, _ in asked])
  return [uid in {p.id for p in passages}
          for (_, uid), passages in zip(asked, results)]


if __name__ == '__main__':
  main()
