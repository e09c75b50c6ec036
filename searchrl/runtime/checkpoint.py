# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: saves the state and host data, and verifies what it restores.

A step is a directory. A `kill -9` at any moment leaves no half-written step
that counts as saved:

    <directory>/<step>/state/          arrays, written by Orbax
    <directory>/<step>/extra.json      host data
    <directory>/<step>/integrity.json  written last: SHA-256 of all of the above

Orbax restores flipped bits silently, and takes an empty directory named "3" for
the latest step. Here a step is committed once it has `integrity.json`, and it
is intact if every leaf matches its digest. Containers are not stored, only the
paths of leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent import futures
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

from searchrl.runtime import array_digests
from searchrl.runtime import atomic_files
from searchrl.runtime import host_memory
from searchrl.runtime import orbax_errors
from searchrl.runtime import run_store

Path = str | os.PathLike[str]

_STATE, _EXTRA, _MARKER = 'state', 'extra.json', 'integrity.json'
_AT_ONCE = 256 << 20  # bytes of arrays that CPUs write at a time


class _Damaged(Exception):
  """Error: a committed step differs from the saved data."""


def save(
    directory: Path, step: int, state: Any, extra: Mapping[str, Any],
    *, keep: int = 2, pinned: Collection[int] = (),
) -> None:
  """Saves one step, and returns when it is committed. See `Saver.save`."""
  with Saver(directory, keep=keep) as saver:
    saver.save(step, state, extra, pinned=pinned)


class Saver:
  """A context manager that saves in the background, one step at a time.

  On accelerators, `save` copies the state, whose buffers may then be donated.
  Files and digests are made from the copy. An error in a save is raised by
  the next `save`, by `wait`, or at the end. With several hosts, every process
  makes the same calls, on a file system that they share.

  If all arrays are on CPUs, `save` does not copy them. It then returns once the
  step is committed, and raises its own errors. Work in the background would use
  the cores of the next step, and a copy as much memory as the state.

  Args:
    directory: Directory of all steps.
    keep: Number of newest steps that are kept; at least 1.
  """

  def __init__(self, directory: Path, *, keep: int = 2):
    if keep < 1:
      raise ValueError(f'keep must be at least 1, but is {keep}.')
    self._directory, self._keep = _absolute(directory), keep
    self._thread = futures.ThreadPoolExecutor(1, 'checkpoint')
    self._saving: futures.Future[None] | None = None

  def save(self, step: int, state: Any, extra: Mapping[str, Any],
           *, pinned: Collection[int] = ()) -> None:
    """Waits for the previous step to be committed, and begins to write a step.

    Args:
      step: Number of the step. It must be larger than every committed one,
        since a committed step is never rewritten.
      state: Nested dict (or any pytree) of `jax.Array`.
      extra: Host data that JSON can hold. Tuples come back as lists, and keys
        as strings.
      pinned: Steps that are kept, besides the newest.

    Raises:
      ValueError: An argument breaks its rule. Nothing is written.
      OSError: The write failed, such as on a full disk. Older steps are whole.
    """
    self.wait()
    leaves, extra_text = _by_path(state), _to_json(extra)
    _check_save(self._directory, step, leaves)
    _check_room(self._directory, leaves)
    host_memory.give_back()  # the update's, since writing takes memory, too
    path = self._directory / str(step)
    if jax.process_index() == 0:
      shutil.rmtree(path, ignore_errors=True)  # left behind by a killed save
      path.mkdir(parents=True)
    _all_agree()
    in_background = not all(map(_is_on_cpus, leaves.values()))
    copies = leaves if not in_background else {
        name: array_digests.copy(leaf) for name, leaf in leaves.items()}
    # What a host lacks a part of is gathered now, while all hosts take part.
    gathered = {name: array_digests.describe(leaf)
                for name, leaf in copies.items()
                if not array_digests.is_whole_on_each_host(leaf)}
    orbax = ocp.AsyncCheckpointer(_handler(leaves, in_background))
    with orbax_errors.of_writes(path):
      orbax.save(path / _STATE, args=ocp.args.PyTreeSave(copies))
    self._saving = self._thread.submit(
        self._commit, orbax, step, copies, gathered, extra_text, pinned)
    if not in_background:
      self.wait()
      host_memory.give_back()  # the compressed bytes'

  def wait(self) -> None:
    """Waits until the last saved step is committed on all hosts."""
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
      elif self._saving is not None:  # raises `error`, not the save's
        futures.wait([self._saving])
    finally:
      self._thread.shutdown()

  def _commit(self, orbax, step, copies, gathered, extra_text, pinned) -> None:
    """Seals the step once Orbax has written it. Runs in the thread."""
    described = {name: gathered.get(name) or array_digests.describe(leaf)
                 for name, leaf in copies.items() if jax.process_index() == 0}
    path = self._directory / str(step)
    with orbax_errors.of_writes(path):
      orbax.close()  # waits until all is written
    if jax.process_index() == 0:
      atomic_files.write(path / _EXTRA, extra_text)
      body = {'step': step, 'extra': _sha256(extra_text), 'leaves': described}
      body['sha256'] = _sha256(_to_json(body))
      atomic_files.write(path / _MARKER, json.dumps(body, indent=1))
      _prune(self._directory, self._keep, pinned)
      run_store.push()


