# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Loads the language model that writes documents beside the policy."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

from jax.sharding import Mesh

from searchrl.experiment import policy
from searchrl.rollouts import driver
from searchrl.rollouts.model_writer import ModelWriter
from searchrl.search.simulated import simulated_documents

FIELD = 'search.options.path'


def loader(mesh: Mesh, *, seed: int) -> Callable[..., ModelWriter]:
  """What `writers.make` loads a model with.

  Args:
    mesh: of the run, of one device.
    seed: of all sampling.
  """
  return functools.partial(_load, mesh, seed)


@dataclasses.dataclass(frozen=True)
class Model:
  """The model of a writer, from search.options.

  Attributes:
    path: a Hugging Face folder or hub id; '' is the tiny base model.
    dialogue: 'module:function', whose first turn is the text.
    slots: texts that are written side by side.
    max_prompt_tokens: a longer prompt is a SearchError.
    max_tokens: of a text.
    temperature: of sampling; 0 is greedy.
    dtype: of weights and cache.
    attention: of the engine, as rollout.attention.
    cache_tokens: of all slots, as rollout.cache_tokens.
  """

  path: str = ''
  dialogue: str = 'searchrl.agent.chat:document'
  slots: int = 72
  max_prompt_tokens: int = 512
  max_tokens: int = 600
  temperature: float = 0.8
  dtype: str = 'float32'
  attention: str = 'auto'
  cache_tokens: int = 0

  @property
  def length(self) -> int:
    """Tokens of a slot."""
    return self.max_prompt_tokens + self.max_tokens


def _load(mesh: Mesh, seed: int, *, prompts: simulated_documents.Prompts, **options: Any
         ) -> ModelWriter:
  """A writer of search.options, the fields of `Model`.

  Raises:
    ValueError, FileNotFoundError: as `policy.second`.
  """
  model = Model(**options)
  sampler, params = policy.second(
      model.path, field=FIELD, mesh=mesh, dialogue=model.dialogue, seed=seed,
      slots=model.slots, length=model.length,
      budgets=driver.Budgets(
          max_turns=1, max_new_tokens=model.max_tokens,
          max_prompt_tokens=model.max_prompt_tokens),
      dtype=model.dtype, engine_dtype=model.dtype, attention=model.attention,
      cache_tokens=model.cache_tokens)
  return ModelWriter(sampler, sampler.sync(params).weights, prompts,
                     temperature=model.temperature)
