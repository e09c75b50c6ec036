# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""`config.search` in, a search engine with typed errors out.

The only caller of `factory.make`: training, evaluation, `ask` and the search
server all use the engines that are built here.
"""

from collections.abc import Sequence
from typing import Any

from searchrl.data import datasets
from searchrl.encoders import embedder
from searchrl.encoders import reranker
from searchrl.evaluation import suite
from searchrl.search import factory
from searchrl.search import wrapped
from searchrl.trajectory import SearchFn

_load_encoder = embedder.cached_loader()  # compiled once a process


def engine(search: Any, corpus: Any, *, seed: int) -> SearchFn:
  """The engine of a config over a corpus; its failures are SearchErrors.

  Args:
    search: config.search.
    corpus: the passages; None unless the engine `needs_corpus`.
    seed: of random passages.

  Raises:
    ValueError, FileNotFoundError: the engine cannot be built.
  """
  return wrapped.with_typed_errors(factory.make(
      search.engine, corpus, seed=seed, load_encoder=_load_encoder,
      load_judge=reranker.load, **search.options))


def needs_corpus(search: Any) -> bool:
  """Whether a corpus has to be loaded for the engine of a config."""
  return factory.needs_corpus(search.engine, search.options)


def is_remote(search: Any) -> bool:
  """Whether the engine of a config waits for a network."""
  return factory.is_remote(search.engine, search.options)


def describe(search: Any, corpus: Any) -> dict[str, Any]:
  """The record of what a run searches: digests, the recall of an index."""
  return factory.describe(search.engine, corpus, search.options,
                          load_encoder=_load_encoder)


def cases(search: Any, sets: Sequence[datasets.Dataset], *, noise: bool,
          seed: int) -> list[suite.EvalCase]:
  """Every set, greedy and sampled; the first also with random passages.

  The last shows whether answers come from retrieval: it should score about 0.
  """
  result, found = [], None
  for before, dataset in zip([None, *sets], sets):
    if found is None or dataset.corpus is not before.corpus:
      found = engine(search, dataset.corpus, seed=seed)
    result += [suite.EvalCase(dataset, search.engine, found, decoding)
               for decoding in ('greedy', 'sampled')]
  if noise and sets and sets[0].corpus is not None:
    found = wrapped.with_typed_errors(
        factory.make('noise', sets[0].corpus, seed=seed))
    result.append(suite.EvalCase(sets[0], 'noise', found, 'greedy'))
  return result
