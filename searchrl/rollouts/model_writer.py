# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A language model beside the policy that writes the documents of a search."""

from collections.abc import Sequence
import collections
import threading

from searchrl.agent import dialogue as dialogues
from searchrl.models import transformer
from searchrl.rollouts.sampler import Sampler
from searchrl.search.simulated import simulated_documents
from searchrl.trajectory import Question, Request, SearchError


class ModelWriter:
  """A `documents.Writer` with an engine of its own, and `pop` and `wait`.

  A text depends on its task and the weights alone: not, on CPUs, on what is
  written beside it, nor when.

  Args:
    sampler: of the model; its dialogue's first turn is the text.
    weights: from the sampler's `sync`.
    prompts: how the model is asked.
    temperature: of sampling; 0 is greedy.
  """

  def __init__(self, sampler: Sampler, weights: transformer.Params,
               prompts: simulated_documents.Prompts, *, temperature: float):
    self._sampler, self._weights, self._prompts = sampler, weights, prompts
    self._temperature = temperature
    self._lock, self._counts = threading.Lock(), collections.Counter()

  def __call__(
      self, tasks: Sequence[simulated_documents.Task]) -> list[str | SearchError]:
    """Writes the texts of all tasks; one that cannot be asked fails alone."""
    asked = [self._request(task) for task in tasks]
    requests = [one for one in asked if isinstance(one, Request)]
    with self._lock:  # one engine, and several calls of a search at a time
      found = iter(self._sampler.rollout(
          self._weights, requests, search=_no_search, step=0,
          temperature=self._temperature).trajectories if requests else ())
      texts = [self._text(next(found)) if isinstance(one, Request) else one
               for one in asked]
    return texts

  def pop(self) -> dict[str, float]:
    """Metrics since the last call: `simulated/tokens` that were sampled."""
    with self._lock:
      counts, self._counts = self._counts, collections.Counter()
    return {'simulated/tokens': counts['tokens']}

  def wait(self) -> None:
    """Returns at once: it is never out of service."""

  def _request(self, task: simulated_documents.Task) -> Request | SearchError:
    try:
      prompt = self._prompts.of(task)
    except simulated_documents.Unanswerable as error:
      return SearchError('unanswerable', str(error))
    sampler = self._sampler
    tokens = len(dialogues.opening(sampler.dialogue, prompt, sampler.tokenizer))
    if tokens > sampler.budgets.max_prompt_tokens:
      return SearchError(
          'too_long', f'the prompt has {tokens} tokens, more than search.options.'
          f'max_prompt_tokens={sampler.budgets.max_prompt_tokens}')
    return Request(Question(f'document:{task.seed}', prompt, ()))

  def _text(self, trajectory) -> str:
    turn, = trajectory.turns
    self._counts['tokens'] += len(turn.action_tokens)
    return turn.text


def _no_search(queries):
  raise AssertionError('a writer does not search')
