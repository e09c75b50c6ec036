# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Collects queries and documents that a simulated engine is tuned on.

  python -m searchrl.main --config=configs/dspo.py
  python -m searchrl.main --config=configs/collect_simulation_data.py \
      --config.collect.run=runs/dspo

A policy answers the training questions through a real engine; documents of its
right answers are useful, those of wrong ones noise. The files that it writes are
those that configs/finetune_simulator.py reads. On the laptop the questions are of
generated worlds, many with few questions each.

Hardware: 2 CPU cores. Time: not yet measured. Result: 27,891 queries, .73 of
them of right answers; of the wrong ones, .56 of last searches hold the answer,
too, so that they teach little noise (BENCHMARKS.md).

Source: Sun et al. 2025, ZeroSearch, arXiv:2505.04588, section 3.2.
"""

from configs import common
from configs import settings

LAPTOP = dict(  # short, for a small model
    useful='Useful documents: {query}\nQuestion: {problem}\n'
           'Answer: {ground_truth}\n',
    noisy='Noisy documents: {query}\nQuestion: {problem}\n'
          'Answer: {ground_truth}\n')


def get_config(size: str = 'laptop'):
  config = common.as_evaluated(common.get_config(size))
  is_tiny = settings.is_laptop(size) or size == 'smoke'
  config.job = 'searchrl.jobs.collect_simulation_data:run'
  config.data.world_seed = 11  # of the first; not those of runs and of tests
  config.collect = dict(
      worlds=60,  # that are generated, where no files are given
      run='',  # whose newest checkpoint asks; '': the model itself
      samples=1,  # a question
      temperature=1.0,  # 0 is greedy
      questions_a_round=600,  # a round is lost where it is killed
      validation_share=0.05,  # of the questions, in [0, 1)
      prompts=LAPTOP if is_tiny else 'zerosearch',  # as the engine is asked
      titled=is_tiny,  # whether documents begin with their titles
      chat=not is_tiny,  # whether the simulator is asked in its chat template
  )
  if is_tiny:
    # Few facts of many worlds: else a simulator learns facts, not to copy.
    config.data.update(per_hop=(70, 70, 70), common=0.1)
  if size == 'smoke':
    config.collect.worlds = 2
    config.data.update(per_hop=(8, 8), common=0.0, mix=(1, 1))
  return config