def restore(
    directory: Path, template: Any,
    *, at: int | None = None, partial: bool = False,
    warn: Callable[[str], None] = warnings.warn,
) -> tuple[int, Any, dict[str, Any]] | None:
  """Returns the newest intact step, as (step, state, extra).

  `extra` is the step's host data. The result is None if no step was committed.
  Damaged steps are renamed `<step>.corrupt`, but only after an older step has
  proved intact: if all are damaged, the cause may be the machine.

  Args:
    directory: Directory that was given to `save`. It may be missing.
    template: Tree of `jax.ShapeDtypeStruct` or arrays, like the saved one. A
      leaf of the result has the sharding of its template, on any mesh. It is a
      numpy array if the template has no sharding.
    at: Committed step to restore. None: the newest intact one.
    partial: Whether the template may lack leaves, which are then not read.
    warn: Function that receives one sentence for each step that is skipped.

  Raises:
    ValueError: The template does not match the state, all steps are damaged, or
      the step `at` is damaged or missing.
    OSError: A file is there, but cannot be read. Nothing is changed.
  """
  directory = _absolute(directory)
  for step in sorted(set(_numbered(directory)) - set(steps(directory))):
    warn(f'Checkpoint {directory / str(step)} was never committed; skipped.')
  damaged: dict[pathlib.Path, str] = {}
  for step in reversed(steps(directory) if at is None else [at]):
    path = directory / str(step)
    try:
      state, extra = _load(path, template, partial)
    except _Damaged as error:
      damaged[path] = str(error).splitlines()[0][:160]
      continue
    for path, reason in damaged.items():
      warn(f'Checkpoint {path} is damaged ({reason}); moved to '
           f'{_quarantine(path).name}, restored step {step} instead.')
    return step, state, extra
  if damaged:
    others = sorted({*steps(directory)} - {at})
    what, way_out = ('every step', 'use another directory to start anew') if (
        at is None) else (f'step {at}', f'name one of {others}')
    raise ValueError('\n  '.join([
        f'a restored checkpoint must be intact, but {what} is damaged:',
        *map('{0[0]}: {0[1]}'.format, damaged.items()), 'Nothing was changed. '
        f'Check disk and memory, copy a good step back, or {way_out}.']))
  return None


def steps(directory: Path) -> list[int]:
  """Returns the committed steps, oldest first, without verifying them."""
  directory = _absolute(directory)
  return [step for step in _numbered(directory)
          if (directory / str(step) / _MARKER).is_file()]


def holds(directory: Path, step: int, name: str) -> bool:
  """Returns whether a committed step has arrays under a name like 'critic'."""
  seal, _ = _read_seal(_absolute(directory) / str(step))
  return any(leaf.startswith(f'{name}/') for leaf in seal['leaves'])


