# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Builds the writer of a simulated engine, and its prompts, from names."""

from collections.abc import Callable
from typing import Any

from searchrl.search.corpus import Corpus
from searchrl.search.simulated import documents
from searchrl.search.simulated import oracle

WRITERS = ('oracle', 'served', 'model')
LoadWriter = Callable[..., documents.Writer]  # (prompts=..., **options)
_PROMPTS = {'zerosearch': documents.zerosearch}


def make(name: str, corpus: Corpus | None, *, titled: bool = False,
         load_writer: LoadWriter | None = None, **options: Any
         ) -> documents.Writer:
  """Builds a writer by its name.

  Args:
    name: 'oracle', which knows the corpus, or a language model: 'served', or
      'model', in this process.
    corpus: of the oracle.
    titled: whether documents begin with titles; of a language model its
      prompts, or its tuning, must see to it.
    load_writer: loads a 'model'.
    **options: prompts ('zerosearch', or a dict of useful and noisy), and the
      others of `completions.completions` or of `load_writer`.

  Raises:
    ValueError: there is no such writer here, or an option is out of range.
    TypeError: the writer has no such option.
  """
  if name == 'oracle':
    return oracle.Oracle(corpus, titled=titled, **options)
  if name not in WRITERS:
    raise ValueError(
        f'search.options.writer must be one of {WRITERS}, but is {name!r}.')
  if name == 'model' and load_writer is None:
    raise ValueError(
        "search.options.writer may be 'model' where a policy is trained alone. "
        'Set evaluate.search.engine, or serve the model and name its url.')
  asked = prompts(options.pop('prompts', 'zerosearch'))
  if name == 'model':
    return load_writer(prompts=asked, **options)
  from searchrl.search.remote import completions  # imports urllib3
  return completions.completions(prompts=asked, **options)


def prompts(spec: Any) -> documents.Prompts:
  """The prompts of a name, or of dict(useful=..., noisy=...)."""
  if hasattr(spec, 'items'):  # a dict, or a ConfigDict
    return documents.Prompts(**dict(spec))
  if spec not in _PROMPTS:
    raise ValueError(
        f'search.options.prompts must be one of {sorted(_PROMPTS)}, or a dict '
        f'of useful and noisy, but is {spec!r}.')
  return _PROMPTS[spec]()
