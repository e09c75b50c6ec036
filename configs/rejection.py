# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Rejection sampling: the model is tuned on its own right answers.

  python -m searchrl.main --config=configs/rejection.py
  python -m searchrl.main --config=configs/evaluate.py \
      --config.model.path=runs/rejection/iteration_2/tuned/model

There are two iterations. Each samples four answers to each of 432 questions and
keeps one right answer per question. No hop count may be kept more than four
times as often as the rarest one. The model is then tuned on the kept answers.

Hardware: 2 CPU cores (AMD EPYC, family 25). Time: 130 CPU seconds. Result:
exact match of greedy answers, 1 to 3 hops, names of known parts, .95 .87 .81
(means of three seeds). At the size of Qwen2.5: not yet measured.

Source: Yuan et al. 2023, arXiv:2308.01825; a baseline of Search-R1,
arXiv:2503.09516, which gives no numbers: ours are the laptop's.
"""

from configs import arguments
from configs import common
from configs import sft
from searchrl.experiment.rules import field


def get_config(text: str = ''):
  config = common.as_evaluated(common.get_config(text))
  args = arguments.parse(text)
  config.job = 'searchrl.jobs.rejection:run'
  config.rejection = dict(
      iterations=field(2, at_least=1),
      # Questions per iteration, in the shares of data.mix.
      questions=field(432, at_least=1),
      samples=field(4, at_least=1),  # samples per question
      temperature=field(1.0, above=0),  # temperature of sampling
      # Questions per round; a kill loses one round.
      questions_a_round=field(216, at_least=1),
      # Largest number of right answers kept per question.
      most=field(1, at_least=1),
      # Largest ratio of a hop count to the rarest.
      balance=field(4.0, at_least=1, zero='keeps all'),
  )
  config.tuning = sft.get_config('smoke' if args.size == 'smoke' else 'laptop')
  for name in ('seed', 'allow_changes', 'dialogue', 'plan'):
    del config.tuning[name]
  del config.tuning.data['demonstrations']
  config.tuning.train.update(validate_every=0, save_every=100)
  config.tuning.data.validation_share = 0.0
  if not args.model:
    config.tuning.train.epochs = 3
  else:
    config.tuning.optimizer.learning_rate = 1e-5
    config.tuning.learner.update(
        pack_length=config.rollout.max_length, remat='auto',
        dtype='bfloat16')
    config.tuning.mesh.update(**config.mesh)
    config.rejection.update(questions=20_000, questions_a_round=1000)
  if args.size == 'smoke':
    config.rejection.update(questions=24, questions_a_round=12)
    config.tuning.train.epochs = 1
  return config
