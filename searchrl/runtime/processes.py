# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Many processes in, one program out: start, agree, exchange, guard.

Processes meet on the host, through the key-value store of jax's coordination
service: no device takes part, so a meeting is possible before the first program
and has a time-out. All processes call the same functions here, in the same
order, all from one thread; a process at another `tag` is named. With one
process all of this is free, and no device is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import hashlib
import itertools
import json
import os
import re
import sys
from typing import Any
import zlib

import jax
from jax._src import cloud_tpu_init  # private, and named in this file alone
from jax._src import clusters
from jax._src import distributed

TIMEOUT_SECS = 600  # for a meeting, unless told: rollouts differ in length

_EXPLICIT = ('JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID')
_SLURM = tuple(f'SLURM_{name}' for name in (  # what jax's own detection reads
    'JOB_ID', 'STEP_NODELIST', 'NTASKS', 'PROCID', 'LOCALID'))
_INLINE = 1 << 14  # bytes beside the tag: all processes' come in one message
_PIECE = 1 << 20  # bytes under one key; a message must stay below 2 GiB

_SAME_CALLS = 'processes must make the same calls in the same order'

_numbers = itertools.count()  # of meetings; alike on all processes
_stale: list[str] = []  # folders of meetings that someone may still read
_failed: list[str] = []  # tags of meetings that timed out; alike, once all know


def initialize(environ: Mapping[str, str] = os.environ) -> None:
  """Calls `jax.distributed.initialize` if the environment asks for it.

  It asks by JAX_COORDINATOR_ADDRESS (host:port of process 0) together with
  JAX_NUM_PROCESSES and JAX_PROCESS_ID; or as a SLURM step of several tasks, or
  a Cloud TPU pod of several hosts. Comes before anything that touches a device.

  SEARCHRL_START_SECS (300), SEARCHRL_HEARTBEAT_SECS (100: a dead process ends
  the others so much later) and SEARCHRL_SHUTDOWN_SECS (300) are its time-outs.
  A coordinator on a loopback address listens there alone. Under SLURM jax gives
  each task one GPU; name several by JAX_LOCAL_DEVICE_IDS=0,1,...

  Raises:
    ValueError: if the environment asks in part, or for what cannot be.
  """
  if any(environ.get(name) for name in _EXPLICIT):
    arguments = _explicit(environ)
    if arguments['num_processes'] == 1:
      return
  elif _detected(environ) > 1:
    arguments = {}  # jax finds them out
  else:
    return
  if 'JAX_ENABLE_PREEMPTION_SERVICE' not in environ:
    # It would swallow SIGTERM: processes then outlive it until a SIGKILL. We
    # have a handler of our own, and `stop_requested_anywhere`.
    jax.config.update('jax_enable_preemption_service', False)
  start, heartbeat, shutdown = (
      _number(environ, f'SEARCHRL_{name}_SECS', default) for name, default in
      (('START', 300), ('HEARTBEAT', 100), ('SHUTDOWN', 300)))
  jax.distributed.initialize(
      initialization_timeout=start, heartbeat_timeout_seconds=heartbeat,
      shutdown_timeout_seconds=shutdown, **arguments)


def say(text: str, file: Any = None) -> None:
  """Prints, for all processes, on the first; to stderr unless told."""
  if is_first():
    print(text, file=file or sys.stderr, flush=True)


def count() -> int:
  """How many processes there are; touches no device."""
  return distributed.global_state.num_processes


def index() -> int:
  """This process in [0, count); on TPU, `jax.process_index` may be another."""
  return distributed.global_state.process_id


def is_first() -> bool:
  """Whether this process is the one that writes and speaks for all."""
  return index() == 0


def exchange(tag: str, payload: bytes,
             timeout_secs: float = TIMEOUT_SECS) -> list[bytes]:
  """Every process's bytes, in process order, on every process.

  Args:
    tag: what this meeting is for; may come again.
    payload: of any length; all of it passes through process 0.
    timeout_secs: how long the first to arrive waits for the last.

  Raises:
    TimeoutError: naming the tag, and the processes that did not arrive.
    RuntimeError: if processes meet at different tags; then all are told.
  """
  met = _meet(tag, payload, timeout_secs)
  if any(other != tag for other, _ in met):
    raise RuntimeError(
        'processes must meet at the same tags in the same order, but '
        f'{_told([repr(other) for other, _ in met])}. A host decision before '
        "this depended on one process's own state; LockstepCheck('call') names the "
        'call after which they part.')
  return [theirs for _, theirs in met]


