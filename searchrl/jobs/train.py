# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Trains a policy by RL from a config, with a record of the run."""

from collections.abc import Sequence
import contextlib
import dataclasses
import json
import pathlib
import shutil
import sys
from typing import Any

from searchrl.agent import chat
from searchrl.data import datasets
from searchrl.evaluation import evaluator
from searchrl.evaluation import summary
from searchrl.experiment import build
from searchrl.experiment import health
from searchrl.experiment import loop
from searchrl.experiment import memory_plan
from searchrl.experiment import model_card
from searchrl.experiment import model_defaults
from searchrl.experiment import policy
from searchrl.models import lora as loras
from searchrl.models import weights
from searchrl.rollouts.collect import Progress
from searchrl.runtime import atomic_files
from searchrl.runtime import checkpoint
from searchrl.runtime import dispatch
from searchrl.runtime import folder_lock
from searchrl.runtime import host_memory
from searchrl.runtime import metrics
from searchrl.runtime import processes
from searchrl.runtime import progress as progress_lib
from searchrl.runtime import workdir as workdirs

BEST = 'best.json'  # in a run's directory: step and score of best validation


def run(config, workdir: str | pathlib.Path) -> None:
  """Trains a policy; the same call resumes a run that was stopped.

  With several hosts, every process calls it on a shared file system. The first
  process writes and prints for all.

  Args:
    config: Config of a recipe in configs/.
    workdir: Directory of the run; see docs/run_folder.md.

  Raises:
    Stopped: A signal stopped the run early. Its work is saved.
    ValueError, FileNotFoundError: The config cannot be run, or a guard ends the
      run.
  """
  with folder_lock.release_at_end():
    _train(config, pathlib.Path(workdir))


def _train(config, folder: pathlib.Path) -> None:
  config = memory_plan.chosen(
      model_defaults.resolved(config, folder, trains=True))
  with workdirs.unchanged_on_error(folder) as put_back:
    experiment = build.build(config, folder)
    if end := processes.on_first('done?', lambda: _end(config, folder)):
      no_effect = ', and changes of its config have no effect' * put_back()
      processes.say(f'{summary.table(folder)}\n', file=sys.stdout)
      processes.say(f'{folder} is finished{no_effect}. {end}, or use another '
                    '--workdir for another run.', file=sys.stdout)
      return
    state, progress = loop.restore(
        experiment, folder, keep=config.train.keep_checkpoints,
        keep_best=config.train.keep_best)
  if not health.is_done(progress, config.train):
    processes.on_first('go on', lambda: _forget_end(folder, progress.step))
  if not experiment.learner.needs_base:
    experiment = dataclasses.replace(experiment, params=None)  # makes room
  learner, base = experiment.learner, experiment.params
  with contextlib.closing(metrics.Writer(
      folder, log_to=config.train.loggers,
      config=json.loads(config.to_json()),
      enabled=processes.is_first())) as writer:
    writer.truncate(progress.step)
    _warn_of_lost_lines(folder, writer, progress.step)
    processes.on_first(
        'forget', lambda: health.forget_after(progress.step, folder))
    if progress.step == 0 and config.evaluate.initial:
      _evaluate(experiment, learner.policy(state, base), 'before', folder,
               writer, 0)
    few = dataclasses.replace(experiment, cases=evaluator.limited(
        experiment.cases, config.evaluate.limit, config.seed,
        config.evaluate.num_sets_during))
    state, progress = loop.loop(
        experiment, config, folder, state, progress, writer,
        lambda state, step: _evaluate(
            few, learner.policy(state, base), f'{health.DURING}{step:06d}',
            folder, writer, step))
    _evaluate(experiment, learner.policy(state, base), 'after', folder, writer,
             progress.step)
  sampler = experiment.sampler
  host_memory.give_back()  # memory of the updates
  with progress_lib.phase('Writing the model'):
    params = dispatch.Ordered(loras.merged)(learner.policy(state, base))
    weights.save(folder / 'model', params, sampler.shape,
                 tokenizer_from=config.model.path or policy.TINY_BASE,
                 eos_id=chat.ends(sampler.tokenizer))
  processes.on_first('card', lambda: model_card.write(
      folder / 'model', folder, progress.step))
  recipe = config.algorithm.name.partition(':')[2]
  with progress_lib.phase('Drawing the curves'):
    processes.on_first('finish', lambda: _finish(
        folder, progress, f'{recipe}, seed {config.seed}'))


