# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rejection sampling: tunes a model on its own right answers, in iterations.

Each iteration samples answers to new questions, keeps the right ones, and tunes
the model of the previous iteration. Existing results are not made again.
"""

from collections.abc import Sequence
import copy
import pathlib
import sys
from typing import Any

from searchrl.agent import demonstrations
from searchrl.data import datasets
from searchrl.data import jsonl
from searchrl.experiment import build
from searchrl.experiment import config_checks
from searchrl.experiment import fingerprint
from searchrl.experiment import memory_plan
from searchrl.experiment import model_defaults
from searchrl.experiment import policy
from searchrl.experiment import search as searches
from searchrl.experiment import toolsets
from searchrl.rollouts import collect
from searchrl.rollouts import records
from searchrl.runtime import mesh as meshes
from searchrl.runtime import plugins
from searchrl.runtime import processes
from searchrl.runtime import workdir as workdirs
from searchrl.trajectory import Question, Trajectory

_DATA = 'right.jsonl'


def run(config, workdir: str) -> None:
  """Runs the iterations; the same call resumes a job that was stopped.

  Args:
    config: Config of the job; see configs/rejection.py.
    workdir: Directory for iteration_1/{trajectories,right.jsonl,tuned} and so
      on.

  Raises:
    ValueError, FileNotFoundError: The config cannot be run, or no answer is
      right.
  """
  folder = pathlib.Path(workdir)
  config_checks.check(config)
  config_checks.check_questions(config)
  config_checks.check_training_data(config)
  config_checks.check_supervised(config.tuning)
  build.scorer(config)  # raises before a device is used
  config = model_defaults.resolved(config, folder, trains=True)
  sampling = memory_plan.chosen(phases(config)['sampling']).rollout
  config.rollout.update(
      tensor=sampling.tensor, max_num_seqs=sampling.max_num_seqs)
  options = config.rejection
  model = policy.folder_of(config)
  directory = workdirs.Workdir(folder, config, ('rejection.iterations',))
  directory.check()
  data = datasets.shared(lambda: build.train_set(
      config, folder, admit=model.admit(policy.budgets_of(config))))
  directory.prepare()
  directory.note('questions', lambda: fingerprint.questions([data]),
                 alike=True)
  directory.note('search', lambda: searches.describe(
      config.search, data.corpus), alike=True)
  stream = build.stream(config, data)
  position, path = stream.start, config.model.path
  for number in range(1, options.iterations + 1):
    here = folder / f'iteration_{number}'
    questions, position = stream.draw(position, options.questions, number - 1)
    if not processes.on_first('data?', (here / _DATA).exists):
      _collect(config, path, data.corpus, questions, here)
    tuned = here / 'tuned'
    if not processes.on_first('model?', (tuned / 'model/README.md').exists):
      tune = plugins.resolve(config.tuning.job, field='tuning.job',
                             ours='searchrl.jobs.finetune:run')
      tune(_tuning(config, path, here / _DATA), str(tuned))
    path = str(tuned / 'model')
  processes.say(f'the last model: {path}', file=sys.stdout)


def phases(config) -> dict[str, Any]:
  """Returns the configs of an iteration's parts, as 'sampling' and 'tuning'.

  Their memory is planned separately, because they run one after the other.
  """
  sampling = copy.deepcopy(config)  # also copies which fields are unset
  tuning = _tuning(config, config.model.path, pathlib.Path(_DATA))
  tuning.plan = sampling.plan
  return {'sampling': sampling, 'tuning': tuning}


def _collect(config, path: str, corpus: Any, questions: list[Question],
             here: pathlib.Path) -> None:
  """Samples answers in rounds, and writes the right ones as training data.

  Args:
    config: Config of the job.
    path: Path of the model that answers.
    corpus: Passages that are searched.
    questions: Questions of this iteration.
    here: Directory of this iteration.

  Raises:
    ValueError: No answer is right.
  """
  sampling, options = config.copy_and_resolve_references(), config.rejection
  sampling.unlock()
  sampling.model.path = path
  sampler, params = policy.build(sampling, meshes.make(**config.mesh))
  weights = sampler.sync(params).weights
  search = toolsets.of_sampler(sampler, config.seed)(
      searches.engine(config.search, corpus, seed=config.seed), corpus)

  def play(number: int, chosen: Sequence[Question]) -> list[Trajectory]:
    return sampler.rollout(
        weights, collect.requests(chosen, options.samples),
        search=search, step=number, temperature=options.temperature,
        truncation=config_checks.truncation_of(config.rollout)).trajectories

  scorer = build.scorer(config)
  trajectories = [t for sampled in records.in_rounds(
      here / 'trajectories', questions, options.questions_a_round, play)
                  for t in scorer(sampled)]
  right = demonstrations.right(
      trajectories, lambda trajectory: trajectory.outcome_reward or 0.0,
      most=options.most, balance=options.balance)
  processes.say(f'{here}: {len(right)} of {len(trajectories)} trajectories are '
                'kept')
  if not right:
    raise ValueError(
        f'rejection sampling needs right answers, but of {len(trajectories)} '
        'none is one. Start from a model that is right now and then, or raise '
        'rejection.samples.')
  processes.on_first('data', lambda: jsonl.write(
      here / _DATA, (
          line for trajectory in right
          for line in demonstrations.lines(trajectory, sampler.tokenizer))))


def _tuning(config, path: str, file: pathlib.Path) -> Any:
  """Returns the config that tunes the model at `path` on the data in `file`."""
  tuning = config.tuning.copy_and_resolve_references()
  tuning.unlock()
  tuning.seed, tuning.allow_changes = config.seed, config.allow_changes
  tuning.model.path, tuning.data.train = path, str(file)
  return tuning
