# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A writer that knows the corpus and answers with passages from it.

It needs neither a language model nor an index, and shows what a policy would
learn from a perfect simulator.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from searchrl.search.corpus import Corpus
from searchrl.search.simulated import simulated_documents


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
    self._corpus, self._titled, self._of = corpus, titled, {}
    for place in range(len(corpus)):
      title = corpus[place].title
      if not title.strip():
        raise ValueError(
            'the oracle finds passages by their titles, but passage '
            f'{corpus[place].id!r} of search.corpus has none.')
      self._of.setdefault(title, []).append(place)
    self._titles = sorted(self._of, key=len, reverse=True)

  def __call__(self, tasks: Sequence[simulated_documents.Task]) -> list[str]:
    """Returns a text for each task."""
    return [self._write(task) for task in tasks]

  def _write(self, task: simulated_documents.Task) -> str:
    rng = np.random.default_rng(task.seed)
    text = f' {task.query.text.strip()} '
    about = next((self._of[title] for title in self._titles
                  if f' {title} ' in text), [])
    count = min(task.query.top_k, len(self._corpus))
    chosen = [*map(int, rng.permutation(about)[:count])] if task.useful else []
    others = (int(i) for i in rng.permutation(len(self._corpus))
              if i not in about)
    while len(chosen) < count and (other := next(others, None)) is not None:
      chosen.append(other)
    shown = [self._corpus[place] for place in chosen]
    return simulated_documents.write(
        [(p.title if self._titled else '', p.text) for p in shown])