def _warn_of_lost_lines(folder: pathlib.Path, writer: metrics.Writer, step: int
                       ) -> None:
  """Warns if the file of metrics lacks steps up to `step`, a restored one."""
  if missing := writer.missing(step):
    processes.warn(
        f'{folder / metrics.FILE} must have a line for each step up to {step}, '
        f'but has none for {len(missing)} of them, the first of which is '
        f'{missing[0]}; restore the file, or curves and tables lack them.')


def _finish(folder: pathlib.Path, progress: Progress, title: str) -> None:
  if progress.best:
    step, score = progress.best
    atomic_files.write_json(folder / BEST, {'step': step, 'score': score})
  summary.finish(folder, title)


def _end(config, folder: pathlib.Path) -> str:
  """Returns how to prolong a finished run; '' if its end is not reached.

  The config says where the end is now. A run without checkpoints counts as
  finished.
  """
  if not (folder / summary.FILE).exists():
    return ''
  path = folder / 'checkpoints'
  for step in reversed(checkpoint.steps(path)):
    with contextlib.suppress(ValueError):  # damaged: tries an older one
      progress = Progress.from_json(checkpoint.extra(path, step))
      break
  else:
    return 'It cannot go on, because it has no checkpoint that can be read'
  limits = ' and '.join(health.reached(progress, config.train))
  return limits and f'Raise {limits} to prolong it'


def _forget_end(folder: pathlib.Path, step: int) -> None:
  """Deletes the results of the end of a run, which now goes on from `step`."""
  if (folder / summary.FILE).exists():
    (folder / summary.FILE).unlink()  # first, as it marks the run as finished
    processes.say(f'{folder} was finished at step {step}, and goes on.')
  if (folder / 'evaluation' / 'after').exists():
    metrics.drop(folder, step, 'val/')
  for name in ('model', 'evaluation/after'):
    shutil.rmtree(folder / name, ignore_errors=True)


def _table(folder: pathlib.Path, cases: Sequence[evaluator.EvalCase]
          ) -> list[dict[str, Any]] | None:
  """Returns the rows of an evaluation; None if it is not there.

  A validation of other numbers of questions, before a change of evaluate.limit
  or num_sets_during, is deleted.
  """
  rows = evaluator.read_table(folder)
  if not folder.name.startswith(health.DURING):
    return rows
  asked = {(case.dataset.name, case.engine, case.decoding):
           len(case.dataset.questions) for case in cases}
  answered = {(row['set'], row['engine'], row['decoding']): row['n']
              for row in rows or () if row['hops'] == evaluator.ALL
              and row['set'] != datasets.MEAN}
  if rows is not None and asked != answered:
    shutil.rmtree(folder)
    return None
  return rows


def _evaluate(experiment: build.Experiment, params, name: str,
             folder: pathlib.Path, writer: metrics.Writer, step: int
            ) -> float | None:
  """Evaluates the policy, with results in the folder evaluation/`name`.

  If the results exist already, nothing is evaluated again.

  Returns:
    The greedy main score: see `evaluator.headline`. It is None if there are no
    sets.
  """
  if not experiment.cases:
    return None
  folder = folder / 'evaluation' / name
  rows = processes.on_first(f'{name}?', lambda: _table(
      folder, experiment.cases))
  if rows is None:
    when = name + ' training' if name in ('before', 'after') else (
        f'after step {step}')
    rows = evaluator.run(
        experiment.sampler, params, experiment.cases, folder=folder,
        title=f'Evaluating {when}', judge=experiment.judge)
  values = evaluator.scalars(rows)
  if not all(writer.holds(step, value) for value in values):
    writer.write(step, values)
  return evaluator.headline(rows)
