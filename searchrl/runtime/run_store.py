# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Run folders in an object store, as --workdir=s3://bucket/runs/dspo.

A job works in a local folder. `opened` makes that folder equal to the store at
the start. `push` copies new files to the store after each checkpoint and at the
end; one such copy is called a turn. The store has two folders:

    turns/000012.json                  the files of turn 12: name, key and digest
    files/000012-9f31c2d4/config.json  the files that were new in turn 12

An object is never rewritten, and a turn is written after the files that it
names. The newest turn is the run. So a `kill -9` at any moment leaves the run
as it was at some checkpoint. Files that no turn names are deleted by the next
push. If a push fails, the local folder is marked, and the next start here keeps
its files, unless the store has a newer turn.

A store has no locks. Instead, a turn is created only if its number is unused,
which S3 and Google Cloud Storage check, and only by the process that read or
wrote the turn before it. If two processes use one store, the first that pushes
continues, and the other ends with an error. The files that the other has
uploaded do no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
import contextlib
import functools
import hashlib
import json
import os
import pathlib
import shutil
import time
from typing import Any
import uuid

import filelock
import fsspec

from searchrl.runtime import atomic_files
from searchrl.runtime import folder_lock
from searchrl.runtime import processes
from searchrl.runtime import progress
from searchrl.runtime import shared_folder
from searchrl.runtime import signals

LOCAL = 'file://'  # an address that begins so is a path of this machine

_CHUNK = 1 << 24  # bytes that are read, hashed and uploaded at a time
_THREADS = 8  # files that are copied at the same time
_UPLOAD_SECS = 24 * 3600  # limit of the wait for the last push
_KEPT_TURNS = 3  # so that a process that was slow finds its number used
_PAUSES = (2, 4, 8, 16, 30, 60, 60)  # seconds before a copy is tried again
_UNSENT = '.unsent'  # file that marks a folder with files that were not sent
_open: list[_Mirror] = []  # the mirror of this process's job, if any


def scratch() -> pathlib.Path:
  """Returns the directory that has the local folders of all stores.

  It is SEARCHRL_SCRATCH if set, else ~/.cache/searchrl/stores.
  """
  return pathlib.Path(os.environ.get('SEARCHRL_SCRATCH') or
                      pathlib.Path.home() / '.cache' / 'searchrl' / 'stores')


def is_store(path: str) -> bool:
  """Returns whether a path is the address of an object store.

  The result is False for local folders, such as 'runs/1' or 'file:///data/1'.
  """
  return '://' in path and not path.startswith(LOCAL)


@contextlib.contextmanager
def opened(workdir: str) -> Iterator[str]:
  """Yields the local folder of a job, and copies it to its store at the end.

  Args:
    workdir: Local folder, which is yielded itself, or address of a store. A
      store's files are first copied to the local folder.

  Raises:
    ValueError: The store cannot be read, another process uses its local folder,
      or the processes of this run have different local folders.
    OSError: The folder could not be copied.
  """
  if not is_store(workdir):
    yield workdir.removeprefix(LOCAL)
    return
  mirror = _Mirror(workdir, scratch() / 'work' / _name(workdir))

  def start() -> None:
    mirror.folder.mkdir(parents=True, exist_ok=True)
    folder_lock.hold(mirror.folder)
    mirror.pull()

  processes.on_first('store', start)
  shared_folder.check(
      mirror.folder, 'SEARCHRL_SCRATCH must be a folder that all processes '
      'share, if --workdir is in a store')
  if processes.is_first():
    _open.append(mirror)
  all_end = False
  try:
    yield str(mirror.folder)
    all_end = True
  except signals.Stopped:  # raised by all processes, after the same step
    all_end = True
    raise
  finally:
    push()
    _open.clear()
    if all_end:  # JAX waits only SEARCHRL_SHUTDOWN_SECS for the last process
      processes.barrier('stored', _UPLOAD_SECS)


def push() -> None:
  """Copies new files in the job's folder to its store, if it has a store.

  Raises the errors of `_Mirror.push`.
  """
  for mirror in _open:
    mirror.push()


@functools.cache
def local(path: str) -> str:
  """Returns a local folder that has the files of a run.

  Args:
    path: Local folder, which is returned itself, or address of a store, from
      which the files are copied.

  Raises:
    ValueError: The store cannot be read.
  """
  if not is_store(path):
    return path.removeprefix(LOCAL)
  mirror = _Mirror(path, scratch() / 'copies' / _name(path))
  mirror.folder.mkdir(parents=True, exist_ok=True)
  with filelock.FileLock(mirror.folder / folder_lock.FILE):
    mirror.pull()
  return str(mirror.folder)


def _name(address: str) -> str:
  return address.rstrip('/').replace('://', '/')


class _Altered(OSError):
  """Error for a file in the store that is not the one that a run stored."""