def extra(directory: Path, step: int) -> dict[str, Any]:
  """Returns the host data of a committed step.

  Raises:
    ValueError: The step differs from the saved data.
    OSError: A file is there, but cannot be read.
  """
  path = _absolute(directory) / str(step)
  try:
    return _read_seal(path)[1]
  except _Damaged as reason:
    raise ValueError(f'{path} must be as it was saved, but {reason}.') from None


def delete(directory: Path, step: int) -> None:
  """Deletes a step. A kill leaves the step either intact or uncommitted."""
  path = _absolute(directory) / str(step)
  (path / _MARKER).unlink(missing_ok=True)  # first: uncommits the step
  shutil.rmtree(path, ignore_errors=True)  # the next save tries again


def digest(tree: Any) -> str:
  """Returns a SHA-256, in hex, of all leaves: path, dtype, shape and bytes.

  Equal values give equal digests on any mesh. Any flipped bit changes it.
  """
  leaves = _by_path(tree).items()
  return _sha256(_to_json(
      {name: array_digests.describe(leaf) for name, leaf in leaves}))


def _load(path: pathlib.Path, template: Any, partial: bool
          ) -> tuple[Any, dict[str, Any]]:
  """Returns a step's state and extra, or raises `_Damaged` if altered."""
  seal, extra = _read_seal(path)
  leaves = _by_path(template)
  _check_template(path, leaves, seal['leaves'], partial)
  restored = _read_leaves(path, leaves)
  damaged = [name for name, leaf in restored.items()
             if array_digests.describe(leaf) != seal['leaves'][name]]
  if not _all_agree(not damaged):
    raise _Damaged(f'leaf {(damaged or ["of another process"])[0]} differs '
                   'from what was saved')
  return jax.tree.unflatten(
      jax.tree.structure(template), [restored[name] for name in leaves]), extra


def _read_seal(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns the verified contents of a step's integrity.json and extra.json."""
  try:
    seal = json.loads((path / _MARKER).read_text())
    extra_text = (path / _EXTRA).read_text()
    signed = seal.pop('sha256')
  except (*orbax_errors.ABSENT, ValueError, KeyError, TypeError,
          AttributeError) as error:
    raise _Damaged(f'{type(error).__name__}: {error}') from error
  if signed != _sha256(_to_json(seal)) or str(seal['step']) != path.name:
    raise _Damaged(f'{_MARKER} was altered')
  if seal['extra'] != _sha256(extra_text):
    raise _Damaged(f'{_EXTRA} was altered')
  return seal, json.loads(extra_text)


def _read_leaves(path: pathlib.Path, leaves: dict[str, Any]) -> dict[str, Any]:
  abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=getattr(x, 'sharding', None)), leaves)
  args = ocp.args.PyTreeRestore(
      abstract, partial_restore=True,
      restore_args=ocp.checkpoint_utils.construct_restore_args(abstract))
  restored, reason = {}, ''
  try:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
      restored = checkpointer.restore(path / _STATE, args=args)
  except (MemoryError, jax.errors.JaxRuntimeError):
    raise  # says nothing about the files
  except Exception as error:  # Orbax documents no type for damaged files.
    reason = orbax_errors.damage(path / _STATE, error)
  if not _all_agree(not reason):
    raise _Damaged(reason or 'another process could not read it')
  return restored


def _handler(leaves: dict[str, Any], in_background: bool
             ) -> ocp.PyTreeCheckpointHandler:
  """Returns Orbax's handler of a save.

  On CPUs, arrays of `_AT_ONCE` bytes together, or one larger array, are
  compressed at a time, so that the compressed bytes take little memory.
  """
  if in_background:
    return ocp.PyTreeCheckpointHandler()
  largest = max(leaf.nbytes for leaf in leaves.values())
  return ocp.PyTreeCheckpointHandler(
      handler_impl=ocp.BasePyTreeCheckpointHandler(
          save_concurrent_bytes=max(largest, _AT_ONCE) + 1))


