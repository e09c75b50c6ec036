# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The directory of a run, with its config, code revision and environment.

The same command finds the same directory and resumes. A changed config is
refused, because a run with two different configs has no meaning.
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import filecmp
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
from typing import Any

from searchrl.runtime import atomic_files
from searchrl.runtime import config_fields
from searchrl.runtime import folder_lock
from searchrl.runtime import processes
from searchrl.runtime import shared_folder

CONFIG = 'config.json'
_CHANGES = 20  # largest number of changed fields that an error lists

_PACKAGES = ('searchrl', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint',
             'numpy', 'transformers', 'tokenizers')


@dataclasses.dataclass(frozen=True)
class Workdir:
  """Directory of a run of several processes; only the first process writes.

  All processes must call each method together. An error in the first process is
  raised in all of them.

  Attributes:
    folder: Directory of the run.
    config: Config of the run, with the field `allow_changes`.
    free: Names of config fields that may change, such as 'train.num_steps'.
    unset: Names of config fields that have their default value. A run that
      began before such a field existed behaved as with this value, so that the
      field counts as unchanged.
  """

  folder: pathlib.Path
  config: Any
  free: tuple[str, ...] = ()
  unset: tuple[str, ...] = ()

  def check(self) -> None:
    """Raises the errors that `prepare` would, but writes no file of the run."""
    processes.on_first('workdir?', lambda: check(
        self.folder, self.config.to_dict(), free=self.free, unset=self.unset,
        allow_changes=self.config.allow_changes))

  def prepare(self) -> None:
    """Makes or reopens the run's directory, writes its config, and locks it.

    Raises:
      ValueError: The directory belongs to a run with another config, another
        process uses it, or some processes do not see it.
    """
    processes.on_first('workdir', lambda: prepare(
        self.folder, self.config.to_dict(), free=self.free, unset=self.unset,
        allow_changes=self.config.allow_changes))
    shared_folder.check(
        self.folder, '--workdir must be a folder that all processes share')

  def note(self, name: str, facts: Callable[[], Any], *, alike: bool = False
          ) -> None:
    """Writes facts to <name>.json, or raises a ValueError if they have changed.

    Args:
      name: Name of the file without its suffix.
      facts: Function that the first process calls to get the facts.
      alike: Whether all processes call it, and their facts must be equal.
    """
    agreed = processes.agree(name, facts()) if (
        alike and processes.count() > 1) else None
    processes.on_first(name, lambda: note(
        self.folder, name, agreed or facts(),
        allow_changes=self.config.allow_changes))


def prepare(folder: str | pathlib.Path, config: dict[str, Any], *,
            allow_changes: bool = False, free: tuple[str, ...] = (),
            unset: tuple[str, ...] = ()) -> None:
  """Makes or reopens a run's directory, and locks it until this process ends.

  Args:
    folder: Directory of the run.
    config: Nested dicts that JSON can represent; written to config.json.
    allow_changes: Whether to continue with a changed config, and write it.
    free: Names of config fields that may change, such as 'train.num_steps'.
    unset: Names of config fields that have their default; see `Workdir`.

  Raises:
    ValueError: The directory belongs to a run with another config, or another
      process uses it.
  """
  check(folder, config, allow_changes=allow_changes, free=free, unset=unset)
  path = pathlib.Path(folder)
  path.mkdir(parents=True, exist_ok=True)
  folder_lock.hold(path)
  _write(path / CONFIG, _as_json(config))
  if not (path / 'environment.json').exists():
    _write(path / 'environment.json', environment())


def check(folder: str | pathlib.Path, config: dict[str, Any], *,
          allow_changes: bool = False, free: tuple[str, ...] = (),
          unset: tuple[str, ...] = ()) -> None:
  """Raises the errors that `prepare` would, but writes no file of the run.

  If the directory has a run, it is locked. The arguments are those of
  `prepare`.
  """
  path = pathlib.Path(folder)
  if not (path / CONFIG).exists():
    return
  folder_lock.hold(path)  # before its files are read or changed
  if not allow_changes:
    past = read_config(path)
    new = {*unset} - _flat(past).keys()
    _check_same(path, 'with another config', past, _as_json(config),
                (*free, *new, 'allow_changes'))


@contextlib.contextmanager
def unchanged_on_error(folder: pathlib.Path) -> Iterator[Callable[[], bool]]:
  """Puts the JSON files of a run's directory back if the body raises an error.

  It yields the function that does this, for a body that finds nothing to do.
  The function returns whether a file was put back, in the first process.

  With `allow_changes`, the body may have written a config and facts that do not
  fit a run that began before. A new run without checkpoints has no such files
  afterwards, so that its directory is free for another config. If another run
  has locked the directory, its files stay as they are.
  """
  before = {file: file.read_bytes() for file in folder.glob('*.json')}

  def put_back() -> bool:
    if not (processes.is_first() and folder_lock.is_held(folder) and (
        folder / CONFIG in before or not (folder / 'checkpoints').is_dir())):
      return False
    changed = [file for file in folder.glob('*.json')
               if before.get(file) != file.read_bytes()]
    for file in changed:
      if file in before:
        atomic_files.write(file, before[file])
      else:
        file.unlink()
    return bool(changed)

  try:
    yield put_back
  except Exception:
    put_back()
    raise


