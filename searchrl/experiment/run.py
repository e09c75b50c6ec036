# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A run of RL: a config in, a model and the record of the run out."""

import contextlib
import dataclasses
import json
import pathlib
import shutil
import sys

from searchrl.evaluation import suite
from searchrl.evaluation import summary
from searchrl.experiment import build
from searchrl.experiment import loop
from searchrl.experiment import policy
from searchrl.models import weights
from searchrl.runtime import metrics
from searchrl.runtime import processes

_DURING = 'step_'  # training: the folders of an evaluation


def train(config, folder: pathlib.Path) -> bool:
  """Trains; the same call resumes a run that was stopped.

  On many hosts every process calls it, on a shared file system; the first
  process writes and prints for all.

  Args:
    config: one of the recipes in configs/.
    folder: of the run; see docs/run_folder.md.

  Returns:
    Whether the run is finished; not, if a signal stopped it.
  """
  experiment = build.build(config, folder)
  if processes.on_first('done?', (folder / summary.FILE).exists):
    processes.say((folder / summary.FILE).read_text(), file=sys.stdout)
    processes.say(f'{folder} is finished. Use another --workdir for another '
                  'run.', file=sys.stdout)
    return True
  state, progress = loop.restore(
      experiment, folder, keep=config.train.keep_checkpoints)
  if not experiment.learner.needs_base:
    experiment = dataclasses.replace(experiment, params=None)  # makes room
  learner, base = experiment.learner, experiment.params
  with contextlib.closing(metrics.Writer(
      folder, tensorboard=config.train.tensorboard,
      enabled=processes.is_first())) as writer:
    writer.truncate(progress.step)
    processes.on_first('forget', lambda: _forget_after(progress.step, folder))
    if progress.step == 0 and config.evaluate.initial:
      _evaluate(experiment, learner.policy(state, base), 'before', folder,
               writer, 0)
    few = dataclasses.replace(experiment, cases=suite.limited(
        experiment.cases, config.evaluate.limit, config.seed,
        config.evaluate.during))
    state, progress, stopped = loop.loop(
        experiment, config, folder, state, progress, writer,
        lambda state, step: _evaluate(
            few, learner.policy(state, base), f'{_DURING}{step:06d}', folder,
            writer, step))
    if stopped:
      processes.say(f'Stopped after step {progress.step}; everything is saved '
                    f'in {folder}. Run the same command to go on.')
      return False
    _evaluate(experiment, learner.policy(state, base), 'after', folder, writer,
             progress.step)
  sampler = experiment.sampler
  weights.save(folder / 'model', learner.policy(state, base), sampler.shape,
               tokenizer_from=config.model.path or policy.TINY_BASE,
               eos_id=sampler.tokenizer.eos_ids[0])
  recipe = config.algorithm.name.partition(':')[2]
  processes.on_first('finish', lambda: summary.finish(
      folder, f'{recipe}, seed {config.seed}'))
  return True


def _evaluate(experiment: build.Experiment, params, name: str,
             folder: pathlib.Path, writer: metrics.Writer, step: int) -> None:
  """Evaluates once under each name, and not again after a resume."""
  if not experiment.cases:
    return
  folder = folder / 'evaluation' / name
  rows = processes.on_first(f'{name}?', lambda: _read_table(folder))
  if rows is None:
    count = sum(len(case.dataset.questions) for case in experiment.cases)
    when = name + ' training' if name in ('before', 'after') else (
        f'after step {step}')
    processes.say(f'Evaluating {when} ({count} questions) ...')
    rows = suite.run(experiment.sampler, params, experiment.cases, folder=folder)
  values = suite.scalars(rows)
  if not all(writer.holds(step, value) for value in values):
    writer.write(step, values)


def _forget_after(step: int, folder: pathlib.Path) -> None:
  """Deletes evaluations of steps after a restored one: they are made again."""
  for path in (folder / 'evaluation').glob(f'{_DURING}*'):
    if int(path.name.removeprefix(_DURING)) > step:
      shutil.rmtree(path)


def _read_table(folder: pathlib.Path):
  file = folder / 'table.json'
  return json.loads(file.read_text()) if file.exists() else None
