# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Exports the policy of any kept checkpoint as a Hugging Face model folder.

  python -m searchrl.main --config=configs/export.py \
      --config.export.run=runs/dspo --config.export.step=20

--config=configs/export.py:runs/dspo@20 does the same. It writes
runs/export/dspo_step_20, which `transformers` loads and `model.path`
accepts. Adapters are merged. A finished run already has its last step in
model/.

Result: not yet measured.
"""

from configs import arguments
from configs import common
from searchrl.experiment.rules import field
import ml_collections


def get_config(text: str = '') -> ml_collections.ConfigDict:
  run, base = arguments.with_run(text, common.get_config)
  config = ml_collections.ConfigDict()
  config.job = 'searchrl.jobs.export:run'
  config.mesh = base.mesh
  config.export = dict(
      run=run,  # directory of a training run, perhaps with a step: run@12
      # Step of one of its checkpoints.
      step=field(0, zero='the newest'),
      dtype=field('float32', one_of=common.DTYPES),  # bfloat16: half the size
  )
  return config
