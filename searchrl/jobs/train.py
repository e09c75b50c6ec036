# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Trains a policy by RL."""

import pathlib

from searchrl.experiment import run as runs


def run(config, workdir: str) -> None:
  """Trains a policy; the same call resumes a run that was stopped.

  Args:
    config: Config of a recipe in configs/.
    workdir: Directory of the run; see docs/run_folder.md.
  """
  runs.train(config, pathlib.Path(workdir))
