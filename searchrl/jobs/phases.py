# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Runs several jobs one after the other, each in its own folder.

A phase is the config of a job. Its texts may contain {workdir}, which stands
for the directory of all phases, so that a phase can read files of an earlier
phase. A finished phase is run again only if its config has changed or an
earlier phase is run. Its job then decides what to do, as in a separate run.
"""

from collections.abc import Sequence
import copy
import functools
import json
import pathlib
import re
from typing import Any

from searchrl.runtime import atomic_files
from searchrl.runtime import host_memory
from searchrl.runtime import plugins
from searchrl.runtime import processes

DONE = 'phase.json'  # in a phase's folder, once it is done: its config
WORKDIR = '{workdir}'
_TRAIN = 'searchrl.jobs.train:run'
_OURS = f'{_TRAIN}, searchrl.jobs.finetune:run and others'


def run(config, workdir: str) -> None:
  """Runs the phases in their order; the same call resumes a stopped run.

  Args:
    config: Config with `order`, the names of the phases to run, and `phases`,
      the config of each by its name.
    workdir: Directory for one folder per phase.

  Raises:
    ValueError: `order` is empty or names an unknown phase, or a phase cannot be
      run.
  """
  phases = {name: _in(workdir, config.phases[name])
            for name in _names(config)}
  jobs = {name: plugins.resolve(phase.job, field=f'phases.{name}.job',
                                ours=_OURS) for name, phase in phases.items()}
  is_changed = False
  for number, (name, phase) in enumerate(phases.items(), start=1):
    if 'allow_changes' in phase:
      phase.allow_changes = config.allow_changes
    here = pathlib.Path(workdir) / name
    done = processes.on_first(f'{name}?', lambda: atomic_files.read_json(
        here / DONE))
    if done == _record(phase) and not is_changed:
      processes.say(f'Phase {number} of {len(phases)}, {name}: done before.')
      continue
    is_changed = True  # what follows may read other files than before
    processes.on_first(f'{name}!', functools.partial(
        _forget, pathlib.Path(workdir), _affected(config, name)))
    processes.say(f'\nPhase {number} of {len(phases)}, {name}: {here}')
    host_memory.give_back()  # memory of the phase before
    try:
      jobs[name](phase, str(here))
    except ValueError as error:  # its flags are those of this phase
      raise ValueError(str(error).replace(
          '--config.', f'--config.phases.{name}.')) from error
    processes.on_first(name, lambda: atomic_files.write_json(
        here / DONE, _record(phase)))


def _affected(config, first: str) -> list[str]:
  """Returns the names of a phase and of all phases that depend on its files.

  These are the later ones in `order`, and of those that are not in `order` the
  ones whose configs name a folder of such a phase, or the whole directory.
  """
  names = [*config.order[config.order.index(first):]]
  texts = {name: phase.to_json() for name, phase in config.phases.items()
           if name not in config.order}
  for name in names:  # which grows
    reads = re.compile(
        rf'{re.escape(WORKDIR)}(?:/{re.escape(name)}(?![\w.-])|(?!/))')
    names += [other for other, text in texts.items()
              if other not in names and reads.search(text)]
  return names


def _forget(workdir: pathlib.Path, names: Sequence[str]) -> None:
  """Deletes the files that mark phases as done."""
  for name in names:
    (workdir / name / DONE).unlink(missing_ok=True)


def trainings(config) -> dict[str, Any]:
  """Returns the config of each phase that trains by RL, by the phase's name.

  The configs are for jobs that only describe a training: `jobs.plan` and
  `jobs.show_prompt`. Such a phase may begin from a model that an earlier phase
  has not written yet. In the result, it begins from the initial model of the
  earlier phase, which has the same shape and tokenizer.
  """
  found = {}
  for name in _names(config):
    if config.phases[name].job == _TRAIN:
      found[name] = copy.deepcopy(config.phases[name])
      with found[name].unlocked():
        found[name].model.path = _origin(config, found[name].model.path)
        _without_files(found[name])
  return found


def _without_files(phase) -> None:
  """Empties the fields that name files of earlier phases."""
  for group, name in (('data', 'train'), ('data', 'evaluate'),
                      ('search', 'corpus')):
    if WORKDIR in phase[group][name]:
      phase[group][name] = ''


def _origin(config, path: str) -> str:
  """Returns the initial model from which phases train the model at a path.

  If no phase writes the path, the result is the path itself.
  """
  for _ in config.order:
    if not path.startswith(f'{WORKDIR}/'):
      break
    path = config.phases[path.split('/')[1]].model.path
  return path


def _names(config) -> tuple[str, ...]:
  """Returns the names of the phases to run, or raises a ValueError."""
  unknown = [name for name in config.order if name not in config.phases]
  if unknown or not config.order:
    raise ValueError(
        f'order must name phases, of {", ".join(config.phases)}, but is '
        f'{tuple(config.order)}.')
  return tuple(config.order)


def _in(workdir: str, phase: Any) -> Any:
  """Returns the config of a phase, with {workdir} replaced in its texts."""
  phase = copy.deepcopy(phase)  # with the rules of its fields
  with phase.unlocked():
    return _fill(phase, str(workdir).rstrip('/'))


def _fill(value: Any, workdir: str) -> Any:
  """Replaces {workdir} in the texts of a config, and returns the value."""
  if isinstance(value, str):
    return value.replace(WORKDIR, workdir)
  if isinstance(value, tuple):
    return tuple(_fill(entry, workdir) for entry in value)
  if hasattr(value, 'items'):
    for name, entry in value.items():
      if (new := _fill(entry, workdir)) != entry:
        value[name] = new
  return value


def _record(phase: Any) -> dict[str, Any]:
  """Returns a phase's config as a dict that JSON can hold.

  A phase is finished only if its folder has an equal record.
  """
  record = json.loads(phase.to_json())
  record.pop('allow_changes', None)
  return record
