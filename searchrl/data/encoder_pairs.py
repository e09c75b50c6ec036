# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Batches of queries and passages to train an encoder on.

Pairs come from numbered sources: each is a generated world, or all of a file
once more. The negatives of a query are the other passages of its batch, some of
them found for it by BM25; none of them answers it. Batch n follows from the
seed and n alone.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import pathlib

import numpy as np

from searchrl.data import jsonl
from searchrl.search import corpus as corpora
from searchrl.search.index import bm25
from searchrl.trajectory import Passage, Query, Question
from searchrl.world import facts
from searchrl.world import text as world_text


@dataclasses.dataclass(frozen=True)
class PairSource:
  """Queries, and the passages that answer them, all of them texts.

  Attributes:
    queries: the texts of the queries.
    answers: of each query; the first is its positive.
    negatives: of each query, if known; BM25 adds more.
    find: (queries, depth) -> the passages that BM25 finds, best first.
  """

  queries: Sequence[str]
  answers: Sequence[Sequence[str]]
  negatives: Sequence[Sequence[str]]
  find: Callable[[Sequence[str], int], Sequence[Sequence[str]]]

  @property
  def texts(self) -> list[str]:
    """All of its texts, for a tokenizer to be trained on."""
    return [*self.queries, *(t for texts in self.answers for t in texts),
            *(t for texts in self.negatives for t in texts)]


@dataclasses.dataclass(frozen=True)
class Batch:
  """Texts of one update; see `contrastive.info_nce`."""

  queries: Sequence[str]
  passages: Sequence[str]  # the positives in the queries' order, then others
  excluded: np.ndarray  # bool [queries, passages]


def world_pairs(number: int, *, seed: int, count: int, fresh: float,
                hard: float = 0.0) -> PairSource:
  """Queries about a generated world, each answered by one passage.

  Half are an agent's, "<name> <relation>". The others are questions of one or
  more hops. Their passage is the one that states the first hop.

  Args:
    number: of the source, which is about world seed + number.
    seed: of the first world.
    count: queries.
    fresh: share of worlds whose names are made of words never seen before.
    hard: share of hard worlds; see `facts.make`.
  """
  rng = np.random.default_rng([seed + number, 4])
  source = 'fresh' if rng.random() < fresh else 'known'
  is_hard = np.random.default_rng([seed + number, 7]).random() < hard
  world = facts.make(seed + number, source=source, hard=bool(is_hard))
  stated = world_text.stated(world)
  chains = {hops: facts.chains(world, hops, rng) for hops in (1, 2, 3, 4)}
  queries, answers = [], []
  for _ in range(count):
    hops = int(rng.choice([1, 2, 3, 4], p=[.79, .11, .06, .04]))
    chain = next(chains[hops])
    if hops == 1 and rng.random() < .63:
      query = f'{chain.start} {chain.relations[0]}'
    else:
      query = world_text.ask(chain, rng)
    queries.append(query)
    answers.append((corpora.text_of(stated[chain.facts[0]]),))
  return PairSource(queries, answers, [()] * count, _finder(
      list(map(corpora.text_of, world_text.passages(world)))))


def file_pairs(path: str) -> Callable[[int], PairSource]:
  """The pairs of a jsonl file, {"query", "positive", "negatives"?} a line.

  Returns:
    number -> the pairs; they are the same for each number.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: a line is no such object, or there are fewer than two.
  """
  file = pathlib.Path(path)
  if not file.is_file():
    raise FileNotFoundError(f'data.pairs must be a jsonl file, but {path} is '
                            "none. Correct the path, or set it to '' for "
                            'generated worlds.')
  queries, positives, negatives = [], [], []
  for place, line in jsonl.lines(file):
    query, positive, others = _pair(line, place)
    queries.append(query)
    positives.append(positive)
    negatives.append(others)
  if len(queries) < 2:
    raise ValueError(f'data.pairs must hold two pairs or more, but {path} has '
                     f'{len(queries)}.')
  answering = {}
  for query, positive in zip(queries, positives):
    answering.setdefault(query, []).append(positive)
  answers = [(positive, *answering[query])
             for query, positive in zip(queries, positives)]
  every = dict.fromkeys([*positives, *(t for ts in negatives for t in ts)])
  source = PairSource(queries, answers, negatives, _finder(list(every)))
  return lambda number: source


def _finder(texts: Sequence[str]):
  """BM25 over texts; its index is built when it is first needed."""
  search = functools.cache(lambda: bm25.bm25(corpora.Corpus(tuple(
      Passage(str(i), '', text) for i, text in enumerate(texts)))))

  def find(queries, depth):
    found = search()([Query(text, depth, Question('', text, ()))
                      for text in queries])
    return [[texts[int(p.id)] for p in passages] for passages in found]

  return find


def _pair(line: str, place: str) -> tuple[str, str, tuple[str, ...]]:
  record = jsonl.loads(line, 'a JSON object', place)
  match record:
    case {'query': str(query), 'positive': str(positive)} if (
        query.strip() and positive.strip()):
      others = record.get('negatives', [])
      if isinstance(others, list) and all(isinstance(x, str) for x in others):
        return query, positive, tuple(others)
  raise ValueError(
      'a pair must have "query" and "positive", texts that are not blank, and '
      'may have "negatives", a list of texts, but '
      f'{place} holds {str(record)[:80]}.')


def batch(source_of: Callable[[int], PairSource], step: int, *, seed: int,
          queries: int, hard_negatives: int, depth: int) -> Batch:
  """The batch of an update.

  Args:
    source_of: number -> a source; all have the same number of queries, and
      equal numbers give equal sources.
    step: of the update, from 0.
    seed: of the order of queries and of the choice of negatives.
    queries: of a batch; fewer, if a source has fewer.
    hard_negatives: a query, at most.
    depth: how many of BM25's best passages they are drawn from.
  """
  batches = max(len(source_of(0).queries) // queries, 1)  # a source
  number, place = divmod(step, batches)
  source = source_of(number)
  order = np.random.default_rng([seed, number]).permutation(
      len(source.queries))
  chosen = order[place * queries:(place + 1) * queries]
  rng = np.random.default_rng([seed, number, place])
  texts = [source.queries[i] for i in chosen]
  answers = [source.answers[i] for i in chosen]
  hard = [()] * len(texts)
  if hard_negatives:
    hard = [_hard(source.negatives[i], found, source.answers[i],
                  hard_negatives, rng)
            for i, found in zip(chosen, source.find(texts, depth))]
  passages = [right[0] for right in answers] + [t for ts in hard for t in ts]
  excluded = np.array([[t in right for t in passages] for right in answers])
  return Batch(texts, passages, excluded)


def _hard(given: Sequence[str], found: Sequence[str], answers: Sequence[str],
          count: int, rng) -> list[str]:
  """Negatives of a query: those given first, then some that BM25 found."""
  given = [text for text in dict.fromkeys(given) if text not in answers]
  found = [text for text in found if text not in (*answers, *given)]
  draw = lambda texts, n: [texts[i] for i in rng.permutation(len(texts))[:n]]
  first = draw(given, count)
  return first + draw(found, count - len(first))
