# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A writer that is a second language model beside the policy.

It writes the documents that a simulated search engine returns.
"""

from collections.abc import Callable, Sequence
import dataclasses
import threading
from typing import Any, NoReturn

from searchrl.agent import dialogue as dialogues
from searchrl.models import transformer
from searchrl.papers.zerosearch import documents
from searchrl.papers.zerosearch import simulator_prompts
from searchrl.rollouts import driver
from searchrl.rollouts.sampler import Sampler
from searchrl.search import engine_wrappers
from searchrl.trajectory import (Query, Question, Request, SearchError,
                                 Trajectory)

FIELD = 'search.options.path'
# Function that an engine gets from the run; see `policy.second`.
LoadModel = Callable[..., tuple[Sampler, transformer.Params]]


@dataclasses.dataclass(frozen=True)
class Model:
  """Settings of the writer's language model, from search.options.

  Attributes:
    path: Hugging Face directory or hub id; '' is the tiny base model.
    dialogue: Dialogue as 'module:function'. The model's first turn has the
      documents.
    slots: Number of texts that are written at the same time.
    max_prompt_tokens: Maximum number of tokens of a prompt. A query with a
      longer prompt gets a SearchError.
    max_tokens: Maximum number of tokens of a text.
    temperature: Temperature of sampling; 0 is greedy.
    dtype: Data type of the weights and of the KV cache.
    attention: Attention of the engine, as in rollout.attention.
    cache_tokens: Tokens in the KV cache of all slots, as in
      rollout.cache_tokens.
  """

  path: str = ''
  dialogue: str = (
      'searchrl.papers.zerosearch.zerosearch_dialogues:of_writer')
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


class ModelWriter:
  """A `documents.Writer` with its own engine, and a method `pop`.

  On CPUs, a text depends only on its task and the weights. It does not depend
  on the texts that are written at the same time, nor on when it is written.

  Args:
    load_model: Function that loads the model beside the policy.
    prompts: Templates of the prompts.
    **options: Fields of `Model`.

  Raises:
    ValueError, FileNotFoundError: The model cannot be used or does not exist;
      see `policy.second`.
  """

  def __init__(self, load_model: LoadModel, *,
               prompts: simulator_prompts.Prompts, **options: Any):
    self._prompts, model = prompts, Model(**options)
    self._sampler, params = load_model(
        model.path, field=FIELD, dialogue=model.dialogue, slots=model.slots,
        length=model.length, budgets=driver.Budgets(
            max_turns=1, max_new_tokens=model.max_tokens,
            max_prompt_tokens=model.max_prompt_tokens),
        dtype=model.dtype, engine_dtype=model.dtype, attention=model.attention,
        cache_tokens=model.cache_tokens)
    self._weights = self._sampler.sync(params).weights
    self._temperature = model.temperature
    self._lock, self._counts = threading.Lock(), engine_wrappers.Counts()

  def __call__(self, tasks: Sequence[documents.Task]
              ) -> list[str | SearchError]:
    """Returns a text for each task, or a SearchError for an unusable prompt."""
    requests = [self._request(task) for task in tasks]
    legal = [request for request in requests if isinstance(request, Request)]
    # There is one engine, but a search may make several calls at a time.
    with self._lock:
      trajectories = iter(self._sampler.rollout(
          self._weights, legal, search=_no_search, step=0,
          temperature=self._temperature).trajectories if legal else ())
      return [request if isinstance(request, SearchError) else
              self._text(next(trajectories)) for request in requests]

  def pop(self) -> dict[str, float]:
    """Returns {'simulated/tokens': tokens sampled since the last call}."""
    return {'simulated/tokens': self._counts.pop()['tokens']}

  def _request(self, task: documents.Task) -> Request | SearchError:
    prompt, sampler = self._prompts.of(task), self._sampler
    if isinstance(prompt, SearchError):
      return prompt
    tokens = len(dialogues.opening(sampler.dialogue, prompt, sampler.tokenizer))
    if tokens > sampler.budgets.max_prompt_tokens:
      return SearchError(
          'too_long',
          f'the prompt has {tokens} tokens, more than search.options.'
          f'max_prompt_tokens={sampler.budgets.max_prompt_tokens}')
    return Request(Question(f'document:{task.seed}', prompt, ()))

  def _text(self, trajectory: Trajectory) -> str:
    turn, = trajectory.turns
    self._counts.add(tokens=len(turn.action_tokens))
    return turn.text


def _no_search(queries: Sequence[Query]) -> NoReturn:
  raise AssertionError('a writer does not search')
