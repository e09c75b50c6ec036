# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""One trajectory in the terminal: who wrote each token, and what is trained.

  python -m searchrl.main --config=configs/show.py \
      --trajectory=runs/dspo/trajectories/step_000012.jsonl.gz:3

The number is the line of the file, from 1. Files of training runs and of
evaluations both do.

Hardware: 2 CPU cores (AMD EPYC, family 25). Time: 6 seconds, start included. Result:
the conversation, and a line a token that the policy sampled.
"""

import ml_collections


def get_config(size: str = 'laptop') -> ml_collections.ConfigDict:
  if size != 'laptop':
    raise ValueError(f"size must be 'laptop', but is {size!r}.")
  config = ml_collections.ConfigDict()
  config.job = 'searchrl.jobs.show:run'
  config.show = dict(
      trajectory='',  # FILE:LINE; set by --trajectory
      observations=True,  # also what the engine answered
  )
  return config
