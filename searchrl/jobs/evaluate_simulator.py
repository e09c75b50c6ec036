# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Compares a simulated engine with the real one that the data came from."""

from collections.abc import Sequence
import json
import pathlib

import jax
import numpy as np

from searchrl.data import simulation
from searchrl.evaluation import simulator
from searchrl.experiment import config_checks
from searchrl.experiment import search as searches
from searchrl.experiment import writer_model
from searchrl.runtime import mesh as meshes
from searchrl.search import mapped_corpus
from searchrl.search import engine_wrappers
from searchrl.trajectory import Passages, Query, SearchError, SearchFn

# Steps of a curriculum that has no noise at step 0 and only noise at step 1.
_STEP = {'useful': 0, 'noisy': 1}


def run(config, workdir: str) -> None:
  """Prints the report and writes report.json, report.txt and samples.md.

  Args:
    config: Config as in configs/evaluate_simulator.py.
    workdir: Directory for the three files.

  Raises:
    ValueError, FileNotFoundError: The config cannot be run.
  """
  folder, options = pathlib.Path(workdir), config.simulator
  # Other engines do not have the options that are set below.
  if config.search.engine != 'simulated':
    raise ValueError("search.engine must be 'simulated', but is "
                     f'{config.search.engine!r}.')
  config_checks.check(config)
  pairs = _drawn(simulation.read(options.data), options.limit, config.seed)
  config.search.options = {
      **config.search.options, 'curriculum': dict(start=0.0, end=1.0, steps=1)}
  corpus = _corpus(config.search)
  search = searches.engine(
      config.search, corpus, seed=config.seed, load_writer=writer_model.loader(
          meshes.make(devices=jax.devices()[:1]), seed=config.seed))
  written = {quality: _ask(search, pairs, step)
             for quality, step in _STEP.items()}
  found = [simulator.Compared(pair, *map(_texts, (pair.passages, *both)))
           for pair, *both in zip(pairs, *(
               passages for passages, _ in written.values()))]
  made = simulator.report(found) | {
      'writer': {quality: metrics for quality, (_, metrics) in written.items()}}
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'report.json').write_text(json.dumps(made, indent=1) + '\n')
  (folder / 'report.txt').write_text(simulator.text(made))
  (folder / 'samples.md').write_text(
      simulator.samples(found[:options.samples]))
  print(simulator.text(made))
  print(f'samples  {folder / "samples.md"}')


def _corpus(search) -> mapped_corpus.MappedCorpus | None:
  """Loads the corpus of the real engine if the writer needs it; else None.

  Raises:
    ValueError: The writer needs a corpus, but the config names none.
  """
  if not searches.needs_corpus(search):
    return None
  if not search.corpus:
    raise ValueError(
        'search.corpus must be the corpus that the queries of simulator.data '
        'were asked of, but is empty. Of a generated world it is '
        'world_0/data/train/corpus.jsonl in the folder of its collection.')
  return mapped_corpus.load(search.corpus)


def _drawn(pairs: Sequence[simulation.Pair], limit: int, seed: int
          ) -> list[simulation.Pair]:
  """Returns `limit` pairs, or all if it is 0, in an order drawn by the seed."""
  order = np.random.default_rng(seed).permutation(len(pairs))
  return [pairs[place] for place in order[:limit or None]]


def _ask(search: SearchFn, pairs: Sequence[simulation.Pair], step: int
        ) -> tuple[list[Passages], dict[str, float]]:
  """Returns the engine's passages per pair at a step, and its metrics.

  Raises:
    ValueError: A query failed, so the engines cannot be compared.
  """
  found = search([Query(pair.query, len(pair.passages), pair.question, step,
                        turn=pair.hop - 1) for pair in pairs])
  failed = [one for one in found if isinstance(one, SearchError)]
  if failed:
    raise ValueError(
        f'search.options must name a writer that answers, but {len(failed)} of '
        f'{len(found)} queries failed, the first with {failed[0].kind}: '
        f'{failed[0].detail}.')
  return found, engine_wrappers.pop(search)


def _texts(passages: Passages) -> tuple[str, ...]:
  """Returns one text per passage, with its title in quotes before it."""
  return tuple(f'"{p.title}" {p.text}' if p.title else p.text for p in passages)
