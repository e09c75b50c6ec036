# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Exports the policy of any kept checkpoint as a Hugging Face model folder.

  python -m searchrl.main --config=configs/export.py \
      --config.export.run=runs/dspo --config.export.step=20

It writes runs/export/dspo_step_20, which `transformers` loads and `model.path`
accepts. Adapters are merged. A finished run already has its last step in
model/.

Result: not yet measured.
"""

from configs import common
import ml_collections


def get_config(text: str = '') -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  config.job = 'searchrl.jobs.export:run'
  config.mesh = common.get_config(text).mesh
  config.export = dict(
      run='',  # directory of a training run
      step=0,  # step of one of its checkpoints; 0: the newest
      dtype='float32',  # float32, or bfloat16 for half the size
  )
  return config
