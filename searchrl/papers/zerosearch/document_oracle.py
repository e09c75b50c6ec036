# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A writer that knows the corpus and answers with passages from it.

It needs neither a language model nor an index, and shows what a policy would
learn from a perfect simulator.
"""

import collections
import itertools

import numpy as np

from searchrl.papers.zerosearch import documents
from searchrl.search.corpus import Corpus


def oracle(corpus: Corpus, *, titled: bool = False) -> documents.Writer:
  """Returns a writer that returns passages of a corpus.

  A useful text has the passages of the longest title that occurs in the query,
  followed by randomly drawn passages with other titles. A noisy text has only
  randomly drawn passages with other titles.

  Args:
    corpus: The passages, all with titles that name their subjects.
    titled: Flag that makes the documents begin with their titles.

  Raises:
    ValueError: A passage has no title.
  """
  places = collections.defaultdict(list)  # by title
  for place, passage in enumerate(corpus):
    if not passage.title.strip():
      raise ValueError(
          "passages of search.corpus must have titles, by which the writer "
          f"'oracle' finds them, but passage {passage.id!r} has none. Add one, "
          'or choose another search.options.writer.')
    places[passage.title].append(place)
  titles = sorted(places, key=len, reverse=True)

  def write(task: documents.Task) -> str:
    rng = np.random.default_rng(task.seed)
    text = f' {task.query.text.strip()} '
    about = next((places[title] for title in titles if f' {title} ' in text),
                 [])
    first = rng.permutation(about) if task.useful else ()
    others = (i for i in rng.permutation(len(corpus)) if i not in about)
    shown = [corpus[int(place)] for place in itertools.islice(
        itertools.chain(first, others), task.query.top_k)]
    return documents.write_passages(shown, titled=titled)

  return lambda tasks: [write(task) for task in tasks]
