# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Multi-process runs: start, exchange, agree, and act once for all processes.

A meeting is a point at which all processes wait for each other and exchange
data. Meetings use the key-value store of jax's coordination service on the
hosts. They use no device, so they are possible before the first program and
have a timeout. All processes must call these functions in the same order. If
they do not, an error names the processes and the `tag` of each process's
meeting. A thread other than the main thread needs a `channel` for meetings with
the same thread of the other processes. With one process, these functions cost
nothing and use no device.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import json
import os
import threading
from typing import Any
import zlib

import jax
from jax._src import distributed  # private; used only in this file

from searchrl.runtime import log
from searchrl.runtime import process_environment
from searchrl.runtime import progress

_meeting_secs = 600  # default for a meeting, since rollouts differ in length

_INLINE = 1 << 14  # bytes sent with the tag; one message has all processes'
_PIECE = 1 << 20  # bytes per key; a message must stay below 2 GiB
_LEAVES = 'the early end of a process'  # tag of `leave`
_LEAVE_SECS = 10  # for which a process that ends early waits for a meeting

_REFUSALS = {kind.__name__: kind for kind in (  # the first match is used
    FileNotFoundError, OSError, ValueError)}


@dataclasses.dataclass
class _Channel:
  """Meetings of all processes, at which they exchange data, in one order.

  Meetings of other channels may come in between.
  """

  name: str
  number: int = 0  # number of the next meeting, equal on all processes
  oldest: int = 0  # number of the oldest meeting whose data are stored
  # Tags of timed-out meetings; in the end equal on all processes.
  failed: list[str] = dataclasses.field(default_factory=list)


_MAIN = _Channel('searchrl')
_channels: dict[str, _Channel] = {}
_of_thread = threading.local()


def channel(name: str) -> None:
  """Gives the calling thread a channel for meetings with other processes.

  The thread then meets the threads that use this channel in the other
  processes. The order of these meetings is independent of other channels. Only
  one thread of each process may use a channel at a time.
  """
  _of_thread.channel = _channels.setdefault(name, _Channel(f'searchrl/{name}'))


class Left(Exception):
  """Error: another process has ended early, with the exit code `code`."""

  def __init__(self, process: int, code: int):
    super().__init__(
        f'Process {process} has ended early, with exit code {code}, and so '
        f'does this one, process {index()}. What is saved is whole.')
    self.code = code


def initialize(environ: Mapping[str, str] = os.environ) -> None:
  """Starts `jax.distributed` if the environment asks for it.

  Call it before any use of a device. The environment asks for it by
  JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and
  JAX_PROCESS_ID, or by being a SLURM step of several tasks or a Cloud TPU pod
  of several hosts.

  The timeouts are SEARCHRL_START_SECS (300), SEARCHRL_HEARTBEAT_SECS (100, the
  time after which the others end when a process has died),
  SEARCHRL_MEETING_SECS (600, the time for which a meeting waits for the last
  process) and SEARCHRL_SHUTDOWN_SECS (300). A coordinator on a loopback address
  listens only there. Under SLURM, jax gives each task one GPU.
  JAX_LOCAL_DEVICE_IDS=0,1,... gives it several.

  Raises:
    ValueError: Some of the variables are missing, or one has an illegal value.
  """
  size, arguments = process_environment.read(environ)
  if size <= 1:
    return
  if 'JAX_ENABLE_PREEMPTION_SERVICE' not in environ:
    # That service catches SIGTERM, so that only a SIGKILL ends a process. A run
    # has its own handler, and `stop_requested_anywhere`.
    jax.config.update('jax_enable_preemption_service', False)
  secs = lambda name, default: process_environment.number(
      environ, f'SEARCHRL_{name}_SECS', default)
  global _meeting_secs
  _meeting_secs, start_secs = secs('MEETING', 600), secs('START', 300)
  who, place = f'One of {size} processes', ''
  if arguments:
    who = f'Process {arguments["process_id"]} of {size}'
    place = f' at {arguments["coordinator_address"]}'
  # Each process says it, because jax ends the process if another never comes.
  log.say(f'{who} waits up to {start_secs} s for the others{place}.')
  jax.distributed.initialize(
      initialization_timeout=start_secs,
      heartbeat_timeout_seconds=secs('HEARTBEAT', 100),
      shutdown_timeout_seconds=secs('SHUTDOWN', 300), **arguments)


def say(text: str, file: Any = None) -> None:
  """Logs a text, or prints it to a file, on the first process only."""
  if not is_first():
    return
  if file is None:
    log.say(text)
    return
  with progress.hidden():
    print(text, file=file, flush=True)


def warn(text: str) -> None:
  """Logs a warning on the first process only."""
  say(f'Warning: {text}')


def count() -> int:
  """Returns the number of processes, without touching a device."""
  return distributed.global_state.num_processes


def index() -> int:
  """Returns this process's index. On TPU `jax.process_index` may differ."""
  return distributed.global_state.process_id


