# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A config and a folder in, a run's folder out: what was asked, with which code.

The same command finds the same folder and resumes; a changed config is refused,
for a run that is half one thing and half another is worth nothing.
"""

import importlib.metadata
import json
import pathlib
import platform
import subprocess
from typing import Any

_PACKAGES = ('searchrl', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint',
             'numpy', 'transformers', 'tokenizers')


def prepare(folder: str, config: Any, *, allow_changes: bool = False,
            free: tuple[str, ...] = ()) -> None:
  """Makes or reopens a run's folder.

  Args:
    folder: of the run.
    config: an ml_collections.ConfigDict, written to config.json.
    allow_changes: go on with a changed config, and write it.
    free: names of options that may change, 'train.num_steps' for instance.

  Raises:
    ValueError: the folder belongs to a run with another config.
  """
  path = pathlib.Path(folder)
  path.mkdir(parents=True, exist_ok=True)
  present = _flat(json.loads(config.to_json()))
  file = path / 'config.json'
  if file.exists() and not allow_changes:
    past = _flat(json.loads(file.read_text()))
    changed = [f'{k}: {past.get(k)!r} -> {present.get(k)!r}'
               for k in sorted({*past, *present})
               if past.get(k) != present.get(k)
               and k not in (*free, 'allow_changes')]
    if changed:
      raise ValueError(
          f'{path} holds a run with another config: {"; ".join(changed)}. Use '
          'another --workdir, or go on all the same with --allow_changes.')
  _write(file, json.loads(config.to_json()))
  if not (path / 'environment.json').exists():
    _write(path / 'environment.json', environment())


def note(folder: str | pathlib.Path, name: str, facts: Any, *,
         allow_changes: bool = False) -> None:
  """Writes facts that files outside the config decide to <name>.json.

  Raises:
    ValueError: they were others when the run began.
  """
  file = pathlib.Path(folder) / f'{name}.json'
  present = json.loads(json.dumps(facts))
  if file.exists() and not allow_changes:
    past, new = _flat(json.loads(file.read_text())), _flat(present)
    changed = [f'{k}: {past.get(k)!r} -> {new.get(k)!r}'
               for k in sorted({*past, *new}) if past.get(k) != new.get(k)]
    if changed:
      raise ValueError(
          f'{folder} holds a run whose {name} was another: {"; ".join(changed)}. '
          'Use another --workdir, or go on all the same with --allow_changes.')
  _write(file, present)


def environment() -> dict[str, Any]:
  """Revision, versions and machine: what a figure has to be read with."""
  versions = {}
  for name in _PACKAGES:
    try:
      versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      versions[name] = None
  return {'git': _git(), 'python': platform.python_version(),
          'machine': f'{platform.system()} {platform.machine()}', 'cpu': _cpu(),
          'packages': versions}


def _cpu() -> str | None:
  """Maker, family and model; virtual machines seldom tell more by name."""
  try:
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
  except OSError:
    return None
  found = dict(map(str.strip, line.split(':', 1)) for line in lines if ':' in line)
  return ', '.join(f'{name} {found[name]}' for name in (
      'model name', 'cpu family', 'model') if name in found) or None


def _git() -> str | None:
  here = pathlib.Path(__file__).parents[1]
  try:
    out = subprocess.run(
        ['git', '-C', str(here), 'describe', '--always', '--dirty', '--abbrev=12'],
        capture_output=True, text=True, timeout=10, check=True)
  except (OSError, subprocess.SubprocessError):
    return None
  return out.stdout.strip()


def _flat(tree: Any, prefix: str = '') -> dict[str, Any]:
  if not isinstance(tree, dict):
    return {prefix: tree}
  return {k: v for key, value in tree.items()
          for k, v in _flat(value, f'{prefix}.{key}' if prefix else key).items()}


def _write(file: pathlib.Path, value: Any) -> None:
  temporary = file.with_suffix('.tmp')
  temporary.write_text(json.dumps(value, indent=2, sort_keys=True) + '\n')
  temporary.replace(file)
