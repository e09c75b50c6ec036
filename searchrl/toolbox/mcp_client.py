# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The tools of an MCP server (Model Context Protocol), by the official SDK.

The server is a command, which is started here and talks over its standard
streams, or an address, which is asked over HTTP. A server that breaks is
started, or connected to, again at the next call. A server whose tools change
ends the run. All connections are closed at the end of the process.
"""

import asyncio
import atexit
from collections.abc import AsyncIterator, Callable, Sequence
import contextlib
import dataclasses
import functools
import json
import os
import threading
import time
from typing import Any

from searchrl.runtime import log as logs
from searchrl.search import engine_wrappers
from searchrl.search.remote import wire
from searchrl.trajectory import (
    SearchError, Tool, ToolCall, ToolResult, is_search)

_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 0.5, 30.0
_CLOSE_SECS = 6.0  # the SDK waits 2 s before SIGTERM, and 2 s before SIGKILL
_MAX_PAGES = 1000  # pages of a server's list of tools


def make(*, command: Sequence[str] = (), url: str = '',
         names: Sequence[str] = (), prefix: str = '', call_secs: float = 30.0,
         pause_secs: float = 3600.0, log: str = '', token_env: str = ''
        ) -> list[Tool]:
  """Returns the tools of a server, with the descriptions that the server gives.

  Args:
    command: Program and arguments that start a server, or () for `url`.
    url: Address of a server (Streamable HTTP), or '' for `command`.
    names: Names of the tools to take; () for all.
    prefix: Text before each name, such as 'web_'. A server's tool named search
      needs one, because that is the name of the run's engine.
    call_secs: Seconds after which a call, or the start, has failed.
    pause_secs: Longest time that a run waits for a server that fails.
    log: Path of the file for the standard error of a server that is started
      here; '': its standard error is dropped.
    token_env: Name of the environment variable whose value is sent as a bearer
      token to `url`; '': none is sent.

  Raises:
    ValueError: The package mcp is missing, an option is out of range, the
      variable is not set, the server cannot be reached, or it lacks a tool.
  """
  try:
    import mcp
  except ImportError as error:
    raise ValueError('the tool mcp needs the package mcp. Install it: pip '
                     "install 'searchrl[tools]'.") from error
  if isinstance(command, str) or bool(command) == bool(url):
    raise ValueError(
        f'command must be a tuple of words, or be left out if url is given, but '
        f'they are {command!r} and {url!r}. Write '
        "command=('mcp-server-time',), or url='http://127.0.0.1:8000/mcp'.")
  if not call_secs > 0 or not pause_secs >= 0:
    raise ValueError(f'call_secs must be above 0 and pause_secs at least 0, but '
                     f'they are {call_secs} and {pause_secs}.')
  if token_env and not url:
    raise ValueError('token_env must be left out if command is given, because '
                     'a server that is started here has the environment of the '
                     f'run, but it is {token_env!r}.')
  token = wire.secret(token_env, 'token_env') if token_env else ''

  def connect() -> Any:
    if url:
      return mcp.Client(_streams(url, token) if token else url,
                        read_timeout_seconds=call_secs)
    parameters = mcp.StdioServerParameters(
        command=command[0], args=list(command[1:]), env=dict(os.environ))
    return mcp.Client(
        mcp.stdio_client(parameters, open(log or os.devnull, 'a')),
        read_timeout_seconds=call_secs)

  server: Any = _Server(connect, url or command[0], call_secs, pause_secs)
  try:
    described = server.list_tools()
  except Exception as error:  # whatever the SDK and the server raise
    hint = ' If it needs a token, set token_env.' if url and not token else ''
    raise ValueError(
        f'{"url" if url else "command"} must be an MCP server that answers '
        f'within call_secs={call_secs:g}, but {url or command[0]} failed: '
        f'{_reason(error)}.{hint}') from error
  known = [tool.name for tool in described]
  missing = [name for name in names if name not in known]
  if missing:
    raise ValueError(f'names must be tools of the server, which are '
                     f'{", ".join(known)}, but has {missing[0]!r}.')
  taken = [tool for tool in described if not names or tool.name in names]
  engines = [tool.name for tool in taken if is_search(prefix + tool.name)]
  if engines:
    raise ValueError(
        f'prefix must be given, because a tool named {prefix + engines[0]!r} '
        "would be a search engine of ours. Write for instance prefix='web_', or "
        'leave the tool out of names.')
  server.schemas = {tool.name: tool.input_schema for tool in taken}
  return [Tool(prefix + tool.name,
               ' '.join((tool.description or tool.name).split()),
               tool.input_schema, engine_wrappers.Wrapped(
                   functools.partial(server.call, tool.name), (server,)))
          for tool in taken]


@contextlib.asynccontextmanager
async def _streams(url: str, token: str) -> AsyncIterator[Any]:
  """Yields the streams of a connection whose requests have a bearer token."""
  import httpx2
  from mcp.client import streamable_http
  timeout = httpx2.Timeout(30, read=300)  # seconds, as without a token
  async with httpx2.AsyncClient(
      headers={'Authorization': f'Bearer {token}'}, timeout=timeout) as client:
    async with streamable_http.streamable_http_client(
        url, http_client=client) as streams:
      yield streams


def schemas(tools: Sequence[Tool]) -> dict[str, Any]:
  """Returns the JSON schema of each tool that a server gives, by its name."""
  return {tool.name: tool.parameters for tool in tools
          if any(isinstance(inner, _Server)
                 for inner in getattr(tool.call, 'inner', ()))}


class ChangedToolError(ConnectionError):
  """An error of a server that lacks a tool of the run, or has changed it."""


@dataclasses.dataclass(eq=False)
class _Connection:
  """A connection to a server, and its number of calls without a result.

  If it is `dropped`, it makes no more calls, and closes after the last result.
  """

  client: Any
  end: asyncio.Event  # closes it
  calls: int = 0
  dropped: bool = False

  def close_if_unused(self) -> None:
    if self.dropped and not self.calls:
      _loop().call_soon_threadsafe(self.end.set)


class _Server:
  """A server. The connections to all servers run in one thread (`_loop`)."""

  def __init__(self, connect: Callable[[], Any], place: str, call_secs: float,
               pause_secs: float):
    self._connect, self._place = connect, place
    self._call_secs, self._pause_secs = call_secs, pause_secs
    self._lock = threading.Lock()  # one connection is made at a time
    self._connection: _Connection | None = None
    self._failed = False  # whether a call has failed since the last `wait`
    self.schemas: dict[str, Any] = {}  # name of a tool of the run -> schema

  def list_tools(self) -> list[Any]:
    """Returns the server's descriptions of its tools.

    Raises:
      ChangedToolError: A tool of the run is missing, or has another schema.
    """
    return self._wait_for(self._checked_tools(self._connected().client))

  def call(self, name: str, calls: Sequence[ToolCall]) -> list[Any]:
    """Makes all calls of a tool at the same time; returns their results.

    The result of a call that fails is a SearchError. If the server says that a
    call was wrong, its tools are listed again. If one has changed, all results
    are SearchErrors, and the next `wait` raises an error.
    """
    try:
      results = self._results(name, calls)
      if any(getattr(result, 'is_error', False) for result in results):
        self.list_tools()  # a tool that is gone gives such results, too
      return results
    except Exception as error:  # a server that does not start again, or changed
      self._failed = True
      return [self._unavailable(error)] * len(calls)

  def _results(self, name: str, calls: Sequence[ToolCall]) -> list[Any]:
    """Returns the results of `call`, or raises the error of a connection."""
    connection = self._connected(len(calls))
    futures = [asyncio.run_coroutine_threadsafe(
        connection.client.call_tool(name, dict(call.arguments)), _loop())
               for call in calls]
    return [self._result(future, connection) for future in futures]

  def wait(self) -> None:
    """Waits until the server answers, if a call has failed since the last wait.

    Raises:
      ConnectionError: It has not answered within `pause_secs` of waiting, or
        a tool has changed.
    """
    start, pause = time.monotonic(), _FIRST_PAUSE_SECS
    while self._failed:
      try:
        self.list_tools()
        self._failed = False
      except ChangedToolError:
        raise
      except Exception as error:
        self._drop(self._connection)
        left = start + self._pause_secs - time.monotonic()
        if left <= 0:
          raise ConnectionError(
              f'the MCP server {self._place} must answer within pause_secs='
              f'{self._pause_secs:g}, but failed with {_reason(error)}. Start '
              'it, and run the same command to go on from the last checkpoint.'
              ) from error
        if pause == _FIRST_PAUSE_SECS:
          logs.say(f'Warning: the MCP server {self._place} fails, so the run '
                   f'is paused, up to {self._pause_secs:g} s.')
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE_SECS)

  def _result(self, future: Any, connection: _Connection
              ) -> ToolResult | SearchError:
    """Waits for the result of a call, and takes the call off the count.

    A failure drops the connection. Its other calls still get their results.
    """
    try:
      result = self._awaited(future)
    finally:
      with self._lock:
        connection.calls -= 1
        connection.close_if_unused()
    if isinstance(result, SearchError):
      self._failed = True
      self._drop(connection)
    return result

  def _awaited(self, future: Any) -> ToolResult | SearchError:
    import mcp
    import mcp_types
    try:
      result = future.result(2 * self._call_secs)
    except mcp.MCPError as error:
      if error.code == mcp_types.INVALID_PARAMS:
        return ToolResult(f'Error: {error.message}', is_error=True)
      kind = ('timeout' if error.code == mcp_types.REQUEST_TIMEOUT
              else 'unavailable')
      return self._error(kind, f'code {error.code}')
    except TimeoutError:
      return self._error('timeout', f'after {2 * self._call_secs:g} s')
    except Exception as error:  # whatever the SDK raises
      return self._unavailable(error)
    return ToolResult(_text(result), is_error=bool(result.is_error))

  def _error(self, kind: str, detail: str) -> SearchError:
    return SearchError(kind, f'{self._place}: {detail}')

  def _unavailable(self, error: Exception) -> SearchError:
    return self._error('unavailable', type(_cause(error)).__name__)

  def _connected(self, calls: int = 0) -> _Connection:
    """Returns the connection, made if need be; adds `calls` to its count."""
    with self._lock:
      if self._connection is None:
        self._connection = self._wait_for(self._start())
      self._connection.calls += calls
      return self._connection

  async def _start(self) -> _Connection:
    """Starts a task that holds the connection; returns the connection."""
    ready: asyncio.Future = asyncio.get_running_loop().create_future()
    end = asyncio.Event()

    async def hold():
      try:
        async with self._connect() as client:
          if self.schemas:  # an earlier connection has listed the tools
            await self._checked_tools(client)
          ready.set_result(_Connection(client, end))
          await end.wait()
      except BaseException as error:  # reported by `ready`, or at the next call
        if not ready.done():
          cause = _cause(error)
          ready.set_exception(
              cause if isinstance(cause, Exception) else ConnectionError())

    task = asyncio.ensure_future(hold())
    _TASKS.add(task)
    task.add_done_callback(_TASKS.discard)
    return await ready

  async def _checked_tools(self, client: Any) -> list[Any]:
    """Returns the tools of a client; raises the error of `list_tools`."""
    tools = await _all_tools(client)
    present = {tool.name: tool.input_schema for tool in tools}
    for name, schema in self.schemas.items():
      if present.get(name) != schema:
        change = 'has another input schema' if name in present else 'is missing'
        raise ChangedToolError(
            f'the MCP server {self._place} must keep the tools that the run '
            f'began with, but its tool {name!r} {change}. Start it with the '
            'former tools, and run the same command to go on from the last '
            'checkpoint, or go on with the present tools by --allow_changes.')
    return tools

  def _drop(self, connection: _Connection | None) -> None:
    """Lets the next call open another connection."""
    with self._lock:
      if self._connection is connection:
        self._connection = None
      if connection is not None:
        connection.dropped = True
        connection.close_if_unused()

  def _wait_for(self, coroutine: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(
        asyncio.wait_for(coroutine, self._call_secs), _loop()).result()


async def _all_tools(client: Any) -> list[Any]:
  """Returns the tools of all pages of a server's list."""
  page = await client.list_tools()
  tools, cursors = [*page.tools], set[str]()
  while (cursor := page.next_cursor) is not None:
    if cursor in cursors or len(cursors) + 1 == _MAX_PAGES:
      raise ValueError(f'its list of tools has no end, as page '
                       f'{len(cursors) + 1} refers to {cursor[:40]!r}')
    cursors.add(cursor)
    page = await client.list_tools(cursor=cursor)
    tools += page.tools
  return tools


