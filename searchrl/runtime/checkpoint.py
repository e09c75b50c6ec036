# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""State and host data in, a committed step on disk out; and back, verified.

A step is a directory, complete at every instant that a `kill -9` may choose:

    <directory>/<step>/state/          arrays, written by Orbax
    <directory>/<step>/extra.json      host data
    <directory>/<step>/integrity.json  written last: SHA-256 of all of the above

Orbax restores flipped bits silently and takes an empty directory named "3" for
the latest step; here a step counts only with its `integrity.json`, and only if
every leaf has its digest. Containers are not stored, only paths of leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent import futures
import contextlib
import errno
import hashlib
import itertools
import json
import os
import pathlib
import re
import shutil
from typing import Any
import warnings

import jax
from jax.experimental import multihost_utils
import numpy as np
import orbax.checkpoint as ocp

Path = str | os.PathLike[str]

_STATE, _EXTRA, _MARKER = 'state', 'extra.json', 'integrity.json'


class _Damaged(Exception):
  """A committed step does not hold what was saved."""


def save(
    directory: Path, step: int, state: Any, extra: Mapping[str, Any],
    *, keep: int = 2, pinned: Collection[int] = (),
) -> None:
  """Writes one step, blocks until it is committed, and prunes older ones.

  On many hosts every process calls it, on a file system that they share.

  Args:
    directory: of all steps.
    step: larger than every committed one: a committed step is never rewritten.
    state: nested dict (or any pytree) of `jax.Array`.
    extra: what JSON can hold; tuples come back as lists, keys as strings.
    keep: how many of the newest steps stay.
    pinned: steps that stay besides.

  Raises:
    ValueError: if an argument breaks its rule; nothing is written then.
    OSError: the disk is full, for instance; older steps are whole then.
  """
  with Saver(directory, keep=keep) as saver:
    saver.save(step, state, extra, pinned=pinned)


class Saver:
  """Saves in the background, one step at a time; a context manager.

  A step is copied when it is saved, so that its buffers may be donated; what is
  written, and what its digests are of, is that copy. An error of a save is
  raised by the next one, by `wait`, or at the end.

  Args:
    directory: of all steps.
    keep: how many of the newest steps stay; at least 1.
  """

  def __init__(self, directory: Path, *, keep: int = 2):
    self._directory, self._keep = _absolute(directory), keep
    self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
    self._thread = futures.ThreadPoolExecutor(1, 'checkpoint')
    self._saving: futures.Future[None] | None = None

  def save(self, step: int, state: Any, extra: Mapping[str, Any],
           *, pinned: Collection[int] = ()) -> None:
    """Begins to write one step, once the one before is committed; as `save`."""
    self.wait()
    leaves, extra_text = _named(state), _to_json(extra)
    _check_save(self._directory, step, leaves, self._keep)
    _check_room(self._directory, leaves)
    path = self._directory / str(step)
    if jax.process_index() == 0:
      shutil.rmtree(path, ignore_errors=True)  # left behind by a killed save
      path.mkdir(parents=True)
    _all_agree()
    copies = {name: _copy(leaf) for name, leaf in leaves.items()}
    # Those of several hosts are gathered, which all do at one time: now.
    gathered = {name: _describe(leaf) for name, leaf in copies.items()
                if not leaf.is_fully_addressable}
    with _told_as_os_error(path):
      self._orbax.save(path / _STATE, args=ocp.args.PyTreeSave(copies))
    self._saving = self._thread.submit(
        self._commit, step, copies, gathered, extra_text, pinned)

  def wait(self) -> None:
    """Waits until what is being saved is committed, on all hosts."""
    saving, self._saving = self._saving, None
    if saving is not None:
      saving.result()
      _all_agree()

  def __enter__(self) -> Saver:
    return self

  def __exit__(self, kind, error, trace) -> None:
    try:
      if error is None:
        self.wait()
      elif self._saving is not None:  # that error is told, not another one
        futures.wait([self._saving])
    finally:
      self._thread.shutdown()
      self._orbax.close()

  def _commit(self, step, copies, gathered, extra_text, pinned) -> None:
    """What the thread does: seals the step once Orbax has written it."""
    described = {name: gathered.get(name) or _describe_host(np.asarray(leaf))
                 for name, leaf in copies.items()}
    path = self._directory / str(step)
    with _told_as_os_error(path):
      self._orbax.wait_until_finished()
    if jax.process_index() == 0:
      _write(path / _EXTRA, extra_text)
      body = {'step': step, 'extra': _sha256(extra_text), 'leaves': described}
      body['sha256'] = _sha256(_to_json(body))
      _write(path / _MARKER, json.dumps(body, indent=1))
      _prune(self._directory, self._keep, pinned)


