# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning of a language model: conversations in, a model out.

A killed run continues from its newest checkpoint as if nothing had happened.
"""

import pathlib

from searchrl.experiment import supervised_finetune


def run(config, workdir: str) -> None:
  """Trains a model on conversations and writes it to model/.

  Args:
    config: see configs/sft.py.
    workdir: gets data/, checkpoints/, metrics.jsonl and model/.
  """
  supervised_finetune.finetune(config, pathlib.Path(workdir))
