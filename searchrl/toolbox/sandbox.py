# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The tool `python`, which runs programs on a sandbox server.

The server has the interface of SandboxFusion: a POST of {"code", "language",
"run_timeout"} to /run_code returns {"status", "run_result": {"stdout",
"stderr", "status"}}.
"""

from collections.abc import Callable, Sequence
from concurrent import futures
import json
from typing import Any

from searchrl.search.remote import transport
from searchrl.search.remote import wire
from searchrl.trajectory import SearchError, Tool, ToolCall, ToolResult


def make(*, urls: Sequence[str] = ('http://127.0.0.1:8080/run_code',),
         run_secs: float = 5.0, connections: int = 16, token_env: str = '',
         wiring: dict[str, Callable[..., Any]] | None = None,
         **retries: Any) -> Tool:
  """Returns the tool, which runs a program and returns its output.

  Args:
    urls: Complete addresses of sandbox servers; a call goes to any of them.
    run_secs: Seconds that a program may run. The default of try_secs is five
      seconds more, but at least ten.
    connections: Largest number of simultaneous requests.
    token_env: Name of the environment variable whose value is sent as a bearer
      token; '': none is sent.
    wiring: Arguments `clock`, `sleep` and `warn` of `transport.Transport`,
      which tests replace.
    **retries: Fields of `transport.RetryPolicy`.

  Raises:
    ValueError: An option is out of range, or the variable is not set.
  """
  if not run_secs > 0:
    raise ValueError(f'run_secs must be above 0, but is {run_secs}. 5 is the '
                     'usual.')
  retries = {'try_secs': max(run_secs + 5, transport.RetryPolicy.try_secs),
             'deadline_secs': transport.RetryPolicy.deadline_secs, **retries}
  limits = retries['try_secs'], retries['deadline_secs']
  if run_secs >= min(limits):
    raise ValueError(
        'run_secs must be below try_secs and deadline_secs, so that a program '
        f'that runs too long says so, but is {run_secs:g}, and they are '
        f'{limits[0]:g} and {limits[1]:g}. Raise them.')
  calls = transport.posting_json(
      urls, token_env=token_env, response_bytes=2**20, wiring=wiring,
      group='tool_options.python', **retries)
  return Tool(
      'python', 'Runs a Python program and returns what it prints.',
      {'type': 'object', 'required': ['code'], 'additionalProperties': False,
       'properties': {'code': {'type': 'string', 'description':
                               'The program, which prints its results.'}}},
      _Sandbox(calls, run_secs, connections))


class _Sandbox:
  """The function of the tool, which runs the programs of a call in parallel."""

  def __init__(self, calls: transport.Transport, run_secs: float,
               connections: int):
    self._calls, self._run_secs = calls, run_secs
    self._threads = futures.ThreadPoolExecutor(
        connections, thread_name_prefix='sandbox')

  def __call__(self, calls: Sequence[ToolCall]
              ) -> list[ToolResult | SearchError]:
    """Returns the output of each program, or a SearchError."""
    return [*self._threads.map(
        lambda call: self._run(call.arguments['code']), calls)]

  def pop(self) -> dict[str, float]:
    """Returns metrics of the requests to the sandbox since the last `pop`."""
    return {name.replace('search/remote/', 'tool/python/'): value
            for name, value in self._calls.pop().items()}

  def wait(self) -> None:
    """Waits until a server runs a program, if a call has failed.

    Raises:
      ConnectionError: No server has run it within `pause_secs`.
    """
    self._calls.wait(lambda: self._run('print(1)'))

  def _run(self, code: str) -> ToolResult | SearchError:
    body = json.dumps({'code': code, 'language': 'python',
                       'run_timeout': self._run_secs})
    return self._calls.call(
        read_result, body=body.encode('utf-8', 'replace'))


def read_result(body: bytes) -> ToolResult:
  """Returns the output of a program. A program that failed has `is_error`.

  Raises:
    Malformed: The body is not a response of a sandbox.
  """
  record = wire.read_object(body, 'the response')
  run = record.get('run_result')
  if record.get('status') == 'SandboxError' or not isinstance(run, dict):
    raise wire.Malformed('the sandbox ran no program.')
  printed, error = run.get('stdout') or '', run.get('stderr') or ''
  if not (isinstance(printed, str) and isinstance(error, str)):
    raise wire.Malformed('stdout and stderr must be strings.')
  failed = record.get('status') != 'Success'
  if failed and run.get('status') == 'TimeLimitExceeded':
    error = 'the program ran too long'
  text = printed.strip() + (f'\nError: {error.strip()[-500:]}' if failed else '')
  return ToolResult(text.strip() or 'It printed nothing.', is_error=failed)
