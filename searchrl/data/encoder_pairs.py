# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Batches of queries and passages to train an encoder on.

Pairs come from numbered sources: each source is a generated world, or one pass
over a file. The negatives of a query are the other passages of its batch. Some
of them were found by BM25, and none of them answers the query. Batch n depends
only on the seed and n.
"""

import collections
from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools
import pathlib

import numpy as np

from searchrl.data import jsonl
from searchrl.search import corpus as corpora
from searchrl.search.index import bm25
from searchrl.trajectory import Passage, Query, Question
from searchrl.world import facts
from searchrl.world import text as world_text
from searchrl.world.names import NameSource


@dataclasses.dataclass(frozen=True)
class PairSource:
  """Queries and the passages that answer them, all as texts."""

  queries: Sequence[str]
  # Passages that answer each query. The first of them is its positive.
  answers: Sequence[Sequence[str]]
  # Passages that are known not to answer each query. BM25 finds more.
  negatives: Sequence[Sequence[str]]
  # Function (queries, depth) -> passages that BM25 finds, best first.
  find: Callable[[Sequence[str], int], Sequence[Sequence[str]]]

  @property
  def texts(self) -> list[str]:
    """All texts of the source, on which a tokenizer is trained."""
    return [*self.queries, *itertools.chain(*self.answers, *self.negatives)]


@dataclasses.dataclass(frozen=True)
class Batch:
  """Queries and passages of one update of the encoder, as texts.

  Each query is trained to be closer to its positive, a passage that answers it,
  than to the other passages.
  """

  queries: Sequence[str]
  passages: Sequence[str]  # positives in the queries' order, then others
  excluded: np.ndarray  # bool [queries, passages]; True: answers the query


def world_pairs(number: int, *, seed: int, count: int, fresh: float,
                hard: float = 0.0) -> PairSource:
  """Returns queries about a generated world, each with the passage for it.

  Half of the queries have the form "<name> <relation>", as an agent's queries
  do. The others are questions of one to four hops. The passage for a query is
  the one that states the fact of its first hop.

  Args:
    number: Number of the source. Its world has the seed `seed` + `number`.
    seed: Seed of the world of source 0.
    count: Number of queries.
    fresh: Probability that the names of the world are made of words never seen
      before.
    hard: Probability of a hard world, in which entities have namesakes, and
      passages use other words than queries.
  """
  rng = np.random.default_rng([seed + number, 4])
  source: NameSource = 'fresh' if rng.random() < fresh else 'known'
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
  """Loads pairs of a query and a passage that answers it from a jsonl file.

  Each line is an object with the texts "query" and "positive", which is the
  passage. It may also have "negatives", a list of passages that do not answer
  the query.

  Returns:
    A function from the number of a source to the pairs of this source. Here a
    source is one pass over the file, so that all sources have the same pairs.

  Raises:
    FileNotFoundError: There is no such file.
    ValueError: A line is not such an object, or there are fewer than two lines.
  """
  file = pathlib.Path(path)
  if not file.is_file():
    raise FileNotFoundError(
        f'data.pairs must be a jsonl file, but {path} is not a file. Correct '
        "the path, or set it to '' for generated worlds.")
  pairs = [_pair(line, place) for place, line in jsonl.lines(file)]
  if len(pairs) < 2:
    raise ValueError(f'data.pairs must hold two pairs or more, but {path} has '
                     f'{len(pairs)}.')
  queries, positives, negatives = map(list, zip(*pairs))
  positives_of = collections.defaultdict(list)
  for query, positive in zip(queries, positives):
    positives_of[query].append(positive)
  answers = [(positive, *positives_of[query])
             for query, positive in zip(queries, positives)]
  texts = dict.fromkeys([*positives, *itertools.chain(*negatives)])
  source = PairSource(queries, answers, negatives, _finder(list(texts)))
  return lambda number: source


def _finder(texts: Sequence[str]):
  """Returns the function (queries, depth) -> texts that BM25 finds, best first.

  Its index of the texts is built at the first call.
  """
  search = functools.cache(lambda: bm25.bm25(corpora.Corpus(tuple(
      Passage(str(i), '', text) for i, text in enumerate(texts)))))

  def find(queries, depth):
    results = search()([Query(text, depth, Question('', text, ()))
                        for text in queries])
    return [[texts[int(p.id)] for p in passages] for passages in results]

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
  """Returns the queries and passages on which an update trains the encoder.

  Args:
    source_of: Function number -> source. All sources have the same number of
      queries, and equal numbers give equal sources.
    step: Number of the update, from 0.
    seed: Seed of the order of queries and of the choice of negatives.
    queries: Number of queries per batch, or fewer if a source has fewer.
    hard_negatives: Maximum number of hard negatives per query: passages that
      the source lists or BM25 finds for it, but that do not answer it.
    depth: Number of BM25's best passages from which negatives are drawn.
  """
  batches = max(len(source_of(0).queries) // queries, 1)  # batches per source
  number, place = divmod(step, batches)
  source = source_of(number)
  order = np.random.default_rng([seed, number]).permutation(
      len(source.queries))
  chosen = order[place * queries:(place + 1) * queries]
  rng = np.random.default_rng([seed, number, place])
  texts = [source.queries[i] for i in chosen]
  answers = [source.answers[i] for i in chosen]
  passages = [right[0] for right in answers]
  if hard_negatives:
    for i, results in zip(chosen, source.find(texts, depth)):
      passages += _hard(source.negatives[i], results, source.answers[i],
                        hard_negatives, rng)
  excluded = np.array([[t in right for t in passages] for right in answers])
  return Batch(texts, passages, excluded)


def _hard(given: Sequence[str], results: Sequence[str], answers: Sequence[str],
          count: int, rng: np.random.Generator) -> list[str]:
  """Returns up to `count` random passages that do not answer a query.

  They are drawn from the `given` ones and, if these are too few, from the
  `results` of BM25.
  """
  given = [text for text in dict.fromkeys(given) if text not in answers]
  others = [text for text in results if text not in (*answers, *given)]
  negatives: list[str] = []
  for texts in (given, others):
    drawn = rng.permutation(len(texts))[:count - len(negatives)]
    negatives += [texts[i] for i in drawn]
  return negatives
