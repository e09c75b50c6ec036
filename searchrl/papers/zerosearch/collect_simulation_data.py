# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Collects the data that a simulated engine is tuned on.

A policy sends queries to a real engine. The job works in rounds and writes the
trajectories of each round when it ends. A command that was killed continues
after the last complete round.
"""

from collections.abc import Sequence
import dataclasses
import pathlib
from typing import Any

from searchrl.agent import rewards
from searchrl.data import datasets
from searchrl.data import jsonl
from searchrl.data import questions as questions_lib
from searchrl.experiment import build
from searchrl.experiment import config_checks
from searchrl.experiment import fingerprint
from searchrl.experiment import policy
from searchrl.experiment import run_defaults
from searchrl.experiment import search as searches
from searchrl.papers.zerosearch import query_pairs
from searchrl.papers.zerosearch import simulator_prompts
from searchrl.rollouts import records
from searchrl.runtime import processes
from searchrl.runtime import workdir as workdirs
from searchrl.trajectory import Request


def run(config, workdir: str) -> None:
  """Samples answers to the training questions, and writes their searches.

  Args:
    config: Config as in configs/collect_simulation_data.py.
    workdir: Directory for train.jsonl and validation.jsonl, whose lines are
      `query_pairs.example`s, and for the trajectories of each round.

  Raises:
    ValueError, FileNotFoundError: The config cannot be run, or no search found
      anything.
  """
  config_checks.check(config)
  folder, options = pathlib.Path(workdir), config.collect
  prompts = simulator_prompts.find(options.prompts)
  config = run_defaults.complete(config, options.run, 'collect.run', folder)
  model = policy.folder_of(config)
  directory = workdirs.Workdir(folder, config)
  directory.check()
  worlds = _worlds(config, folder, model.admit(policy.budgets_of(config)))
  sampler, params = policy.of_run(config, options.run, folder=model)
  directory.prepare()
  directory.note('model', lambda: fingerprint.model(config, options.run))
  directory.note('questions', lambda: fingerprint.questions(worlds), alike=True)
  directory.note('search', lambda: {data.name: searches.describe(
      config.search, data.corpus) for data in worlds}, alike=True)
  weights, pairs = sampler.sync(params).weights, []
  for data in worlds:
    of_world: list[query_pairs.Pair] = []
    search = searches.engine(config.search, data.corpus, seed=config.seed)
    size = options.questions_a_round
    for number, first in enumerate(range(0, len(data.questions), size)):
      file = folder / 'trajectories' / f'{data.name}_{number:06d}.jsonl.gz'
      if not processes.on_first(file.name, file.exists):
        requests = [
            Request(question, sample, group) for group, question in
            enumerate(data.questions[first:first + size])
            for sample in range(options.samples)]
        trajectories = sampler.rollout(
            weights, requests, search=search, step=number,
            temperature=options.temperature).trajectories
        if processes.is_first():
          records.write(file, trajectories)
      if processes.is_first():
        of_world += query_pairs.pairs(
            records.read(file), lambda t: rewards.em(t) == 1)
        processes.say(f'{data.name}, round {number + 1}: {len(of_world)} '
                      'searches so far')
    pairs += query_pairs.distinct(of_world)
  if processes.is_first():
    _write_examples(folder, pairs, prompts, options, config.seed)


def _worlds(config, folder: pathlib.Path, admit: questions_lib.Admit
           ) -> list[datasets.Dataset]:
  """Returns the sets of questions from which data is collected.

  There is one set per generated world. If config.data.train names files, there
  is one set with all their questions.
  """
  seed, worlds = config.data.world_seed, []
  for number in range(1 if config.data.train else config.collect.worlds):
    config.data.world_seed = seed + number
    data = datasets.shared(lambda: build.train_set(
        config, folder / f'world_{number}', admit=admit))
    worlds.append(dataclasses.replace(data, name=f'world_{number}'))
  config.data.world_seed = seed
  return worlds


def _write_examples(folder: pathlib.Path, pairs: Sequence[query_pairs.Pair],
                    prompts: simulator_prompts.Prompts, options: Any,
                    seed: int) -> None:
  """Writes the training and validation files and prints their contents."""
  if not pairs:
    raise ValueError(
        'collect.run must be of a policy that searches, but none of its '
        'searches found anything. Name a run that has learned to search.')
  sides = query_pairs.split(pairs, options.validation_share, seed)
  for name, side in zip(('train', 'validation'), sides):
    file = folder / f'{name}.jsonl'
    jsonl.write(file, (query_pairs.example(
        pair, prompts, titled=options.titled, chat=options.chat)
                       for pair in side))
    useful = sum(pair.useful for pair in side)
    processes.say(f'{file}: {len(side)} queries, {useful} with useful '
                  f'documents and {len(side) - useful} with noise')
  if not sides[1]:
    processes.say('There are no queries for validation: tune with '
                  '--config.data.validation=')
