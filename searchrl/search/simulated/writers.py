# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Builds the writer of a simulated engine and its prompts from their names."""

from collections.abc import Callable
from typing import Any

from searchrl.search.corpus import Corpus
from searchrl.search.simulated import simulation_examples
from searchrl.search.simulated import simulated_documents
from searchrl.search.simulated import document_oracle

WRITERS = ('oracle', 'served', 'model')
PUBLISHED = {  # ZeroSearch's simulators, tuned on the results of an engine
    f'{engine}_{size}': f'sunhaonlp/Simulation_LLM_{engine}_{size.upper()}_V2'
    for engine in ('google', 'wiki') for size in ('3b', '7b', '14b')}
SHAPES = {  # base model of each simulator, as ZeroSearch's paper says
    name: f'Qwen/Qwen2.5-{name.rpartition("_V2")[0].rpartition("_")[2]}'
    for name in PUBLISHED.values()}
# Function of (prompts=..., **options) that loads a writer.
LoadWriter = Callable[..., simulated_documents.Writer]
_PROMPTS = {'zerosearch': simulated_documents.zerosearch,
            'demonstrated': simulation_examples.prompts}


def make(name: str, corpus: Corpus | None, *, titled: bool = False,
         simulator: str = '', load_writer: LoadWriter | None = None,
         **options: Any) -> simulated_documents.Writer:
  """Builds a writer by its name.

  Args:
    name: Name of the writer: 'oracle', which knows the corpus, or a language
      model, which is 'served' over HTTP, or a 'model' in this process.
    corpus: Passages that the oracle knows.
    titled: Flag that makes the oracle's documents begin with titles. For a
      language model, its prompts or its tuning must produce the titles.
    simulator: Name in PUBLISHED, which sets the model's name and its prompts.
      With '', the options give them.
    load_writer: Function that loads a 'model'.
    **options: Options of the writer. For a language model, `prompts` is
      'zerosearch', 'demonstrated' (for a model that was not tuned), or a dict
      of useful and noisy. The other options are those of
      `completions.completions` or of `load_writer`.

  Raises:
    ValueError: The writer is not available here, or an option is out of range.
    TypeError: The writer does not have an option that was given.
  """
  if name == 'oracle':
    return document_oracle.Oracle(corpus, titled=titled, **options)
  if name not in WRITERS:
    raise ValueError(
        f'search.options.writer must be one of {WRITERS}, but is {name!r}.')
  if name == 'model' and load_writer is None:
    raise ValueError(
        "search.options.writer may be 'model' where a policy is trained alone. "
        'Set evaluate.search.engine, or serve the model and name its url.')
  options |= published(simulator, name)
  asked = prompts(options.pop('prompts', 'zerosearch'))
  if name == 'model':
    return load_writer(prompts=asked, **options)
  from searchrl.search.remote import completions  # imports urllib3
  return completions.completions(prompts=asked, **options)


def published(simulator: str, writer: str) -> dict[str, str]:
  """Returns the options that a published simulator's name sets; none for ''.

  Raises:
    ValueError: There is no such simulator.
  """
  if not simulator:
    return {}
  if simulator not in PUBLISHED:
    raise ValueError(
        f'search.options.simulator must be one of {sorted(PUBLISHED)}, or '
        f"'' for a model of your own, but is {simulator!r}.")
  field = 'path' if writer == 'model' else 'model'
  return {field: PUBLISHED[simulator], 'prompts': 'zerosearch'}


def prompts(spec: Any) -> simulated_documents.Prompts:
  """Returns the prompts for a name or for dict(useful=..., noisy=...).

  Raises:
    ValueError: There are no prompts of that name.
  """
  if hasattr(spec, 'items'):  # a dict, or a ConfigDict
    return simulated_documents.Prompts(**dict(spec))
  if spec not in _PROMPTS:
    raise ValueError(
        f'search.options.prompts must be one of {sorted(_PROMPTS)}, or a dict '
        f'of useful and noisy, but is {spec!r}.')
  return _PROMPTS[spec]()