def barrier(tag: str, timeout_secs: float = TIMEOUT_SECS) -> None:
  """Waits until every process is here; raises as `exchange` does."""
  exchange(tag, b'', timeout_secs)


def agree(tag: str, value: Any, timeout_secs: float = TIMEOUT_SECS) -> Any:
  """Returns the value, which must be alike on all processes.

  Args:
    tag: what the message calls the value, such as 'config'.
    value: what JSON can hold; of nested dicts only the differences are told.
    timeout_secs: as of `exchange`.

  Raises:
    RuntimeError: naming the processes, and what each of them has.
  """
  mine = json.dumps(value, sort_keys=True).encode()
  flat = [_flatten(json.loads(x)) for x in exchange(tag, mine, timeout_secs)]
  paths = sorted({path for one in flat for path in one})
  told = [f'{tag}{path}: {_told(theirs)}' for path in paths
          if len(set(theirs := [x.get(path, 'nothing') for x in flat])) > 1]
  if told:
    raise RuntimeError('\n  '.join([
        f'{tag} must be alike on all processes, but differs:', *told[:16],
        'Start all processes by the same command, from the same files and '
        'packages.']))
  return value


def share(items: Sequence[Any]) -> Sequence[Any]:
  """This process's part of what all have: blocks in process order, as even as
  can be."""
  edges = [len(items) * i // count() for i in (index(), index() + 1)]
  return items[slice(*edges)]


def on_first(tag: str, function: Callable[[], Any],
             timeout_secs: float = TIMEOUT_SECS) -> Any:
  """What a function gives on the first process, told to all; the others wait.

  Args:
    tag: what this meeting is for.
    function: writes files, or reads what may change; gives what JSON can hold.
    timeout_secs: as of `exchange`.

  Raises:
    ValueError, FileNotFoundError: of the function, on all processes.
  """
  told, error = None, None
  if is_first():
    try:
      told = function()
    except (ValueError, FileNotFoundError) as raised:
      error = raised
  refusal = [type(error).__name__, str(error)] if error else None
  met = exchange(tag, json.dumps([told, refusal]).encode(), timeout_secs)
  if error:
    raise error
  told, refusal = json.loads(met[0])
  if refusal:
    kind, text = refusal
    raise (FileNotFoundError if kind == 'FileNotFoundError' else ValueError)(text)
  return told


def stop_requested_anywhere(asked: bool,
                            timeout_secs: float = TIMEOUT_SECS) -> bool:
  """Whether any process was asked to stop: all leave the loop at one step."""
  return any(exchange('stop?', b'1' if asked else b'', timeout_secs))


class LockstepCheck:
  """Finds out that processes no longer make the same calls in the same order.

  Programs that diverge do not always hang: collectives pair up by position, and
  wrong numbers come out. So before each dispatch of a program with collectives:

      guard('update', batch, num_microbatches)   # what will be dispatched
      guard.phase('train')                       # at the end of a phase

  Args:
    mode: 'off'; 'phase' compares a running SHA-256 at phases, which costs next
      to nothing; 'call' compares every call, some milliseconds each, and so
      names the one at which processes part.
    timeout_secs: as of `exchange`.
  """

  def __init__(self, mode: str = 'phase', timeout_secs: float = TIMEOUT_SECS):
    if mode not in ('off', 'phase', 'call'):
      raise ValueError("a guard's mode must be 'off', 'phase' or 'call', but "
                       f"is {mode!r}. Take 'phase' unless you are debugging.")
    self._mode, self._timeout_secs = mode, timeout_secs
    self._digest = hashlib.sha256()
    self._calls, self._last = 0, 'none'

  def __call__(self, tag: str, *facts: Any) -> None:
    """One call is about to be dispatched.

    Args:
      tag: which program.
      facts: what it is compiled for. Arrays (or shapes) in any pytree count by
        dtype and shape, all else by `repr`.

    Raises:
      RuntimeError: in 'call' mode, on all processes, at the call at which they
        part, with its number, what each calls, and the last call in common.
    """
    if self._mode == 'off' or count() == 1:
      return
    call = f'{tag}({", ".join(_describe(facts))})'
    self._digest.update(call.encode() + b'\n')
    if self._mode == 'call':
      at = f'call {self._calls}: {tag}'
      met = _meet(at, call.encode(), self._timeout_secs)
      if any(theirs != call.encode() for _, theirs in met):
        calls = [theirs.decode() if other.startswith('call ') else
                 f'nothing, but is at {other!r}' for other, theirs in met]
        raise RuntimeError(
            f'{_SAME_CALLS}, but part at call {self._calls}. This is process '
            f'{index()}, which calls {_cut(call)}; of all, {_told(calls)}. '
            f'Last call in common: {_cut(self._last)}. What decides between '
            'the two may depend only on values that all processes share.')
    self._calls, self._last = self._calls + 1, call

  def phase(self, name: str) -> None:
    """A phase ends: raises a RuntimeError if calls have differed until now."""
    if self._mode == 'off' or count() == 1:
      return
    mine = (f'{self._calls} calls of digest {self._digest.hexdigest()[:16]}, '
            f'the last {_cut(self._last)}')
    met = exchange(f'phase {name}', mine.encode(), self._timeout_secs)
    if len(set(met)) > 1:
      raise RuntimeError(
          f'{_SAME_CALLS}, but differ at the end of phase {name!r}: '
          f'{_told([theirs.decode() for theirs in met])}. Rerun with '
          "LockstepCheck('call'), which names the call at which they part.")


def _meet(tag: str, payload: bytes, timeout_secs: float):
  """All processes' (tag, payload), whatever the tags are."""
  if count() == 1:
    return [(tag, payload)]
  client, folder = distributed.global_state.client, f'searchrl/{next(_numbers)}'
  packed = zlib.compress(payload, 1)
  _stale.append(folder)
  for start in range(_INLINE, len(packed), _PIECE):
    client.key_value_set_bytes(f'{folder}/rest/{index()}/{start}',
                               packed[start:start + _PIECE])
  head = json.dumps([tag, len(packed)]).encode() + b'\n'
  head += packed[:_INLINE]
  client.key_value_set_bytes(f'{folder}/head/{index()}', head)
  _wait(client, tag, f'{folder}/head/', timeout_secs)
  while _stale[0] != folder:  # whoever is here has left all earlier meetings
    old = _stale.pop(0)
    if is_first():
      client.key_value_delete(f'{old}/')
  heads = dict(client.key_value_dir_get_bytes(f'{folder}/head/'))
  met = []
  for process in range(count()):
    head, _, packed = heads[f'{folder}/head/{process}'].partition(b'\n')
    other, size = json.loads(head)
    packed += b''.join(
        client.key_value_try_get_bytes(f'{folder}/rest/{process}/{start}')
        for start in range(_INLINE, size, _PIECE))
    met.append((other, zlib.decompress(packed)))
  return met


def _wait(client: Any, tag: str, heads: str, timeout_secs: float) -> None:
  """The barrier; a TimeoutError says whose head is not there."""
  try:  # The service keeps each name for ever, so one serves until it fails.
    client.wait_at_barrier(f'searchrl/{len(_failed)}', int(timeout_secs * 1000))
  except jax.errors.JaxRuntimeError as error:
    if 'DEADLINE_EXCEEDED' not in str(error):
      raise
    _failed.append(tag)
    there = {key for key, _ in client.key_value_dir_get_bytes(heads)}
    missing = [i for i in range(count()) if f'{heads}{i}' not in there]
    raise TimeoutError(
        f'all {count()} processes must reach {tag!r} within {timeout_secs:g} s '
        f'of the first, but {_named(missing) if missing else "the last"} did '
        f'not (this is process {index()}). Look at the logs of those, then '
        'restart all processes.') from error


def _explicit(environ: Mapping[str, str]) -> dict[str, Any]:
  """Arguments for jax from the three variables."""
  missing = [name for name in _EXPLICIT if not environ.get(name)]
  if missing:
    raise ValueError(f'{", ".join(_EXPLICIT)} must be set together, but lack '
                     f'{", ".join(missing)}. Set all, or none for one process.')
  address = environ['JAX_COORDINATOR_ADDRESS']
  host, _, port = address.rpartition(':')
  if not host or not port.isdecimal():
    raise ValueError('JAX_COORDINATOR_ADDRESS must be host:port of process 0, '
                     f'but is {address!r}. Any free port will do.')
  size, process = (_number(environ, name) for name in _EXPLICIT[1:])
  if process >= size:
    raise ValueError(f'JAX_PROCESS_ID must be below JAX_NUM_PROCESSES={size}, '
                     f'but is {process}. Number the processes from 0.')
  arguments = dict(  # with nothing left for jax to find out
      coordinator_address=address, num_processes=size, process_id=process,
      cluster_detection_method='deactivate')
  if host.startswith('127.') or host in ('localhost', '[::1]'):
    arguments['coordinator_bind_address'] = address  # not on all interfaces
  return arguments


def _detected(environ: Mapping[str, str]) -> int:
  """How many tasks the SLURM step has, or hosts the TPU pod."""
  if all(environ.get(name) for name in _SLURM):
    return _number(environ, 'SLURM_NTASKS')
  if environ.get('JAX_PLATFORMS') == 'cpu':
    return 1  # a look at something from one of a pod's hosts
  hosts = (environ.get('TPU_PROCESS_ADDRESSES') or
           environ.get('TPU_WORKER_HOSTNAMES'))
  if hosts:
    return len(hosts.split(',')) * _number(environ, 'MEGASCALE_NUM_SLICES', 1)
  if not cloud_tpu_init.running_in_cloud_tpu_vm:
    return 1
  # Asks the metadata server; TPU_SKIP_MDS_QUERY=1 says that there is one host.
  for cluster in clusters.ClusterEnv._cluster_types:
    if not cluster.opt_in_only_method and cluster.is_env_present():
      return cluster.get_process_count()
  return 1


def _number(environ: Mapping[str, str], name: str, default: int = 0) -> int:
  text = environ.get(name) or str(default)
  if not text.isdecimal():
    raise ValueError(f'{name} must be digits alone, but is {text!r}. Mend it.')
  return int(text)


def _describe(facts: Any) -> list[str]:
  """'path=dtype[shape]' of each array in a tree, 'path=repr' of all else."""
  def told(x):
    if hasattr(x, 'shape') and hasattr(x, 'dtype'):
      return f'{x.dtype}[{",".join(map(str, x.shape))}]'
    return re.sub(r' at 0x[0-9a-f]+', '', repr(x))  # a process's own addresses

  return [f'{jax.tree_util.keystr(path[1:])}='.lstrip('=') + told(x) for path, x
          in jax.tree.leaves_with_path(facts, is_leaf=lambda x: x is None)]


def _flatten(value: Any, path: str = '') -> dict[str, str]:
  if isinstance(value, dict) and value:
    return {inner: text for key, child in value.items()
            for inner, text in _flatten(child, f'{path}.{key}').items()}
  return {path: json.dumps(value)}


def _told(texts: Sequence[str]) -> str:
  """'process 0: a; processes 1, 2: b', from where texts begin to differ."""
  start = max(len(os.path.commonprefix(list(texts))) - 100, 0)
  return '; '.join(
      f'{_named([i for i, other in enumerate(texts) if other == text])}: '
      f'{"... " if start else ""}{_cut(text[start:])}'
      for text in dict.fromkeys(texts))


def _named(numbers: Sequence[int]) -> str:
  rest = f', ... ({len(numbers)} in all)' if len(numbers) > 8 else ''
  shown = ', '.join(map(str, numbers[:8]))
  return f'process{"es" if len(numbers) > 1 else ""} {shown}{rest}'


def _cut(text: str) -> str:
  return text if len(text) <= 400 else f'{text[:400]} ...'
