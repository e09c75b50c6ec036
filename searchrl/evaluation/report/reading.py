# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads a report's data from the folders of runs, which are not changed."""

import collections
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import gzip
import json
import pathlib
import re
from typing import Any
import zlib

from searchrl.evaluation import evaluator
from searchrl.rollouts import records
from searchrl.runtime import atomic_files
from searchrl.runtime import metrics
from searchrl.runtime import workdir
from searchrl.trajectory import Trajectory

_ROLLBACKS = 'rollbacks.jsonl'  # in a run's directory
_DEPTH = 4  # search depth for runs below a folder, as in sweeps and self-play


@dataclasses.dataclass(frozen=True)
class Run:
  """A folder with metrics, evaluations or both."""

  name: str  # name in the report
  folder: pathlib.Path
  config: Mapping[str, Any]  # recorded config; {} if it is missing
  environment: Mapping[str, Any]  # Git revision and versions
  # Lines of metrics.jsonl: one per step, and others for evaluations.
  lines: Sequence[Mapping[str, float]]

  @property
  def family(self) -> str:
    """A key that is equal for runs that differ only in their seeds.

    Paths to phases of a run, such as seed_1/tune/model, may differ, too.
    """
    key = json.dumps(dict(self.config, seed=None), sort_keys=True)
    return re.sub(r'\bseed_?\d+/', '', key)

  @functools.cached_property
  def steps(self) -> list[Mapping[str, float]]:
    """The lines of training steps."""
    return [line for line in self.lines if 'critic/score/mean' in line]

  @functools.cached_property
  def updates(self) -> list[Mapping[str, float]]:
    """The lines of updates, if the run is a tuning of configs/sft.py."""
    return [line for line in self.lines if 'sft/loss' in line]

  @functools.cached_property
  def rollbacks(self) -> list[dict[str, Any]]:
    """Rollbacks in order of time: {'at': step, 'to': step, 'why': reason}."""
    return atomic_files.read_jsonl(self.folder / _ROLLBACKS)

  @functools.cached_property
  def tables(self) -> dict[str, list[dict[str, Any]]]:
    """Rows of each evaluation, by its name, in order of time.

    The names are 'before', 'step 20' and 'after'. The name is '' if the folder
    is itself that of an evaluation.
    """
    folders = {'': self.folder} | self._evaluations
    return {where: rows for where, folder in folders.items()
            if (rows := evaluator.read_table(folder)) is not None}

  @property
  def _evaluations(self) -> dict[str, pathlib.Path]:
    """Folders of evaluations by name, in order: before, step 20, after."""
    order = {'before': 0, 'after': 2}
    names = sorted((path.name for path in self.folder.glob('evaluation/*')
                    if path.is_dir()),
                   key=lambda name: (order.get(name, 1), name))
    return {f'step {int(name[5:])}' if name.startswith('step_') else name:
            self.folder / 'evaluation' / name for name in names}

  @property
  def score(self) -> str:
    """Name of the main score of the run's evaluations."""
    return self.config.get('evaluate', {}).get('score') or 'em'

  @property
  def sources(self) -> dict[str, list[pathlib.Path]]:
    """Files of trajectories. All training steps come before all evaluations.

    The keys are 'step 12' for a training step, 'evaluated before', 'evaluated
    step 20' or 'evaluated after' for an evaluation of a run, and 'evaluated' if
    the folder is that of an evaluation.
    """
    result = {f'step {int(file.name[5:11])}': [file] for file in sorted(
        self.folder.glob('trajectories/step_*.jsonl.gz'))}
    for where, folder in self._evaluations.items():
      result[f'evaluated {where}'] = sorted(folder.rglob('*.jsonl.gz'))
    for part in (evaluator.RECORDS, 'methods'):
      if files := sorted((self.folder / part).rglob('*.jsonl.gz')):
        result['evaluated'] = files
    return {where: files for where, files in result.items() if files}


@dataclasses.dataclass(frozen=True)
class Entry:
  """A trajectory of the report."""

  run: Run
  where: str  # the step or the evaluation
  set: str  # name of the data set; for an evaluation also engine and decoding
  trajectory: Trajectory
  score: float | None  # reward, or main score of an evaluation
  learned: Mapping[str, Any]  # result of `records.read_learned`, or {}


def step_of(line: Mapping[str, float]) -> float:
  """Returns the step of a line of metrics: of training, or of a tuning."""
  return line[metrics.STEP] if metrics.STEP in line else line['sft/step']


def runs(folders: Sequence[str]) -> list[Run]:
  """Returns the runs of folders. A folder of runs gives all runs in it.

  Raises:
    FileNotFoundError: A folder has no run.
  """
  names = {}
  for folder in map(pathlib.Path, folders):
    paths = [folder] if _is_run(folder) else sorted(
        path.parent for depth in range(1, _DEPTH + 1)
        for path in folder.glob('/'.join(['*'] * depth + ['config.json']))
        if _is_run(path.parent)
        and 'evaluation' not in path.relative_to(folder).parts)
    if not paths:
      raise FileNotFoundError(
          'report.runs must be folders of runs or evaluations, with a '
          f'metrics.jsonl or table.json in them or below, but {folder} has '
          'neither. Name the --workdir of a command that trained or evaluated, '
          'without a step, and several joined by commas; a relative path '
          'begins in the present folder.')
    for path in paths:
      names[path] = '/'.join(
          (folder.resolve().name, *path.relative_to(folder).parts))
  count = collections.Counter(names.values())
  return [_run(path, name if count[name] == 1 else str(path))
          for path, name in names.items()]