def restore(
    directory: Path, template: Any,
    *, at: int | None = None, partial: bool = False,
    warn: Callable[[str], None] = warnings.warn,
) -> tuple[int, Any, dict[str, Any]] | None:
  """The newest intact step, as (step, state, extra); None if there is none.

  Steps that were never committed are passed over. Damaged ones are renamed
  `<step>.corrupt` once an older step has proved intact; while none has, nothing
  is touched, for then the cause may be the machine and not the files.

  Args:
    directory: as given to `save`; may be missing.
    template: tree of `jax.ShapeDtypeStruct` or arrays, as saved. A leaf comes
      back with the template's sharding, on any mesh; without one, as numpy.
    at: the committed step that is wanted; None: the newest intact one.
    partial: the template may lack leaves of the saved state, which are then not
      read: `{'params': ...}` does without the optimizer's.
    warn: receives one sentence for each step that was passed over.

  Raises:
    ValueError: if the template is that of another state, or all are damaged.
  """
  directory = _absolute(directory)
  for step in sorted(set(_numbered(directory)) - set(steps(directory))):
    warn(f'Checkpoint {directory / str(step)} was never committed; skipped.')
  damaged = {}
  for step in reversed(steps(directory) if at is None else [at]):
    path = directory / str(step)
    try:
      found = (step, *_load(path, template, partial))
    except _Damaged as reason:
      damaged[path] = str(reason).splitlines()[0][:160]
      continue
    for bad, reason in damaged.items():
      moved = _quarantine(bad)
      warn(f'Checkpoint {bad} is damaged ({reason}); moved to {moved.name}, '
           f'restored step {step} instead.')
    return found
  if damaged:
    raise ValueError('\n  '.join([
        'a restored checkpoint must be intact, but every step is damaged:',
        *(f'{path}: {reason}' for path, reason in damaged.items()),
        'Nothing was changed. Check disk and memory, copy a good step back, or '
        'use another directory to start anew.']))
  return None


def steps(directory: Path) -> list[int]:
  """The committed steps, oldest first; whether they are intact is not read."""
  directory = _absolute(directory)
  return [step for step in _numbered(directory)
          if (directory / str(step) / _MARKER).is_file()]


def holds(directory: Path, step: int, name: str) -> bool:
  """Whether a committed step has a leaf below a name, such as 'critic'."""
  seal, _ = _read_seal(_absolute(directory) / str(step))
  return any(leaf.startswith(f'{name}/') for leaf in seal['leaves'])


def extra(directory: Path, step: int) -> dict[str, Any]:
  """The host data of a committed step.

  Raises:
    ValueError: it is not what was saved.
  """
  path = _absolute(directory) / str(step)
  try:
    return _read_seal(path)[1]
  except _Damaged as reason:
    raise ValueError(f'{path} must be as it was saved, but {reason}.') from None


def delete(directory: Path, step: int) -> None:
  """Deletes a step; a kill leaves it whole or never committed."""
  path = _absolute(directory) / str(step)
  (path / _MARKER).unlink(missing_ok=True)  # first: half a step is none
  shutil.rmtree(path, ignore_errors=True)  # what stays, the next save tries


def digest(tree: Any) -> str:
  """SHA-256, in hex, over path, dtype, shape and bytes of all leaves.

  Equal for equal values on any mesh; any flipped bit changes it.
  """
  return _sha256(_to_json({n: _describe(x) for n, x in _named(tree).items()}))


