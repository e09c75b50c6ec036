# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Snippets: a search that shows only the first sentences of each passage.

A policy that needs more of a document opens it (the tool `open`).
"""

from collections.abc import Sequence
import dataclasses

import regex

from searchrl.trajectory import Passage, Passages, Query, SearchError, SearchFn

# Space between sentences. It may be empty after the marks of Chinese and
# Japanese, unless what is quoted ends there. (STerm: marks that end sentences,
# such as ؟ and ।; Lo: letters without case; Pi, Pf, Pe: quotes and brackets.)
_END = regex.compile(
    r'((?<=\p{STerm})\s+(?=[\p{Lu}\p{Lt}\p{Lo}\p{Nd}\p{Pi}„¿¡"\'(])|'
    r'(?<=[。！？｡])\s*(?=[^\s\p{STerm}\p{Pf}\p{Pe}"\'…、，]))')


def shown(search: SearchFn, *, sentences: int = 1) -> SearchFn:
  """Returns a search whose passages are cut to their first sentences.

  Args:
    search: Search whose results are shown.
    sentences: Number of sentences of each passage.

  Raises:
    ValueError: `sentences` is below 1.
  """
  if sentences < 1:
    raise ValueError('search.options.sentences must be at least 1, but is '
                     f'{sentences}. 1 is the usual.')

  def cut(passage: Passage) -> Passage:
    parts = _END.split(passage.text)[:2 * sentences - 1]
    return dataclasses.replace(passage, text=''.join(
        ' ' if part.isspace() else part for part in parts))

  def search_and_cut(queries: Sequence[Query]
                    ) -> list[Passages | SearchError]:
    return [result if isinstance(result, SearchError) else
            tuple(map(cut, result)) for result in search(queries)]

  return search_and_cut
