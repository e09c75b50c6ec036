# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A second language model, which writes the documents of a search."""

from collections.abc import Sequence
import collections
import threading

from searchrl.agent import dialogue as dialogues
from searchrl.models import transformer
from searchrl.rollouts.sampler import Sampler
from searchrl.search.simulated import simulated_documents
from searchrl.trajectory import Question, Request, SearchError


class ModelWriter:
  """A `simulated_documents.Writer` with its own engine, `pop` and `wait`.

  On CPUs, a text depends only on its task and the weights. It does not depend
  on the texts that are written at the same time, nor on when it is written.

  Args:
    sampler: Sampler of the model. The first turn of its dialogue is the text.
    weights: Weights that the sampler's `sync` returned.
    prompts: Templates of the prompts.
    temperature: Temperature of sampling; 0 is greedy.
  """

  def __init__(self, sampler: Sampler, weights: transformer.Params,
               prompts: simulated_documents.Prompts, *, temperature: float):
    self._sampler, self._weights, self._prompts = sampler, weights, prompts
    self._temperature = temperature
    self._lock, self._counts = threading.Lock(), collections.Counter()

  def __call__(self, tasks: Sequence[simulated_documents.Task]
              ) -> list[str | SearchError]:
    """Returns a text per task, or a SearchError if its prompt is not usable."""
    asked = [self._request(task) for task in tasks]
    requests = [one for one in asked if isinstance(one, Request)]
    # There is one engine, but a search may make several calls at a time.
    with self._lock:
      found = iter(self._sampler.rollout(
          self._weights, requests, search=_no_search, step=0,
          temperature=self._temperature).trajectories if requests else ())
      texts = [self._text(next(found)) if isinstance(one, Request) else one
               for one in asked]
    return texts

  def pop(self) -> dict[str, float]:
    """Returns `simulated/tokens`, the tokens sampled since the last call."""
    with self._lock:
      counts, self._counts = self._counts, collections.Counter()
    return {'simulated/tokens': counts['tokens']}

  def wait(self) -> None:
    """Returns at once, because the model is never out of service."""

  def _request(self, task: simulated_documents.Task) -> Request | SearchError:
    try:
      prompt = self._prompts.of(task)
    except simulated_documents.Unanswerable as error:
      return SearchError('unanswerable', str(error))
    sampler = self._sampler
    tokens = len(dialogues.opening(sampler.dialogue, prompt, sampler.tokenizer))
    if tokens > sampler.budgets.max_prompt_tokens:
      return SearchError(
          'too_long',
          f'the prompt has {tokens} tokens, more than search.options.'
          f'max_prompt_tokens={sampler.budgets.max_prompt_tokens}')
    return Request(Question(f'document:{task.seed}', prompt, ()))

  def _text(self, trajectory) -> str:
    turn, = trajectory.turns
    self._counts['tokens'] += len(turn.action_tokens)
    return turn.text


def _no_search(queries):
  raise AssertionError('a writer does not search')