def read_config(folder: str | pathlib.Path) -> dict[str, Any]:
  """Returns the config that a run wrote.

  Raises:
    FileNotFoundError: The directory has no config.json.
    ValueError: The file is damaged.
  """
  file = pathlib.Path(folder) / CONFIG
  try:
    config = json.loads(file.read_text())
    if not isinstance(config, dict):
      raise ValueError(f'it holds {type(config).__name__}')
  except ValueError as error:  # also of JSON and UTF-8
    raise ValueError(
        f'{file} must be the JSON object that a run writes, but is not: '
        f'{error}. Restore it, or use another folder.') from error
  return config


def note(folder: str | pathlib.Path, name: str, facts: Any, *,
         allow_changes: bool = False) -> None:
  """Writes facts about a run to <name>.json in its directory.

  The facts depend on files outside the config, such as the data.

  Args:
    folder: Directory of the run.
    name: Name of the file without its suffix.
    facts: Value that JSON can hold.
    allow_changes: Whether the facts may differ from those of an earlier start.

  Raises:
    ValueError: The facts were different when the run began.
  """
  file = pathlib.Path(folder) / f'{name}.json'
  present = _as_json(facts)
  past = None if allow_changes else atomic_files.read_json(file)
  if past is not None:
    _check_same(pathlib.Path(folder), f'whose {name} was another', past,
                present)
  _write(file, present)


def environment() -> dict[str, Any]:
  """Returns the git revision, package versions and machine of this process.

  They are recorded with measurements.
  """
  versions: dict[str, str | None] = {}
  for name in _PACKAGES:
    try:
      versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      versions[name] = None
  return {'git': _git(), 'python': platform.python_version(),
          'machine': f'{platform.system()} {platform.machine()}', 'cpu': _cpu(),
          'packages': versions}


def _cpu() -> str | None:
  """Returns the CPU's name, family and model as a text; None if unknown."""
  try:
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
  except OSError:
    return None
  pairs = [line.split(':', 1) for line in lines if ':' in line]
  fields = {name.strip(): value.strip() for name, value in pairs}
  return ', '.join(f'{name} {fields[name]}' for name in (
      'model name', 'cpu family', 'model') if name in fields) or None


def _git() -> str | None:
  """Returns the git revision of this package's clone; None if there is none."""
  here = pathlib.Path(__file__).parents[1]
  try:
    out = subprocess.run(
        ['git', '-C', str(here), 'describe', '--always', '--dirty',
         '--abbrev=12'],
        capture_output=True, text=True, timeout=10, check=True)
  except (OSError, subprocess.SubprocessError):
    return None
  return out.stdout.strip()


def _check_same(folder: pathlib.Path, difference: str, past: dict[str, Any],
                present: dict[str, Any], free: tuple[str, ...] = ()) -> None:
  """Raises a ValueError if a field that is not `free` has changed.

  Args:
    folder: Directory of the run, for the error.
    difference: Words of the error, such as 'with another config'.
    past: Fields when the run began.
    present: Fields now.
    free: Names of the fields that may change.
  """
  before, after = _flat(past), _flat(present)
  changes = [f'{name}: {before.get(name)!r} -> {after.get(name)!r}'
             for name in sorted({*before, *after} - {*free})
             if not _is_same(before.get(name), after.get(name), folder)]
  more = len(changes) - _CHANGES
  changes[_CHANGES:] = [f'and {more} more'] if more > 0 else []
  if changes:
    raise ValueError(
        f'{folder} holds a run {difference}: {"; ".join(changes)}. Use another '
        '--workdir, or go on all the same with --allow_changes.')


def _is_same(before: Any, after: Any, folder: pathlib.Path) -> bool:
  """Returns whether two values are equal, or are paths of the same file.

  The paths may be spelled differently, or `before` may be the old path of a
  file that was moved or copied together with the run's folder. Runs in one
  folder, such as the phases of a job, name each other's files.
  """
  if before == after or not isinstance(before, str) or not isinstance(
      after, str):
    return before == after
  if not before or not after:
    return False
  if os.path.abspath(before) == os.path.abspath(after):
    return True
  places = [os.path.relpath(after, above) for above in (
      folder.parent, folder.parent.parent)]
  return any(not place.startswith('..') and before.endswith(f'/{place}')
             for place in places) and os.path.exists(after) and (
                 not os.path.exists(before) or _is_copy(before, after))


def _is_copy(one: str, other: str) -> bool:
  """Returns whether two files, or two folders of files, have equal bytes."""
  if not (os.path.isdir(one) and os.path.isdir(other)):
    return os.path.isfile(one) and os.path.isfile(other) and filecmp.cmp(
        one, other, shallow=False)
  names = sorted(os.listdir(one))
  return names == sorted(os.listdir(other)) and all(
      _is_copy(os.path.join(one, name), os.path.join(other, name))
      for name in names)


def _as_json(value: Any) -> Any:
  """Returns a value in the form that JSON reads back: tuples become lists."""
  return json.loads(json.dumps(value))


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
  """Returns {'path.of.keys': leaf} of nested dicts, without empty dicts."""
  return {name: leaf for name, leaf in config_fields.leaves(tree) if leaf != {}}


def _write(file: pathlib.Path, value: Any) -> None:
  """Replaces a file atomically.

  A kill leaves either the old or the new file.
  """
  atomic_files.write(file, json.dumps(value, indent=2, sort_keys=True) + '\n')
