# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Loads the language model that writes documents beside the policy."""

from collections.abc import Callable
import functools
from typing import Any

from jax.sharding import Mesh

from searchrl.experiment import policy
from searchrl.rollouts import driver
from searchrl.rollouts.writer import ModelWriter
from searchrl.search.simulated import documents


def loader(mesh: Mesh, *, seed: int) -> Callable[..., ModelWriter]:
  """What `writers.make` loads a model with.

  Args:
    mesh: of the run, of one device.
    seed: of all sampling.
  """
  return functools.partial(_load, mesh, seed)


def _load(mesh: Mesh, seed: int, *, prompts: documents.Prompts, path: str = '',
          dialogue: str = 'searchrl.agent.dialogue:continuation',
          slots: int = 72, max_prompt_tokens: int = 512, max_tokens: int = 600,
          temperature: float = 0.8, dtype: str = 'float32',
          **options: Any) -> ModelWriter:
  """A writer of a model folder.

  Args:
    mesh: of one device.
    seed: of all sampling.
    prompts: how the model is asked.
    path: a Hugging Face folder or hub id; '' is the tiny base model.
    dialogue: 'module:function', whose first turn is the text.
    slots: texts that are written side by side.
    max_prompt_tokens: a longer prompt is a SearchError.
    max_tokens: of a text.
    temperature: of sampling; 0 is greedy.
    dtype: of weights and cache.
    **options: attention and cache_tokens of `policy.load`.

  Raises:
    ValueError, FileNotFoundError: as `policy.second`.
  """
  sampler, params = policy.second(
      path, field='search.options.path', mesh=mesh, dialogue=dialogue,
      seed=seed, slots=slots, length=max_prompt_tokens + max_tokens,
      budgets=driver.Budgets(
          max_turns=1, max_turn_tokens=max_tokens,
          max_prompt_tokens=max_prompt_tokens),
      dtype=dtype, engine_dtype=dtype, **options)
  return ModelWriter(sampler, sampler.sync(params).weights, prompts,
                     temperature=temperature)
