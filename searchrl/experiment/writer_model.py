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
  """Returns the function with which `writers.make` loads a model.

  Args:
    mesh: Mesh of the run, with one device.
    seed: Seed of all sampling.
  """
  return functools.partial(_load, mesh, seed)


@dataclasses.dataclass(frozen=True)
class Model:
  """Settings of the model of a writer, from search.options.

  Attributes:
    path: Hugging Face directory or hub id; '' is the tiny base model.
    dialogue: Dialogue as 'module:function'. Its first turn is the text.
    slots: Number of texts that are written at the same time.
    max_prompt_tokens: Most tokens of a prompt. A longer one is a SearchError.
    max_tokens: Most tokens of a text.
    temperature: Temperature of sampling; 0 is greedy.
    dtype: Data type of the weights and of the KV cache.
    attention: Attention of the engine, as in rollout.attention.
    cache_tokens: Tokens in the KV cache of all slots, as in
      rollout.cache_tokens.
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
    """Number of tokens of a slot, for prompt and text together."""
    return self.max_prompt_tokens + self.max_tokens


def _load(mesh: Mesh, seed: int, *, prompts: simulated_documents.Prompts,
          **options: Any) -> ModelWriter:
  """Loads a writer; the options are search.options, the fields of `Model`.

  Raises:
    ValueError, FileNotFoundError: The model cannot be used or does not exist,
      as `policy.second` says.
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