def _load(path, template, partial) -> tuple[Any, dict[str, Any]]:
  """One step's state and extra; `_Damaged` unless they are what was saved."""
  seal, extra = _read_seal(path)
  wanted = _named(template)
  _check_template(path, wanted, seal['leaves'], partial)
  restored = _read_leaves(path, wanted)
  for name, leaf in restored.items():
    if _describe(leaf) != seal['leaves'][name]:
      raise _Damaged(f'leaf {name} differs from what was saved')
  return jax.tree.unflatten(
      jax.tree.structure(template), [restored[name] for name in wanted]), extra


def _read_seal(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
  """The verified integrity.json and extra.json of a step."""
  try:
    seal = json.loads((path / _MARKER).read_text())
    extra_text = (path / _EXTRA).read_text()
    signed = seal.pop('sha256')
  except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
    raise _Damaged(f'{type(error).__name__}: {error}') from error
  if signed != _sha256(_to_json(seal)) or str(seal['step']) != path.name:
    raise _Damaged(f'{_MARKER} was altered')
  if seal['extra'] != _sha256(extra_text):
    raise _Damaged(f'{_EXTRA} was altered')
  return seal, json.loads(extra_text)


def _read_leaves(path: pathlib.Path, wanted: dict[str, Any]) -> dict[str, Any]:
  abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=getattr(x, 'sharding', None)), wanted)
  args = ocp.args.PyTreeRestore(
      abstract, partial_restore=True,
      restore_args=ocp.checkpoint_utils.construct_restore_args(abstract))
  restored, reason = {}, ''
  try:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
      restored = checkpointer.restore(path / _STATE, args=args)
  except (MemoryError, PermissionError, jax.errors.JaxRuntimeError):
    raise  # no evidence about the files
  except Exception as error:  # Orbax documents no type for damaged files.
    reason = f'{type(error).__name__}: {error}'
  if not _all_agree(not reason):
    raise _Damaged(reason or 'another process could not read it')
  return restored


def _check_room(directory: pathlib.Path, leaves: dict[str, Any]) -> None:
  """Raises an OSError if the disk is too full.

  Orbax would find out in each of its threads, with a traceback of each.
  """
  needed = sum(leaf.nbytes for leaf in leaves.values())
  there = next(path for path in (directory, *directory.parents)
               if path.exists())
  free = shutil.disk_usage(there).free
  if not _all_agree(free >= needed):
    raise OSError(errno.ENOSPC, f'No space left: a checkpoint has {needed:,} '
                  f'bytes, and the disk {free:,}', str(directory))


@contextlib.contextmanager
def _told_as_os_error(path: pathlib.Path) -> Iterator[None]:
  """Raises a write that failed as an OSError that says of what.

  tensorstore raises a ValueError with the number in its text; of the files that
  Orbax writes itself, the error has no name.
  """
  try:
    yield
  except (ValueError, OSError) as error:
    code = getattr(error, 'errno', None)
    if found := re.search(r"os_error_code='(\d+)'", str(error)):
      code = int(found[1])
    if not code or getattr(error, 'filename', None):
      raise
    raise OSError(code, f'{os.strerror(code)}: a checkpoint could not be '
                  'written; those before it are whole', str(path)) from error


def _check_save(directory, step, leaves, keep) -> None:
  if keep < 1:
    raise ValueError(f'keep must be at least 1, but is {keep}.')
  if step <= max(steps(directory), default=-1):
    raise ValueError(
        f'step must be at least 0 and larger than every committed step, but is '
        f'{step}, and {directory} holds {steps(directory)}. Restore before you '
        'train on, or save to another directory.')
  for name, leaf in leaves.items():
    if not isinstance(leaf, jax.Array) or not leaf.size:
      raise ValueError(
          f'state leaf {name} must be a jax.Array with elements, but is '
          f'{type(leaf).__name__}{np.shape(leaf)}. Host data goes to `extra`.')


