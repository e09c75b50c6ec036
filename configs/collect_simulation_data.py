# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Collects queries and documents for tuning a simulated engine.

  python -m searchrl.main --config=configs/dspo.py
  python -m searchrl.main --config=configs/collect_simulation_data.py \
      --config.collect.run=runs/dspo

A policy answers the training questions through a real engine. Documents of
right answers count as useful, and documents of wrong answers count as noise.
configs/finetune_simulator.py reads the files that this job writes. On the
laptop the questions are from many generated worlds, a few from each.

Hardware: 2 CPU cores. Time: not yet measured. Result: 27,891 queries, .73 of
them of right answers; of the wrong ones, .56 of last searches hold the answer,
too, so that they teach little noise (BENCHMARKS.md).

Source: Sun et al. 2025, ZeroSearch, arXiv:2505.04588, section 3.2.
"""

from configs import arguments
from configs import common
from searchrl.experiment.rules import field

LAPTOP = dict(  # short prompts, for a small model
    useful='Useful documents: {query}\nQuestion: {problem}\n'
           'Answer: {ground_truth}\n',
    noisy='Noisy documents: {query}\nQuestion: {problem}\n'
          'Answer: {ground_truth}\n')


def get_config(text: str = ''):
  config = common.as_evaluated(common.get_config(text))
  args = arguments.parse(text)
  is_tiny = not args.model
  config.job = 'searchrl.papers.zerosearch.collect_simulation_data:run'
  # Seed of the first world; it differs from those of runs and of tests.
  config.data.world_seed = 11
  config.collect = dict(
      # number of generated worlds, if no files are given
      worlds=field(60, at_least=1),
      run='',  # run whose newest checkpoint asks; '': the model itself
      samples=field(1, at_least=1),  # samples per question
      temperature=field(1.0, at_least=0),  # temperature of sampling; 0 is greedy
      # questions per round; a kill loses one round
      questions_a_round=field(600, at_least=1),
      validation_share=field(0.05, at_least=0, below=1),  # share of questions
      prompts=LAPTOP if is_tiny else 'zerosearch',  # prompts of the simulator
      titled=is_tiny,  # True if documents begin with their titles
      chat=not is_tiny,  # True if the simulator's chat template is used
  )
  if is_tiny:
    # Few facts from many worlds, so that a simulator learns to copy and does
    # not memorise the facts.
    config.data.update(per_hop=(70, 70, 70), common=0.1)
  if args.size == 'smoke':
    config.collect.worlds = 2
    config.data.update(per_hop=(8, 8), common=0.0, mix=(1, 1))
  return config
