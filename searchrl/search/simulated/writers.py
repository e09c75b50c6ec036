# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Builds the writer of a simulated engine, and its prompts, from names."""

from typing import Any

from searchrl.search.corpus import Corpus
from searchrl.search.simulated import documents
from searchrl.search.simulated import oracle

WRITERS = ('oracle', 'served')
_PROMPTS = {'zerosearch': documents.zerosearch}


def make(name: str, corpus: Corpus | None, **options: Any) -> documents.Writer:
  """Builds a writer by its name.

  Args:
    name: 'oracle', which knows the corpus, or 'served', a language model.
    corpus: of the oracle.
    **options: of 'served': prompts ('zerosearch', or a dict of useful and
      noisy), and the others of `completions.completions`.

  Raises:
    ValueError: there is no such writer, or an option is out of range.
    TypeError: the writer has no such option.
  """
  if name == 'oracle':
    return oracle.Oracle(corpus, **options)
  if name == 'served':
    from searchrl.search.remote import completions  # imports urllib3
    return completions.completions(
        prompts=_prompts(options.pop('prompts', 'zerosearch')), **options)
  raise ValueError(
      f'search.options.writer must be one of {WRITERS}, but is {name!r}.')


def _prompts(spec: Any) -> documents.Prompts:
  """The prompts of a name, or of dict(useful=..., noisy=...)."""
  if hasattr(spec, 'items'):  # a dict, or a ConfigDict
    return documents.Prompts(**dict(spec))
  if spec not in _PROMPTS:
    raise ValueError(
        f'search.options.prompts must be one of {sorted(_PROMPTS)}, or a dict '
        f'of useful and noisy, but is {spec!r}.')
  return _PROMPTS[spec]()
