# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""HRPO: rows with the same number of hops share a baseline.

  python -m searchrl.main --config=configs/hrpo.py

There is one sample per question, which is the aim of the method. There is no
ratio, so that a batch allows only one optimizer step.

Hardware: a core of an AMD EPYC (family 25, model 17) or, one seed, an Intel
Xeon (family 6, model 167). Time: 113 CPU seconds. Result: exact match of greedy
answers, 1 to 4 hops, .94 .00 .00 .00 before and .96 .84 .74 .57 after, with 1
search before and 1 2 3 4 after (means of five seeds, 200 questions of each hop
count, names of known parts; BENCHMARKS.md). At the size of Qwen2.5: not yet
measured.

Source: Dr. Zero, arXiv:2601.07055, eq. 2 and 3. Differs: here the policy
answers questions; drzero.py trains the one that writes them.
"""

from configs import arguments
from configs import common


def get_config(text: str = ''):
  config = common.get_config(text)
  common.one_sample_a_question(config)
  config.algorithm.update(
      name='searchrl.rl.algorithms:hrpo',
      kl_coef=0.0,  # per nat, to the model that the run started from
  )
  config.learner.minibatches = 1
  arguments.apply_setting(config, text, 'drzero_solver')
  return config
