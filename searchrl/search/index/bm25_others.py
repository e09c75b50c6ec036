# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""BM25 of other libraries, bm25s and Lucene, as SearchFns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import importlib
import pathlib
from typing import Any

from searchrl.search.corpus import Corpus
from searchrl.search.index import bm25
from searchrl.trajectory import Passage, Passages, Query, SearchFn


def bm25s(corpus: Corpus, *, k1: float = 0.9, b: float = 0.4) -> SearchFn:
  """A search by bm25s, with our `bm25.analyze` for passages and queries.

  Its lengths are exact, where Lucene's and ours are rounded to a byte: scores
  of long passages differ a little.

  Raises:
    ValueError: k1 or b is out of range.
    ImportError: the package is missing.
  """
  bm25.check(k1, b)
  library = _import('bm25s', 'bm25s')
  index = library.BM25(k1=k1, b=b, method='lucene')
  terms = [bm25.analyze(text) for text in corpus.texts]
  known = {term for row in terms for term in row}
  if known:  # without a term the library fails
    index.index(terms, show_progress=False)

  def answer(query: Query) -> Passages:
    words = [term for term in bm25.analyze(query.text) if term in known]
    if not words or query.top_k < 1:
      return ()
    scores = index.get_scores(words)
    return tuple(dataclasses.replace(corpus[i], score=float(scores[i]))
                 for i in bm25.top(scores, query.top_k))

  return lambda queries: [answer(query) for query in queries]


def lucene(corpus: Corpus, *, index: str, k1: float = 0.9, b: float = 0.4,
           threads: int = 4) -> SearchFn:
  """A search by a Lucene index that pyserini has built of the corpus.

  Args:
    corpus: has the passages whose ids the index returns.
    index: the folder of the index.
    k1: how slowly repeated terms saturate.
    b: how much the length counts.
    threads: per call.

  Raises:
    FileNotFoundError: there is no such folder.
    ValueError: index and corpus differ in their number of passages.
    ImportError: the package pyserini, which needs Java, is missing.
  """
  if not pathlib.Path(index).is_dir():
    raise FileNotFoundError(
        f'search.options.index must be a folder of Lucene, but there is none '
        f'at {index}. Check the path.')
  searcher = _import('pyserini.search.lucene', 'lucene').LuceneSearcher(index)
  if searcher.num_docs != len(corpus):
    raise ValueError(
        'index and corpus must belong together, but they have '
        f'{searcher.num_docs} and {len(corpus)} passages. Give the corpus that '
        'the index was built from.')
  searcher.set_bm25(k1, b)
  passage = _passage_of(corpus)

  def search(queries: Sequence[Query]) -> list[Passages]:
    names = {f'{i}': q for i, q in enumerate(queries)
             if q.text.strip() and q.top_k > 0}
    if not names:
      return [()] * len(queries)
    most = max(q.top_k for q in names.values())
    hits = searcher.batch_search(
        [q.text for q in names.values()], list(names), k=most, threads=threads)
    return [tuple(map(passage, hits.get(f'{i}', ())[:q.top_k]))
            if f'{i}' in names else () for i, q in enumerate(queries)]

  return search


def _passage_of(corpus: Corpus) -> Callable[[Any], Passage]:
  """A function from one of Lucene's hits to its passage, with its score."""
  positions = {} if corpus.ids_are_positions else {
      passage.id: i for i, passage in enumerate(corpus)}

  def passage(hit: Any) -> Passage:
    uid = str(hit.docid)
    i = positions.get(uid) if positions else int(uid)
    if i is None or not 0 <= i < len(corpus):
      raise ValueError(f'the index returned passage {uid!r}, which the corpus '
                       'does not have. Give the corpus that it was built from.')
    return dataclasses.replace(corpus[i], score=float(hit.score))

  return passage


def _import(module: str, extra: str) -> Any:
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise ImportError(
        f"search.engine={extra!r} needs {module.partition('.')[0]}, which "
        f"cannot be imported: {error}. Install it: pip install "
        f"'searchrl[{extra}]'.") from error