def is_first() -> bool:
  """Returns whether this process writes and prints for all processes."""
  return index() == 0


def exchange(tag: str, payload: bytes,
             timeout_secs: float | None = None) -> list[bytes]:
  """Returns the payloads of all processes, in process order, on every process.

  Args:
    tag: Purpose of this call, at which all processes meet. A tag may be used
      again.
    payload: Bytes of any length from this process. The payloads of all
      processes pass through process 0.
    timeout_secs: Seconds to wait until all processes have arrived. None:
      SEARCHRL_MEETING_SECS.

  Raises:
    Left: Another process has ended early.
    TimeoutError: Some processes did not arrive. The error names them and the
      tag.
    RuntimeError: The processes meet with different tags. All processes raise
      it.
  """
  meetings = meet(tag, payload, timeout_secs)
  if any(other != tag for other, _ in meetings):
    raise RuntimeError(
        'processes must meet at the same tags in the same order, but '
        f'{by_process([repr(other) for other, _ in meetings])}. A host '
        "decision before this depended on one process's own state; "
        "LockstepCheck('call') names the first call that differs.")
  return [payload for _, payload in meetings]


def barrier(tag: str, timeout_secs: float | None = None) -> None:
  """Waits until every process has called it.

  Raises the errors of `exchange`.
  """
  exchange(tag, b'', timeout_secs)


def agree(tag: str, value: Any) -> Any:
  """Returns the value, after checking that all processes have an equal one.

  Args:
    tag: Name of the value in the error message, such as 'config'.
    value: Value that JSON can hold. The error names only the leaves of nested
      dicts that differ.

  Raises:
    ValueError: The values differ. All processes raise the same error, which
      names the processes and their values.
  """
  text = json.dumps(value, sort_keys=True)
  differences = _differences(tag, [
      _flatten(json.loads(other)) for other in exchange(tag, text.encode())])
  if differences:
    raise ValueError('\n  '.join([
        f'{tag} must be alike on all processes, but differs:',
        *differences[:16],
        'Start all processes by the same command, from the same files and '
        'packages.']))
  return value


