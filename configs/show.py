# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Shows one trajectory: the origin of each token, and the tokens trained on.

  python -m searchrl.main --config=configs/show.py \
      --trajectory=runs/dspo/trajectories/step_000012.jsonl.gz:3

The number is the line of the file, counted from 1. The file may be from a
training run or from an evaluation.

Hardware: 2 CPU cores (AMD EPYC, family 25). Time: 6 seconds, start included.
Result: the conversation, and a line for each token that the policy sampled.
"""

import ml_collections


def get_config(text: str = '') -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  config.job = 'searchrl.jobs.show:run'
  config.show = dict(
      # FILE:LINE, set by --trajectory or by the text after the colon.
      trajectory=text,
      observations=True,  # True shows the engine's answers too
  )
  return config
