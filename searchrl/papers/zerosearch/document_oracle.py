# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A writer that knows the corpus and answers with passages from it.

It needs neither a language model nor an index, and shows what a policy would
learn from a perfect simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
import itertools

import numpy as np

from searchrl.papers.zerosearch import documents
from searchrl.search.corpus import Corpus


class Oracle:
  """A writer of passages of a corpus whose titles name their subjects.

  A useful text has the passages of the longest title that occurs in the query,
  followed by randomly drawn passages with other titles. A noisy text has only
  randomly drawn passages with other titles.

  Args:
    corpus: The passages, all with titles.
    titled: Flag that makes the documents begin with their titles.

  Raises:
    ValueError: A passage has no title.
  """

  def __init__(self, corpus: Corpus, *, titled: bool = False):
    self._corpus, self._titled = corpus, titled
    self._places: dict[str, list[int]] = {}  # by title
    for place, passage in enumerate(corpus):
      if not passage.title.strip():
        raise ValueError(
            'the oracle finds passages by their titles, but passage '
            f'{passage.id!r} of search.corpus has none.')
      self._places.setdefault(passage.title, []).append(place)
    self._titles = sorted(self._places, key=len, reverse=True)

  def __call__(self, tasks: Sequence[documents.Task]) -> list[str]:
    """Returns a text for each task."""
    return [self._write(task) for task in tasks]

  def _write(self, task: documents.Task) -> str:
    rng = np.random.default_rng(task.seed)
    text = f' {task.query.text.strip()} '
    about = next((self._places[title] for title in self._titles
                  if f' {title} ' in text), [])
    first = rng.permutation(about) if task.useful else ()
    others = (i for i in rng.permutation(len(self._corpus)) if i not in about)
    shown = [self._corpus[int(place)] for place in itertools.islice(
        itertools.chain(first, others), task.query.top_k)]
    return documents.write(
        [(p.title if self._titled else '', p.text) for p in shown])
