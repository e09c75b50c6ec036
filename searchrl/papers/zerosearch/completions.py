# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A writer of documents that asks a server with OpenAI's chat completions API.

Our server (`searchrl.jobs.serve_model`), vLLM and SGLang implement the API.
Each task is one request. A request can be sent again, because it has the seed
of its task.
"""

from collections.abc import Callable, Sequence
from concurrent import futures
import json
from typing import Any

from searchrl.papers.zerosearch import documents
from searchrl.papers.zerosearch import simulator_prompts
from searchrl.runtime import option_rules
from searchrl.search import engine_wrappers
from searchrl.search.remote import recovery_probe
from searchrl.search.remote import transport
from searchrl.search.remote import wire
from searchrl.search.remote.wire import Malformed
from searchrl.trajectory import SearchError

CONNECTIONS = 128  # simultaneous requests; language model servers batch them


class Completions:
  """A `Writer` that gets its texts from servers over HTTP.

  It also has the methods `pop` and `wait`. The defaults are those of
  ZeroSearch. The system message is empty, as published.

  Args:
    prompts: Prompts of the model.
    urls: Complete addresses of the servers, at least one, such as
      'http://127.0.0.1:6001/v1/chat/completions'.
    model: Name of the model on the servers.
    max_tokens: Maximum number of tokens for all documents of a query.
    temperature: Sampling temperature.
    connections: Largest number of simultaneous requests.
    response_bytes: Largest size of a response in bytes. A longer response is an
      error.
    token_env: Name of the environment variable whose value is sent as a bearer
      token. If it is '', no token is sent.
    wiring: Arguments `clock`, `sleep` and `warn` of `transport.Transport`,
      which tests replace.
    **retries: Fields of `transport.RetryPolicy`.

  Raises:
    ValueError: An option is out of range, or the environment variable is not
      set.
    TypeError: An option of `retries` is not a field of `RetryPolicy`.
  """

  def __init__(
      self, *, prompts: simulator_prompts.Prompts, urls: Sequence[str] = (),
      model: str = '', max_tokens: int = 600, temperature: float = 0.8,
      connections: int = CONNECTIONS, response_bytes: int = 2**22,
      token_env: str = '', wiring: dict[str, Callable[..., Any]] | None = None,
      **retries: Any):
    option_rules.at_least(
        1, 'search.options.', max_tokens=max_tokens, connections=connections,
        response_bytes=response_bytes)
    option_rules.at_least(0, 'search.options.', temperature=temperature)
    self._calls = transport.posting_json(
        urls, token_env=token_env, response_bytes=response_bytes,
        wiring=wiring, **retries)
    self._prompts, self._request = prompts, dict(
        model=model, max_tokens=max_tokens, temperature=temperature)
    self._rehearsal = recovery_probe.Rehearsal()
    self._threads = futures.ThreadPoolExecutor(
        connections, thread_name_prefix='simulated-search')
    self._counts = engine_wrappers.Counts()

  def __call__(
      self, tasks: Sequence[documents.Task]) -> list[str | SearchError]:
    """Returns a text for each task, or a SearchError if this task failed."""
    prompts = [self._prompts.of(task) for task in tasks]
    texts = iter(self._rehearsal.watch(self._texts, [
        (prompt, task.seed) for prompt, task in zip(prompts, tasks)
        if isinstance(prompt, str)]))
    return [next(texts) if isinstance(prompt, str) else prompt
            for prompt in prompts]

  def pop(self) -> dict[str, float]:
    """Returns metrics of the simulator since the last call of `pop`."""
    return {'simulated/tokens': self._counts.pop()['tokens'],
            **self._calls.pop()}

  def wait(self) -> None:
    """Waits until a server answers a short call and the largest failed load.

    A load is several texts to complete at the same time; see `recovery_probe`.

    Raises:
      ConnectionError: No server has answered within `pause_secs`, or one does
        not accept the call.
    """
    ping = lambda: self._ask('Doc 1:', read_any, seed=0, max_tokens=1)
    self._calls.wait(lambda: self._rehearsal.probe(ping, self._texts))

  def _texts(self, prompts: list[tuple[str, int]]) -> list[str | SearchError]:
    """Returns the texts for prompts and seeds, by parallel requests."""
    return [*self._threads.map(
        lambda prompt: self._ask(prompt[0], seed=prompt[1]), prompts)]

  def _ask(self, prompt: str, read: Callable[[bytes], tuple[str, int]] | None
           = None, **fields: Any) -> str | SearchError:
    # Lone surrogates, which UTF-8 cannot encode, are replaced.
    prompt = prompt.encode('utf-8', 'replace').decode()
    messages = [{'role': 'system', 'content': ''},
                {'role': 'user', 'content': prompt}]
    completion = self._calls.call(read or read_completion, body=json.dumps(
        self._request | fields | {'messages': messages}).encode())
    if isinstance(completion, SearchError):
      return completion
    text, tokens = completion
    self._counts.add(tokens=tokens)
    return text


def read_any(body: bytes) -> tuple[str, int]:
  """Returns '' and 0 for every chat completion, even for one without a text.

  The one token of a short call may be white space, or begin a thought.

  Raises:
    Malformed: The body is not a chat completion.
  """
  match wire.read_object(body, 'the response'):
    case {'choices': [{'message': {}}, *_]}:
      return '', 0
  raise Malformed('choices[0].message must be an object.')


def read_completion(body: bytes) -> tuple[str, int]:
  """Returns a response's text and its number of tokens (0 if not stated).

  Raises:
    Malformed: The body is not a chat completion with a text.
  """
  record = wire.read_object(body, 'the response')
  tokens = 0
  match record:
    case {'usage': {'completion_tokens': int(number)}}:
      tokens = max(number, 0)
  match record:
    case {'choices': [{'message': {'content': str(text)}}, *_]} if text.strip():
      return text, tokens
  raise Malformed('choices[0].message.content must be a text.')