def _is_on_cpus(leaf: jax.Array) -> bool:
  device: Any = next(iter(leaf.sharding.device_set))
  return device.platform == 'cpu'


def _check_room(directory: pathlib.Path, leaves: dict[str, Any]) -> None:
  """Raises an OSError if the disk has too little free space.

  Without this, each of Orbax's threads would fail and print a traceback.
  """
  needed = sum(leaf.nbytes for leaf in leaves.values())
  existing = next(path for path in (directory, *directory.parents)
                  if path.exists())
  free = shutil.disk_usage(existing).free
  if not _all_agree(free >= needed):
    raise OSError(errno.ENOSPC, f'No space left: a checkpoint has {needed:,} '
                  f'bytes, and the disk {free:,}', str(directory))


def _check_save(directory: pathlib.Path, step: int, leaves: dict[str, Any]
                ) -> None:
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


def _check_template(path: pathlib.Path, template: dict[str, Any],
                    saved: dict[str, Any], partial: bool) -> None:
  kinds = {name: f'{np.dtype(leaf.dtype)}{list(leaf.shape)}'
           for name, leaf in template.items()}
  rules = {name: leaf['array'] for name, leaf in saved.items()}
  for name in sorted(kinds if partial else kinds | rules):
    rule, kind = rules.get(name, 'absent'), kinds.get(name, 'absent')
    if rule != kind:
      raise ValueError(
          f'template leaf {name} must be {rule} as in {path}, but is {kind}. '
          'Restore with the configuration that it was saved with (partial=True '
          'leaves out what is absent here), or use another directory.')


def _prune(directory: pathlib.Path, keep: int, pinned: Collection[int]) -> None:
  """Deletes old steps, and all unfinished saves.

  The `keep` newest of the finished steps and the pinned ones are kept.
  """
  committed = steps(directory)
  keeps = {*committed[-keep:], *({*committed} & {*pinned})}
  for step in set(_numbered(directory)) - keeps:
    delete(directory, step)


def _quarantine(path: pathlib.Path) -> pathlib.Path:
  """Renames a damaged step to an unused name, which is not that of a step."""
  names = (f'{path}.corrupt{i or ""}' for i in itertools.count())
  target = next(t for t in map(pathlib.Path, names) if not t.exists())
  if jax.process_index() == 0:
    path.rename(target)
  return target


def _absolute(directory: Path) -> pathlib.Path:
  if '://' in str(directory):
    raise ValueError(
        f'directory must be a local path, but is {directory}. A store is given '
        'as --workdir.')
  return pathlib.Path(directory).expanduser().absolute()


def _numbered(directory: pathlib.Path) -> list[int]:
  """Returns all steps that have a directory, committed or not, in order."""
  if not directory.is_dir():
    return []
  return sorted(int(path.name) for path in directory.iterdir()
                if re.fullmatch('0|[1-9][0-9]*', path.name) and path.is_dir())


def _by_path(tree: Any) -> dict[str, Any]:
  """Returns the leaves by path ('params/layers/wq'), in the tree's order."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  by_path = {jax.tree_util.keystr(path, simple=True, separator='/'): leaf
             for path, leaf in leaves}
  if len(by_path) != len(leaves):
    raise ValueError('leaf paths must differ when joined by "/", but two are '
                     'the same. Take the "/" out of the keys.')
  return by_path


def _sha256(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()


def _to_json(value: Any) -> str:
  try:
    return json.dumps(value, sort_keys=True)
  except TypeError as error:
    raise ValueError(f'extra must hold what JSON can, but: {error}. Convert '
                     'arrays with .tolist().') from error


def _all_agree(ok: bool = True) -> bool:
  """Returns whether `ok` holds on all processes; waits for the others."""
  return ok if jax.process_count() == 1 else bool(
      multihost_utils.process_allgather(np.array(ok)).all())