def share(items: Sequence[Any]) -> Sequence[Any]:
  """Returns this process's share of a sequence: one contiguous block of it.

  The blocks of all processes cover the sequence; sizes differ by at most 1.
  """
  edges = [len(items) * i // count() for i in (index(), index() + 1)]
  return items[slice(*edges)]


def on_first(tag: str, function: Callable[[], Any],
             timeout_secs: float | None = None) -> Any:
  """Calls a function on the first process; returns its result on all processes.

  Args:
    tag: Name of the purpose for which the processes wait for each other.
    function: Function that writes files, or reads files that may change. It
      returns a value that JSON can hold. The other processes wait for it.
    timeout_secs: Maximum waiting time in seconds. None: SEARCHRL_MEETING_SECS.

  Raises:
    ValueError, OSError: The function raised this error on the first process.
      All processes then raise it.
  """
  value, error = None, None
  if is_first():
    try:
      value = function()
    except tuple(_REFUSALS.values()) as raised:
      error = raised
  name = next((name for name, kind in _REFUSALS.items()
               if isinstance(error, kind)), None)
  payloads = exchange(
      tag, json.dumps([value, name, str(error)]).encode(), timeout_secs)
  if error:
    raise error
  value, name, text = json.loads(payloads[0])
  if name:
    raise _REFUSALS[name](text)
  return value


def stop_requested_anywhere(is_requested: bool) -> bool:
  """Returns whether any process was asked to stop.

  All processes can then stop at the same time.
  """
  return any(exchange('stop?', b'1' if is_requested else b''))


def leave(code: int) -> bool:
  """Tells the other processes that this one ends early, with an exit code.

  They learn of it when all processes meet to exchange data, and then raise
  `Left`. They have 10 seconds to come to such a meeting.

  Returns:
    True if all others came. If False, they may be waiting in a program on their
    devices, and notice the end of this process only when it no longer answers.
  """
  try:
    meet(_LEAVES, str(code).encode(), _LEAVE_SECS)
  except (TimeoutError, jax.errors.JaxRuntimeError):
    return False
  return True


def meet(tag: str, payload: bytes, timeout_secs: float | None = None
        ) -> list[tuple[str, bytes]]:
  """Returns the tag and payload that each process brought to this meeting.

  The list is in process order. The tags may differ.

  Raises:
    TimeoutError: Some processes did not arrive in time.
    Left: Another process has ended early.
    ValueError: The processes have different values of JAX_NUM_PROCESSES.
  """
  if count() == 1:
    return [(tag, payload)]
  client: Any = distributed.global_state.client
  own = getattr(_of_thread, 'channel', _MAIN)
  number, folder = own.number, f'{own.name}/{own.number}'
  packed = zlib.compress(payload, 1)
  # A signal may have ended an earlier call after it stored some of these keys.
  store = functools.partial(client.key_value_set_bytes, allow_overwrite=True)
  for start in range(_INLINE, len(packed), _PIECE):
    store(f'{folder}/rest/{index()}/{start}', packed[start:start + _PIECE])
  head = json.dumps([tag, len(packed)]).encode() + b'\n'
  store(f'{folder}/head/{index()}', head + packed[:_INLINE])
  _wait(client, own, tag, f'{folder}/head/', timeout_secs or _meeting_secs)
  _forget_meetings_before(client, own, number)
  heads = dict(client.key_value_dir_get_bytes(f'{folder}/head/'))
  if len(heads) != count() and tag != _LEAVES:
    raise ValueError(
        f'JAX_NUM_PROCESSES must be equal on all processes, but is {count()} '
        f'on process {index()}, and {len(heads)} in all came to {tag!r}. Start '
        'all processes again with one number.')
  meetings = [_unpack(client, folder, i, heads[f'{folder}/head/{i}'])
              for i in range(min(count(), len(heads)))]
  for process, (other, code) in enumerate(meetings):
    if other == _LEAVES and tag != _LEAVES:
      raise Left(process, int(code))
  return meetings


def _forget_meetings_before(client: Any, own: _Channel, number: int) -> None:
  """Deletes the data of a channel's meetings before the meeting `number`."""
  while own.oldest < number:
    if is_first():
      client.key_value_delete(f'{own.name}/{own.oldest}/')
    own.oldest += 1


def _unpack(client: Any, folder: str, process: int, entry: bytes
           ) -> tuple[str, bytes]:
  """Returns the tag and payload of a process from its stored entries."""
  head, _, packed = entry.partition(b'\n')
  tag, size = json.loads(head)
  packed += b''.join(
      client.key_value_try_get_bytes(f'{folder}/rest/{process}/{start}')
      for start in range(_INLINE, size, _PIECE))
  return tag, zlib.decompress(packed)


def _wait(client: Any, own: _Channel, tag: str, heads: str,
          timeout_secs: float) -> None:
  """Waits at a barrier, which counts as one meeting of the channel.

  Raises:
    TimeoutError: A process is missing; the message names it.
  """
  # A barrier's name is never freed, so it is used again until it fails.
  name, millis = f'{own.name}/{len(own.failed)}', int(timeout_secs * 1000)
  wait = client.wait_at_barrier
  try:
    # Python raises a signal's exception after a call, and so not between these
    # two lines. A meeting is counted only if the process comes to the barrier.
    own.number += 1
    wait(name, millis)
  except jax.errors.JaxRuntimeError as error:
    if 'DEADLINE_EXCEEDED' not in str(error):
      raise
    own.failed.append(tag)
    arrived = {key for key, _ in client.key_value_dir_get_bytes(heads)}
    missing = [i for i in range(count()) if f'{heads}{i}' not in arrived]
    raise TimeoutError(
        f'all {count()} processes must reach {tag!r} within {timeout_secs:g} s '
        f'of the first, but {_named(missing) if missing else "the last"} did '
        f'not (this is process {index()}). Look at the logs of those, then '
        'restart all processes.') from error


def _flatten(value: Any, path: str = '') -> dict[str, str]:
  """Returns {'.path.of.keys': JSON of the leaf}."""
  if isinstance(value, dict) and value:
    return {inner: text for key, child in value.items()
            for inner, text in _flatten(child, f'{path}.{key}').items()}
  return {path: json.dumps(value)}


def _differences(tag: str, values: Sequence[dict[str, str]]) -> list[str]:
  """Returns 'tag.path: process 0: a; process 1: b' for each differing path."""
  paths = sorted(set().union(*values))
  texts = [[value.get(path, 'nothing') for value in values] for path in paths]
  return [f'{tag}{path}: {by_process(text)}' for path, text in zip(paths, texts)
          if len(set(text)) > 1]


def by_process(texts: Sequence[str]) -> str:
  """Returns a text such as 'process 0: a; processes 1, 2: b'.

  Equal texts are written once. If all begin alike, only the last 100 characters
  of this beginning are kept.
  """
  start = max(len(os.path.commonprefix(list(texts))) - 100, 0)
  return '; '.join(
      f'{_named([i for i, other in enumerate(texts) if other == text])}: '
      f'{"... " if start else ""}{shortened(text[start:])}'
      for text in dict.fromkeys(texts))


def _named(numbers: Sequence[int]) -> str:
  """Returns 'process 3' or 'processes 0, 1, 2', for messages."""
  rest = f', ... ({len(numbers)} in all)' if len(numbers) > 8 else ''
  shown = ', '.join(map(str, numbers[:8]))
  return f'process{"es" if len(numbers) > 1 else ""} {shown}{rest}'


def shortened(text: str) -> str:
  """Returns at most 400 characters of a text, for messages."""
  return text if len(text) <= 400 else f'{text[:400]} ...'
