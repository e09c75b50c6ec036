# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Compares a simulated engine with the real one that the data came from."""

from collections.abc import Sequence
import functools
import pathlib
from typing import Any

import jax
import numpy as np

from searchrl.experiment import config_checks
from searchrl.experiment import policy
from searchrl.experiment import search as searches
from searchrl.papers.zerosearch import query_pairs
from searchrl.papers.zerosearch import simulator_report
from searchrl.runtime import atomic_files
from searchrl.runtime import mesh as meshes
from searchrl.runtime import processes
from searchrl.search import engine_wrappers
from searchrl.search import mapped_corpus
from searchrl.search.corpus import Corpus
from searchrl.trajectory import Passages, Query, SearchError, SearchFn

ENGINE = 'searchrl.papers.zerosearch.simulated:make'


def run(config, workdir: str) -> None:
  """Prints the report and writes report.json, report.txt and samples.md.

  Args:
    config: Config as in configs/evaluate_simulator.py.
    workdir: Directory for the three files.

  Raises:
    ValueError, FileNotFoundError: The config cannot be run, or there are
      several processes.
  """
  folder, options = pathlib.Path(workdir), config.simulator
  # Other engines do not have the options that are set below.
  if config.search.engine != ENGINE:
    raise ValueError(f'search.engine must be {ENGINE!r}, but is '
                     f'{config.search.engine!r}.')
  config_checks.check(config)
  if processes.count() > 1:
    raise ValueError('the evaluation of a simulated engine needs one process, '
                     f'but there are {processes.count()}. Start it alone.')
  pairs = query_pairs.read(options.data)
  order = np.random.default_rng(config.seed).permutation(len(pairs))
  pairs = [pairs[place] for place in order[:options.limit or None]]
  config.search.options = {  # no noise at step 0 and only noise at step 1
      **config.search.options, 'curriculum': dict(start=0.0, end=1.0, steps=1)}
  corpus = _corpus(config.search)
  search = searches.engine(
      config.search, corpus, seed=config.seed, load_model=functools.partial(
          policy.second, mesh=meshes.make(devices=jax.devices()[:1]),
          seed=config.seed))
  useful, of_useful = _ask(search, pairs, step=0)
  noisy, of_noisy = _ask(search, pairs, step=1)
  compared = [
      simulator_report.Compared(pair, *map(_texts, (pair.passages, *written)))
      for pair, *written in zip(pairs, useful, noisy)]
  report = simulator_report.report(compared) | {
      'writer': {'useful': of_useful, 'noisy': of_noisy}}
  text = simulator_report.text(report)
  atomic_files.write_json(folder / 'report.json', report)
  atomic_files.write(folder / 'report.txt', text)
  atomic_files.write(folder / 'samples.md', simulator_report.samples(
      compared[:options.samples]))
  print(text)
  print(f'samples  {folder / "samples.md"}')


def _corpus(search: Any) -> Corpus | mapped_corpus.MappedCorpus | None:
  """Loads the corpus of the real engine if the writer needs it, else None.

  Raises:
    ValueError: The writer needs a corpus, but the config names none.
  """
  if not searches.spec(search).needs_corpus:
    return None
  if not search.corpus:
    raise ValueError(
        'search.corpus must be the corpus that the queries of simulator.data '
        'were asked of, but is empty. Of a generated world it is '
        'world_0/data/train/corpus.jsonl in the folder of its collection.')
  return mapped_corpus.load(search.corpus)


def _ask(search: SearchFn, pairs: Sequence[query_pairs.Pair], step: int
        ) -> tuple[list[Passages], dict[str, float]]:
  """Returns the engine's passages for each pair, and its metrics.

  Raises:
    ValueError: A query failed, so that the engines cannot be compared.
  """
  results = search([Query(pair.query, len(pair.passages), pair.question, step,
                          turn=pair.hop - 1) for pair in pairs])
  errors = [result for result in results if isinstance(result, SearchError)]
  if errors:
    raise ValueError(
        f'search.options must name a writer that answers, but {len(errors)} of '
        f'{len(results)} queries failed, the first with {errors[0].kind}: '
        f'{errors[0].detail}.')
  return ([passages for passages in results
           if not isinstance(passages, SearchError)],
          engine_wrappers.pop(search))


def _texts(passages: Passages) -> tuple[str, ...]:
  """Returns one text per passage, with its title in quotes before it."""
  return tuple(f'"{p.title}" {p.text}' if p.title else p.text for p in passages)