def entries(runs: Sequence[Run], most: int) -> tuple[list[Entry], int]:
  """Reads trajectories of some runs, or a sample of them if there are many.

  The steps and evaluations of all runs give equal parts of the sample, each
  with evenly spaced trajectories.

  Args:
    runs: Runs to read.
    most: Maximum number of trajectories of all runs together.

  Returns:
    The entries, and the number of trajectories that exist.
  """
  sources = [(run, where, files) for run in runs
             for where, files in run.sources.items()]
  counts = [sum(map(_count, files)) for _, _, files in sources]
  result = []
  for source, count, share in zip(sources, counts, _shares(counts, most)):
    chosen = {n * count // share for n in range(share)}  # evenly spaced
    result += [entry for n, entry in enumerate(_entries(*source))
               if n in chosen]
  return result, sum(counts)


def entries_of(run: Run, where: str) -> Iterator[Entry]:
  """Yields a run's entries from the files of `where`, a key of `sources`."""
  return _entries(run, where, run.sources[where])


def entry(file: pathlib.Path, line: int) -> Entry:
  """Returns the trajectory in a line of a file, counted from 1.

  Raises:
    FileNotFoundError: There is no such file.
    ValueError: The file has fewer lines, or is not a file of trajectories.
  """
  if not file.is_file():
    raise FileNotFoundError(
        f'There is no file {file}. Runs keep trajectories in '
        'trajectories/step_NNNNNN.jsonl.gz, evaluations below records/.')
  if file.parent.name == 'learned':
    raise ValueError(
        f'{file} must be a file of trajectories, but files in learned/ have '
        'only numbers of the update. Name the file of the same name in '
        'trajectories/.')
  folder = next((parent for parent in file.parents
                 if (parent / workdir.CONFIG).is_file()), file.parent)
  try:
    lines = [*_entries(_run(folder, folder.name), file.stem, [file])]
  except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
    raise ValueError(f'{file} must be a file of trajectories, gzipped jsonl, '
                     f'but reading it failed: {error}.') from error
  if not 1 <= line <= len(lines):
    raise ValueError(f'{file} has {len(lines)} trajectories, lines 1 to '
                     f'{len(lines)}, but line {line} is asked for.')
  return lines[line - 1]


def _is_run(folder: pathlib.Path) -> bool:
  return (folder / evaluator.RECORDS).is_dir() or any(
      (folder / name).is_file() for name in (metrics.FILE, evaluator.TABLE))


def _run(folder: pathlib.Path, name: str) -> Run:
  config, environment = (
      atomic_files.read_json(folder / name) or {}
      for name in (workdir.CONFIG, 'environment.json'))
  log = folder / metrics.FILE
  return Run(name, folder, config, environment,
             metrics.read(log) if log.exists() else [])


def _shares(counts: Sequence[int], most: int) -> list[int]:
  """Returns how many items to take of each source, `most` in all.

  Each source gives an equal part. A source with fewer items gives all of them,
  and the others share the rest. `counts` has the items of each source.
  """
  shares, left = [0] * len(counts), most
  order = sorted(range(len(counts)), key=lambda n: counts[n])
  for rank, n in enumerate(order):
    shares[n] = min(counts[n], left // (len(order) - rank))
    left -= shares[n]
  return shares


@contextlib.contextmanager
def _named(file: pathlib.Path, of: str = ' of trajectories') -> Iterator[None]:
  """Raises a ValueError that names the file if the body finds it damaged."""
  try:
    yield
  except (EOFError, OSError, zlib.error, ValueError) as error:
    raise ValueError(
        f'{file} must be a whole file{of}, gzipped jsonl, but is not: {error}. '
        'Move it away, and make the report again.') from error


def _count(file: pathlib.Path) -> int:
  """Returns the number of lines of a file of trajectories."""
  with _named(file), gzip.open(file) as lines:
    return sum(1 for _ in lines)


def _entries(run: Run, where: str, files: Sequence[pathlib.Path]
            ) -> Iterator[Entry]:
  for file in files:
    with _named(file):
      lines = records.unpacked(file.read_bytes())
    if file.parent.name == 'trajectories':
      updates = run.folder / 'learned' / file.name
      with _named(updates, of=''):
        learned = records.read_learned(updates)
      for trajectory in map(records.from_json, lines):
        yield Entry(run, where, trajectory.question.data_source, trajectory,
                    trajectory.reward,
                    learned.get((trajectory.group, trajectory.sample), {}))
    else:
      for record in lines:
        name = ', '.join(dict.fromkeys(
            record[key] for key in ('method', 'set', 'engine', 'decoding')))
        values = record.get('score', {}).get('values', {})
        yield Entry(run, where, name.removeprefix('agent, '),
                    records.from_json(record['trajectory']),
                    values.get(run.score, record['em']), {})