def _cause(error: BaseException) -> BaseException:
  """Returns an error itself, or the first error of a group of errors."""
  while isinstance(error, BaseExceptionGroup):
    error = error.exceptions[0]
  return error


def _reason(error: BaseException) -> str:
  """Returns the type of an error's cause, and its text if it has one."""
  cause = _cause(error)
  return ': '.join(filter(None, (type(cause).__name__, str(cause))))


def _text(result: Any) -> str:
  """Returns a result as text: its structured content if it has nothing else."""
  if not result.content and result.structured_content is not None:
    return json.dumps(result.structured_content, ensure_ascii=False)
  texts = []
  for part in result.content:
    source = part.resource if part.type == 'resource' else part
    texts.append(getattr(source, 'text', f'({part.type})'))
  return '\n'.join(texts)


_TASKS: set[Any] = set()  # tasks, which asyncio itself would not keep alive


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
  loop = asyncio.new_event_loop()
  thread = threading.Thread(target=loop.run_forever, daemon=True, name='mcp')
  thread.start()
  atexit.register(_close_all, loop, thread)
  return loop


def _close_all(loop: asyncio.AbstractEventLoop, thread: threading.Thread
              ) -> None:
  """Closes all connections, as the protocol says.

  A server that was started here gets the end of its standard input, and after
  a while signals.
  """
  async def close():
    for task in _TASKS:
      task.cancel()
    if _TASKS:
      await asyncio.wait(_TASKS)

  if thread.is_alive():  # it is not in a forked process
    try:
      asyncio.run_coroutine_threadsafe(close(), loop).result(_CLOSE_SECS)
    except TimeoutError:  # the process ends all the same
      pass