class _Mirror:
  """A local folder and the store that has a copy of it.

  Attributes:
    folder: Local folder.
    owner: Random name of this process in the store.
  """

  def __init__(self, address: str, folder: pathlib.Path):
    self._address, self.folder = address.rstrip('/'), folder
    self.owner = uuid.uuid4().hex[:8]
    self._turn = 0  # newest turn that this process has read or written
    # name -> [key, digest], and the time and size of the local file
    self._stored: dict[str, list[str]] = {}
    self._seen: dict[str, tuple[int, int]] = {}
    self._next: dict[str, list[str]] | None = None  # turn whose files are sent
    with _plain_errors(self._address):
      self._fs, self._root = fsspec.core.url_to_fs(
          self._address, use_listings_cache=False)

  def pull(self) -> None:
    """Makes the local folder equal to the newest turn (copy) in the store.

    A folder that a failed push has left keeps its files if there is no newer
    turn. If the store cannot be reached, reading is tried again for seconds.
    """
    self._retry(self._read, _PAUSES[:3])

  def _read(self) -> None:
    """Copies the newest turn in the store to the local folder."""
    with (_plain_errors(self._address),
          progress.phase(f'Reading {self._address}')):
      while True:
        self._turn = max(self._turns(), default=0)
        self._stored = self._read_turn(self._turn)
        if self._keep_unsent():
          return
        try:
          self._each(self._download, self._stored)
          break
        except FileNotFoundError:  # deleted by a push since
          if max(self._turns(), default=0) == self._turn:
            raise
    for name in _files(self.folder).keys() - self._stored.keys():
      (self.folder / name).unlink()
    for folder in sorted(self.folder.rglob('*/'), reverse=True):
      with contextlib.suppress(OSError):  # not empty
        folder.rmdir()
    self._seen = _files(self.folder)

  def _keep_unsent(self) -> bool:
    """Returns whether the local folder continues the newest turn of the store.

    It does after a push that failed, if no other process has pushed since.
    """
    mark = self.folder / _UNSENT
    if not mark.exists() or mark.read_text() != self._position():
      mark.unlink(missing_ok=True)
      return False
    self._seen = {
        name: state for name, state in _files(self.folder).items()
        if name in self._stored
        and atomic_files.sha256(self.folder / name) == self._stored[name][1]}
    processes.say(f'{self.folder} has files that {self._address} lacks. The '
                  'run goes on from them.')
    return True

  def _position(self) -> str:
    """Returns a digest of the newest turn that this process knows."""
    turn = json.dumps([self._turn, self._stored], sort_keys=True)
    return hashlib.sha256(turn.encode()).hexdigest()

  def push(self) -> None:
    """Copies the local folder to the store as its next version, or turn.

    Nothing is copied if the folder has not changed. While the store cannot be
    reached, the copy is tried again for some minutes.

    Raises:
      ValueError: Another process has written to the store.
      OSError: The store cannot be written.
    """
    files = _files(self.folder)
    changed = [name for name, state in files.items()
               if self._seen.get(name) != state]
    if not changed and files.keys() == self._stored.keys():
      return
    self._next = None
    try:
      self._retry(lambda: self._copy(files, changed), _PAUSES)
    except OSError as error:
      raise OSError(
          f'{error} The files that it lacks are in {self.folder}. The same '
          'command on this machine goes on from them, and copies them. If the '
          'run goes on elsewhere, it deletes them, so copy them before.'
      ) from error
    (self.folder / _UNSENT).unlink(missing_ok=True)

  def _retry(self, copy: Callable[[], None], pauses: Sequence[int]) -> None:
    """Copies files, and does so again after each pause while that fails."""
    for pause in (*pauses, None):
      try:
        return copy()
      except OSError as error:
        if pause is None or type(error) is not OSError or isinstance(
            error.__cause__, PermissionError):  # waiting would not help
          raise
        processes.say(f'Warning: {error} It is tried again in {pause} s.')
        time.sleep(pause)

  def _copy(self, files: dict[str, tuple[int, int]], changed: list[str]
           ) -> None:
    """Copies files to the store, and then the turn that names them.

    If that fails, a mark in the local folder says so.
    """
    with (self._marked(), _plain_errors(self._address),
          progress.phase(f'Copying to {self._address}', quiet=True)):
      turn = self._turn + 1
      if self._next is None:
        self._check_turn(self._turn)
        prefix = f'files/{turn:06d}-{self.owner}'
        uploaded = self._each(
            functools.partial(self._upload, prefix), changed)
        self._next = {name: place for name, place in self._stored.items()
                      if name in files} | {
                          name: place for name, place in uploaded if place}
      try:
        self._fs.pipe_file(self._key(turn), json.dumps(self._next).encode(),
                           mode='create')
      except FileExistsError:  # by us, if the answer to an earlier try was lost
        if self._read_turn(turn) != self._next:
          raise self._taken() from None
      self._turn, self._stored, self._seen = turn, self._next, files
      self._check_turn(turn)
      self._delete_unnamed()

  @contextlib.contextmanager
  def _marked(self) -> Iterator[None]:
    """Marks the local folder if an OSError is raised."""
    try:
      yield
    except OSError:
      (self.folder / _UNSENT).write_text(self._position())
      raise

  def _turns(self) -> list[int]:
    """Returns the numbers of the turns in the store."""
    try:
      keys = self._fs.ls(f'{self._root}/turns', detail=False, refresh=True)
    except FileNotFoundError:
      bucket = self._root.partition('/')[0]
      if not self._fs.exists(bucket):
        raise ValueError(f'{self._address} must be in a bucket that exists, '
                         f'but there is no {bucket}. Make it.') from None
      return []
    return [int(key.rpartition('/')[2].removesuffix('.json')) for key in keys
            if key.endswith('.json')]

  def _key(self, turn: int) -> str:
    return f'{self._root}/turns/{turn:06d}.json'

  def _read_turn(self, turn: int) -> dict[str, list[str]]:
    return json.loads(self._fs.cat_file(self._key(turn))) if turn else {}

  def _check_turn(self, turn: int) -> None:
    """Raises a ValueError if another process has written a later turn."""
    if max(self._turns(), default=0) != turn:
      raise self._taken()

  def _taken(self) -> ValueError:
    return ValueError(
        f'{self._address} must be used by one run at a time, but another '
        f'process has written to it since turn {self._turn}. End one of them, '
        'or use another --workdir.')

  def _each(self, copy: Any, names: Any) -> list[Any]:
    """Copies files, several at the same time."""
    with futures.ThreadPoolExecutor(_THREADS, 'store') as threads:
      return [*threads.map(copy, names)]

  def _upload(self, prefix: str, name: str) -> tuple[str, list[str]]:
    """Uploads a file, and returns its name with its key and digest."""
    digest, key = hashlib.sha256(), f'{prefix}/{name}'
    try:
      source = (self.folder / name).open('rb')
    except FileNotFoundError:  # replaced or deleted since it was listed
      return name, []
    with source, self._fs.open(f'{self._root}/{key}', 'wb') as target:
      while chunk := source.read(_CHUNK):
        digest.update(chunk)
        target.write(chunk)
    return name, [key, digest.hexdigest()]

  def _download(self, name: str) -> None:
    """Makes a local file equal to the file of the newest turn."""
    key, digest = self._stored[name]
    file = self.folder / name
    if file.is_file() and atomic_files.sha256(file) == digest:
      return
    with atomic_files.new_file(file) as temporary:
      with (self._fs.open(f'{self._root}/{key}', 'rb') as source,
            temporary.open('wb') as target):
        shutil.copyfileobj(source, target, _CHUNK)
      if atomic_files.sha256(temporary) != digest:
        raise _Altered(
            f'{self._address}/{key} must have the SHA-256 {digest}, as when '
            'the run stored it, but has another. Restore that file, or use '
            'another --workdir.')

  def _delete_unnamed(self) -> None:
    """Deletes files that the newest turn does not name."""
    named = {f'{self._root}/{key}' for key, _ in self._stored.values()}
    unnamed = {*self._fs.find(f'{self._root}/files')} - named
    unnamed |= {self._key(turn) for turn in self._turns()
                if turn <= self._turn - _KEPT_TURNS}
    if unnamed:
      self._fs.rm([*unnamed])


def _files(folder: pathlib.Path) -> dict[str, tuple[int, int]]:
  """Returns {relative path: (time, size)} of all files that are not hidden."""
  result = {}
  for file in folder.rglob('*'):
    name = file.relative_to(folder)
    if any(part.startswith('.') for part in name.parts):
      continue
    with contextlib.suppress(FileNotFoundError):  # deleted since
      if file.is_file():
        facts = file.stat()
        result[name.as_posix()] = facts.st_mtime_ns, facts.st_size
  return result


@contextlib.contextmanager
def _plain_errors(address: str) -> Iterator[None]:
  """Raises errors of a store's library as errors with a plain sentence."""
  try:
    yield
  except ImportError as error:
    raise ValueError(
        f'{address} needs a package that is not installed: {error}. Install '
        "'searchrl[s3]' or 'searchrl[gcs]'.") from error
  except (ValueError, FileNotFoundError, NotADirectoryError, _Altered) as error:
    raise error
  except Exception as error:  # each store's library has its own types
    raise OSError(
        f'{address} must be a store that can be read and written, but failed '
        f'with {type(error).__name__}: {error}. Check the address and the '
        'rights to it.') from error
