# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Random passages as search results: a baseline without useful search."""

import dataclasses
import hashlib
import json

import numpy as np

from searchrl.search.corpus import Corpus
from searchrl.trajectory import Passages, Query, SearchFn


def random_passages(corpus: Corpus, *, seed: int) -> SearchFn:
  """Returns a search that draws passages uniformly, without replacement.

  Every score is 0. The passages of a query depend on the seed, the question's
  uid, the query's text and top_k, but not on the other queries of the call. A
  blank query finds nothing.
  """

  def answer(query: Query) -> Passages:
    if not query.text.strip():
      return ()
    name = json.dumps([seed, query.question.uid, query.text]).encode()
    rng = np.random.default_rng(
        int.from_bytes(hashlib.sha256(name).digest(), 'big'))
    drawn = rng.choice(
        len(corpus), min(query.top_k, len(corpus)), replace=False)
    return tuple(dataclasses.replace(corpus[i], score=0.0) for i in drawn)

  return lambda queries: [answer(query) for query in queries]
