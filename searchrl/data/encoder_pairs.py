# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Generated worlds or a file in, batches of queries and passages out.

Queries come in books: a generated world each, or all of a file once more. The
other passages of a batch are negatives of a query, and so are some that BM25
finds for it and that do not answer it. Batch n follows from the seed and n
alone.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import json
import pathlib

import numpy as np

from searchrl.search import corpus as corpora
from searchrl.search.index import bm25
from searchrl.trajectory import Passage, Query, Question
from searchrl.world import facts
from searchrl.world import text as world_text


@dataclasses.dataclass(frozen=True)
class Book:
  """Queries, and the passages that answer them, all of them texts.

  Attributes:
    queries: what is asked.
    answers: of each query; the first is its positive.
    negatives: of each query, if known; BM25 adds more.
    find: texts and a number to the passages that BM25 finds, best first.
  """

  queries: Sequence[str]
  answers: Sequence[Sequence[str]]
  negatives: Sequence[Sequence[str]]
  find: Callable[[Sequence[str], int], Sequence[Sequence[str]]]

  @property
  def texts(self) -> list[str]:
    """All that it says, for a tokenizer to learn from."""
    return [*self.queries, *(t for its in self.answers for t in its),
            *(t for its in self.negatives for t in its)]


@dataclasses.dataclass(frozen=True)
class Batch:
  """Texts of one update; see `contrastive.info_nce`."""

  queries: Sequence[str]
  passages: Sequence[str]  # the positives in the queries' order, then others
  excluded: np.ndarray  # bool [queries, passages]


def world_book(number: int, *, seed: int, count: int, fresh: float) -> Book:
  """Queries about a generated world, each answered by one passage.

  Half are an agent's, "<name> <relation>"; the others questions of one hop, or
  of more, whose first fact is looked for.

  Args:
    number: of the book; it takes world seed + number.
    seed: of the first world.
    count: queries.
    fresh: share of worlds whose names are made of words never seen before.
  """
  rng = np.random.default_rng([seed + number, 4])
  source = 'fresh' if rng.random() < fresh else 'known'
  world = facts.make(seed + number, source=source)
  passages = world_text.passages(world)
  about = {p.title: corpora.text_of(p) for p in passages}
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
    answers.append((about[chain.start],))
  return Book(queries, answers, [()] * count, _finder(list(about.values())))


def own_book(path: str) -> Callable[[int], Book]:
  """The pairs of a jsonl file, {"query", "positive", "negatives"?} a line.

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
  with file.open(encoding='utf-8') as lines:
    for number, line in enumerate(lines, 1):
      if line.strip():
        query, positive, others = _pair(line, f'{path}:{number}')
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
  book = Book(queries, answers, negatives, _finder(list(every)))
  return lambda number: book


def _finder(texts: Sequence[str]):
  """BM25 over texts; it is built when it is first needed."""
  search = functools.cache(lambda: bm25.bm25(corpora.Corpus(tuple(
      Passage(str(i), '', text) for i, text in enumerate(texts)))))

  def find(queries, depth):
    found = search()([Query(text, depth, Question('', text, ()))
                      for text in queries])
    return [[texts[int(p.id)] for p in passages] for passages in found]

  return find


def _pair(line: str, place: str) -> tuple[str, str, tuple[str, ...]]:
  try:
    record = json.loads(line)
  except ValueError as error:
    raise ValueError(f'a line must be a JSON object, but {place} is not: '
                     f'{error}.') from error
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


def batch(book_of: Callable[[int], Book], step: int, *, seed: int,
          queries: int, hard_negatives: int, depth: int) -> Batch:
  """The batch of an update.

  Args:
    book_of: number of a book -> Book; equal numbers, equal books of equal size.
    step: of the update, from 0.
    seed: of the order of queries and of the choice of negatives.
    queries: of a batch; fewer, if a book has fewer.
    hard_negatives: a query, at most.
    depth: of BM25's best passages, from which they are drawn.
  """
  a_book = max(len(book_of(0).queries) // queries, 1)
  number, place = divmod(step, a_book)
  book = book_of(number)
  order = np.random.default_rng([seed, number]).permutation(len(book.queries))
  chosen = order[place * queries:(place + 1) * queries]
  rng = np.random.default_rng([seed, number, place])
  asked = [book.queries[i] for i in chosen]
  answers = [book.answers[i] for i in chosen]
  hard = [()] * len(asked)
  if hard_negatives:
    hard = [_hard(book.negatives[i], found, book.answers[i], hard_negatives,
                  rng) for i, found in zip(chosen, book.find(asked, depth))]
  passages = [its[0] for its in answers] + [t for its in hard for t in its]
  excluded = np.array([[text in its for text in passages] for its in answers])
  return Batch(asked, passages, excluded)


def _hard(given: Sequence[str], found: Sequence[str], answers: Sequence[str],
          count: int, rng) -> list[str]:
  """Negatives of a query: those given first, then some that BM25 found."""
  given = [text for text in dict.fromkeys(given) if text not in answers]
  found = [text for text in found if text not in (*answers, *given)]
  draw = lambda texts, n: [texts[i] for i in rng.permutation(len(texts))[:n]]
  first = draw(given, count)
  return first + draw(found, count - len(first))
