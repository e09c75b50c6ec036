# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning of a language model on conversations.

A killed run continues from its newest checkpoint, with the same result.
"""

import pathlib

from searchrl.experiment import supervised_finetune


def run(config, workdir: str) -> None:
  """Trains a model on conversations and writes it to model/.

  Args:
    config: Config of the job; see configs/sft.py.
    workdir: Directory for data/, checkpoints/, metrics.jsonl and model/.
  """
  supervised_finetune.finetune(config, pathlib.Path(workdir))