def _check_template(path, wanted, saved, partial) -> None:
  found = {name: f'{np.dtype(leaf.dtype)}{list(leaf.shape)}'
           for name, leaf in wanted.items()}
  rules = {name: leaf['array'] for name, leaf in saved.items()}
  for name in sorted(found if partial else found | rules):
    rule, kind = rules.get(name, 'absent'), found.get(name, 'absent')
    if rule != kind:
      raise ValueError(
          f'template leaf {name} must be {rule} as in {path}, but is {kind}. '
          'Restore with the configuration that it was saved with (partial=True '
          'passes over leaves absent here), or use another directory.')


def _prune(directory: pathlib.Path, keep: int, pinned: Collection[int]) -> None:
  """Deletes all but the newest committed steps, killed saves included."""
  kept = {*steps(directory)[-keep:], *(set(steps(directory)) & {*pinned})}
  for step in set(_numbered(directory)) - kept:
    delete(directory, step)


def _quarantine(path: pathlib.Path) -> pathlib.Path:
  """Renames a damaged step to a free name that no step can have."""
  names = (f'{path}.corrupt{i or ""}' for i in itertools.count())
  target = next(t for t in map(pathlib.Path, names) if not t.exists())
  if jax.process_index() == 0:
    path.rename(target)
  return target


def _absolute(directory: Path) -> pathlib.Path:
  if '://' in str(directory):
    raise ValueError(
        f'directory must be a local path, but is {directory}. Mount the bucket '
        '(gcsfuse) and give the path that it has here.')
  return pathlib.Path(directory).expanduser().absolute()


def _numbered(directory: pathlib.Path) -> list[int]:
  """Steps that have a directory, committed or not, in order."""
  if not directory.is_dir():
    return []
  return sorted(int(path.name) for path in directory.iterdir()
                if re.fullmatch('0|[1-9][0-9]*', path.name) and path.is_dir())


def _named(tree: Any) -> dict[str, Any]:
  """The leaves by path, such as 'params/layers/wq', in the tree's order."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  named = {jax.tree_util.keystr(path, simple=True, separator='/'): leaf
           for path, leaf in leaves}
  if len(named) != len(leaves):
    raise ValueError('leaf paths must differ when joined by "/", but two are '
                     'the same. Take the "/" out of the keys.')
  return named


def _describe(leaf: Any) -> dict[str, str]:
  """Dtype, shape and SHA-256 of the bytes, wherever the array is."""
  if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
    leaf = multihost_utils.process_allgather(leaf, tiled=True)
  elif isinstance(leaf, jax.Array):
    leaf = _copy(leaf)  # an array keeps its host copy for life
  return _describe_host(np.asarray(leaf))


def _describe_host(x: np.ndarray) -> dict[str, str]:
  flat = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
  return {'array': f'{x.dtype}{list(x.shape)}',
          'sha256': hashlib.sha256(flat).hexdigest()}


def _copy(leaf: jax.Array) -> jax.Array:
  """A copy with the same layout: of an accelerator's array, on its host."""
  sharding = leaf.sharding
  device = next(iter(sharding.device_set))
  if device.platform != 'cpu' and 'pinned_host' in {
      memory.kind for memory in device.addressable_memories()}:
    sharding = sharding.with_memory_kind('pinned_host')
  return jax.device_put(leaf, sharding, may_alias=False)


def _sha256(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()


def _to_json(value: Any) -> str:
  try:
    return json.dumps(value, sort_keys=True)
  except TypeError as error:
    raise ValueError(f'extra must hold what JSON can, but: {error}. Convert '
                     'arrays with .tolist().') from error


def _write(path: pathlib.Path, text: str) -> None:
  """The whole file or none of it, also when the power fails."""
  with open(f'{path}.tmp', 'w') as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  os.replace(f'{path}.tmp', path)
  folder = os.open(path.parent, os.O_RDONLY)
  os.fsync(folder)
  os.close(folder)


def _all_agree(ok: bool = True) -> bool:
  """Whether `ok` holds on all processes; each waits here for the others."""
  return ok if jax.process_count() == 1 else bool(
      multihost_utils.process_allgather(np.array(ok)).all())
