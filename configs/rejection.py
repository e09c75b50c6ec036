# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Rejection sampling: the model is tuned on its own right answers.

  python -m searchrl.main --config=configs/rejection.py
  python -m searchrl.main --config=configs/evaluate.py \
      --config.model.path=runs/rejection/iteration_2/tuned/model

Two iterations: four answers to each of 432 questions are sampled, one right one
of a question is kept, no hop count more than four times as often as the
rarest, and the model is tuned on them.

Hardware: 2 CPU cores (AMD EPYC, family 25). Time: 130 CPU seconds. Result: exact
match of greedy answers, 1 to 3 hops, names of known parts, .95 .87 .81 (means of
three seeds), as dspo.py. At the size of Qwen2.5: not yet measured.

Source: Yuan et al. 2023, arXiv:2308.01825; a baseline of Search-R1,
arXiv:2503.09516, which gives no numbers: ours are the laptop's.
"""

from configs import common
from configs import settings
from configs import sft


def get_config(size: str = 'laptop'):
  config = common.as_evaluated(common.get_config(size))
  is_tiny = settings.is_laptop(size) or size == 'smoke'
  config.job = 'searchrl.jobs.rejection:run'
  config.rejection = dict(
      iterations=2,
      questions=432,  # an iteration, in the shares of data.mix
      samples=4,  # a question
      temperature=1.0,  # above 0
      questions_a_round=216,  # a round is lost where it is killed
      most=1,  # right answers that are kept of a question
      balance=4.0,  # times the rarest hop count that another may have; 0: any
  )
  config.tuning = sft.get_config('smoke' if size == 'smoke' else 'laptop')
  for name in ('job', 'seed', 'allow_changes', 'dialogue'):
    del config.tuning[name]
  del config.tuning.data['demonstrations']
  config.tuning.train.update(validate_every=0, save_every=100)
  config.tuning.data.validation_share = 0.0
  if is_tiny:
    config.tuning.train.epochs = 3
  else:
    config.tuning.optimizer.learning_rate = 1e-5
    config.tuning.learner.update(
        row_length=config.rollout.length, remat='nothing', dtype='bfloat16')
    config.rejection.update(questions=20_000, questions_a_round=1000)
  if size == 'smoke':
    config.rejection.update(questions=24, questions_a_round=12)
    config.tuning.train.epochs = 1
  return config
